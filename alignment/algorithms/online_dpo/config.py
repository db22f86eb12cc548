"""Settings of online DPO, and what they must not be."""

from dataclasses import dataclass, field
from typing import Literal

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.algorithms.dpo.setup import WeightedLoss, choose_losses
from alignment.algorithms.ppo.setup import check_metric_names, refuse_evaluation
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig
from alignment.losses.direct_preference import Divergence, OffsetScale
from alignment.losses.preference_table import LOSSES, PARAMETERS, Rows
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class OnlineDPOConfig:
    """Settings of one run of online DPO. `training.max_steps` or `training.epochs` count iterations over the prompts.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        data: prompts. None are held out: what is learnt is compared by `alignment evaluate winrate`.
        output: the run's directory.
        judge: who says which response is better. reward_model (given as `reward_model`), gold (the true reward of the
            hotel data set, for its prompts only), or module:function, which is given prompts, responses shown first and
            responses shown second, and gives for each the verdict for the one shown first: 1, 0.5, 0, or None where it
            cannot say. Each two responses to a prompt are shown to it in both orders.
        reward_model: directory of the judging reward model.
        responses_per_prompt: responses sampled to each prompt, at least 2; the best and the worst become a pair.
        tie_margin: largest difference of two scores that is a tie; a prompt whose best and worst response tie gives no
            pair. With a judge of pairs, scores are shares of comparisons won.
        missing_end_penalty: taken off the score of a response that did not end.
        loss: a loss of pairs, or several with their weights, as for `alignment dpo`.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume. simpo, orpo and
            cpo have none.
        beta, label_smoothing, gamma, tau, length_penalty, offset_coef, offset_scale, f_divergence, f_alpha, sft_coef: as for
            `alignment dpo`; odpo's margins are differences of scores.
        adapter: train an adapter, without dropout; the reference is then the same weights with the adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's and the reward model's among them. Networks that
            are adapters of one base hold its weights once, where FSDP2 or ZeRO do not shard each network by itself.
        max_new_tokens: longest response, end token included.
        temperature: of the samples; the loss takes log-probabilities at temperature 1.
        micro_rollout_batch_size: responses that one process samples side by side; it changes memory and speed, and no
            response.
        rollout_weights: of the policy while it samples, where FSDP2 or ZeRO-3 shards it: gathered, sharded or auto, as
            for `alignment ppo`.
        epochs: passes over the pairs of each iteration.
        minibatches: updates in each pass.
        metrics: functions of prompts and responses to log the mean of, which nothing learns from: a name of METRICS, or
            module:function. A mean is logged under its function's name.
    """

    policy: str
    data: DataConfig
    output: str
    judge: str = "reward_model"
    reward_model: str | None = None
    responses_per_prompt: int = 2
    tie_margin: float = 0.0
    missing_end_penalty: float = 1.0
    loss: str | dict[str, float] = "sigmoid"
    reference: str | None = None
    beta: float | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    tau: float | None = None
    length_penalty: float | None = None
    offset_coef: float | None = None
    offset_scale: OffsetScale | None = None
    f_divergence: Divergence = "reverse_kl"
    f_alpha: float = 0.5
    sft_coef: float | None = None
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    max_new_tokens: int = 64
    temperature: float = 1.0
    micro_rollout_batch_size: int = 256
    rollout_weights: Literal["auto", "gathered", "sharded"] = "auto"
    epochs: int = 1
    minibatches: int = 1
    metrics: list[str] = field(default_factory=list)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        refuse_dropout(self.adapter, "online DPO")
        check_judge(self)
        check_loss(self)
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: equal responses make no pair")
        SamplingConfig(self.max_new_tokens, self.temperature)  # checks their ranges
        for name, least in (
            ("responses_per_prompt", 2),
            ("micro_rollout_batch_size", 1),
            ("epochs", 1),
            ("minibatches", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("tie_margin", "missing_end_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (off) or above, got {getattr(self, name)}")
        if self.minibatches > self.training.batch_size:
            raise ValueError(
                f"minibatches ({self.minibatches}) cannot exceed training.batch_size ({self.training.batch_size})"
            )
        refuse_evaluation({"data": self.data}, self.training, "online_dpo", "online DPO")
        check_metric_names(self.metrics)

    @property
    def losses(self) -> tuple[WeightedLoss, ...]:
        """What is minimized."""
        parameters = {name: getattr(self, name) for name in PARAMETERS if hasattr(self, name)}
        return choose_losses(self.loss, parameters, self.f_divergence, self.f_alpha)

    @property
    def rows(self) -> Rows:
        """The kind of rows that the losses learn from: pairs."""
        return self.losses[0].spec.rows

    @property
    def sft(self) -> None:
        """Demonstrations beside the pairs; there are none."""
        return None

    @property
    def refers(self) -> bool:
        """Whether a loss compares with a reference."""
        return any(loss.spec.reference for loss in self.losses)

    @property
    def holds_reference(self) -> bool:
        """Whether the reference is asked during the updates, as a network or as the policy with its adapter off."""
        return self.refers

    @property
    def sft_weight(self) -> float:
        """Weight of the term that imitates the chosen responses."""
        return max(loss.spec.sft_coef for loss in self.losses) if self.sft_coef is None else self.sft_coef


def check_judge(config: OnlineDPOConfig) -> None:
    """Refuse a judge that there is not, or that lacks its reward model.

    Raises:
        ValueError: in words.
    """
    if config.judge == "reward_model":
        if config.reward_model is None:
            raise ValueError(
                "say who judges: judge=reward_model with reward_model=DIR, judge=module:function, or judge=gold for prompts "
                "of the generated hotel world alone"
            )
    elif config.judge != "gold" and ":" not in config.judge:
        raise ValueError(f"judge: there is no {config.judge!r}; there are reward_model, gold and module:function")
    elif config.reward_model is not None:
        raise ValueError(f"reward_model: judge={config.judge} reads none; leave it out, or set judge=reward_model")


def check_loss(config: OnlineDPOConfig) -> None:
    """Refuse a loss that learns from other rows than pairs, and a reference or weight that none of the losses has.

    Raises:
        ValueError: in words.
    """
    names = " and ".join(loss.name for loss in config.losses)
    if (rows := config.rows) != "comparisons":
        pairs = ", ".join(name for name, spec in LOSSES.items() if spec.rows == "comparisons")
        raise ValueError(f"loss: {names} learns from {rows}, and online DPO makes pairs; take one of {pairs}")
    if not config.refers and config.reference is not None:
        raise ValueError(f"reference: {names} needs none; leave it out")
    if config.sft_weight < 0:
        raise ValueError(f"sft_coef must be 0 (off) or above, got {config.sft_coef}")

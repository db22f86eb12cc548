"""Settings of DPO and its kin, and what they must not be."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.algorithms.preference_losses import WeightedLoss, choose_losses
from alignment.data.config import DataConfig
from alignment.errors import raise_all
from alignment.losses.direct_preference import Divergence, OffsetScale
from alignment.losses.preference_table import PARAMETERS, Rows
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class DPOConfig:
    """Settings of one run of DPO or its kin.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        data: comparisons; labels for kto and apo_zero_unpaired, rankings for plackett_luce.
        output: the run's directory.
        loss: sigmoid (DPO), sigmoid_norm (on means over tokens), robust, ipo, hinge (SLiC), exo_pair, discopop, odpo,
            rdpo, nca_pair, bco_pair, bco, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, simpo, orpo, cpo, kto,
            apo_zero_unpaired or plackett_luce; or several with their weights, {sigmoid: 0.8, bco_pair: 0.2}.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume. simpo, orpo and
            cpo have none.
        reference_log_probs: compute: by the reference at every update; cache: once, before the first update, and kept on
            disk under a hash of weights and rows, so that the reference leaves the memory.
        reference_cache: folder of the cached log-probabilities; None: in the output directory.
        beta: pull towards the reference, > 0; scale of the reward of simpo and cpo, weight of orpo's odds-ratio term.
            None: the loss's default, 0.1 for most, 2 for simpo, 5 for sigmoid_norm, 0.05 for discopop, 0.001 for sppo_hard.
        label_smoothing: share of labels assumed flipped, in [0, 0.5): of sigmoid (cDPO), sigmoid_norm, robust, exo_pair,
            cpo, aot and aot_unpaired. None: 0, of robust 0.1, of exo_pair 0.001.
        gamma: of simpo: reward by which the chosen response should lead; None: 1.
        tau: of discopop: width of the change between its two costs; None: 0.05.
        length_penalty: of rdpo: reward taken away for each token; None: 0.01.
        offset_coef: of odpo: weight of the offset; None: 1.
        offset_scale: of odpo: log or linear, of the rows' margins; None: log.
        desirable_weight: of kto and apo_zero_unpaired: weight of the rows with desirable responses; None: 1.
        undesirable_weight: of the others; None: 1.
        f_divergence: reverse_kl (DPO's own), forward_kl, js or alpha, for losses of reward differences.
        f_alpha: of the alpha-divergence, in (0, 1]; 0 would be the reverse, 1 is the forward KL.
        sft_coef: weight of the mean negative log-likelihood per token of the chosen responses, or of `sft` where it is
            given; None: the loss's default, 1 for orpo and cpo, 0 for the others.
        sft: demonstrations for that term, in place of the chosen responses.
        sft_batch_size: demonstrations per update over all ranks.
        adapter: train an adapter, without dropout; the reference is then the same weights with the adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's among them.
    """

    policy: str
    data: DataConfig
    output: str
    loss: str | dict[str, float] = "sigmoid"
    reference: str | None = None
    reference_log_probs: Literal["compute", "cache"] = "compute"
    reference_cache: str | None = None
    beta: float | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    tau: float | None = None
    length_penalty: float | None = None
    offset_coef: float | None = None
    offset_scale: OffsetScale | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    f_divergence: Divergence = "reverse_kl"
    f_alpha: float = 0.5
    sft_coef: float | None = None
    sft: DataConfig | None = None
    sft_batch_size: int = 16
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        refuse_dropout(self.adapter, "DPO")
        check_reference(self)
        if self.sft_weight < 0 or self.sft_batch_size < 1:
            raise ValueError("sft_coef must be 0 (off) or above, and sft_batch_size at least 1")
        if self.sft is not None and self.sft.evaluation_share is not None:
            raise ValueError("sft.evaluation_share is not read: these rows are trained on only; take it out")
        if self.sft is not None and self.sft_weight == 0:
            raise ValueError("sft: these demonstrations would have no weight; set sft_coef, or leave them out")

    @property
    def losses(self) -> tuple[WeightedLoss, ...]:
        """What is minimized."""
        parameters = {name: getattr(self, name) for name in PARAMETERS}
        return choose_losses(self.loss, parameters, self.f_divergence, self.f_alpha)

    @property
    def rows(self) -> Rows:
        """The kind of rows that the losses learn from."""
        return self.losses[0].spec.rows

    @property
    def refers(self) -> bool:
        """Whether a loss compares with a reference."""
        return any(loss.spec.reference for loss in self.losses)

    @property
    def holds_reference(self) -> bool:
        """Whether the reference's weights are in memory during the updates, where it is no adapter switched off."""
        return self.refers and self.reference_log_probs == "compute"

    @property
    def sft_weight(self) -> float:
        """Weight of the term that imitates responses."""
        defaults = (loss.spec.sft_coef for loss in self.losses)
        return max(defaults) if self.sft_coef is None else self.sft_coef


def check_reference(config: DPOConfig) -> None:
    """Refuse settings of a reference that no loss has, or whose log-probabilities cannot be computed beforehand.

    Raises:
        ValueError: in words.
    """
    names, cached = " and ".join(loss.name for loss in config.losses), config.reference_log_probs == "cache"
    if not config.refers and (config.reference is not None or cached):
        raise ValueError(f"reference: {names} needs none; leave reference and reference_log_probs out")
    if any(loss.spec.batch_input == "kl" for loss in config.losses):
        if cached:
            raise ValueError(
                "reference_log_probs: kto estimates a KL divergence on prompts and responses that each batch pairs anew, which "
                "cannot be computed beforehand; take compute, or loss=apo_zero_unpaired"
            )
        if config.training.batch_size < 2:
            raise ValueError(
                "training.batch_size: kto needs two rows or more, whose prompts and responses it exchanges"
            )
    if cached and config.data.streaming:
        raise ValueError(
            "reference_log_probs: cache computes them for all rows before the first update, and data.streaming does not know "
            "these; set reference_log_probs=compute, or data.streaming=false"
        )
    if config.reference_cache is not None and not cached:
        raise ValueError("reference_cache: nothing is cached; set reference_log_probs=cache, or leave it out")


def require_margins(losses: Sequence[WeightedLoss], *parts: Sequence[Any]) -> None:
    """Refuse pairs without the margin that an offset is made of, all at once.

    Raises:
        UserError: naming the rows.
    """
    for loss in losses:
        if loss.spec.row_input == "margins":
            lowest = 0.0 if loss.parameters["offset_scale"] == "log" else -float("inf")
            bad = [row.row_id for rows in parts for row in rows if row.margin is None or row.margin <= lowest]
            shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            what = "a margin above 0" if lowest == 0 else "a margin"
            raise_all([f"{shown}: no {what}, of which {loss.name} makes its offset; take loss=sigmoid"] if bad else [])

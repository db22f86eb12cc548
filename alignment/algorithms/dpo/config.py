"""Settings of DPO and its variants, and the losses that they choose from losses/preference_table.py."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.data.config import DataConfig
from alignment.errors import spelling_hint
from alignment.losses.preference import Divergence, OffsetScale
from alignment.losses.preference_table import ALIASES, LOSSES, PARAMETERS, LossSpec, Rows
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.settings import NonNegativeFloat, PositiveFloat, Rule, Settings, refusal
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class WeightedLoss:
    """A loss of the table with its parameters, and its weight in the sum that a run minimizes."""

    name: str
    weight: float
    spec: LossSpec
    parameters: Mapping[str, Any]  # numbers, and odpo's offset_scale
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5

    @property
    def beta(self) -> float:
        """Scale of the implicit reward."""
        return float(self.parameters["beta"])


@dataclass(frozen=True)
class PolicyOptim(OptimConfig):
    """The optimizer and its schedule, with a learning rate for all weights of a tuned policy."""

    learning_rate: PositiveFloat = 1e-6


@dataclass(frozen=True)
class PreferenceConfig(Settings):
    """Settings that DPO on given rows and on pairs of sampled responses have in common.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        output: the run's directory.
        loss: sigmoid (DPO, also named dpo), sigmoid_norm (on means over tokens), robust, ipo, hinge (SLiC), exo_pair,
            discopop, odpo, rdpo, nca_pair, bco_pair, bco, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, simpo,
            orpo, cpo, kto, apo_zero_unpaired or plackett_luce (K responses with ranks); or several with their weights,
            {sigmoid: 0.8, bco_pair: 0.2}.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume. simpo, orpo
            and cpo have none.
        beta: pull towards the reference, > 0; scale of the reward of simpo and cpo, weight of orpo's odds-ratio term.
            None: the loss's default, 0.1 for most, 2 for simpo, 5 for sigmoid_norm, 0.05 for discopop, 0.001 for
                sppo_hard.
        label_smoothing: share of labels assumed flipped, in [0, 0.5): of sigmoid (cDPO), sigmoid_norm, robust,
            exo_pair, cpo, aot and aot_unpaired. None: 0, of robust 0.1, of exo_pair 0.001.
        gamma: of simpo: reward by which the chosen response should lead; None: 1.
        tau: of discopop: width of the change between its two costs; None: 0.05.
        length_penalty: of rdpo: reward taken away for each token; None: 0.01.
        offset_coef: of odpo: weight of the offset; None: 1.
        offset_scale: of odpo: log or linear, of the rows' margins; None: log.
        f_divergence: reverse_kl (DPO's own), forward_kl, js or alpha, for losses of reward differences.
        f_alpha: of the alpha-divergence, in (0, 1]; 0 would be the reverse, 1 is the forward KL.
        sft_coef: weight of the mean negative log-likelihood per token of the chosen responses; None: the loss's
            default, 1 for orpo and cpo, 0 for the others.
        adapter: train an adapter, without dropout; the reference is then the same weights with the adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's and a judging reward model's among them.
    """

    policy: str
    data: DataConfig
    output: str
    _: KW_ONLY
    loss: str | dict[str, PositiveFloat] = "sigmoid"
    reference: str | None = None
    beta: PositiveFloat | None = None
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] | None = None
    gamma: NonNegativeFloat | None = None
    tau: PositiveFloat | None = None
    length_penalty: NonNegativeFloat | None = None
    offset_coef: NonNegativeFloat | None = None
    offset_scale: OffsetScale | None = None
    f_divergence: Divergence = "reverse_kl"
    f_alpha: Annotated[float, Interval(gt=0, le=1)] = 0.5
    sft_coef: NonNegativeFloat | None = None
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optim: PolicyOptim = field(default_factory=PolicyOptim)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule("loss", lambda c: unknown_loss(c)),
        Rule("loss", lambda c: not c.loss, "must name at least one"),
        Rule(
            "loss",
            lambda c: len({loss.spec.rows for loss in c.losses}) > 1,
            "must not name losses that learn from different rows, as {self.loss_names} do",
        ),
        *(Rule(name, partial(lambda name, c: foreign_parameter(c, name), name)) for name in PARAMETERS),
        Rule(
            "label_smoothing",
            lambda c: c.label_smoothing == 0 and "exo_pair" in [loss.name for loss in c.losses],
            "must be above 0 for exo_pair, whose divergence is infinite at 0; the paper's is 0.001",
        ),
        Rule(
            "f_alpha",
            lambda c: c.f_divergence != "alpha" and c.f_alpha != 0.5,
            "goes with f_divergence=alpha; f_divergence={self.f_divergence} has none",
        ),
        Rule(
            "f_divergence",
            lambda c: c.f_divergence != "reverse_kl" and not all(loss.spec.by_difference for loss in c.losses),
            "{self.f_divergence} leaves a constant of each prompt unknown, which only the difference of two rewards is "
            "free of; {self.loss_names} needs the rewards themselves. It goes with "
            + ", ".join(name for name, spec in LOSSES.items() if spec.by_difference),
        ),
        Rule(
            "reference",
            lambda c: c.losses and not c.refers and c.reference is not None,
            "must be left out: {self.loss_names} needs none",
        ),
        Rule(
            "weights",
            lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None, judges=True).removeprefix(
                "weights."
            ),
        ),
        Rule("adapter.dropout", lambda c: refusal(refuse_dropout, c.adapter, "DPO").removeprefix("adapter.dropout ")),
    )

    @property
    def losses(self) -> tuple[WeightedLoss, ...]:
        """The losses that are minimized, with the table's defaults for what the config leaves out."""
        given = {name: value for name in PARAMETERS if (value := getattr(self, name, None)) is not None}
        chosen = []
        for name, weight in loss_weights(self).items():
            if (spec := LOSSES.get(name)) is not None:  # others are refused
                parameters = {key: given.get(key, default) for key, default in spec.defaults.items()}
                chosen.append(WeightedLoss(name, weight, spec, parameters, self.f_divergence, self.f_alpha))
        return tuple(chosen)

    @property
    def loss_names(self) -> str:
        """The names of the losses, for messages."""
        return " and ".join(loss_weights(self))

    @property
    def rows(self) -> Rows:
        """The kind of rows that the losses learn from."""
        return self.losses[0].spec.rows

    @property
    def refers(self) -> bool:
        """True where a loss compares with a reference."""
        return any(loss.spec.reference for loss in self.losses)

    @property
    def sft_weight(self) -> float:
        """Weight of the term that imitates the chosen responses."""
        return max(loss.spec.sft_coef for loss in self.losses) if self.sft_coef is None else self.sft_coef


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PreferenceConfig):
    """Settings of one run of DPO or a variant: the keys of `PreferenceConfig`, and its own.

    Attributes:
        data: comparisons; labels for kto and apo_zero_unpaired, rankings for plackett_luce.
        reference_log_probs: compute: by the reference at every update; cache: once, before the first update, and kept
            on disk under a hash of weights and rows, so that the reference leaves the memory.
        reference_cache: folder of the cached log-probabilities; None: in the output directory.
        desirable_weight: of kto and apo_zero_unpaired: weight of the rows with desirable responses; None: 1.
        undesirable_weight: of the others; None: 1.
    """

    reference_log_probs: Literal["compute", "cache"] = "compute"
    reference_cache: str | None = None
    desirable_weight: NonNegativeFloat | None = None
    undesirable_weight: NonNegativeFloat | None = None

    RULES = (
        Rule(
            "reference_log_probs",
            lambda c: c.cached and not c.refers,
            "must be left out: {self.loss_names} needs no reference",
        ),
        Rule(
            "reference_log_probs",
            lambda c: c.cached and c.needs("kl"),
            "must be compute with kto, which estimates a KL divergence on prompts and responses that each batch pairs "
            "anew and that cannot be computed beforehand; or take loss=apo_zero_unpaired",
        ),
        Rule(
            "reference_log_probs",
            lambda c: c.cached and c.data.streaming,
            "cache computes them for all rows before the first update, and data.streaming does not know these; set it "
            "to compute, or data.streaming=false",
        ),
        Rule(
            "reference_cache",
            lambda c: c.reference_cache is not None and not c.cached,
            "has no effect: nothing is cached; set reference_log_probs=cache, or leave it out",
        ),
        Rule(
            "training.batch_size",
            lambda c: c.needs("kl") and c.training.batch_size < 2,
            "must be at least 2 with kto, which exchanges the rows' prompts and responses",
        ),
        Rule(
            "data.streaming",
            lambda c: c.data.streaming and c.needs("margins"),
            "must be false with odpo, which looks for a margin in all rows beforehand",
        ),
    )

    def needs(self, what: str) -> bool:
        """True where a loss needs this further input."""
        return any(loss.spec.needs == what for loss in self.losses)

    @property
    def cached(self) -> bool:
        """True where the reference's log-probabilities are computed before the first update."""
        return self.reference_log_probs == "cache"

    @property
    def holds_reference(self) -> bool:
        """True where the reference's weights are in memory during the updates, unless it is an adapter switched off."""
        return self.refers and not self.cached


def loss_weights(config: PreferenceConfig) -> dict[str, float]:
    """Names of the losses in the table -> their weights."""
    given = {config.loss: 1.0} if isinstance(config.loss, str) else config.loss
    return {ALIASES.get(name, name): weight for name, weight in given.items()}


def unknown_loss(config: PreferenceConfig) -> str:
    """Why a loss's name is wrong; empty where all are in the table."""
    unknown = [name for name in loss_weights(config) if name not in LOSSES]
    if not unknown:
        return ""
    hint = spelling_hint(unknown[0], LOSSES)
    return f"{unknown[0]!r} is unknown; {hint and hint + '; '}there are {', '.join(LOSSES)}"


def foreign_parameter(config: PreferenceConfig, name: str) -> str:
    """Why a parameter is wrong that none of the losses has; empty where one has it, or it is not set."""
    if (
        getattr(config, name, None) is None
        or any(name in loss.parameters for loss in config.losses)
        or not config.losses
    ):
        return ""
    owners = ", ".join(other for other, spec in LOSSES.items() if name in spec.defaults)
    known = ", ".join(sorted({parameter for loss in config.losses for parameter in loss.parameters}))
    return f"is a parameter of {owners}; the loss is {config.loss_names}, which has {known}"

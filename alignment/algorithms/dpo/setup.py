"""Settings of DPO and its kin, what they must not be, and the losses that they choose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.data.config import DataConfig
from alignment.errors import raise_all, spelling_hint
from alignment.losses.direct_preference import Divergence, OffsetScale
from alignment.losses.preference_table import LOSSES, PARAMETERS, LossSpec, Parameter, Rows
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import OptimConfig, TrainingConfig

LOWEST = {  # parameter -> what it must be above, or at least
    "beta": "above 0", "tau": "above 0", "gamma": "0 or above", "length_penalty": "0 or above", "offset_coef": "0 or above",
    "desirable_weight": "0 or above", "undesirable_weight": "0 or above",
}  # fmt: skip


@dataclass(frozen=True)
class WeightedLoss:
    """A loss of the table with its parameters, and its weight in the sum that a run minimizes."""

    name: str
    weight: float
    spec: LossSpec
    parameters: Mapping[str, Parameter]
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5

    @property
    def beta(self) -> float:
        """Scale of the implicit reward."""
        return float(self.parameters["beta"])


@dataclass(frozen=True)
class PreferenceConfig:
    """Settings that DPO on given rows and on pairs of sampled responses have in common.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        output: the run's directory.
        loss: sigmoid (DPO), sigmoid_norm (on means over tokens), robust, ipo, hinge (SLiC), exo_pair, discopop, odpo,
            rdpo, nca_pair, bco_pair, bco, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, simpo, orpo, cpo, kto,
            apo_zero_unpaired or plackett_luce (K responses with ranks); or several with their weights, {sigmoid: 0.8, bco_pair: 0.2}.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume. simpo, orpo and
            cpo have none.
        beta: pull towards the reference, > 0; scale of the reward of simpo and cpo, weight of orpo's odds-ratio term.
            None: the loss's default, 0.1 for most, 2 for simpo, 5 for sigmoid_norm, 0.05 for discopop, 0.001 for sppo_hard.
        label_smoothing: share of labels assumed flipped, in [0, 0.5): of sigmoid (cDPO), sigmoid_norm, robust, exo_pair,
            cpo, aot and aot_unpaired. None: 0, of robust 0.1, of exo_pair 0.001.
        gamma: of simpo: reward by which the chosen response should lead; None: 1.
        tau: of discopop: width of the change between its two costs; None: 0.05.
        length_penalty: of rdpo: reward taken away for each token; None: 0.01.
        offset_coef: of odpo: weight of the offset; None: 1.
        offset_scale: of odpo: log or linear, of the rows' margins; None: log.
        f_divergence: reverse_kl (DPO's own), forward_kl, js or alpha, for losses of reward differences.
        f_alpha: of the alpha-divergence, in (0, 1]; 0 would be the reverse, 1 is the forward KL.
        sft_coef: weight of the mean negative log-likelihood per token of the chosen responses; None: the loss's default, 1
            for orpo and cpo, 0 for the others.
        adapter: train an adapter, without dropout; the reference is then the same weights with the adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's and a judging reward model's among them.
    """

    policy: str
    data: DataConfig
    output: str
    _: KW_ONLY
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
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    @property
    def losses(self) -> tuple[WeightedLoss, ...]:
        """What is minimized."""
        parameters = {name: getattr(self, name, None) for name in PARAMETERS}
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
    def sft_weight(self) -> float:
        """Weight of the term that imitates responses."""
        defaults = (loss.spec.sft_coef for loss in self.losses)
        return max(defaults) if self.sft_coef is None else self.sft_coef

    @property
    def chosen_weight(self) -> float:
        """Weight of that term on the chosen responses."""
        return self.sft_weight


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PreferenceConfig):
    """Settings of one run of DPO or its kin: the keys of `PreferenceConfig`, and its own.

    Attributes:
        data: comparisons; labels for kto and apo_zero_unpaired, rankings for plackett_luce.
        reference_log_probs: compute: by the reference at every update; cache: once, before the first update, and kept on
            disk under a hash of weights and rows, so that the reference leaves the memory.
        reference_cache: folder of the cached log-probabilities; None: in the output directory.
        desirable_weight: of kto and apo_zero_unpaired: weight of the rows with desirable responses; None: 1.
        undesirable_weight: of the others; None: 1.
        sft: demonstrations that the term of `sft_coef` imitates in place of the chosen responses; mixed and weighed by
            its own keys.
        sft_batch_size: demonstrations per update over all ranks.
    """

    reference_log_probs: Literal["compute", "cache"] = "compute"
    reference_cache: str | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    sft: DataConfig | None = None
    sft_batch_size: int = 16

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        refuse_dropout(self.adapter, "DPO")
        check_reference(self)
        refuse_streaming(self)
        if self.sft_weight < 0 or self.sft_batch_size < 1:
            raise ValueError("sft_coef must be 0 (off) or above, and sft_batch_size at least 1")
        if self.sft is not None and self.sft.evaluation_share is not None:
            raise ValueError("sft.evaluation_share is not read: these rows are trained on only; take it out")
        if self.sft is not None and self.sft_weight == 0:
            raise ValueError("sft: these demonstrations would have no weight; set sft_coef, or leave them out")
        if self.sft is not None and self.sft.evaluation is not None:
            raise ValueError("sft.evaluation is not read: preferences are held out in data.evaluation; leave it out")

    @property
    def holds_reference(self) -> bool:
        """Whether the reference's weights are in memory during the updates, where it is no adapter switched off."""
        return self.refers and self.reference_log_probs == "compute"

    @property
    def chosen_weight(self) -> float:
        """Weight of the chosen responses' log-likelihood: 0 where demonstrations take their place."""
        return self.sft_weight if self.sft is None else 0.0


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


def refuse_streaming(config: DPOConfig) -> None:
    """Refuse streamed rows where all rows must be seen before the first update.

    Raises:
        ValueError: in words.
    """
    if config.sft is not None and config.sft.streaming:
        raise ValueError("sft.streaming: demonstrations beside preferences are prepared; set sft.streaming=false")
    if config.data.streaming and any(loss.spec.row_input == "margins" for loss in config.losses):
        raise ValueError("odpo looks for a margin in all rows beforehand; set data.streaming=false")


def require_margins(losses: Sequence[WeightedLoss], *parts: Sequence[Any]) -> None:
    """Refuse pairs without the margin that an offset is made of, all at once.

    Raises:
        UserError: naming the rows.
    """
    for loss in losses:
        if loss.spec.row_input == "margins":
            lowest = 0.0 if loss.parameters["offset_scale"] == "log" else -float("inf")
            bad = [
                row.row_id
                for rows in parts
                for row in rows
                if row.values.get("margin") is None or row.values["margin"] <= lowest
            ]
            shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            what = "a margin above 0" if lowest == 0 else "a margin"
            raise_all([f"{shown}: no {what}, of which {loss.name} makes its offset; take loss=sigmoid"] if bad else [])


# The choice of losses


def choose_losses(
    names: str | Mapping[str, float],
    settings: Mapping[str, Parameter | None],
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> tuple[WeightedLoss, ...]:
    """The losses of a config, with the table's defaults for what it leaves out.

    Args:
        names: a loss, or losses with their weights.
        settings: the config's parameters by name; None where it sets none.
        divergence, alpha: as for `f_divergence_scores`.

    Raises:
        ValueError: a loss that the table lacks, losses of different kinds of rows, a parameter that none of them has, or a
            value outside its range.
    """
    weights = {names: 1.0} if isinstance(names, str) else dict(names)
    for name, weight in weights.items():
        if name not in LOSSES:
            hint = "DPO's own is sigmoid" if name == "dpo" else spelling_hint(name, LOSSES)
            raise ValueError(f"loss: there is no {name!r}; {hint and hint + '; '}there are {', '.join(LOSSES)}")
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"loss: the weight of {name} must be above 0, got {weight}")
    if not weights:
        raise ValueError("loss: name at least one")
    rows = {LOSSES[name].rows for name in weights}
    if len(rows) > 1:
        raise ValueError(f"loss: {' and '.join(weights)} learn from different rows, {' and '.join(sorted(rows))}")
    given = {name: value for name, value in settings.items() if value is not None}
    for key in given:
        if not any(key in LOSSES[name].defaults for name in weights):
            _refuse_parameter(key, list(weights))
    if divergence != "alpha" and alpha != 0.5:
        raise ValueError(f"f_alpha goes with f_divergence=alpha; f_divergence={divergence} has none")
    if divergence != "reverse_kl":
        _require_difference(weights, divergence, alpha)
    chosen = []
    for name, weight in weights.items():
        spec = LOSSES[name]
        parameters = {**spec.defaults, **{key: value for key, value in given.items() if key in spec.defaults}}
        _check(name, parameters)
        chosen.append(WeightedLoss(name, weight, spec, parameters, divergence, alpha))
    return tuple(chosen)


def _refuse_parameter(key: str, names: Sequence[str]) -> None:
    owners = [name for name, spec in LOSSES.items() if key in spec.defaults]
    known = sorted({parameter for name in names for parameter in LOSSES[name].defaults})
    raise ValueError(
        f"{key} is a parameter of {', '.join(owners)}; the loss is {' and '.join(names)}, which has {', '.join(known)}"
    )


def _require_difference(names: Mapping[str, float], divergence: str, alpha: float) -> None:
    if divergence not in get_args(Divergence):
        raise ValueError(f"f_divergence must be one of {', '.join(get_args(Divergence))}, got {divergence!r}")
    if alpha <= 0 or alpha > 1:
        raise ValueError(f"f_alpha must be in (0, 1], got {alpha}")
    for name in names:
        if not LOSSES[name].by_difference:
            able = ", ".join(other for other, spec in LOSSES.items() if spec.by_difference)
            raise ValueError(
                f"f_divergence={divergence} leaves a constant of each prompt unknown, which only the difference of two "
                f"rewards is free of; {name} needs the rewards themselves. It goes with {able}"
            )


def _check(name: str, parameters: Mapping[str, Parameter]) -> None:
    for key, value in parameters.items():
        if key == "label_smoothing":
            low = "(0" if name == "exo_pair" else "[0"
            if not 0 <= float(value) < 0.5 or (low == "(0" and value == 0):
                raise ValueError(f"label_smoothing must be in {low}, 0.5) for {name}, got {value}")
        elif key == "offset_scale":
            if value not in get_args(OffsetScale):
                raise ValueError(f"offset_scale must be one of {', '.join(get_args(OffsetScale))}, got {value!r}")
        elif float(value) < 0 or (float(value) == 0 and LOWEST[key] == "above 0"):
            raise ValueError(
                f"{key} must be {LOWEST[key]}, got {value}; {name}'s default is {LOSSES[name].defaults[key]}"
            )

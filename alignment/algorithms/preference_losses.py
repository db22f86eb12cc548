"""The losses that a run of DPO's family minimizes: chosen from the table by the config, and what they take of a batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from alignment.algorithms.policies import LogProbModel, sequence_log_probs
from alignment.data.batches import PairBatch, PreferenceBatch, RankedBatch, UnpairedBatch
from alignment.errors import suggest
from alignment.losses.direct_preference import Divergence, OffsetScale, f_divergence_scores
from alignment.losses.preference_table import LOSSES, LossSpec, Parameter
from alignment.training import LossSum

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
            raise ValueError(f"loss: there is no {name!r}{suggest(name, LOSSES)}; there are {', '.join(LOSSES)}")
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


# What they take of a batch


@dataclass(frozen=True)
class GlobalInputs:
    """What losses take of the whole global batch, computed before the update, without gradient.

    Attributes:
        kl: KTO's reference point, nats, a scalar; None: 0.
        pairs: log-probabilities of all pairs, columns of the chosen and the rejected ones under the policy, then under the
            reference, nats, [n, 4]; None: AOT sorts the micro-batch alone, and BCO's shift is 0.
        mean_tokens: tokens of preferred responses for each row, a scalar; None: those of the micro-batch itself.
    """

    kl: Tensor | None = None
    pairs: Tensor | None = None
    mean_tokens: Tensor | None = None

    def keywords(self, loss: WeightedLoss) -> dict[str, Any]:
        """The arguments of a loss's function."""
        if loss.spec.batch_input == "kl":
            return {"kl": 0.0 if self.kl is None else self.kl}
        if loss.spec.batch_input is None or self.pairs is None:
            return {}
        policy_chosen, policy_rejected, reference_chosen, reference_rejected = self.pairs.unbind(1)
        chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
        if loss.spec.batch_input == "shift":
            return {"shift": loss.beta * (chosen.mean() + rejected.mean()) / 2}
        if loss.spec.batch_input == "unpaired_values":
            return {"values_of_all": (chosen, rejected)}
        return {"values_of_all": (policy_chosen - policy_rejected, reference_chosen - reference_rejected)}


ALONE = GlobalInputs()  # a micro-batch that is the whole batch


class PreferenceLossFn(Protocol):
    """A loss function whose sums may depend on the whole global batch."""

    def __call__(self, batch: Any, given: GlobalInputs = ALONE) -> LossSum:
        """The sums over a micro-batch."""
        ...


@dataclass(frozen=True)
class ResponseLogProbs:
    """Log-probabilities of D responses.

    Attributes:
        policy: of each whole response under the policy, nats, [D].
        reference: under the reference, [D]; None where no loss asks for it.
        tokens: of each response, the end token among them, [D].
    """

    policy: Tensor
    reference: Tensor | None
    tokens: Tensor

    def of(self, loss: WeightedLoss) -> list[Tensor]:
        """The policy's, and where the loss takes a reference the reference's, in the form that the loss takes, [D] each."""
        columns = [self.policy]
        if loss.spec.reference:
            assert self.reference is not None
            columns.append(self.reference)
            if loss.divergence != "reverse_kl":
                scores = f_divergence_scores(self.policy - self.reference, loss.divergence, loss.alpha)
                columns = [scores, torch.zeros_like(scores)]
        return [column / self.tokens for column in columns] if loss.spec.means else columns

    def rewards(self, loss: WeightedLoss) -> Tensor:
        """Implicit rewards of the responses, without gradient, [D]; without a reference beta * log-probability."""
        policy, *reference = (column.detach() for column in self.of(loss))
        return loss.beta * (policy - reference[0] if reference else policy)


def response_log_probs(
    policy: LogProbModel, reference: LogProbModel | None, batch: PreferenceBatch
) -> ResponseLogProbs:
    """Log-probabilities of a batch's responses, the reference's computed here or beforehand."""
    ours = sequence_log_probs(policy, batch.ragged)
    theirs = batch.reference
    if theirs is None and reference is not None:
        theirs = sequence_log_probs(reference, batch.ragged)
    rows = batch.ragged.target_rows
    tokens = torch.zeros_like(ours).index_add(0, rows, torch.ones_like(rows, dtype=ours.dtype))
    return ResponseLogProbs(ours, theirs, tokens)


def preferred_responses(batch: PreferenceBatch) -> Tensor:
    """Which of a batch's responses are to be imitated: the chosen, the desirable, or the best ones; bool, [D]."""
    if isinstance(batch, PairBatch):
        return torch.arange(len(batch.lengths), device=batch.ragged.tokens.device) < len(batch.lengths) // 2
    return batch.desirable if isinstance(batch, UnpairedBatch) else batch.ranks == 0


def preferred_tokens(batch: PreferenceBatch) -> Tensor:
    """Tokens of a batch's preferred responses."""
    return preferred_responses(batch)[batch.ragged.target_rows].sum()


def with_sft(
    loss: LossSum,
    responses: ResponseLogProbs,
    batch: PreferenceBatch,
    given: GlobalInputs,
    *,
    sft_coef: float,
    means: dict[str, tuple[Tensor, Tensor]],
) -> LossSum:
    """The loss with further means, and where its weight is not 0 `sft_part` of the batch's preferred responses."""
    if not sft_coef:
        return LossSum(loss.total, loss.metrics, loss.means | means)
    part, mean = sft_part(responses, preferred_responses(batch), batch.weight, given)
    return LossSum(loss.total + sft_coef * part, loss.metrics, loss.means | means | {"sft_loss": mean})


def by_prompt(values: Tensor, batch: RankedBatch) -> tuple[Tensor, Tensor]:
    """Values of D responses as one row per prompt, padded with 0, [B, K]; and where they are, bool, [B, K]."""
    sizes = torch.tensor(batch.sizes, device=values.device)
    index = torch.arange(len(values), device=values.device) - (sizes.cumsum(0) - sizes)[batch.groups]
    mask = torch.arange(max(batch.sizes), device=values.device) < sizes[:, None]
    return values.new_zeros(mask.shape).index_put((batch.groups, index), values), mask


def sft_part(
    responses: ResponseLogProbs, preferred: Tensor, rows: float, given: GlobalInputs
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The preferred responses' negative log-likelihood as a part of a sum over rows.

    Over the whole global batch the parts add up to (rows) * (mean over the preferred responses' tokens of -log p).

    Args:
        responses: D of them.
        preferred: which of them count, bool, [D].
        rows: of the micro-batch.
        given: `mean_tokens`, the tokens for each row.

    Returns:
        The part, a scalar with gradient; and without it the sum of -log p with the number of tokens.
    """
    cost = -torch.where(preferred, responses.policy, 0.0).sum()
    tokens = torch.where(preferred, responses.tokens, 0.0).sum()
    mean_tokens = tokens / rows if given.mean_tokens is None else given.mean_tokens
    return cost / mean_tokens.clamp(min=1e-9), (cost.detach(), tokens)

"""One update of DPO's family: what its losses take of the whole global batch is computed first, without gradient.

KTO's reference point and AOT's order belong to the global batch, BCO's shift to all of them so far: they are computed over
all rows and all ranks, so that neither micro-batches nor the number of ranks change the loss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from alignment.algorithms.dpo.responses import (
    Means,
    ResponseLogProbs,
    logged_metrics,
    preferred_responses,
    preferred_tokens,
    response_log_probs,
)
from alignment.algorithms.dpo.setup import DPOConfig, WeightedLoss
from alignment.algorithms.policies import LogProbModel, language_loss_fn
from alignment.algorithms.runs import sources_of
from alignment.data.batches import PairBatch, PreferenceBatch, RankedBatch, UnpairedBatch, collate
from alignment.data.examples import Example, TokenizedRow
from alignment.data.mixture import RowOrder, stream_of
from alignment.data.text.truncation import truncate
from alignment.data.tokenize import last_span
from alignment.losses.unpaired import kl_reference_point
from alignment.ragged import Batch
from alignment.training import Engine, LossFn, LossSum, Term, held_out_metrics
from alignment.training.terms import ZeroWeightBatch, shard_rows, unwrap_batch

Collate = Callable[[Sequence[Any]], Sequence[Any]]  # rows -> micro-batches


@dataclass(frozen=True)
class GlobalInputs:
    """What losses take of the whole global batch, computed before the update, without gradient.

    Attributes:
        kl: KTO's reference point, nats, a scalar; None: 0.
        pairs: log-probabilities of all pairs, columns of the chosen and the rejected ones under the policy, then under the
            reference, nats, [n, 4]; None: AOT sorts the micro-batch alone.
        first: place among them of this rank's first pair.
        shift: BCO's shift before it is multiplied by beta, nats; None: 0.
        mean_tokens: tokens of preferred responses for each row, a scalar; None: those of the micro-batch itself.
    """

    kl: Tensor | None = None
    pairs: Tensor | None = None
    first: int = 0
    shift: float | None = None
    mean_tokens: Tensor | None = None

    def keywords(self, loss: WeightedLoss) -> dict[str, Any]:
        """The arguments of a loss's function."""
        if loss.spec.batch_input == "kl":
            return {"kl": 0.0 if self.kl is None else self.kl}
        if loss.spec.batch_input == "shift":
            return {"shift": 0.0 if self.shift is None else loss.beta * self.shift}
        if loss.spec.batch_input is None or self.pairs is None:
            return {}
        policy_chosen, policy_rejected, reference_chosen, reference_rejected = self.pairs.unbind(1)
        chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
        if loss.spec.batch_input == "unpaired_values":
            return {"values_of_all": (chosen, rejected)}
        return {"values_of_all": (policy_chosen - policy_rejected, reference_chosen - reference_rejected)}


ALONE = GlobalInputs()  # a micro-batch that is the whole batch


class RewardShift:
    """The mean log-ratio of the chosen and the rejected responses of all updates so far: BCO's shift over beta, nats.

    Attributes:
        mean: of the log-ratios, nats; 0 before the first update.
        pairs: whose log-ratios they are.

    Source: Jung et al. 2024, arXiv:2404.04656 (a moving average).
    """

    def __init__(self) -> None:
        self.mean, self.pairs = 0.0, 0

    def add(self, pairs: Tensor) -> None:
        """Take in the pairs of an update, [n, 4] as in `GlobalInputs`."""
        self.pairs += len(pairs)
        self.mean += (mean_log_ratio(pairs) - self.mean) * len(pairs) / self.pairs


def mean_log_ratio(pairs: Tensor) -> float:
    """Mean of the log-ratios of both sides of some pairs, [n, 4] as in `GlobalInputs`; nats."""
    policy, reference = pairs.double().split(2, dim=1)
    return float((policy - reference).mean())


class PreferenceLossFn(Protocol):
    """A loss function whose sums may depend on the whole global batch."""

    def __call__(self, batch: Any, given: GlobalInputs = ALONE) -> LossSum:
        """The sums over a micro-batch."""
        ...


@dataclass(frozen=True)
class Demonstrations:
    """Responses to imitate beside the preferences: a second term of the objective.

    Attributes:
        stream: their order.
        collate: rows -> micro-batches.
        loss_fn: of -log p of their tokens.
        coef: weight of its mean per token.
    """

    stream: RowOrder[Any]
    collate: Collate
    loss_fn: LossFn
    coef: float


@dataclass(frozen=True)
class PreferenceUpdates:
    """Updates and evaluations of a policy that learns from preferences.

    Attributes:
        engine: trains the policy.
        losses: what is minimized.
        loss_fn: micro-batch, and what it takes of the global batch -> sums.
        reference: gives log-probabilities that no batch holds; None where no loss needs them.
        collate: rows -> micro-batches.
        mismatch: rows -> their responses after other rows' prompts; for KTO's reference point.
        imitates: whether the loss has a part per token of the preferred responses.
        demonstrations: a second term of the objective.
        shift: BCO's, over the updates so far; an evaluation leaves it as it is.
    """

    engine: Engine
    losses: Sequence[WeightedLoss]
    loss_fn: PreferenceLossFn
    reference: LogProbModel | None
    collate: Collate
    mismatch: Callable[[Sequence[Example]], list[Example]]
    imitates: bool = False
    demonstrations: Demonstrations | None = None
    shift: RewardShift = field(default_factory=RewardShift)

    def state(self) -> dict[str, float] | None:
        """What the next update needs to know of those before, for checkpoints; None: nothing."""
        return {"shift": self.shift.mean, "pairs": self.shift.pairs} if self.shift.pairs else None

    def restore(self, state: object) -> None:
        """Go on from what `state` returned."""
        if isinstance(state, dict):
            self.shift.mean, self.shift.pairs = float(state["shift"]), int(state["pairs"])

    def update(self, step: int, rows: Sequence[Example]) -> dict[str, float]:
        """One update on the rows of a global batch, which are the same on every rank; its metrics."""
        batches = self._shard(rows, self.collate)
        given = self.inputs(batches, rows, shared=True)
        terms = [Term(with_positions(batches, given), partial(self.loss_fn, given=given))]
        if self.demonstrations is not None:
            texts = self._shard(self.demonstrations.stream.rows_at(step), self.demonstrations.collate)
            terms.append(Term(texts, self.demonstrations.loss_fn, self.demonstrations.coef, "sft"))
        return logged_metrics(self.engine.update(*terms))

    def evaluate(self, rows: Sequence[Example], batches: Sequence[PreferenceBatch]) -> dict[str, float]:
        """Mean loss and metrics over held-out rows, taken as one global batch; every rank reads them all."""
        given = self.inputs(batches, rows, shared=False)
        numbered, loss_fn = with_positions(batches, given), partial(self.loss_fn, given=given)
        return logged_metrics(held_out_metrics(self.engine, numbered, loss_fn), "held_out_")

    @torch.no_grad()
    def inputs(self, batches: Sequence[Batch], rows: Sequence[Example], *, shared: bool) -> GlobalInputs:
        """What the losses take of a global batch; a collective operation where it is shared among ranks.

        Args:
            batches: of this rank.
            rows: of the global batch.
            shared: whether every rank has a part of the batches; otherwise each has all of them.
        """
        kinds = {loss.spec.batch_input for loss in self.losses}
        pairs, first = (
            self._pairs(batches, shared) if kinds & {"shift", "paired_values", "unpaired_values"} else (None, 0)
        )
        shift = None
        if pairs is not None and "shift" in kinds:
            if shared:
                self.shift.add(pairs)
            shift = self.shift.mean if self.shift.pairs else mean_log_ratio(pairs)
        return GlobalInputs(
            kl=self._reference_point([row for row in rows if "desirable" in row.values], shared)
            if "kl" in kinds
            else None,
            pairs=pairs,
            first=first,
            shift=shift,
            mean_tokens=self._mean_tokens(batches, shared) if self.imitates else None,
        )

    def _reference_point(self, rows: Sequence[Example], shared: bool) -> Tensor:
        """KTO's z0, from the responses of the global batch after other rows' prompts; 0 where there is one row alone."""
        device = self.engine.process_group.device
        totals = torch.zeros(2, device=device)  # sum of log-ratios, their number
        if len(rows) < 2:
            return totals[0]
        mismatched = self.mismatch(rows)
        batches = self._shard(mismatched, self.collate) if shared else self.collate(mismatched)
        for responses in self._log_probs(batches):
            assert responses.reference is not None
            ratios = responses.policy - responses.reference
            totals += torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))])
        total, count = (self.engine.process_group.sum(totals) if shared else totals).unbind()
        return kl_reference_point(total, count)

    def _pairs(self, batches: Sequence[Batch], shared: bool) -> tuple[Tensor, int]:
        """Log-probabilities of all pairs, [n, 4], and the place of this rank's first one; see `GlobalInputs`."""
        columns = [torch.empty(0, 4, device=self.engine.process_group.device)]
        for responses in self._log_probs(batches):
            assert responses.reference is not None
            columns.append(torch.stack([*responses.policy.chunk(2), *responses.reference.chunk(2)], dim=1).float())
        local = torch.cat(columns)
        if not shared:
            return local, 0
        group = self.engine.process_group
        parts = group.gather_objects(local.cpu())
        return torch.cat([part.to(local.device) for part in parts]), sum(map(len, parts[: group.rank]))

    def _mean_tokens(self, batches: Sequence[Batch], shared: bool) -> Tensor:
        """Tokens of preferred responses for each row of the global batch, a scalar."""
        totals = torch.zeros(2)
        for batch in batches:
            if isinstance(batch, PairBatch | RankedBatch | UnpairedBatch):
                totals += torch.tensor([float(preferred_tokens(batch)), float(batch.weight)])
        device = self.engine.process_group.device
        tokens, count = (self.engine.process_group.sum(totals) if shared else totals).to(device).unbind()
        return tokens / count

    def _log_probs(self, batches: Sequence[Batch]) -> Iterator[ResponseLogProbs]:
        """Log-probabilities of each batch that counts; the ranks call their models equally often."""
        most = self.engine.process_group.largest(len(batches)) if self.engine.backend.collective_forward else 0
        extra = [ZeroWeightBatch(unwrap_batch(batches[-1]))] * (most - len(batches))
        for batch in (*batches, *extra):
            moved = unwrap_batch(batch.to(self.engine.process_group.device))
            assert isinstance(moved, PairBatch | RankedBatch | UnpairedBatch)
            responses = response_log_probs(self.engine.model, self.reference, moved)
            if not isinstance(batch, ZeroWeightBatch):
                yield responses

    def _shard(self, rows: Sequence[TokenizedRow], collate: Collate) -> list[Batch]:
        """This rank's micro-batches of a global batch."""
        return shard_rows(rows, collate, self.engine.process_group.rank, self.engine.process_group.size)


def with_positions(batches: Sequence[Batch], given: GlobalInputs) -> list[Batch]:
    """This rank's batches, with the positions of their pairs among `given.pairs` where these are known."""
    numbered, start = [], given.first
    for batch in batches:
        inner = unwrap_batch(batch)
        if given.pairs is not None and isinstance(inner, PairBatch):
            positions = torch.arange(len(inner.lengths) // 2)
            if isinstance(batch, ZeroWeightBatch):  # counts for nothing, wherever it stands
                batch = ZeroWeightBatch(replace(inner, pair_positions=positions))
            else:
                batch, start = replace(inner, pair_positions=start + positions), start + len(positions)
        numbered.append(batch)
    return numbered


def with_sft(
    loss: LossSum,
    responses: ResponseLogProbs,
    batch: PreferenceBatch,
    given: GlobalInputs,
    *,
    sft_coef: float,
    means: Means,
) -> LossSum:
    """The loss with further means, and where its weight is not 0 `sft_part` of the batch's preferred responses."""
    if not sft_coef:
        return LossSum(loss.total, loss.metrics, loss.means | means)
    part, mean = sft_part(responses, preferred_responses(batch), batch.weight, given)
    return LossSum(loss.total + sft_coef * part, loss.metrics, loss.means | means | {"sft_loss": mean})


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


def demonstrations(config: DPOConfig, texts: Sequence[Example], engine: Engine) -> Demonstrations | None:
    """The second term of a config that names demonstrations, which are drawn and weighed as its `sft` says."""
    if config.sft is None:
        return None
    sources, training = sources_of(config.sft), config.training
    return Demonstrations(
        stream_of(config.sft, texts, batch_size=config.sft_batch_size, seed=training.seed + 1),
        partial(sources.weighted(collate), micro_batch_tokens=training.tokens_per_forward),
        language_loss_fn(engine.model, sources),
        config.sft_weight,
    )


def mismatched_rows(rows: Sequence[Example], max_length: int, bos: int | None) -> list[Example]:
    """Each prompt with the response of the row before it, the first one with that of the last, at most `max_length` long.

    The responses are those of the batch itself, as in KTO's own code, and the rows are those of the global batch in the
    order of the run: the pairing depends neither on micro-batches nor on ranks.
    """
    starts = [last_span(row.mask) for row in rows]
    pieces = [(row.ids[:start], row.ids[start:]) for row, start in zip(rows, starts, strict=True)]
    mismatched = []
    for number, row in enumerate(rows):
        prompt, responses = truncate(pieces[number][0], [pieces[number - 1][1]], max_length, bos)
        desirable = row.values["desirable"]
        mismatched.append(Example.answered(prompt, responses, row.row_id, row.source, desirable=desirable))
    return mismatched

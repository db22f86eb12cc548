"""Inputs of losses from the whole global batch, and the updates that compute them.

KTO's reference point z0 and AOT's order belong to one global batch, BCO's shift to all of them so far: they are
computed over all rows and all ranks, before each update and without gradient, so that neither micro-batches nor the
number of ranks change the loss. DPO itself needs none of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms.dpo.config import PreferenceConfig
from alignment.algorithms.dpo.responses import (
    ResponseLogProbs,
    logged_metrics,
    preferred_responses,
    response_log_probs,
)
from alignment.data.batches import (
    Example,
    PairBatch,
    PreferenceBatch,
    RankedBatch,
    TokenizedRow,
    UnpairedBatch,
)
from alignment.data.tokenize import last_span, truncate
from alignment.losses.preference import BatchOrder
from alignment.models.outputs import LogProbModel
from alignment.ragged import Batch, on_float64_device
from alignment.training import Engine, LossSum, Term, held_out_metrics
from alignment.training.terms import ZeroWeightBatch, shard_rows, unwrap_batch


@dataclass(frozen=True)
class GlobalInputs:
    """Inputs of the losses from the whole global batch.

    Attributes:
        kl: KTO's reference point, nats, a scalar.
        shift: BCO's shift before it is multiplied by beta, nats.
        pairs: log-probabilities of all pairs, columns of the chosen and the rejected ones under the policy, then under
            the reference, nats, [n, 4]; None: AOT sorts the micro-batch alone.
        first: place among them of this rank's first pair.
        mean_tokens: tokens of preferred responses for each row, a scalar; None: those of the micro-batch itself.
    """

    kl: Tensor | float = 0.0
    shift: float = 0.0
    pairs: Tensor | None = None
    first: int = 0
    mean_tokens: Tensor | None = None

    def order(self, batch: PreferenceBatch, *, paired: bool) -> BatchOrder | None:
        """AOT's values of all pairs; None: the batch is alone.

        Those are the margins, chosen minus rejected, under policy and reference where `paired`, else the log-ratios of
        the chosen and of the rejected responses.
        """
        if self.pairs is None or not isinstance(batch, PairBatch) or batch.pair_positions is None:
            return None
        policy_chosen, policy_rejected, reference_chosen, reference_rejected = self.pairs.unbind(1)
        if paired:
            first = policy_chosen - policy_rejected
            second = reference_chosen - reference_rejected
        else:
            first = policy_chosen - reference_chosen
            second = policy_rejected - reference_rejected
        return BatchOrder(first, second, batch.pair_positions)


NO_GLOBAL_INPUTS = GlobalInputs()  # a micro-batch that is the whole batch
PreferenceLossFn = Callable[..., LossSum]  # (micro-batch, inputs=NO_GLOBAL_INPUTS) -> its sums


@dataclass
class PreferenceUpdates:
    """Updates and evaluations of a policy that learns from preferences.

    Attributes:
        engine: trains the policy.
        config: names the losses.
        loss_fn: micro-batch and inputs of the global batch -> sums.
        reference: gives log-probabilities that no batch holds; None where no loss needs them.
        collate: rows -> micro-batches.
        bos: the token at the beginning of every row; None where there is none.
        shift: BCO's over beta, nats: the mean log-ratio of the chosen and the rejected responses of all updates so far;
            0 before the first one. An evaluation leaves it as it is.
        pairs: number of pairs whose log-ratios they are.

    Source: BCO's moving average: Jung et al. 2024, arXiv:2404.04656.
    """

    engine: Engine
    config: PreferenceConfig
    loss_fn: PreferenceLossFn
    reference: LogProbModel | None
    collate: Callable[[Sequence[Any]], Sequence[Any]]
    bos: int | None = None
    shift: float = 0.0
    pairs: int = 0

    def state(self) -> dict[str, float] | None:
        """BCO's shift, for checkpoints; None without one."""
        return {"shift": self.shift, "pairs": self.pairs} if self.pairs else None

    def restore(self, state: object) -> None:
        """Go on from what `state` returned."""
        if isinstance(state, dict):
            self.shift = float(state["shift"])
            self.pairs = int(state["pairs"])

    def update(self, step: int, rows: Sequence[Example]) -> dict[str, float]:
        """One update on the rows of a global batch, which are the same on every rank; its metrics."""
        batches = self._shard(rows)
        inputs = self.inputs(batches, rows, shared=True)
        return logged_metrics(
            self.engine.update(Term(with_positions(batches, inputs), partial(self.loss_fn, inputs=inputs)))
        )

    def evaluation(self, rows: Sequence[Example]) -> Callable[[], dict[str, float]] | None:
        """A function that returns mean loss and metrics of held-out rows as one global batch; None without rows.

        Every rank reads them all.
        """
        if not rows:
            return None
        batches = self.collate(rows)

        def evaluate() -> dict[str, float]:
            inputs = self.inputs(batches, rows, shared=False)
            loss_fn = partial(self.loss_fn, inputs=inputs)
            return logged_metrics(held_out_metrics(self.engine, with_positions(batches, inputs), loss_fn), "held_out_")

        return evaluate

    @torch.no_grad()
    def inputs(self, batches: Sequence[Batch], rows: Sequence[Example], *, shared: bool) -> GlobalInputs:
        """The inputs that the losses need of a global batch; a collective operation where it is shared among ranks."""
        needed = {loss.spec.needs for loss in self.config.losses}
        kl = 0.0
        shift = 0.0
        pairs, first = self._pairs(batches, shared) if needed & {"shift", "order"} else (None, 0)
        if pairs is not None and "shift" in needed:
            if shared:
                self.add_to_shift(pairs)
            shift = self.shift if self.pairs else mean_log_ratio(pairs)
        if "kl" in needed:
            kl = self._reference_point([row for row in rows if "desirable" in row.values], shared)
        mean_tokens = self._mean_tokens(batches, shared) if self.config.sft_weight else None
        return GlobalInputs(kl, shift, pairs, first, mean_tokens)

    def add_to_shift(self, pairs: Tensor) -> None:
        """Take in the pairs of an update, [n, 4] as in `GlobalInputs`."""
        self.pairs += len(pairs)
        self.shift += (mean_log_ratio(pairs) - self.shift) * len(pairs) / self.pairs

    def _reference_point(self, rows: Sequence[Example], shared: bool) -> Tensor:
        """KTO's z0 = max(0, mean log-ratio of the global batch's responses after other rows' prompts), nats.

        It is 0 for a batch of one row.

        Source: Ethayarajh et al. 2024, arXiv:2402.01306.
        """
        totals = torch.zeros(2, device=self.engine.process_group.device)  # sum of log-ratios, their number
        if len(rows) < 2:
            return totals[0]
        mismatched = mismatched_rows(rows, self.config.data.max_length, self.bos)
        for responses in self._log_probs(self._shard(mismatched) if shared else self.collate(mismatched)):
            assert responses.reference is not None
            ratios = responses.policy - responses.reference
            totals += torch.stack([ratios.sum(), ratios.new_full((), len(ratios))])
        total, count = (self.engine.process_group.sum(totals) if shared else totals).unbind()
        return (total / count.clamp(min=1)).clamp(min=0)

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
            if isinstance(batch, PreferenceBatch):
                tokens = preferred_responses(batch)[batch.ragged.target_rows].sum()
                totals += torch.tensor([float(tokens), float(batch.weight)])
        group = self.engine.process_group
        tokens, count = (group.sum(totals) if shared else totals).to(group.device).unbind()
        return tokens / count

    def _log_probs(self, batches: Sequence[Batch]) -> Iterator[ResponseLogProbs]:
        """Log-probabilities of each batch that counts; the ranks call their models equally often."""
        for batch in joint_batches(batches, self.engine):
            moved = unwrap_batch(batch.to(self.engine.process_group.device))
            assert isinstance(moved, PairBatch | RankedBatch | UnpairedBatch)
            responses = response_log_probs(self.engine.model, self.reference, moved)
            if not isinstance(batch, ZeroWeightBatch):
                yield responses

    def _shard(self, rows: Sequence[TokenizedRow]) -> list[Batch]:
        """This rank's micro-batches of a global batch."""
        return shard_rows(rows, self.collate, self.engine.process_group.rank, self.engine.process_group.size)


def mean_log_ratio(pairs: Tensor) -> float:
    """Mean of the log-ratios of both sides of some pairs, [n, 4] as in `GlobalInputs`; nats."""
    policy, reference = on_float64_device(pairs).double().split(2, dim=1)
    return float((policy - reference).mean())


def joint_batches(batches: Sequence[Batch], engine: Engine) -> list[Batch]:
    """The batches; where forwards are collective, the last one again at weight 0 until every rank has as many."""
    most = engine.process_group.largest(len(batches)) if engine.backend.collective_forward else 0
    return [*batches, *[ZeroWeightBatch(unwrap_batch(batches[-1]))] * (most - len(batches))]


def with_positions(batches: Sequence[Batch], inputs: GlobalInputs) -> list[Batch]:
    """This rank's batches, with the positions of their pairs among `inputs.pairs` where these are known."""
    if inputs.pairs is None:
        return list(batches)
    numbered = []
    start = inputs.first
    for batch in batches:
        inner = unwrap_batch(batch)
        if isinstance(inner, PairBatch):
            positions = torch.arange(len(inner.lengths) // 2)
            if isinstance(batch, ZeroWeightBatch):  # counts for nothing, wherever it stands
                batch = ZeroWeightBatch(replace(inner, pair_positions=positions))
            else:
                batch = replace(inner, pair_positions=start + positions)
                start = start + len(positions)
        numbered.append(batch)
    return numbered


def mismatched_rows(rows: Sequence[Example], max_length: int, bos: int | None) -> list[Example]:
    """Each prompt with the response of the row before it, the first with that of the last, at most `max_length` long.

    The responses are those of the batch itself, as in KTO's own code, and the rows are those of the global batch in the
    order of the run: the pairing depends neither on micro-batches nor on ranks.
    """
    starts = [last_span(row.mask) for row in rows]
    pieces = [(row.ids[:start], row.ids[start:]) for row, start in zip(rows, starts, strict=True)]
    mismatched = []
    for index, row in enumerate(rows):
        prompt, responses = truncate(pieces[index][0], [pieces[index - 1][1]], max_length, bos)
        desirable = row.values["desirable"]
        mismatched.append(Example.answered(prompt, responses, row.row_id, row.source, desirable=desirable))
    return mismatched

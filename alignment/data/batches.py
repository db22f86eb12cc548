"""Examples to ragged micro-batches of limited size; how records become examples is in tokenize.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from alignment.data.examples import Example, LabeledExample, PairExample, RankedExample
from alignment.ragged import Ragged, RaggedBatch, Sharing, allowed, common_prompt, fill_groups

Row = TypeVar("Row")


@dataclass(frozen=True)
class PairBatch(RaggedBatch):
    """B pairs as 2B documents: all chosen, then all rejected in the same order. Its weight is B."""

    margins: Tensor | None  # [B]; None where no row has one
    reference: Tensor | None = None  # log-probabilities under a reference, nats, computed beforehand, [2B]
    pair_positions: Tensor | None = None  # of the pairs among those of the global batch, [B]; None: not asked for

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each pair, [B]."""
        return None if self.ragged.sources is None else self.ragged.sources[: len(self.lengths) // 2]


def collate(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """Ragged batches of at most `micro_batch_tokens` tokens each; a longer document stands alone.

    Documents of similar length come together, which costs attention the least. The weight is the number of targets.
    """
    return [
        Ragged.build(
            [example.ids for example in group],
            [example.mask for example in group],
            row_ids=[example.row_id for example in group],
        ).with_sources([example.source for example in group])
        for group in _longest_first(examples, [(len(example.ids),) for example in examples], micro_batch_tokens)
    ]


def collate_whole(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """`collate` with every token but each document's first as a target, whatever the examples' masks."""
    return collate([replace(example, mask=[True] * len(example.ids)) for example in examples], micro_batch_tokens)


def collate_pairs(
    pairs: Sequence[PairExample], micro_batch_tokens: int, *, share_prompts: Sharing = False
) -> list[PairBatch]:
    """Pair batches of at most `micro_batch_tokens` tokens each, both sides together; a longer pair stands alone.

    Args:
        pairs: rows.
        micro_batch_tokens: a prompt that its sides share counts once.
        share_prompts: whether the prompt of a pair is in the batch once.
    """
    sides = [(pair.chosen, pair.rejected) for pair in pairs]
    groups = _groups(pairs, sides, micro_batch_tokens, share_prompts)
    return [_pair_batch(group, share_prompts) for group in groups]


def _pair_batch(pairs: Sequence[PairExample], share_prompts: Sharing) -> PairBatch:
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    together = [(number, len(pairs) + number) for number in range(len(pairs))]
    ragged = _laid_out(sides, together, share_prompts).with_sources([pair.source for pair in pairs] * 2)
    return PairBatch(ragged, _margins([pair.margin for pair in pairs]), _references(sides))


@dataclass(frozen=True)
class RankedBatch(RaggedBatch):
    """D responses to B prompts as D documents, those to one prompt side by side. Its weight is B.

    Attributes:
        ranks: place of each response, 0 is best; equal places are ties, [D].
        groups: number of the prompt, from 0, that each response answers, [D].
        sizes: responses to each prompt, B numbers.
        margins: by how much the better of two leads, 0 where a row says nothing, [B]; None where no row has one.
        reference: log-probabilities under a reference, nats, where they were computed beforehand, [D].
    """

    ranks: Tensor
    groups: Tensor
    sizes: tuple[int, ...]
    margins: Tensor | None
    reference: Tensor | None = None

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each prompt, [B]."""
        if self.ragged.sources is None:
            return None
        firsts = [0, *accumulate(self.sizes)][:-1]
        return self.ragged.sources[torch.tensor(firsts, device=self.ragged.sources.device)]


def collate_rankings(
    rows: Sequence[RankedExample], micro_batch_tokens: int, *, share_prompts: Sharing = False
) -> list[RankedBatch]:
    """Batches of at most `micro_batch_tokens` tokens each, all responses to a prompt together; a longer row stands alone.

    Args:
        rows: rows.
        micro_batch_tokens: a prompt that its responses share counts once.
        share_prompts: whether the prompt of a row is in the batch once.
    """
    groups = _groups(rows, [row.responses for row in rows], micro_batch_tokens, share_prompts)
    return [_ranked_batch(group, share_prompts) for group in groups]


def _ranked_batch(rows: Sequence[RankedExample], share_prompts: Sharing) -> RankedBatch:
    sizes = tuple(len(row.responses) for row in rows)
    starts = [0, *accumulate(sizes)]
    together = [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    responses = [response for row in rows for response in row.responses]
    ragged = _laid_out(responses, together, share_prompts)
    return RankedBatch(
        ragged.with_sources([row.source for row in rows for _ in row.responses]),
        ranks=torch.tensor([rank for row in rows for rank in row.ranks]),
        groups=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes)),
        sizes=sizes,
        margins=_margins([row.margin for row in rows]),
        reference=_references(responses),
    )


def padded_groups(x: Tensor, batch: RankedBatch) -> tuple[Tensor, Tensor]:
    """What belongs to the responses, [D], as rows of one prompt each padded with zeros, [B, K], and their mask."""
    sizes = torch.tensor(batch.sizes, device=x.device)
    mask = torch.arange(max(batch.sizes), device=x.device) < sizes[:, None]
    return x.new_zeros(mask.shape).masked_scatter(mask, x), mask


@dataclass(frozen=True)
class UnpairedBatch(RaggedBatch):
    """B responses, each judged alone. Its weight is B.

    Attributes:
        desirable: whether each response is a good one, bool, [B].
        reference: log-probabilities under a reference, nats, where they were computed beforehand, [B].
    """

    desirable: Tensor
    reference: Tensor | None = None


PreferenceBatch = PairBatch | RankedBatch | UnpairedBatch


def collate_labeled(rows: Sequence[LabeledExample], micro_batch_tokens: int) -> list[UnpairedBatch]:
    """Batches of at most `micro_batch_tokens` tokens each; a longer response stands alone."""
    groups = _longest_first(rows, [(len(row.example.ids),) for row in rows], micro_batch_tokens)
    return [_unpaired_batch(group) for group in groups]


def _unpaired_batch(rows: Sequence[LabeledExample]) -> UnpairedBatch:
    responses = [row.example for row in rows]
    together = [(number,) for number in range(len(rows))]
    ragged = _laid_out(responses, together, False).with_sources([row.source for row in rows])
    return UnpairedBatch(ragged, torch.tensor([row.desirable for row in rows]), _references(responses))


def _laid_out(sides: Sequence[Example], together: Sequence[Sequence[int]], share_prompts: Sharing) -> Ragged:
    """The documents end to end, with the number of groups as weight.

    Args:
        sides: prompt with response each.
        together: numbers of the sides of one prompt.
        share_prompts: whether these share it.
    """
    documents, masks = [side.ids for side in sides], [side.mask for side in sides]
    row_ids = [side.row_id for side in sides]
    if share_prompts is False:
        return Ragged.build(documents, masks, weight=len(together), row_ids=row_ids)
    return Ragged.build_shared(documents, masks, together, weight=len(together), row_ids=row_ids, share=share_prompts)


def _references(sides: Sequence[Example]) -> Tensor | None:
    """Log-probabilities under the reference, where every side has one."""
    known = [side.reference for side in sides if side.reference is not None]
    return torch.tensor(known) if len(known) == len(sides) else None


def _margins(margins: Sequence[float | None]) -> Tensor | None:
    """None where no row has a margin; a row without one beside others is a plain comparison."""
    return None if all(margin is None for margin in margins) else torch.tensor([margin or 0.0 for margin in margins])


def _groups(
    rows: Sequence[Row], sides: Sequence[Sequence[Example]], limit: int, share_prompts: Sharing
) -> list[list[Row]]:
    """`_longest_first` of rows with several sides each, a shared prompt counted once."""
    lengths = [[len(side.ids) for side in each] for each in sides]
    once = [0] * len(rows)
    if share_prompts is not False:
        for number, each in enumerate(sides):
            if allowed(share_prompts, lengths[number]):
                prompt = common_prompt([side.ids for side in each], [side.mask for side in each])
                once[number] = (len(each) - 1) * prompt
    return _longest_first(rows, lengths, limit, once)


def _longest_first(
    rows: Sequence[Row], lengths: Sequence[Sequence[int]], limit: int, saved: Sequence[int] | None = None
) -> list[list[Row]]:
    """Rows from long to short by their longest document (equal ones in their order), in groups of `limit` tokens.

    Args:
        rows: to be grouped.
        lengths: tokens of the documents of each row.
        limit: tokens of a group.
        saved: tokens of each row that are in several documents and count once; None: none.
    """
    order = sorted(range(len(rows)), key=lambda number: -max(lengths[number]))
    saved = saved or [0] * len(rows)
    sizes = [sum(each) - less for each, less in zip(lengths, saved, strict=True)]
    return [[rows[number] for number in group] for group in fill_groups(order, sizes, limit)]

"""Examples to ragged micro-batches of limited size; how records become examples is in tokenize.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from alignment.data.examples import Example, PairExample
from alignment.ragged import Ragged, RaggedBatch, fill_groups

Row = TypeVar("Row")


@dataclass(frozen=True)
class PairBatch(RaggedBatch):
    """B pairs as 2B documents: all chosen, then all rejected in the same order. Its weight is B."""

    margins: Tensor | None  # [B]; None where no row has one


def collate(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """Ragged batches of at most `micro_batch_tokens` tokens each; a longer document stands alone.

    Documents of similar length come together, which costs attention the least. The weight is the number of targets.
    """
    return [
        Ragged.build(
            [example.ids for example in group],
            [example.mask for example in group],
            row_ids=[example.row_id for example in group],
        )
        for group in _longest_first(examples, [(len(example.ids),) for example in examples], micro_batch_tokens)
    ]


def collate_pairs(pairs: Sequence[PairExample], micro_batch_tokens: int) -> list[PairBatch]:
    """Pair batches of at most `micro_batch_tokens` tokens each, both sides together; a longer pair stands alone."""
    lengths = [(len(pair.chosen.ids), len(pair.rejected.ids)) for pair in pairs]
    return [_pair_batch(group) for group in _longest_first(pairs, lengths, micro_batch_tokens)]


def _pair_batch(pairs: Sequence[PairExample]) -> PairBatch:
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    ragged = Ragged.build(
        [side.ids for side in sides],
        [side.mask for side in sides],
        weight=len(pairs),
        row_ids=[side.row_id for side in sides],
    )
    margins = [pair.margin for pair in pairs]
    if all(margin is None for margin in margins):
        return PairBatch(ragged, None)
    return PairBatch(ragged, torch.tensor([margin or 0.0 for margin in margins]))  # no margin: a plain comparison


def _longest_first(rows: Sequence[Row], lengths: Sequence[tuple[int, ...]], limit: int) -> list[list[Row]]:
    """Rows from long to short by their longest document (equal ones in their order), in groups of `limit` tokens."""
    order = sorted(range(len(rows)), key=lambda number: -max(lengths[number]))
    return [[rows[number] for number in group] for group in fill_groups(order, [sum(each) for each in lengths], limit)]

"""Batches of responses with labeled steps, for process reward models."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from alignment.data.examples import StepExample
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length


@dataclass(frozen=True)
class StepBatch(RaggedBatch):
    """Responses with S labeled steps in all, which are its weight.

    Attributes:
        ends: index of each step's last token among the tokens of the batch, [S].
        labels: whether each step is right, [S], bool.
        rows: document of each step, [S].
    """

    ends: Tensor
    labels: Tensor
    rows: Tensor

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each step, [S]."""
        return None if self.ragged.sources is None else self.ragged.sources[self.rows]


def collate_steps(examples: Sequence[StepExample], micro_batch_tokens: int) -> list[StepBatch]:
    """Batches of at most `micro_batch_tokens` tokens each, documents of similar length together; a longer one alone."""
    lengths = [len(example.ids) for example in examples]
    return [_step_batch(group) for group in group_rows_by_length(examples, lengths, micro_batch_tokens)]


def _step_batch(examples: Sequence[StepExample]) -> StepBatch:
    starts = [0, *accumulate(len(example.ids) for example in examples)]
    labels = [label for example in examples for label in example.labels]
    ragged = Ragged.build(
        [example.ids for example in examples],
        [[False] * len(example.ids) for example in examples],
        weight=len(labels),
        row_ids=[example.row_id for example in examples],
    ).with_sources([example.source for example in examples])
    ends = [start + end for start, example in zip(starts, examples, strict=False) for end in example.ends]
    rows = [row for row, example in enumerate(examples) for _ in example.ends]
    return StepBatch(ragged, torch.tensor(ends), torch.tensor(labels, dtype=torch.bool), torch.tensor(rows))

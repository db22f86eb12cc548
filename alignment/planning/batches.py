"""Micro-batches for tracing: rows as long as the config allows, or the longest rows of the data that are there."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.data.examples import Example, TokenizedRow, join_examples
from alignment.data.pretraining.next_sentence import SentencePairBatch
from alignment.data.table import longest_rows
from alignment.data.tasks.examples import TaskBatch
from alignment.ragged import DeviceBatch, Ragged, Seq2Seq

MASKED_SHARE = 0.15  # of the tokens, in masked text
TARGET_SHARE = 0.25  # of the source's length, that a corrupted text's target has
CHOICES = 4  # of a row of multiple choice
RANKED = 4  # responses of a ranking
STEP = 32  # tokens of a step

Moved = TypeVar("Moved", bound=DeviceBatch)
Row = TypeVar("Row", bound=TokenizedRow)


def rows_of(tokens: int, length: int, most: int | None = None) -> int:
    """Rows of `length` tokens in a micro-batch of `tokens`: at least one, at most `most`."""
    rows = max(1, tokens // length)
    return rows if most is None else max(1, min(rows, most))


def example(length: int, prompt: int = 1) -> Example:
    """A row of `length` tokens; those after the first `prompt` are to be predicted."""
    return Example.single([0] * length, [False] * prompt + [True] * (length - prompt), "row")


def ranking(length: int) -> Example:
    """A ranking of `RANKED` responses, `length` tokens each with the prompt."""
    return join_examples([example(length)] * RANKED, ranks=list(range(RANKED)))


def steps(length: int) -> Example:
    """A response of `length` tokens with a labeled step every `STEP` tokens."""
    ends = tuple(range(STEP - 1, length, STEP)) or (length - 1,)
    return Example.single([0] * length, [False] * length, "row", ends=ends, labels=[True] * len(ends))


def longest(examples: Sequence[Row], count: int) -> list[Row]:
    """The `count` longest examples."""
    return longest_rows(examples, count)


def masked_text_batch(length: int, rows: int) -> Ragged:
    """Masked texts: a share of all tokens is predicted, with labels of its own."""
    batch = Ragged.build([[0] * length] * rows)
    index = torch.arange(0, len(batch.tokens), round(1 / MASKED_SHARE))
    labels = torch.zeros(len(index), dtype=torch.long)
    return replace(batch, target_index=index, target_rows=index // length, labels=labels, weight=float(len(index)))


def sentence_pair_batch(length: int, rows: int) -> SentencePairBatch:
    """Masked pairs of sentences."""
    batch = masked_text_batch(length, rows)
    segments = torch.zeros(len(batch.tokens), dtype=torch.long)
    return SentencePairBatch(replace(batch, segments=segments), torch.zeros(rows, dtype=torch.long))


def seq2seq_batch(length: int, rows: int) -> Seq2Seq:
    """Sources of `length` tokens together with their targets."""
    target = max(2, round(length * TARGET_SHARE / (1 + TARGET_SHARE)))
    return Seq2Seq(Ragged.build([[0] * (length - target)] * rows), Ragged.build([[0] * target] * rows))


def task_batch(task: str, length: int, rows: int) -> TaskBatch:
    """A micro-batch of a fine-tuning task; `rows` documents."""
    choices = min(CHOICES, rows) if task == "multiple_choice" else 1
    count = rows // choices
    labels = count * {"token_classification": length, "question_answering": 2}.get(task, 1)
    documents = Ragged.build([[0] * length] * (count * choices))
    return TaskBatch(documents, torch.zeros(labels, dtype=torch.long), torch.arange(count).repeat_interleave(choices))


def as_fake(batch: Moved, mode: FakeTensorMode) -> Moved:
    """The batch with fake tensors in the place of its real ones."""
    held = {field.name: getattr(batch, field.name) for field in fields(batch)}
    changed: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(value, Tensor):
            changed[name] = mode.from_tensor(value)
        elif isinstance(value, DeviceBatch):
            changed[name] = as_fake(value, mode)
    return replace(batch, **changed)

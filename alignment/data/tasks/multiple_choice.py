"""Multiple choice as encoders read it: context and choice as a pair, once for each choice. GPT-1's way: gpt_formats.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from alignment.data.pretraining.corruption import cut_pair
from alignment.data.pretraining.examples import measured
from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import NO_TEXT, PAIR_CUT, ClassExample, ragged_of, text_budget
from alignment.data.tasks.gpt1_inputs import MultiSequenceBatch
from alignment.data.tasks.rows import Choice
from alignment.data.text.special_tokens import EncodedText, frame_of, tokenize_with_offsets
from alignment.ragged import group_rows_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A context with each of its choices between special tokens, and the number of the right one."""

    framed: list[EncodedText]
    label: int
    row_id: str


def encode_pair_choices(
    rows: Sequence[Choice], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[ChoiceExample], Tally]:
    """Each choice with its context as the tokenizer frames a pair, cut to `max_length` at the longer one's end.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.4 (SWAG).
    """
    frame, counts, examples = frame_of(tokenizer), Tally(rows=len(rows)), []
    room = text_budget(max_length, frame.pair_size)
    contexts = tokenize_with_offsets(tokenizer, [row.context for row in rows])
    pieces = iter(tokenize_with_offsets(tokenizer, [choice for row in rows for choice in row.choices]))
    for row, context in zip(rows, contexts, strict=True):
        choices = [next(pieces).ids for _ in row.choices]
        if not context.ids or not all(choices):
            counts.drop(NO_TEXT, row.row_id)
            continue
        if len(context.ids) + max(map(len, choices)) > room:
            counts.shorten(PAIR_CUT, row.row_id)
        framed = [frame.pair(*cut_pair(context.ids, choice, room)) for choice in choices]
        examples.append(ChoiceExample(framed, row.label, row.row_id))
    counts.kept = len(examples)
    return examples, measured(counts, [framed.ids for example in examples for framed in example.framed])


def collate_pair_choices(examples: Sequence[ChoiceExample], micro_batch_tokens: int) -> list[MultiSequenceBatch]:
    """Rows as batches of at most `micro_batch_tokens` tokens, all choices of a row together; a longer row alone."""
    lengths = [sum(len(framed.ids) for framed in example.framed) for example in examples]
    batches = []
    for chosen in group_rows_by_length(examples, lengths, micro_batch_tokens):
        pairs = [ClassExample(framed, row.label, row.row_id) for row in chosen for framed in row.framed]
        views = torch.tensor([len(example.framed) for example in chosen])
        batches.append(
            MultiSequenceBatch(
                replace(ragged_of(pairs), weight=float(len(chosen))),
                torch.tensor([example.label for example in chosen]),
                torch.repeat_interleave(torch.arange(len(chosen)), views),
            )
        )
    return batches

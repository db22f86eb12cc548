"""Examples and batches of multiple choice for encoders: context and choice as a pair, once for each choice.

GPT-1's inputs for the same task are in gpt1_inputs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import NO_TEXT, PAIR_CUT, ClassExample, build_ragged
from alignment.data.tasks.gpt1_inputs import MultiSequenceBatch
from alignment.data.tasks.rows import Choice
from alignment.data.text.special_tokens import EncodedText, special_token_template, tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate_pair
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.ragged import group_rows_by_length


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A context with each of its choices as an encoded pair, and the number of the right choice."""

    pairs: list[EncodedText]
    label: int
    row_id: str

    @property
    def documents(self) -> list[list[int]]:
        """Context and choice, for each choice."""
        return [pair.ids for pair in self.pairs]


def encode_choices(rows: Sequence[Choice], tokenizer: Tokenizer, max_length: int) -> tuple[list[ChoiceExample], Tally]:
    """Context and choice as a pair with the tokenizer's special tokens, truncated to `max_length`, for each choice.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.4 (SWAG).
    """
    template, counts, examples = special_token_template(tokenizer), Tally(rows=len(rows)), []
    budget = text_budget(max_length, template.pair_size)
    contexts = tokenize_with_offsets(tokenizer, [row.context for row in rows])
    texts = iter(tokenize_with_offsets(tokenizer, [choice for row in rows for choice in row.choices]))
    for row, context in zip(rows, contexts, strict=True):
        choices = [next(texts).ids for _ in row.choices]
        if not context.ids or not all(choices):
            counts.drop(NO_TEXT, row.row_id)
            continue
        if len(context.ids) + max(map(len, choices)) > budget:
            counts.note_cut(PAIR_CUT, row.row_id)
        pairs = [template.pair(*truncate_pair(context.ids, choice, budget)) for choice in choices]
        examples.append(ChoiceExample(pairs, row.label, row.row_id))
    counts.kept = len(examples)
    return examples, counts.with_documents(ids for example in examples for ids in example.documents)


def collate_choices(examples: Sequence[ChoiceExample], micro_batch_tokens: int) -> list[MultiSequenceBatch]:
    """Rows as batches of at most `micro_batch_tokens` tokens, all choices of a row together; a longer row is alone."""
    lengths = [sum(len(pair.ids) for pair in example.pairs) for example in examples]
    batches = []
    for group in group_rows_by_length(examples, lengths, micro_batch_tokens):
        pairs = [ClassExample(pair, example.label, example.row_id) for example in group for pair in example.pairs]
        sizes = torch.tensor([len(example.pairs) for example in group])
        batches.append(
            MultiSequenceBatch(
                replace(build_ragged(pairs), weight=float(len(group))),
                torch.tensor([example.label for example in group]),
                torch.repeat_interleave(torch.arange(len(group)), sizes),
            )
        )
    return batches

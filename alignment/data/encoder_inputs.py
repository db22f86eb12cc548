"""Comparisons and rankings as an encoder reads them: prompt and response as a pair of texts with its special tokens.

An empty prompt leaves one text. In the examples `mask` marks the second text of a pair, from which `with_segments` makes
the segments (transformers: token_type_ids) of a batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from alignment.data.batches import Example
from alignment.data.rows.records import Comparison, Ranking, Tally, replies_of
from alignment.data.text.special_tokens import EncodedText, special_token_template, tokenize_with_offsets
from alignment.data.tokenize import (
    EQUAL,
    TIED_RANKING,
    counted,
    label_values,
    note_cuts,
    refused_rows,
    text_budget,
    truncate,
)
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.ragged import Ragged

MESSAGES = "the prompt is a list of messages, and an encoder reads texts; write it as one text, or train a decoder"
NO_RESPONSE = "response of which the tokenizer makes no token"


def encode_prompts_with_responses(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[EncodedText]:
    """Prompts and responses with the special tokens of a pair, or of one text where the prompt is empty."""
    template, ids = special_token_template(tokenizer), _ids(tokenizer, [text for pair in pairs for text in pair])
    return [
        template.encode(first, second) if prompt else template.encode(second)
        for (prompt, _), first, second in zip(pairs, ids[::2], ids[1::2], strict=True)
    ]


def encode_responses(
    rows: Sequence[Comparison | Ranking], tokenizer: Tokenizer, max_length: int, ordered: bool = False
) -> tuple[list[Example], Tally]:
    """Each row's prompt with each of its responses; rows of which one gives no token, or equal pairs, are dropped.

    Truncated as decoders' rows are: the prompt loses its beginning first, then each response its end, and special tokens
    stay whole. `ordered`: rankings whose responses all tie are dropped too.
    """
    if refused := [row.row_id for row in rows if not isinstance(row.prompt, str)]:
        raise refused_rows({MESSAGES: refused})
    template, counts, encoded = special_token_template(tokenizer), Tally(rows=len(rows)), []
    prompts = _ids(tokenizer, [str(row.prompt) for row in rows])
    ids = iter(_ids(tokenizer, [text for row in rows for text in replies_of(row)]))
    for row, head in zip(rows, prompts, strict=True):
        tails = [next(ids) for _ in replies_of(row)]
        if not all(tails):
            counts.drop(NO_RESPONSE, row.row_id)
            continue
        budget = text_budget(max_length, template.size(2 if row.prompt else 1))
        kept_head, kept = truncate(head, tails, budget, None) if row.prompt else ([], [tail[:budget] for tail in tails])
        if isinstance(row, Comparison) and kept[0] == kept[1]:
            counts.drop(EQUAL, row.row_id)
        elif ordered and len(set(cast("Ranking", row).ranks)) == 1:
            counts.drop(TIED_RANKING, row.row_id)
        else:
            texts = [template.encode(kept_head, tail) if row.prompt else template.encode(tail) for tail in kept]
            masks = [[part == 1 for part in text.segments] for text in texts]
            values = label_values(row, range(len(texts)))
            shorter = any(len(tail) > len(short) for tail, short in zip(tails, kept, strict=True))
            note_cuts(counts, row.row_id, len(head) > len(kept_head), shorter)
            encoded.append(Example([text.ids for text in texts], masks, row.row_id, values=values))
    return counted(encoded, counts)


encode_comparisons = encode_rankings = encode_responses  # a record says how it is judged


def encode_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """`encode_responses` without rankings whose responses are all tied."""
    return encode_responses(rows, tokenizer, max_length, ordered=True)


def with_segments(batch: Ragged) -> Ragged:
    """A batch of these examples with the segments that their masks stand for."""
    if not len(batch.target_index):
        return batch
    return replace(batch, segments=torch.zeros_like(batch.tokens).index_fill(0, batch.target_index, 1))


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in tokenize_with_offsets(tokenizer, texts)]

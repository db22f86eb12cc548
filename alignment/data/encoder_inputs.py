"""Comparisons and rankings as an encoder reads them: prompt and response as a pair of texts with its special tokens.

An empty prompt leaves one text. In the examples `mask` marks the second text of a pair, from which `with_segments` makes
the segments (transformers: token_type_ids) of a batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from alignment.data.examples import Example, Values
from alignment.data.rows.records import Comparison, Ranking, Tally
from alignment.data.text.special_tokens import EncodedText, special_token_template, tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate
from alignment.data.tokenize import EQUAL, PROMPT_CUT, RESPONSE_CUT, RefusedRows, counted, margin_of, ordered_only
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.ragged import Ragged

MESSAGES = "the prompt is a list of messages, and an encoder reads texts; write it as one text, or train a decoder"
NO_RESPONSE = "response of which the tokenizer makes no token"


def encode_prompts_with_responses(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[EncodedText]:
    """Prompts and responses with the special tokens of a pair, or of one text where the prompt is empty."""
    template = special_token_template(tokenizer)
    ids = _ids(tokenizer, [text for pair in pairs for text in pair])
    return [
        template.encode(first, second) if prompt else template.encode(second)
        for (prompt, _), first, second in zip(pairs, ids[::2], ids[1::2], strict=True)
    ]


def encode_comparisons(
    rows: Sequence[Comparison], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """Both responses after the same prompt; see `encode_responses`."""
    replies = [(row.chosen, row.rejected) for row in rows]
    encoded, counts = encode_responses(rows, replies, [margin_of(row) for row in rows], tokenizer, max_length)
    pairs = []
    for pair in encoded:
        if pair.documents[0] == pair.documents[1]:
            counts.drop(EQUAL, pair.row_id)
        else:
            pairs.append(pair)
    counts.kept = len(pairs)
    return counted(pairs, counts)


def encode_rankings(rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """All responses after the same prompt; see `encode_responses`."""
    values = [{"ranks": list(row.ranks), **margin_of(row)} for row in rows]
    encoded, counts = encode_responses(rows, [row.responses for row in rows], values, tokenizer, max_length)
    counts.kept = len(encoded)
    return counted(encoded, counts)


def encode_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """`encode_rankings` without those whose responses are all tied."""
    return ordered_only(*encode_rankings(rows, tokenizer, max_length))


def encode_responses(
    rows: Sequence[Comparison | Ranking],
    replies: Sequence[Sequence[str]],
    values: Sequence[Values],
    tokenizer: Tokenizer,
    max_length: int,
) -> tuple[list[Example], Tally]:
    """Each row's prompt with each of its replies; rows of which a reply gives no token are dropped.

    Truncated as decoders' rows are: the prompt loses its beginning first, then each response its end, and special tokens
    stay whole.

    Args:
        replies: of each row.
        values: of each row's example.
        tokenizer: the encoder's.
        max_length: tokens of prompt and response with special tokens.

    Raises:
        UserError: prompts that are messages, all at once.
    """
    if refused := [row.row_id for row in rows if not isinstance(row.prompt, str)]:
        raise RefusedRows({MESSAGES: refused})
    template, counts = special_token_template(tokenizer), Tally(rows=len(rows))
    prompts = _ids(tokenizer, [str(row.prompt) for row in rows])
    ids = iter(_ids(tokenizer, [text for of_row in replies for text in of_row]))
    encoded: list[Example] = []
    for row, head, of_row, known in zip(rows, prompts, replies, values, strict=True):
        tails = [next(ids) for _ in of_row]
        if not all(tails):
            counts.drop(NO_RESPONSE, row.row_id)
            continue
        budget = text_budget(max_length, template.size(2 if row.prompt else 1))
        kept_head, kept = truncate(head, tails, budget, None) if row.prompt else ([], [tail[:budget] for tail in tails])
        if len(head) > len(kept_head):
            counts.note_cut(PROMPT_CUT, row.row_id)
        if any(len(tail) > len(short) for tail, short in zip(tails, kept, strict=True)):
            counts.note_cut(RESPONSE_CUT, row.row_id)
        texts = [template.encode(kept_head, tail) if row.prompt else template.encode(tail) for tail in kept]
        masks = [[part == 1 for part in text.segments] for text in texts]
        encoded.append(Example([text.ids for text in texts], masks, row.row_id, values=known))
    return encoded, counts


def with_segments(batch: Ragged) -> Ragged:
    """A batch of these examples with the segments that their masks stand for."""
    if not len(batch.target_index):
        return batch
    segments = torch.zeros_like(batch.tokens).index_fill(0, batch.target_index, 1)
    return replace(batch, segments=segments)


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in tokenize_with_offsets(tokenizer, texts)]

"""Comparisons and rankings as an encoder reads them: prompt and response as a pair of texts with its special tokens.

An empty prompt leaves one text. In the examples `mask` marks the second text of a pair, from which `with_segments` makes
the segments (transformers: token_type_ids) of a batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from alignment.data.examples import Example, PairExample, RankedExample
from alignment.data.rows.records import Comparison, Ranking, Tally
from alignment.data.text.special_tokens import EncodedText, special_token_template, tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate
from alignment.data.tokenize import EQUAL, PROMPT_CUT, RESPONSE_CUT, RefusedRows, ordered_only
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
) -> tuple[list[PairExample], Tally]:
    """Both responses after the same prompt; see `encode_responses`."""
    encoded, counts = encode_responses(
        [(row.prompt, (row.chosen, row.rejected), row.row_id) for row in rows], tokenizer, max_length
    )
    pairs = []
    for row, sides in zip(rows, encoded, strict=True):
        if sides is not None and sides[0].ids == sides[1].ids:
            counts.drop(EQUAL, row.row_id)
        elif sides is not None:
            pairs.append(PairExample(sides[0], sides[1], row.margin, row.row_id))
    counts.kept = len(pairs)
    return pairs, counts.with_documents(ids for pair in pairs for ids in pair.documents)


def encode_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[RankedExample], Tally]:
    """All responses after the same prompt; see `encode_responses`."""
    encoded, counts = encode_responses([(row.prompt, row.responses, row.row_id) for row in rows], tokenizer, max_length)
    groups = [
        RankedExample(tuple(sides), row.ranks, row.row_id, margin=row.margin)
        for row, sides in zip(rows, encoded, strict=True)
        if sides is not None
    ]
    counts.kept = len(groups)
    return groups, counts.with_documents(ids for group in groups for ids in group.documents)


def encode_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[RankedExample], Tally]:
    """`encode_rankings` without those whose responses are all tied."""
    return ordered_only(*encode_rankings(rows, tokenizer, max_length))


def encode_responses(
    rows: Sequence[tuple[object, Sequence[str], str]], tokenizer: Tokenizer, max_length: int
) -> tuple[list[list[Example] | None], Tally]:
    """Each row's prompt with each of its responses, None for rows that are dropped.

    Truncated as decoders' rows are: the prompt loses its beginning first, then each response its end, and special tokens
    stay whole.

    Args:
        rows: prompt, responses, and row id of each.
        tokenizer: the encoder's.
        max_length: tokens of prompt and response with special tokens.

    Raises:
        UserError: prompts that are messages, all at once.
    """
    if refused := [row_id for prompt, _, row_id in rows if not isinstance(prompt, str)]:
        raise RefusedRows({MESSAGES: refused})
    template, counts = special_token_template(tokenizer), Tally(rows=len(rows))
    prompts = _ids(tokenizer, [str(prompt) for prompt, _, _ in rows])
    ids = iter(_ids(tokenizer, [text for _, responses, _ in rows for text in responses]))
    encoded: list[list[Example] | None] = []
    for (prompt, responses, row_id), head in zip(rows, prompts, strict=True):
        tails = [next(ids) for _ in responses]
        if not all(tails):
            counts.drop(NO_RESPONSE, row_id)
            encoded.append(None)
            continue
        budget = text_budget(max_length, template.size(2 if prompt else 1))
        if prompt:
            kept_head, kept = truncate(head, tails, budget, None)
        else:
            kept_head, kept = [], [tail[:budget] for tail in tails]
        if len(head) > len(kept_head):
            counts.note_cut(PROMPT_CUT, row_id)
        if any(len(tail) > len(short) for tail, short in zip(tails, kept, strict=True)):
            counts.note_cut(RESPONSE_CUT, row_id)
        texts = [template.encode(kept_head, tail) if prompt else template.encode(tail) for tail in kept]
        encoded.append([Example(text.ids, [part == 1 for part in text.segments], row_id) for text in texts])
    return encoded, counts


def with_segments(batch: Ragged) -> Ragged:
    """A batch of these examples with the segments that their masks stand for."""
    if not len(batch.target_index):
        return batch
    segments = torch.zeros_like(batch.tokens).index_fill(0, batch.target_index, 1)
    return replace(batch, segments=segments)


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in tokenize_with_offsets(tokenizer, texts)]

"""Rows as encoders and encoder-decoders read them.

An encoder reads prompt and response as a pair of texts with its special tokens. An empty prompt leaves one text. In the
examples `mask` marks the second text of a pair, from which `with_segments` makes the segments (transformers:
token_type_ids) of a batch.

Of an encoder-decoder the encoder reads the prompt and the decoder writes the response, each with the special tokens
that the tokenizer puts around a text alone. An example has both end to end, and collate_for_encoder_decoder cuts them
apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from alignment.data.batches import Example
from alignment.data.rows.records import Comparison, Kind, Message, Ranking, Tally, is_plain, replies_of
from alignment.data.text.chat import EncodedChat
from alignment.data.text.special_tokens import (
    EncodedText,
    end_token_id,
    special_token_template,
    stop_strings,
    tokenize_with_offsets,
    without_end,
)
from alignment.data.tokenize import (
    EQUAL,
    PLAIN_PROMPT,
    TIED_RANKING,
    PromptedRow,
    Sides,
    Tokenize,
    counted,
    encode_prompts,
    label_values,
    note_cuts,
    refused_rows,
    text_budget,
    tokenize_demonstrations,
    tokenize_prompts,
    tokenize_responses,
    truncate,
)
from alignment.data.tokenizers.tokenizer import Tokenizer, encode, naming_panics
from alignment.ragged import Ragged

MESSAGES = "the prompt is a list of messages, and an encoder reads texts; write it as one text, or train a decoder"
NO_RESPONSE = "response of which the tokenizer makes no token"
NO_PROMPT = "the tokenizer makes no token of the prompt, and an encoder reads at least one"
NOT_PLAIN = "the reply has tool calls or reasoning, and an encoder-decoder learns texts; write it as one text"


def encode_prompts_with_responses(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[EncodedText]:
    """Prompts and responses with the special tokens of a pair, or of one text where the prompt is empty."""
    template = special_token_template(tokenizer)
    ids = _ids(tokenizer, [text for pair in pairs for text in pair])
    return [
        template.encode(first, second) if prompt else template.encode(second)
        for (prompt, _), first, second in zip(pairs, ids[::2], ids[1::2], strict=True)
    ]


def encode_responses(
    rows: Sequence[Comparison | Ranking], tokenizer: Tokenizer, max_length: int, ordered: bool = False
) -> tuple[list[Example], Tally]:
    """Each row's prompt with each of its responses; rows of which one gives no token, or equal pairs, are dropped.

    Truncated as decoders' rows are: the prompt loses its beginning first, then each response its end, and special
    tokens stay whole. `ordered`: rankings whose responses all tie are dropped too.
    """
    if refused := [row.row_id for row in rows if not isinstance(row.prompt, str)]:
        raise refused_rows({MESSAGES: refused})
    template = special_token_template(tokenizer)
    counts = Tally(rows=len(rows))
    encoded = []
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


# Encoder-decoders


def source_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts for an encoder, with the special tokens that its tokenizer adds (T5: the end token).

    Special tokens written in a text become those tokens, unlike in a decoder's prompt: T5's sentinels mark the gaps
    that it is asked to fill.
    """
    with naming_panics(tokenizer):
        options = {"padding": False, "truncation": False, "verbose": False}
        return tokenizer(list(texts), **options)["input_ids"] if texts else []


def encode_sources(tokenizer: Tokenizer, rows: Sequence[PromptedRow], counts: Tally | None = None) -> list[list[int]]:
    """Ids of each prompt for the encoder: of texts those of `source_ids`; the chat template first renders messages.

    Raises:
        UserError: prompts without a token; messages that the chat template refuses, or of a tokenizer without one.
    """
    before, after = special_token_template(tokenizer).single
    texts = iter(source_ids(tokenizer, [row.prompt for row in rows if isinstance(row.prompt, str)]))
    chats = iter(encode_prompts(tokenizer, [row for row in rows if not isinstance(row.prompt, str)]))
    sources = list[list[int]]()
    for row in rows:
        if isinstance(row.prompt, str):
            sources.append(next(texts))
            if counts is not None and tokenizer.chat_template is not None:
                counts.note(PLAIN_PROMPT, row.row_id)
        else:
            ids = next(chats)
            sources.append([*before, *(ids[len(before) :] if ids[: len(before)] == before else ids), *after])
    if empty := [row.row_id for row, ids in zip(rows, sources, strict=True) if not ids]:
        raise refused_rows({NO_PROMPT: empty})
    return sources


def encode_targets(
    tokenizer: Tokenizer, replies: Sequence[tuple[PromptedRow, str | Message]], counts: Tally | None = None
) -> list[EncodedChat]:
    """Ids of each reply as the decoder writes it after its start token, with one end token (BART: <s> reply </s>)."""
    if rich := [row.row_id for row, reply in replies if not (isinstance(reply, str) or is_plain(reply))]:
        raise refused_rows({NOT_PLAIN: rich})
    before = special_token_template(tokenizer).single[0]
    end = end_token_id(tokenizer)
    stops = stop_strings(tokenizer)
    texts = [without_end(reply if isinstance(reply, str) else reply["content"], stops) for _, reply in replies]
    targets = [[*before, *ids, end] if ids else [end] for ids in encode(tokenizer, texts)]
    return [EncodedChat(ids, [True] * len(ids)) for ids in targets]


SOURCE_AND_TARGET = Sides(encode_sources, encode_targets)
TEXT_TO_TEXT: dict[Kind, Tokenize] = {
    "demonstrations": partial(tokenize_demonstrations, sides=SOURCE_AND_TARGET),
    "comparisons": partial(tokenize_responses, sides=SOURCE_AND_TARGET),
    "labels": partial(tokenize_responses, sides=SOURCE_AND_TARGET),
    "rankings": partial(tokenize_responses, ordered=True, sides=SOURCE_AND_TARGET),
    "prompts": partial(tokenize_prompts, sides=SOURCE_AND_TARGET),
}

"""Special tokens: BOS, the ends of turns and documents, and those that a tokenizer adds around texts; token offsets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from alignment.data.text.templates import chat_format, name_of
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos, naming_panics
from alignment.errors import UserError

SENTINEL = "<extra_id_{}>"


def end_token_id(tokenizer: Tokenizer) -> int:
    """The token that ends a response: the template's end of turn where there is one, else the tokenizer's EOS."""
    if tokenizer.chat_template and (turn := chat_format(tokenizer).end) is not None:
        return tokenizer.convert_tokens_to_ids(turn)
    return document_end_id(tokenizer)


def document_end_id(tokenizer: Tokenizer) -> int:
    """The token that ends a document of plain text: EOS."""
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} names no end token, so nothing could learn to stop; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return end


def end_token_ids(tokenizer: Tokenizer) -> set[int]:
    """The tokens that end what is trained: the template's ends of a turn and of a tool call, and EOS."""
    ends = {end_token_id(tokenizer), tokenizer.eos_token_id}
    for tools in (False, True) if tokenizer.chat_template else ():
        form = chat_format(tokenizer, tools)
        ends |= {tokenizer.convert_tokens_to_ids(end) for end in (form.end, form.call_end) if end}
    return ends - {None}


def stop_token_ids(tokenizer: Tokenizer) -> set[int]:
    """All tokens at which generation stops: those that end what is trained, and those that the checkpoint names."""
    return end_token_ids(tokenizer).union(getattr(tokenizer, "published_ends", ()))


def stop_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokens at which generation stops."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer)))]


def without_end(text: str, stops: Sequence[str]) -> str:
    """The text without the end tokens written at its end."""
    while stop := next((stop for stop in stops if text.rstrip().endswith(stop)), None):
        text = text.rstrip().removesuffix(stop)
    return text


def bos_adder(tokenizer: Tokenizer) -> Callable[[list[int]], list[int]]:
    """A function that puts the BOS before a sequence, where the tokenizer has one and the template wrote none.

    Two are refused.
    """
    bos = tokenizer.bos_token_id
    adds = adds_bos(tokenizer)

    def with_one_bos(ids: list[int]) -> list[int]:
        if bos is not None and ids[:2] == [bos, bos]:
            raise UserError(f"{name_of(tokenizer)} writes the BOS twice; one is right")
        return [bos, *ids] if adds and bos is not None and ids[:1] != [bos] else ids

    return with_one_bos


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text or a pair of texts with its special tokens, N tokens."""

    ids: list[int]
    segments: list[int]  # 0 or 1, the text of the pair that each token belongs to (transformers: token_type_ids)
    is_text: list[bool]  # False for special tokens
    starts: tuple[int, ...]  # index of the first token of the first and, in a pair, of the second text


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """The special tokens around texts, as the tokenizer's post-processor adds them."""

    single: tuple[list[int], list[int]]  # ids before and after a single text
    pair: tuple[list[int], list[int], list[int]]  # ids before, between and after two texts
    pair_segments: tuple[int, ...]  # 0 or 1 for the five parts: before, first text, between, second text, after

    def size(self, texts: int) -> int:
        """Number of special tokens around one text or two."""
        return sum(map(len, self.single if texts == 1 else self.pair))

    def encode(self, *texts: Sequence[int]) -> EncodedText:
        """One text or two with their special tokens."""
        first, *others = self.single if len(texts) == 1 else self.pair
        parts = [first, *(part for pair in zip(texts, others, strict=True) for part in pair)]
        segments = (0, 0, 0) if len(texts) == 1 else self.pair_segments
        return EncodedText(
            ids=[token for part in parts for token in part],
            segments=[segment for part, segment in zip(parts, segments, strict=True) for _ in part],
            is_text=[index % 2 == 1 for index, part in enumerate(parts) for _ in part],
            starts=tuple(accumulate(map(len, parts)))[:-1:2],
        )


def special_token_template(tokenizer: Tokenizer) -> SpecialTokenTemplate:
    """The special tokens that a fast tokenizer adds, found by encoding one text and a pair of texts."""
    [one] = _encodings(tokenizer, ["a"], add_special_tokens=True)
    [two] = _encodings(tokenizer, ["a"], ["a"], add_special_tokens=True)
    of_texts = ((one.sequence_ids, 0), (two.sequence_ids, 0), (two.sequence_ids, 1))
    (head, end), (first, last), (start, stop) = (
        (ids.index(text), len(ids) - ids[::-1].index(text)) for ids, text in of_texts
    )
    types = two.type_ids
    return SpecialTokenTemplate(
        (one.ids[:head], one.ids[end:]),
        (two.ids[:first], two.ids[last:start], two.ids[stop:]),
        (types[0], types[first], types[last] if start > last else types[first], types[start], types[-1]),
    )


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of one text without special tokens."""

    ids: list[int]
    word_starts: list[bool]  # True where a word begins, as the tokenizer's pre-tokenizer splits words
    offsets: list[tuple[int, int]]  # first character of each token in the text and the one after its last


def tokenize_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenizedText]:
    """Ids of each text with word starts and character offsets; a string such as "[SEP]" in it stays ordinary text."""
    tokenized = []
    for encoding in _encodings(tokenizer, list(texts), add_special_tokens=False) if texts else []:
        starts = [word is None or word != before for before, word in pairwise([None, *encoding.word_ids])]
        tokenized.append(TokenizedText(encoding.ids, starts, encoding.offsets))
    return tokenized


def _encodings(tokenizer: Tokenizer, *texts: list[str], add_special_tokens: bool) -> list[Any]:
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: not a fast tokenizer; save it with a tokenizer.json")
    options = {"split_special_tokens": True, "padding": False, "truncation": False, "verbose": False}
    with naming_panics(tokenizer):
        encoded = tokenizer(*texts, add_special_tokens=add_special_tokens, **options)
    return list(encoded.encodings or [])


def sentinel_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of <extra_id_0>, <extra_id_1>, ... as far as the tokenizer has them; in T5's vocabulary they descend."""
    vocabulary = tokenizer.get_vocab()
    ids = []
    while (sentinel := vocabulary.get(SENTINEL.format(len(ids)))) is not None:
        ids.append(sentinel)
    return ids

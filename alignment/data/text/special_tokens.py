"""The special tokens that a tokenizer adds to a text or a pair of texts, and token ids with their character offsets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignment.data.tokenizers.tokenizer import Tokenizer, naming_panics
from alignment.errors import UserError

MASK_NAMES = ("<mask>", "[MASK]")  # looked up where the tokenizer names no mask token
SENTINEL = "<extra_id_{}>"


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text or a pair of texts with its special tokens.

    Attributes:
        ids: token ids, [N].
        segments: 0 or 1, the text of the pair that each token belongs to (transformers: token_type_ids), [N].
        is_text: True for tokens of the texts, False for special tokens, [N].
        starts: index of the first token of the first and, in a pair, of the second text.
    """

    ids: list[int]
    segments: list[int]
    is_text: list[bool]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """The special tokens before, between and after texts, as the tokenizer's post-processor adds them.

    Attributes:
        prefix: special ids before a single text.
        suffix: special ids after it.
        pair_prefix: special ids before the first text of a pair.
        separator: special ids between the two texts.
        pair_suffix: special ids after the second text.
        pair_segments: 0 or 1 for the five parts of a pair: prefix, first text, separator, second text, suffix.
    """

    prefix: list[int]
    suffix: list[int]
    pair_prefix: list[int]
    separator: list[int]
    pair_suffix: list[int]
    pair_segments: tuple[int, int, int, int, int]

    @property
    def size(self) -> int:
        """Number of special tokens of a single text."""
        return len(self.prefix) + len(self.suffix)

    @property
    def pair_size(self) -> int:
        """Number of special tokens of a pair."""
        return len(self.pair_prefix) + len(self.separator) + len(self.pair_suffix)

    def single(self, ids: Sequence[int]) -> EncodedText:
        """One text with its special tokens."""
        is_text = [False] * len(self.prefix) + [True] * len(ids) + [False] * len(self.suffix)
        return EncodedText([*self.prefix, *ids, *self.suffix], [0] * len(is_text), is_text, (len(self.prefix),))

    def pair(self, first: Sequence[int], second: Sequence[int]) -> EncodedText:
        """Two texts with their special tokens."""
        parts = [self.pair_prefix, first, self.separator, second, self.pair_suffix]
        segments = [segment for part, segment in zip(parts, self.pair_segments, strict=True) for _ in part]
        is_text = [number in (1, 3) for number, part in enumerate(parts) for _ in part]
        starts = (len(self.pair_prefix), len(self.pair_prefix) + len(first) + len(self.separator))
        return EncodedText([token for part in parts for token in part], segments, is_text, starts)


def special_token_template(tokenizer: Tokenizer) -> SpecialTokenTemplate:
    """The special tokens that the tokenizer adds, found by encoding one text and a pair of texts.

    Raises:
        UserError: the tokenizer is not a fast one; only those report which text a token comes from.
    """
    one, two = _encoding(tokenizer, "a"), _encoding(tokenizer, "a", "a")
    only, end = _range_of(0, one.sequence_ids)
    (first, last), (start, stop) = _range_of(0, two.sequence_ids), _range_of(1, two.sequence_ids)
    types = two.type_ids
    separator_type = types[last] if start > last else types[first]
    return SpecialTokenTemplate(
        prefix=one.ids[:only],
        suffix=one.ids[end:],
        pair_prefix=two.ids[:first],
        separator=two.ids[last:start],
        pair_suffix=two.ids[stop:],
        pair_segments=(types[0], types[first], separator_type, types[start], types[-1]),
    )


def _range_of(text: int, sequence_ids: Sequence[int | None]) -> tuple[int, int]:
    """First token of text number `text` and the one after its last."""
    positions = [position for position, sequence in enumerate(sequence_ids) if sequence == text]
    return positions[0], positions[-1] + 1


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of one text without special tokens.

    Attributes:
        ids: token ids, [N].
        word_starts: True where a word begins, as the tokenizer's pre-tokenizer splits words, [N].
        offsets: first character of each token in the text and the one after its last, [N].
    """

    ids: list[int]
    word_starts: list[bool]
    offsets: list[tuple[int, int]]


def tokenize_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenizedText]:
    """Ids of each text with word starts and character offsets; a string such as "[SEP]" in a text stays ordinary text."""
    if not texts:
        return []
    return [
        TokenizedText(encoding.ids, _word_starts(encoding.word_ids), encoding.offsets)
        for encoding in _encodings(tokenizer, list(texts), add_special_tokens=False)
    ]


def _word_starts(words: Sequence[int | None]) -> list[bool]:
    return [index == 0 or word is None or word != words[index - 1] for index, word in enumerate(words)]


def _encoding(tokenizer: Tokenizer, *texts: str) -> Any:
    return _encodings(tokenizer, *([text] for text in texts), add_special_tokens=True)[0]


def _encodings(tokenizer: Tokenizer, *texts: list[str], add_special_tokens: bool) -> list[Any]:
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: not a fast tokenizer; save it with a tokenizer.json")
    with naming_panics(tokenizer):
        encoded = tokenizer(
            *texts,
            add_special_tokens=add_special_tokens,
            split_special_tokens=True,
            padding=False,
            truncation=False,
            verbose=False,
        )
    return list(encoded.encodings or [])


def mask_id(tokenizer: Tokenizer) -> int:
    """The id of the mask token.

    Raises:
        UserError: there is none.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    vocabulary = tokenizer.get_vocab()
    for name in MASK_NAMES:
        if name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"{tokenizer.name_or_path or 'the tokenizer'} has no mask token; train a wordpiece one, or a bpe one whose "
        "special tokens hold <mask>"
    )


def sentinel_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of <extra_id_0>, <extra_id_1>, ... as far as the tokenizer has them; in T5's vocabulary they descend."""
    vocabulary, ids = tokenizer.get_vocab(), []
    while (sentinel := vocabulary.get(SENTINEL.format(len(ids)))) is not None:
        ids.append(sentinel)
    return ids


def non_special_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Ids of all tokens that are not special, ascending."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {int(number) for number in tokenizer.all_special_ids}
    return np.array(sorted(set(tokenizer.get_vocab().values()) - special))

"""What a tokenizer puts around one text and around two, and its text's pieces with their places. Cuts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignment.data.text.encoding import naming_panics
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

MASK_NAMES = ("<mask>", "[MASK]")  # where the tokenizer has such a token and does not say what it is for
SENTINEL = "<extra_id_{}>"


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text or a pair between its special tokens.

    Attributes:
        ids: [N].
        segments: 0 or 1 for the sentence each token belongs to, [N].
        ordinary: True for the text's own tokens, [N].
        starts: where the first and, in a pair, the second text begins.
    """

    ids: list[int]
    segments: list[int]
    ordinary: list[bool]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """Special tokens before, between and after; a tokenizer's own rule, read off an example.

    Attributes:
        around: special ids before the text, [0], and after it, [1].
        around_pair: special ids before the first text, between the two, and after the second.
        segments: of the five stretches of a pair: before, first, between, second, after.
    """

    around: tuple[list[int], list[int]]
    around_pair: tuple[list[int], list[int], list[int]]
    segments: tuple[int, int, int, int, int]

    @property
    def size(self) -> int:
        """Special tokens around one text."""
        return sum(map(len, self.around))

    @property
    def pair_size(self) -> int:
        """Special tokens around two texts."""
        return sum(map(len, self.around_pair))

    def single(self, ids: Sequence[int]) -> EncodedText:
        """One text with what stands around it."""
        lead, tail = self.around
        ordinary = [False] * len(lead) + [True] * len(ids) + [False] * len(tail)
        return EncodedText([*lead, *ids, *tail], [0] * len(ordinary), ordinary, (len(lead),))

    def pair(self, first: Sequence[int], second: Sequence[int]) -> EncodedText:
        """Two texts with what stands around and between them."""
        lead, middle, tail = self.around_pair
        stretches = [lead, first, middle, second, tail]
        segments = [segment for stretch, segment in zip(stretches, self.segments, strict=True) for _ in stretch]
        ordinary = [place in (1, 3) for place, stretch in enumerate(stretches) for _ in stretch]
        starts = (len(lead), len(lead) + len(first) + len(middle))
        return EncodedText([token for stretch in stretches for token in stretch], segments, ordinary, starts)


def frame_of(tokenizer: Tokenizer) -> SpecialTokenTemplate:
    """The frame that the tokenizer's post-processor puts around texts.

    Raises:
        UserError: the tokenizer is none of the fast ones, which alone say where their tokens come from.
    """
    one, two = _encoding(tokenizer, "a"), _encoding(tokenizer, "a", "a")
    own = [place for place, sequence in enumerate(one.sequence_ids) if sequence is not None]
    places = [[place for place, sequence in enumerate(two.sequence_ids) if sequence == which] for which in (0, 1)]
    (first, last), (start, stop) = ((which[0], which[-1] + 1) for which in places)
    types = two.type_ids
    middle = types[last] if start > last else types[first]
    return SpecialTokenTemplate(
        (one.ids[: own[0]], one.ids[own[-1] + 1 :]),
        (two.ids[:first], two.ids[last:start], two.ids[stop:]),
        (types[0], types[first], middle, types[start], types[-1]),
    )


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of one text, nothing around them.

    Attributes:
        ids: [N].
        word_starts: True where a word begins, as the tokenizer's first cut sees words, [N].
        offsets: first character of each token in the text and the one after its last, [N].
    """

    ids: list[int]
    word_starts: list[bool]
    offsets: list[tuple[int, int]]


def tokenize_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenizedText]:
    """Ids of each text with word starts and places; strings like "[SEP]" in a text are spelt out."""
    if not texts:
        return []
    return [
        TokenizedText(encoding.ids, _word_starts(encoding.word_ids), encoding.offsets)
        for encoding in _encodings(tokenizer, list(texts), add_special_tokens=False)
    ]


def _word_starts(words: Sequence[int | None]) -> list[bool]:
    return [place == 0 or word is None or word != words[place - 1] for place, word in enumerate(words)]


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
        return int(tokenizer.mask_token_id)  # type: ignore[arg-type]
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


def ordinary_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Ids of all tokens that are not special, ascending."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {int(number) for number in tokenizer.all_special_ids}
    return np.array(sorted(set(tokenizer.get_vocab().values()) - special))

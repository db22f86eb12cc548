"""Generated pairs of sequences: copy, reversal and transliteration, and where in the source each target symbol comes from."""

import zlib
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Task = Literal["copy", "reversal", "transliteration"]
PAD, START, END = 0, 1, 2
LETTERS = range(3, 23)
VOCABULARY = 23
VOWELS = range(3, 8)
FOLDS = 10  # of sources, by their letters; the last one is held out


class Pairs(NamedTuple):
    """A batch of pairs, padded on the right.

    Attributes:
        source: letters and the end, [B, S].
        target: letters and the end, [B, T].
        origin: index of the source letter that each target letter comes from; -1 at the end and at padding, [B, T].
    """

    source: Tensor
    target: Tensor
    origin: Tensor

    @property
    def before(self) -> Tensor:
        """The decoder's input: the start, then the target without its last column, [B, T]."""
        return torch.cat([torch.full_like(self.target[:, :1], START), self.target[:, :-1]], 1)


def _rules() -> dict[tuple[int, bool], list[int]]:
    """(letter, True after a vowel) -> one or two letters; the same in every run, as an alphabet is."""
    rng = Random("alphabet")
    return {
        (letter, after): rng.choices(LETTERS, k=rng.choice((1, 2))) for letter in LETTERS for after in (False, True)
    }


RULES = _rules()


def rewrite(task: Task, source: list[int]) -> tuple[list[int], list[int]]:
    """The target's letters, and the index of the source letter of each."""
    places = list(range(len(source)))
    if task == "reversal":
        places.reverse()
    if task != "transliteration":
        return [source[place] for place in places], places
    written = [RULES[letter, place > 0 and source[place - 1] in VOWELS] for place, letter in enumerate(source)]
    return [letter for those in written for letter in those], [place for place in places for _ in written[place]]


def sample_pairs(rng: Random, task: Task, lengths: tuple[int, int], count: int, *, held_out: bool) -> Pairs:
    """`count` pairs whose sources have a length drawn from `lengths` (both included) and are in the held-out fold or not."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    while len(rows) < count:
        source = rng.choices(LETTERS, k=rng.randint(*lengths))
        if (zlib.crc32(bytes(source)) % FOLDS == FOLDS - 1) == held_out:
            target, origin = rewrite(task, source)
            rows.append((torch.tensor([*source, END]), torch.tensor([*target, END]), torch.tensor([*origin, -1])))
    sources, targets, origins = zip(*rows, strict=True)
    return Pairs(
        pad_sequence(sources, batch_first=True),  # PAD is 0
        pad_sequence(targets, batch_first=True),
        pad_sequence(origins, batch_first=True, padding_value=-1),
    )

"""Examples (rows as token sequences), ragged micro-batches of limited size; records become examples in tokenize.py."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from alignment.ragged import (
    Ragged,
    RaggedBatch,
    Seq2Seq,
    Sharing,
    allowed,
    common_prompt,
    cut_at_targets,
    fill_groups,
    group_rows_by_length,
)

Row = TypeVar("Row")
Values = dict[str, Any]  # of an example, JSON-like


class RowSequence(Sequence[Row]):
    """Rows that are made when they are asked for; a slice is a list of them."""

    @abstractmethod
    def row_at(self, index: int) -> Row:
        """The row of an index from 0."""

    def __getitem__(self, index: int | slice) -> Any:
        selected = range(len(self))[index]
        return [self.row_at(place) for place in selected] if isinstance(selected, range) else self.row_at(selected)


class TokenizedRow(Protocol):
    """A row as token sequences: an `Example`, or the row of a task."""

    @property
    def row_id(self) -> str: ...
    @property
    def documents(self) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class Example:
    """A data row as K token sequences and a few values.

    | rows           | documents                        | values                                                      |
    |----------------|----------------------------------|-------------------------------------------------------------|
    | text           | the text, or a piece of it       |                                                             |
    | demonstrations | prompt and response              |                                                             |
    | comparisons    | prompt with chosen, rejected     | margin: by how much chosen leads, where the row says        |
    | labels         | prompt and response              | desirable: true or false                                    |
    | rankings       | prompt with each of K responses  | ranks: place of each, 0 is best, equal ones tie; margin     |
    | steps          | prompt and all steps             | ends: index of each step's last token; labels: is it right  |
    | prompts        | prompt                           | prompt, extra: as they were read; cut: its beginning is off |

    Attributes:
        documents: token ids, [K][N].
        masks: True where a token is to be predicted and counts, [K][N].
        row_id: name of the data row.
        source: number of its source among those of the data config.
        values: JSON-like. `reference`: log-probabilities of the documents' targets under a run's reference, nats, [K],
            where they were computed beforehand.
    """

    documents: list[list[int]]
    masks: list[list[bool]]
    row_id: str
    source: int = 0
    values: Values = field(default_factory=dict)

    @classmethod
    def single(cls, ids: list[int], mask: list[bool], row_id: str, source: int = 0, **values: Any) -> "Example":
        """An example of one document."""
        return cls([ids], [mask], row_id, source, values)

    @classmethod
    def answered(
        cls, prompt: list[int], responses: Sequence[list[int]], row_id: str, source: int = 0, **values: Any
    ) -> "Example":
        """A prompt with each of K responses, whose tokens count."""
        masks = [[False] * len(prompt) + [True] * len(response) for response in responses]
        return cls([prompt + response for response in responses], masks, row_id, source, values)

    @property
    def ids(self) -> list[int]:
        """Token ids of the first document."""
        return self.documents[0]

    @property
    def mask(self) -> list[bool]:
        """Mask of the first document."""
        return self.masks[0]

    @property
    def prompt(self) -> Any:
        """The prompt of a row of prompts as it was read, text or messages."""
        return self.values["prompt"]

    @property
    def extra(self) -> dict[str, Any]:
        """The other columns of a row of prompts."""
        return self.values["extra"]


@dataclass(frozen=True)
class PairBatch(RaggedBatch):
    """B pairs as 2B documents: all chosen, then all rejected in the same order. Its weight is B."""

    margins: Tensor | None  # [B]; None where no row has one
    reference: Tensor | None = None  # log-probabilities under a reference, nats, computed beforehand, [2B]
    pair_positions: Tensor | None = None  # of the pairs among those of the global batch, [B]; None: not asked for

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each pair, [B]."""
        return None if self.ragged.sources is None else self.ragged.sources[: len(self.lengths) // 2]


@dataclass(frozen=True)
class RankedBatch(RaggedBatch):
    """D responses to B prompts as D documents, those to one prompt side by side. Its weight is B.

    Attributes:
        ranks: place of each response, 0 is best; equal places are ties, [D].
        groups: number of the prompt, from 0, that each response answers, [D].
        sizes: responses to each prompt, B numbers.
        margins: by how much the better of two leads, 0 where a row says nothing, [B]; None where no row has one.
        reference: log-probabilities under a reference, nats, where they were computed beforehand, [D].
    """

    ranks: Tensor
    groups: Tensor
    sizes: tuple[int, ...]
    margins: Tensor | None
    reference: Tensor | None = None

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each prompt, [B]."""
        if self.ragged.sources is None:
            return None
        firsts = [0, *accumulate(self.sizes)][:-1]
        return self.ragged.sources[torch.tensor(firsts, device=self.ragged.sources.device)]


@dataclass(frozen=True)
class UnpairedBatch(RaggedBatch):
    """B responses, each judged alone. Its weight is B.

    Attributes:
        desirable: True for each good response, bool, [B].
        reference: log-probabilities under a reference, nats, where they were computed beforehand, [B].
    """

    desirable: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class StepBatch(RaggedBatch):
    """Responses with S labeled steps in all, which are its weight."""

    ends: Tensor  # index of each step's last token among the tokens of the batch, [S]
    labels: Tensor  # True for each right step, [S], bool
    rows: Tensor  # document of each step, [S]

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each step, [S]."""
        return None if self.ragged.sources is None else self.ragged.sources[self.rows]


PreferenceBatch = PairBatch | RankedBatch | UnpairedBatch


def collate(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """Ragged batches of at most `micro_batch_tokens` tokens each; a longer document stands alone.

    Documents of similar length come together, which costs attention the least. The weight is the number of targets.
    """
    return [_lay_out([(row, 0) for row in rows]) for rows in _longest_first(examples, micro_batch_tokens)]


def collate_whole(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """`collate` with every token but each document's first as a target, whatever the examples' masks."""
    return collate([replace(example, masks=[[True] * len(example.ids)]) for example in examples], micro_batch_tokens)


def collate_for_encoder_decoder(
    examples: Sequence[Example],
    micro_batch_tokens: int,
    *,
    collate: Callable[..., Sequence[Ragged | RaggedBatch]],
    start_token: int,
) -> list[Seq2Seq | RaggedBatch]:
    """Batches of `collate` with the prompts for an encoder, the responses behind `start_token` for a decoder.

    Tokens are counted without the start tokens.
    """
    return [
        replace(batch, ragged=cut_at_targets(batch.ragged, start_token))  # pyright: ignore[reportArgumentType]
        if isinstance(batch, RaggedBatch)
        else cut_at_targets(batch, start_token)
        for batch in collate(examples, micro_batch_tokens=micro_batch_tokens)
    ]


def collate_pairs(
    pairs: Sequence[Example], micro_batch_tokens: int, *, share_prompts: Sharing = False
) -> list[PairBatch]:
    """Pair batches of at most `micro_batch_tokens` tokens each, both sides together; a longer pair stands alone.

    Args:
        pairs: examples of two documents, the chosen one first.
        micro_batch_tokens: a prompt that the sides of a pair share counts once.
        share_prompts: True where the prompt of a pair is in the batch once.
    """
    return [_pairs(rows, share_prompts) for rows in _longest_first(pairs, micro_batch_tokens, share_prompts)]


def _pairs(rows: Sequence[Example], share_prompts: Sharing) -> PairBatch:
    sides = [(row, side) for side in (0, 1) for row in rows]
    together = [(index, len(rows) + index) for index in range(len(rows))]
    return PairBatch(_lay_out(sides, together, share_prompts), _margins(rows), _references(sides))


def collate_rankings(
    examples: Sequence[Example], micro_batch_tokens: int, *, share_prompts: Sharing = False
) -> list[RankedBatch]:
    """Batches of at most `micro_batch_tokens` tokens each, all responses to a prompt together; see `collate_pairs`."""
    return [_rankings(rows, share_prompts) for rows in _longest_first(examples, micro_batch_tokens, share_prompts)]


def _rankings(rows: Sequence[Example], share_prompts: Sharing) -> RankedBatch:
    sides = [(row, side) for row in rows for side in range(len(row.documents))]
    sizes = tuple(len(row.documents) for row in rows)
    together = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return RankedBatch(
        _lay_out(sides, together, share_prompts),
        ranks=torch.tensor([rank for row in rows for rank in row.values["ranks"]]),
        groups=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes)),
        sizes=sizes,
        margins=_margins(rows),
        reference=_references(sides),
    )


def collate_labeled(examples: Sequence[Example], micro_batch_tokens: int) -> list[UnpairedBatch]:
    """Batches of at most `micro_batch_tokens` tokens each; a longer response stands alone."""
    return [_labeled(rows) for rows in _longest_first(examples, micro_batch_tokens)]


def _labeled(rows: Sequence[Example]) -> UnpairedBatch:
    sides = [(row, 0) for row in rows]
    together = [(index,) for index in range(len(rows))]
    desirable = torch.tensor([row.values["desirable"] for row in rows])
    return UnpairedBatch(_lay_out(sides, together), desirable, _references(sides))


def collate_steps(examples: Sequence[Example], micro_batch_tokens: int) -> list[StepBatch]:
    """Batches of at most `micro_batch_tokens` tokens each, documents of similar length together; a longer one alone."""
    lengths = [len(row.ids) for row in examples]
    return [_steps(rows) for rows in group_rows_by_length(examples, lengths, micro_batch_tokens)]


def _steps(rows: Sequence[Example]) -> StepBatch:
    starts = accumulate((len(row.ids) for row in rows), initial=0)
    ends = [start + end for start, row in zip(starts, rows, strict=False) for end in row.values["ends"]]
    labels = [label for row in rows for label in row.values["labels"]]
    documents = [index for index, row in enumerate(rows) for _ in row.values["ends"]]
    ragged = replace(_lay_out([(row, 0) for row in rows]), weight=float(len(labels)))
    return StepBatch(ragged, torch.tensor(ends), torch.tensor(labels, dtype=torch.bool), torch.tensor(documents))


def padded_groups(x: Tensor, batch: RankedBatch) -> tuple[Tensor, Tensor]:
    """Values of the responses, [D], as one row for each prompt, padded with zeros, [B, K], and their mask."""
    sizes = torch.tensor(batch.sizes, device=x.device)
    mask = torch.arange(max(batch.sizes), device=x.device) < sizes[:, None]
    return x.new_zeros(mask.shape).masked_scatter(mask, x), mask


def _lay_out(
    sides: Sequence[tuple[Example, int]], together: Sequence[Sequence[int]] | None = None, share: Sharing = False
) -> Ragged:
    """Documents of examples end to end.

    Args:
        sides: an example and the number of its document.
        together: numbers of the sides of one prompt; the weight is the number of prompts. None: the number of targets.
        share: True where the sides of one prompt share it.
    """
    documents = [row.documents[side] for row, side in sides]
    masks = [row.masks[side] for row, side in sides]
    weight = None if together is None else len(together)
    row_ids = [row.row_id for row, _ in sides]
    if share is False or together is None:
        ragged = Ragged.build(documents, masks, weight=weight, row_ids=row_ids)
    else:
        ragged = Ragged.build_shared(documents, masks, together, weight=weight, row_ids=row_ids, share=share)
    return ragged.with_sources([row.source for row, _ in sides])


def _references(sides: Sequence[tuple[Example, int]]) -> Tensor | None:
    """Log-probabilities of the sides under the reference; None where not every row has them."""
    if not all("reference" in row.values for row, _ in sides):
        return None
    return torch.tensor([row.values["reference"][side] for row, side in sides])


def _margins(rows: Sequence[Example]) -> Tensor | None:
    """None where no row has a margin; a row without one beside others is a plain comparison."""
    margins = [row.values.get("margin") for row in rows]
    return None if all(margin is None for margin in margins) else torch.tensor([margin or 0.0 for margin in margins])


def _longest_first(rows: Sequence[Example], limit: int, share: Sharing = False) -> list[list[Example]]:
    """Rows from long to short by their longest document (equal ones in their order), in groups of `limit` tokens.

    A prompt that the documents of a row share counts once.
    """
    lengths = [[len(ids) for ids in row.documents] for row in rows]
    sizes = [sum(row_lengths) for row_lengths in lengths]
    for index, row in enumerate(rows if share is not False else ()):
        if allowed(share, lengths[index]):
            sizes[index] -= (len(row.documents) - 1) * common_prompt(row.documents, row.masks)
    order = sorted(range(len(rows)), key=lambda index: -max(lengths[index]))
    return [[rows[index] for index in group] for group in fill_groups(order, sizes, limit)]

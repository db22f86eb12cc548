"""Examples: data rows as token sequences, as a model reads them. Records become examples in tokenize.py, batches in batches.py."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from alignment.data.rows.records import Messages

Row = TypeVar("Row")


class RowSequence(Sequence[Row]):
    """Rows that are made when they are asked for; a slice is a list of them."""

    @abstractmethod
    def row_at(self, index: int) -> Row:
        """The row of an index, which counts from the end where it is negative.

        Raises:
            IndexError: there is no such row.
        """

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self.row_at(index)


class TokenizedRow(Protocol):
    """An example of any kind: the token sequences that a model reads of one row."""

    @property
    def row_id(self) -> str: ...
    @property
    def documents(self) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class Example:
    """One token sequence.

    Attributes:
        ids: token ids.
        mask: True where a token is to be predicted and counts.
        row_id: name of the data row.
        source: number of its source among those of the data config.
        reference: log-probability of its targets under a run's reference, nats, where it was computed beforehand.
    """

    ids: list[int]
    mask: list[bool]
    row_id: str
    source: int = 0
    reference: float | None = None

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.ids]


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two responses to the same prompt tokens."""

    chosen: Example
    rejected: Example
    margin: float | None
    row_id: str
    source: int = 0

    @property
    def documents(self) -> list[list[int]]:
        """Prompt with the chosen and with the rejected response."""
        return [self.chosen.ids, self.rejected.ids]


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A prompt ready to be continued; `prompt` and `extra` as they were read, `cut` where `ids` lack its beginning."""

    ids: list[int]
    prompt: str | Messages
    extra: dict[str, Any]
    row_id: str
    cut: bool = False
    source: int = 0

    @property
    def documents(self) -> list[list[int]]:
        """The prompt's tokens."""
        return [self.ids]


@dataclass(frozen=True, slots=True)
class LabeledExample:
    """A response judged alone (KTO): prompt and response, and whether the response is desirable."""

    example: Example
    desirable: bool
    row_id: str
    source: int = 0

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.example.ids]


@dataclass(frozen=True, slots=True)
class RankedExample:
    """K responses to the same prompt tokens, from K = 2.

    Attributes:
        responses: prompt with each response.
        ranks: place of each response, 0 is best; equal places are ties.
        row_id: name of the data row.
        source: number of its source.
        margin: by how much the better of two leads; None where K > 2 or the row has none.
    """

    responses: tuple[Example, ...]
    ranks: tuple[int, ...]
    row_id: str
    source: int = 0
    margin: float | None = None

    @property
    def documents(self) -> list[list[int]]:
        """Prompt with each response."""
        return [response.ids for response in self.responses]


PreferenceExample = PairExample | LabeledExample | RankedExample


@dataclass(frozen=True, slots=True)
class StepExample:
    """A response in steps, each labeled (process supervision).

    Attributes:
        ids: prompt and all steps.
        ends: index of each step's last token.
        labels: whether each step is right.
        row_id: name of the data row.
        source: number of its source.
    """

    ids: list[int]
    ends: tuple[int, ...]
    labels: tuple[bool, ...]
    row_id: str
    source: int = 0

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.ids]

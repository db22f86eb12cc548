"""Examples: data rows as token sequences, as a model reads them. Records become examples in tokenize.py, batches in batches.py."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Row = TypeVar("Row")
Values = dict[str, Any]  # of an example, JSON-like


class RowSequence(Sequence[Row]):
    """Rows that are made when they are asked for; a slice is a list of them."""

    @abstractmethod
    def row_at(self, index: int) -> Row:
        """The row of an index from 0."""

    def __getitem__(self, index: int | slice) -> Any:
        found = range(len(self))[index]
        return [self.row_at(each) for each in found] if isinstance(found, range) else self.row_at(found)


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
        values: JSON-like. `reference`: log-probabilities of the documents' targets under a run's reference, nats, [K], where
            they were computed beforehand.
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


def join_examples(parts: Sequence[Example], **values: Any) -> Example:
    """The documents of all parts as one example, with the name and the source of the first."""
    documents = [ids for part in parts for ids in part.documents]
    masks = [mask for part in parts for mask in part.masks]
    return Example(documents, masks, parts[0].row_id, parts[0].source, values)

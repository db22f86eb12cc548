"""The models that training loops, generation and evaluation take: modules of ours, and wrapped ones of transformers."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, overload

from torch import Tensor, nn

from alignment.models.outputs import LanguageOutput, LogitsOutput, ValueOutput
from alignment.models.safetensors_files import HFConfig
from alignment.ragged import Ragged, Seq2Seq


class Module(Protocol):
    """The part of `nn.Module` that callers use, with the Hugging Face config that a checkpoint is saved with."""

    config: HFConfig
    training: bool

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


class LanguageModelSpec(Protocol):
    """Rows of a language model's token table, and tokens of its longest document."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class DecodingCache(Protocol):
    """Keys and values, or the like, of documents that are being continued, one row per document.

    Attributes:
        lengths: tokens of each row, [rows].
        rows: documents held.
        capacity: most tokens one document may have.
    """

    lengths: Tensor

    @property
    def rows(self) -> int: ...
    @property
    def capacity(self) -> int: ...

    def keep(self, rows: Tensor) -> None:
        """Hold only these rows from now on, in this order; rows: indices, or one boolean per row, [n]."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Put row `rows[i]` at position i; a row may come several times, or not at all. rows: indices, [n]."""
        ...


class GenerativeModel(Module, Protocol):
    """A policy or a reference: a decoder, or an encoder-decoder, that can be trained and continued token by token."""

    @property
    def spec(self) -> LanguageModelSpec: ...

    @overload
    def __call__(
        self, *, batch: Ragged | Seq2Seq, temperature: float = 1.0, entropy: bool = False
    ) -> LanguageOutput: ...
    @overload
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> LogitsOutput: ...

    @property
    def new_cache(self) -> Callable[[int, int], DecodingCache]:
        """(rows, capacity) -> an empty cache of the model's own kind, for documents of up to `capacity` tokens each."""
        ...

    @property
    def prefill(self) -> Callable[..., Tensor]:
        """(batch, cache) -> logits [B, V] after each document's last token; the documents now fill the cache."""
        ...

    @property
    def decode(self) -> Callable[..., Tensor]:
        """(tokens [B], cache) -> logits [B, V] after one more token for every cache row."""
        ...


class ScoringModel(Module, Protocol):
    """A reward or value model: one number per token."""

    def __call__(self, *, batch: Ragged, tokens: Tensor | None = None) -> ValueOutput:
        """Values of every token, [N], or of the named ones, [M]."""
        ...

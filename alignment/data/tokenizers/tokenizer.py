"""What the library uses of a tokenizer, and how the tokenizers library fails. Neither is imported here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from alignment.errors import UserError


class Tokenizer(Protocol):
    """A tokenizer of transformers, as far as the library calls it; `PreTrainedTokenizerBase` fits.

    Attributes:
        name_or_path: where it was loaded from, for messages.
        chat_template: Jinja text, or one text per name, or None.
    """

    name_or_path: str
    chat_template: Any

    # Ids and names of the special tokens; transformers makes these attributes at run time.
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...
    @property
    def mask_token_id(self) -> int | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    @property
    def is_fast(self) -> bool: ...
    def __len__(self) -> int: ...
    def __call__(self, text: str | Sequence[str], **options: Any) -> Any: ...
    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any: ...
    def convert_tokens_to_ids(self, tokens: str) -> Any: ...
    def add_special_tokens(self, special_tokens_dict: Mapping[str, Sequence[str]], **options: Any) -> int: ...
    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **options: Any) -> Any: ...
    def save_pretrained(self, save_directory: str | Path) -> Any: ...


@contextmanager
def naming_panics(tokenizer: Tokenizer) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into a `UserError`.

    Raises:
        UserError: a pattern in tokenizer.json gave up on a text (it backtracks without end), or its tables do not fit.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(
            f"{tokenizer.name_or_path or 'this tokenizer'}: tokenizer.json cannot read a text: {error}; take the "
            "tokenizer that its authors publish"
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of Rust code; the class of that exception cannot be imported."""
    return type(error).__name__ == "PanicException"

"""A tokenizer as the library uses it: its interface, texts to token ids, its control tokens, and how it fails.

Whether a string such as "</s>" is a control token is the caller's choice, never the text's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from alignment.errors import UserError

ANCHOR = "\n"  # a text put before another one, so that it is not the first


class Tokenizer(Protocol):
    """A tokenizer of transformers, as far as the library calls it; `PreTrainedTokenizerBase` fits."""

    name_or_path: str
    chat_template: Any  # Jinja text, or one text per name, or None
    bos_token_id: int | None
    eos_token_id: int | None

    def __len__(self) -> int: ...
    def __call__(self, text: str | Sequence[str], **options: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, control_tokens: bool = False, follows: bool = False
) -> list[list[int]]:
    """Ids of each text, nothing added.

    Args:
        control_tokens: True reads "</s>" and the like as the control token (only for text a template wrote);
            False spells such strings out in ordinary pieces.
        follows: the texts continue others, so SentencePiece-like tokenizers must not put a blank before them.
    """
    if not texts:
        return []
    if not follows or not _puts_a_blank_first(tokenizer):
        return _encode(tokenizer, texts, control_tokens)
    # Such a tokenizer puts a blank before the first word only: encode a newline before the text, then drop its ids.
    [anchor] = _encode(tokenizer, [ANCHOR], control_tokens)
    anchored = _encode(tokenizer, [ANCHOR + text for text in texts], control_tokens)
    plain = _encode(tokenizer, texts, control_tokens)
    return [
        ids[len(anchor) :] if ids[: len(anchor)] == anchor else alone
        for ids, alone in zip(anchored, plain, strict=True)  # the newline may merge with the text's own first newline
    ]


def _puts_a_blank_first(tokenizer: Tokenizer) -> bool:
    anchor, alone, after = _encode(tokenizer, [ANCHOR, "a", ANCHOR + "a"], False)
    return bool(anchor) and after[: len(anchor)] == anchor and after[len(anchor) :] != alone


def _encode(tokenizer: Tokenizer, texts: Sequence[str], control_tokens: bool) -> list[list[int]]:
    with naming_panics(tokenizer):
        if (backend := _plain_backend(tokenizer)) is not None:
            backend.encode_special_tokens = not control_tokens
            return [each.ids for each in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        encoded = tokenizer(  # verbose=False: no warning about long texts, which are truncated later
            list(texts), add_special_tokens=False, split_special_tokens=not control_tokens, padding=False, truncation=False,
            return_attention_mask=False, return_token_type_ids=False, verbose=False,
        )  # fmt: skip
    return cast("list[list[int]]", encoded["input_ids"])


def _plain_backend(tokenizer: Tokenizer) -> Any:
    """The object of the tokenizers library behind a tokenizer that hands texts to it as they are, else None."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "_tokenizer", None)
    encode_plus = getattr(type(tokenizer), "_encode_plus", None)
    if backend is None or encode_plus is not getattr(PreTrainedTokenizerFast, "_encode_plus", 0):
        return None
    return backend if backend.truncation is None and backend.padding is None else None


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The id of BOS, or None where the tokenizer has no such token."""
    return tokenizer.bos_token_id


def adds_bos(tokenizer: Tokenizer) -> bool:
    """True where the tokenizer itself puts its BOS before a text (post-processor or `add_bos_token`)."""
    with_special = cast("list[int]", tokenizer("a", add_special_tokens=True)["input_ids"])
    return with_special[:1] == [tokenizer.bos_token_id]


def control_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of all control tokens, longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(special, key=lambda text: (-len(text), text))


@contextmanager
def naming_panics(tokenizer: Tokenizer) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into a `UserError`."""
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
    """True for a panic of Rust code; the class of that exception cannot be imported."""
    return type(error).__name__ == "PanicException"

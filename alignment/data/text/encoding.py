"""Texts to token ids. Whether a string such as "</s>" is a control token is the caller's choice, never the text's."""

from collections.abc import Sequence
from typing import cast

from alignment.data.tokenizers.tokenizer import Tokenizer, naming_panics

ANCHOR = "\n"


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, control_tokens: bool = False, follows: bool = False
) -> list[list[int]]:
    """Ids of each text, nothing added.

    Args:
        control_tokens: True reads "</s>" and the like as the control token (only for text a template wrote);
            False spells such strings out in ordinary pieces.
        follows: the texts continue others, so SentencePiece-like tokenizers must not put a blank before them.

    Returns:
        One list of ids per text.
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
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not control_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about long texts: they are truncated later
        )
    return cast("list[list[int]]", encoded["input_ids"])


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The id of BOS, or None where the tokenizer has no such token."""
    return tokenizer.bos_token_id


def adds_bos(tokenizer: Tokenizer) -> bool:
    """True where the tokenizer itself puts its BOS before a text (post-processor or `add_bos_token`)."""
    with_special = cast("list[int]", tokenizer("a", add_special_tokens=True)["input_ids"])
    return with_special[:1] == [bos_id(tokenizer)]


def control_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of all control tokens, longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(special, key=lambda text: (-len(text), text))

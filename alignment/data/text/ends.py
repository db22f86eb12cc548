"""The tokens that begin and end sequences: BOS, the end of a turn, the end of a document."""

from collections.abc import Callable, Sequence

from alignment.data.text.templates import chat_format, name_of
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos
from alignment.errors import UserError


def end_token_id(tokenizer: Tokenizer) -> int:
    """The token that ends a response: the template's end of turn where there is one, else the tokenizer's EOS.

    Raises:
        UserError: the tokenizer has neither.
    """
    if tokenizer.chat_template and (turn := chat_format(tokenizer).end) is not None:
        return tokenizer.convert_tokens_to_ids(turn)
    return document_end_id(tokenizer)


def document_end_id(tokenizer: Tokenizer) -> int:
    """The token that ends a document of plain text: EOS.

    Raises:
        UserError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} names no end token, so nothing could learn to stop; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return end


def stop_token_ids(tokenizer: Tokenizer) -> set[int]:
    """All tokens at which generation stops: the end of turn, the end of a tool call, and EOS."""
    stops = {end_token_id(tokenizer)}
    if tokenizer.chat_template and (call := chat_format(tokenizer).call_end) is not None:
        stops.add(tokenizer.convert_tokens_to_ids(call))
    return stops if tokenizer.eos_token_id is None else stops | {tokenizer.eos_token_id}


def stop_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokens at which generation stops."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer)))]


def without_end(text: str, stops: Sequence[str]) -> str:
    """The text without the end tokens written at its end."""
    while stop := next((stop for stop in stops if text.rstrip().endswith(stop)), None):
        text = text.rstrip().removesuffix(stop)
    return text


def bos_adder(tokenizer: Tokenizer) -> Callable[[list[int]], list[int]]:
    """A function that puts the BOS before a sequence, where the tokenizer has one and the template wrote none.

    It raises a UserError where the template wrote two.
    """
    bos, adds = tokenizer.bos_token_id, adds_bos(tokenizer)

    def with_one_bos(ids: list[int]) -> list[int]:
        if bos is not None and ids[:2] == [bos, bos]:
            raise UserError(f"{name_of(tokenizer)} writes the BOS twice; one is right")
        return [bos, *ids] if adds and bos is not None and ids[:1] != [bos] else ids

    return with_one_bos

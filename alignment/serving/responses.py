"""Answers in OpenAI's form: choices with log-probabilities and usage, whole or in streamed chunks, and errors. No HTTP here."""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.generation.requests import TokenEvent
from alignment.serving.requests import BadRequest, CompletionRequest

JSON = dict[str, object]
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's blank


@dataclass
class ResponseChoice:
    """One response so far.

    Attributes:
        index: among the choices of its answer.
        prompt_tokens: length of its prompt.
        events: its tokens.
    """

    index: int
    prompt_tokens: int
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> str | None:
        """Why it ended: stop or length; None: it goes on."""
        return self.events[-1].finish if self.events else None


class AnswerWriter:
    """Writes the answer to one request, whole or as chunks.

    Args:
        request: what was asked for.
        model: its name in answers.
        tokenizer: for the texts of single tokens.
        stop_ids: tokens that end a response; they have no log-probability in an answer, as they have no text.
    """

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self._request, self._tokenizer, self._stop_ids = request, tokenizer, frozenset(stop_ids)
        self._chat = request.kind == "chat"
        prefix, self._object = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._head: JSON = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[ResponseChoice]) -> JSON:
        """The answer at once."""
        written = []
        for choice in choices:
            body: JSON = {
                "index": choice.index,
                "finish_reason": choice.finish,
                "logprobs": self._log_probs(choice.events),
            }
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            written.append(body | ({"message": message} if self._chat else {"text": choice.text}))
        return {**self._head, "object": self._object, "choices": written, "usage": self.usage(choices)}

    def first_chunk(self, choice: ResponseChoice) -> JSON | None:
        """Who speaks, before a chat's first words; None of a text completion."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, choice) if self._chat else None

    def chunk(self, choice: ResponseChoice, event: TokenEvent) -> JSON | None:
        """What a token adds; None: nothing that can be shown yet."""
        if not event.text and event.finish is None and self._request.alternatives is None:
            return None
        before = len(choice.text) - len(event.text)
        said: JSON = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        return self._chunk(said | {"logprobs": self._log_probs([event], before)}, choice, event.finish)

    def last_chunk(self, choices: Sequence[ResponseChoice]) -> JSON:
        """The counts of tokens."""
        return {**self._head, "object": self._chunk_object, "choices": [], "usage": self.usage(choices)}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, body: JSON, choice: ResponseChoice, finish: str | None = None) -> JSON:
        written = {"index": choice.index, "logprobs": None, **body, "finish_reason": finish}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": self._chunk_object, "choices": [written], **usage}

    def usage(self, choices: Sequence[ResponseChoice]) -> JSON:
        """Tokens of the prompts, each counted once, and of all responses, end tokens included."""
        prompts = sum(choice.prompt_tokens for choice in choices[:: self._request.n])
        responses = sum(len(choice.events) for choice in choices)
        return {"prompt_tokens": prompts, "completion_tokens": responses, "total_tokens": prompts + responses}

    def _log_probs(self, events: Sequence[TokenEvent], offset: int = 0) -> JSON | None:
        if self._request.alternatives is None:
            return None
        shown = [event for event in events if event.token not in self._stop_ids]
        if self._chat:
            return {"content": [self._token_log_prob(event) for event in shown], "refusal": None}
        offsets = []
        for event in events:
            offsets += [offset] if event.token not in self._stop_ids else []
            offset += len(event.text)
        return {
            "tokens": [self._name(event.token) for event in shown],
            "token_logprobs": [event.log_prob for event in shown],
            "top_logprobs": [
                {self._name(token): written_log_prob(value) for token, value in event.alternatives} for event in shown
            ]
            if self._request.alternatives
            else None,
            "text_offset": offsets,
        }

    def _token_log_prob(self, event: TokenEvent) -> JSON:
        alternatives = [self._entry(token, value) for token, value in event.alternatives]
        return self._entry(event.token, event.log_prob) | {"top_logprobs": alternatives}

    def _entry(self, token: int, log_prob: float) -> JSON:
        written = token_bytes(self._tokenizer, token)
        return {"token": self._name(token), "logprob": written_log_prob(log_prob), "bytes": list(written)}

    def _name(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode("utf-8", errors="replace")


def written_log_prob(value: float) -> float:
    """A log-probability for JSON, which has no infinity: what cannot be drawn has OpenAI's number for it."""
    return max(value, -9999.0)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for inside a text, also where it is a part of a character only."""
    if token in tokenizer.added_tokens_decoder:
        return str(tokenizer.added_tokens_decoder[token]).encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if (found := BYTE_PIECE.fullmatch(piece)) is not None:
        return bytes([int(found[1], 16)])
    if BLANK in piece:
        return piece.replace(BLANK, " ").encode()
    text = tokenizer.decode([token], skip_special_tokens=False)
    known = byte_of_character()
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in known for character in piece):
        return bytes(known[character] for character in piece)
    return text.encode()


@cache
def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level BPE's pieces stands for.

    Source: Radford et al. 2019 (GPT-2), section 2.2: bytes that print stand for themselves, the others, in order, for the
        characters from 256 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


def error_body(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> JSON:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: BadRequest) -> JSON:
    """A refused request as an error in OpenAI's form."""
    return error_body(str(error), status=error.status, param=error.param, code=error.code)

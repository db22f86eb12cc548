"""OpenAI's chat and text completions as JSON: requests in, answers and errors out. No HTTP here.

What is not supported is refused in words. An answer has choices with log-probabilities and usage, whole or in streamed
chunks.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import Interval

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.data.rows.fields import BadRow, messages_field
from alignment.data.rows.records import Messages
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, suggest
from alignment.generation.requests import SamplingConfig, TokenEvent
from alignment.settings import PositiveInt, Rule, Settings, refusal

Kind = Literal["chat", "completions"]
JSON = dict[str, object]
Form = TypeVar("Form", bound="Body")
Encode = Callable[[str | Messages], list[int]]  # ids of a text or of messages
MOST_RESPONSES = 512  # of one request: prompts times n
MOST_STOPS = 16
MOST_CHARACTERS = 4 * 2**20  # of a prompt
CHARACTERS_PER_TOKEN = 16  # four times those of English text: a prompt with more on average is not worth encoding
IGNORED = {  # say who asks and how it is billed or stored
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store",
}  # fmt: skip
OFF = {  # parameter -> the values that ask for nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "audio": (), "prediction": (), "verbosity": (),
    "reasoning_effort": (), "web_search_options": (), "suffix": ("",), "echo": (False,), "best_of": (1,),
}  # fmt: skip
SAMPLING = {  # parameter -> setting of `SamplingConfig`; those beyond OpenAI's as vLLM names them
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "min_tokens": "min_new_tokens",
}  # fmt: skip
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's blank


class BadRequest(UserError):
    """A request that cannot be answered.

    Attributes:
        param: the parameter that is wrong.
        code: OpenAI's name of the fault, for programs.
        status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


# Requests


def _sampling_problem(body: "Body", name: str) -> str:
    """The fault of a sampling parameter, by the limits of `SamplingConfig`."""
    value = getattr(body, name)
    problem = "" if value is None else refusal(SamplingConfig, max_new_tokens=10_000_000, **{SAMPLING[name]: value})
    return problem.partition(" ")[2]


@dataclass(frozen=True, kw_only=True)
class Body(Settings):
    """The parameters that both kinds have, beside the prompts; None: not given."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    n: Annotated[int, Interval(ge=1, le=128)] = 1  # as OpenAI's
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stream: bool = False
    stream_options: Mapping[str, bool] = field(default_factory=dict)

    RULES = (
        *(Rule(name, lambda c, name=name: _sampling_problem(c, name)) for name in SAMPLING),
        Rule(
            "stop",
            lambda c: not all(c.stop) or (not isinstance(c.stop, str) and len(c.stop) > MOST_STOPS),
            f"must be a text or a list of texts, none of them empty, at most {MOST_STOPS}",
        ),
        Rule(
            "stream_options",
            lambda c: set(c.stream_options) - {"include_usage", "include_obfuscation"},
            "may hold include_usage only",
        ),
        Rule("stream_options", lambda c: c.stream_options and not c.stream, "needs stream: true"),
    )


@dataclass(frozen=True, kw_only=True)
class ChatBody(Body):
    """The parameters of a chat completion."""

    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Interval(ge=0, le=20)] = 0  # as OpenAI's

    RULES = (
        Rule("top_logprobs", lambda c: c.top_logprobs and not c.logprobs, "needs logprobs: true"),
        Rule(
            "max_tokens",
            lambda c: None not in (c.max_tokens, c.max_completion_tokens) and c.max_tokens != c.max_completion_tokens,
            "and max_completion_tokens name different lengths; give one",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TextBody(Body):
    """The parameters of a text completion."""

    logprobs: Annotated[int, Interval(ge=0, le=20)] | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """A client's request.

    Attributes:
        kind: chat or completions.
        prompts: messages, texts or token ids; chat has exactly one.
        model: its name; None: not given.
        n: choices for each prompt.
        max_tokens: longest response; None: the server's default.
        sampling: settings of `SamplingConfig` without length and seed.
        seed: None: another one for each request.
        stop: texts that end a response.
        alternatives: number of likeliest tokens beside each token; None: no log-probabilities.
        stream: send tokens as they come.
        include_usage: a streamed response ends with the counts of tokens.
    """

    kind: Kind
    prompts: tuple[str | Messages | list[int], ...]
    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    stream: bool = False
    include_usage: bool = False


def read_request(kind: Kind, body: object) -> CompletionRequest:
    """The request of a JSON body.

    Raises:
        BadRequest: something is missing, of a wrong type, out of its range, unknown or not supported.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    form, text = (ChatBody, "messages") if kind == "chat" else (TextBody, "prompt")
    known = {text, *(each.name for each in fields(form))}
    for name in given.keys() - known:
        if name not in OFF:
            name = name[:80]  # a search for a name that is alike takes seconds for millions of letters
            raise BadRequest(f"unknown parameter {name!r}; {suggest(name, known)}", name)
        value = given[name]
        if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF[name]):
            raise BadRequest(f"{name} is not supported here; leave it out", name, code="unsupported_parameter")
    prompts = _messages(given) if kind == "chat" else _prompts(given.get("prompt"))
    asked = _checked(form, {name: given[name] for name in given.keys() & known - {text}})
    if len(prompts) * asked.n > MOST_RESPONSES:
        raise BadRequest(
            f"{len(prompts)} prompts with n = {asked.n} ask for {len(prompts) * asked.n} responses; at most "
            f"{MOST_RESPONSES} in one request: send several",
            "prompt",
        )
    alternatives, longest = asked.logprobs, asked.max_tokens
    if isinstance(asked, ChatBody):
        alternatives = asked.top_logprobs if asked.logprobs else None
        longest = asked.max_tokens or asked.max_completion_tokens
    return CompletionRequest(
        kind,
        tuple(prompts),
        model=asked.model,
        n=asked.n,
        max_tokens=longest,
        sampling={ours: value for name, ours in SAMPLING.items() if (value := getattr(asked, name)) is not None},
        seed=asked.seed,
        stop=(asked.stop,) if isinstance(asked.stop, str) else asked.stop,
        alternatives=alternatives,
        stream=asked.stream,
        include_usage=asked.stream_options.get("include_usage", False),
    )


def _checked(form: type[Form], values: Mapping[str, object]) -> Form:
    """The parameters in a body, each of the right type and in its range."""
    try:
        return build(form, SourcedYaml(dict(values), {(): "request"}))
    except UserError as error:
        why = str(error).replace("request: ", "")
        raise BadRequest(why[:1000], re.split(r"[:.\[]", why, maxsplit=1)[0][:80]) from error


def _messages(given: Mapping[str, object]) -> list[Messages]:
    if "messages" not in given:
        raise BadRequest("messages is missing", "messages")
    try:
        messages = messages_field(given, "messages")
    except BadRow as bad:
        raise BadRequest(f"messages: {bad}", "messages") from bad
    if messages[-1]["role"] == "assistant":
        raise BadRequest("messages must end with a message of someone else than the assistant", "messages")
    return [messages]


def _prompts(value: object) -> list[Any]:
    """The prompts of a completion: a text, a list of texts, token ids, or a list of lists of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and prompts and all(_is_ids(one) or (one and isinstance(one, str)) for one in prompts):
        return prompts
    wrong = "prompt must be a text, a list of texts, token ids, or a list of lists of token ids, none of them empty"
    raise BadRequest(wrong, "prompt")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def encode_prompt(prompt: str | Messages | list[int], encode: Encode, *, vocabulary: int, positions: int) -> list[int]:
    """Token ids of a prompt.

    Args:
        encode: gives the ids of a text or of messages.
        vocabulary: rows of the model's token table.
        positions: most tokens of a prompt.

    Raises:
        BadRequest: an id that is none, a prompt that the tokenizer or the chat template refuses, or one so long that it
            is not encoded.
    """
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        ids = cast("list[int]", prompt)
        if len(ids) <= positions and (wrong := [token for token in ids if not 0 <= token < vocabulary]):
            raise BadRequest(f"prompt: {wrong[0]} is no token id; they are 0 to {vocabulary - 1}", "prompt")
        return ids
    param = "prompt" if isinstance(prompt, str) else "messages"
    size = len(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
    if size > (most := min(CHARACTERS_PER_TOKEN * positions, MOST_CHARACTERS)):
        raise BadRequest(
            f"the prompt has {size} characters, of which at most {most} are read: the model has {positions} positions",
            param,
            code="context_length_exceeded",
        )
    try:
        ids = encode(cast("str | Messages", prompt))
    except UserError as error:
        raise BadRequest(str(error), param) from error
    if not ids:
        raise BadRequest("the prompt has no token", param)
    return ids


# Answers


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


class AnswerWriter:
    """Writes the answer to one request, whole or as chunks.

    Args:
        request: the client's.
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
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            said: JSON = {"message": message} if self._chat else {"text": choice.text}
            ends: JSON = {"index": choice.index, "finish_reason": choice.events[-1].finish}
            written.append({**ends, "logprobs": self._log_probs(choice.events), **said})
        return {**self._head, "object": self._object, "choices": written, "usage": self._usage(choices)}

    def first_chunk(self, choice: ResponseChoice) -> JSON | None:
        """The speaker, before a chat's first words; None of a text completion."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, choice) if self._chat else None

    def chunk(self, choice: ResponseChoice, event: TokenEvent) -> JSON | None:
        """The addition of a token; None: nothing that can be shown yet."""
        if not event.text and event.finish is None and self._request.alternatives is None:
            return None
        before = len(choice.text) - len(event.text)
        said: JSON = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        return self._chunk(said | {"logprobs": self._log_probs([event], before)}, choice, event.finish)

    def last_chunk(self, choices: Sequence[ResponseChoice]) -> JSON:
        """The counts of tokens."""
        return {**self._head, "object": self._chunk_object, "choices": [], "usage": self._usage(choices)}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, body: JSON, choice: ResponseChoice, finish: str | None = None) -> JSON:
        written = {"index": choice.index, "logprobs": None, **body, "finish_reason": finish}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": self._chunk_object, "choices": [written], **usage}

    def _usage(self, choices: Sequence[ResponseChoice]) -> JSON:
        """Tokens of the prompts, each counted once, and of all responses, end tokens included."""
        prompts = sum(choice.prompt_tokens for choice in choices[:: self._request.n])
        responses = sum(len(choice.events) for choice in choices)
        return {"prompt_tokens": prompts, "completion_tokens": responses, "total_tokens": prompts + responses}

    def _log_probs(self, events: Sequence[TokenEvent], offset: int = 0) -> JSON | None:
        if self._request.alternatives is None:
            return None
        shown, offsets = [], []
        for event in events:
            if event.token not in self._stop_ids:
                shown.append(event)
                offsets.append(offset)
            offset += len(event.text)
        if self._chat:
            return {"content": [self._token_log_prob(event) for event in shown], "refusal": None}
        top = [{self._name(token): _finite(value) for token, value in event.alternatives} for event in shown]
        return {
            "tokens": [self._name(event.token) for event in shown],
            "token_logprobs": [event.log_prob for event in shown],
            "top_logprobs": top if self._request.alternatives else None,
            "text_offset": offsets,
        }

    def _token_log_prob(self, event: TokenEvent) -> JSON:
        own, *alternatives = (
            {
                "token": self._name(token),
                "logprob": _finite(value),
                "bytes": list(token_bytes(self._tokenizer, token)),
            }
            for token, value in [(event.token, event.log_prob), *event.alternatives]
        )
        return {**own, "top_logprobs": alternatives}

    def _name(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode("utf-8", errors="replace")


def _finite(log_prob: float) -> float:
    """A log-probability for JSON, which has no infinity: impossible tokens have OpenAI's number for them."""
    return max(log_prob, -9999.0)


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
    known = _byte_of_character()
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in known for character in piece):
        return bytes(known[character] for character in piece)
    return text.encode()


@cache
def _byte_of_character() -> dict[str, int]:
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

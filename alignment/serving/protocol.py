"""OpenAI's chat and text completions as JSON: requests in, answers and errors out. No HTTP here.

What is not supported is refused in words. An answer has choices with log-probabilities and usage, whole or in streamed
chunks.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Interval
from transformers.convert_slow_tokenizer import bytes_to_unicode

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.data.rows.fields import BadRow, messages_field
from alignment.data.rows.records import Messages
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, suggest
from alignment.generation.requests import TokenEvent
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings, Share

Kind = Literal["chat", "completions"]
JSON = dict[str, object]
Prompt = str | Messages | list[int]
MOST_RESPONSES = 512  # of one request: prompts times n
MOST_STOPS = 16
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
IGNORED = {  # say who asks and how it is billed or stored
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
}
OFF = {  # parameter -> the values that ask for nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "audio": (), "prediction": (), "verbosity": (),
    "reasoning_effort": (), "web_search_options": (), "suffix": ("",), "echo": (False,), "best_of": (1,),
}  # fmt: skip


class BadRequest(UserError):
    """A request that is not answered.

    Attributes:
        param: the parameter that is wrong.
        code: OpenAI's name of the fault, for programs.
        status: HTTP status; from 500 on the request is not to blame.
    """

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    @property
    def body(self) -> JSON:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# Requests


@dataclass(frozen=True, kw_only=True)
class Body(Settings):
    """The parameters that both kinds have, beside the prompts; those beyond OpenAI's as vLLM names them."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    repetition_penalty: PositiveFloat = 1.0
    min_tokens: NonNegativeInt = 0
    n: Annotated[int, Interval(ge=1, le=128)] = 1  # as OpenAI's
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stream: bool = False
    stream_options: Mapping[str, bool] = field(default_factory=dict)

    RULES = (
        Rule(
            "stop",
            lambda c: c.stop == "" or not all(c.stop) or (not isinstance(c.stop, str) and len(c.stop) > MOST_STOPS),
            f"must be a text or a list of texts, none of them empty, at most {MOST_STOPS}",
        ),
        Rule(
            "stream_options",
            lambda c: set(c.stream_options) - {"include_usage", "include_obfuscation"},
            "may hold include_usage only",
        ),
        Rule("stream_options", lambda c: c.stream_options and not c.stream, "needs stream: true"),
    )

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens beside each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def longest(self) -> int | None:
        """Longest response; None: the server's default."""
        return self.max_tokens


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

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def longest(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens


@dataclass(frozen=True, kw_only=True)
class TextBody(Body):
    """The parameters of a text completion."""

    logprobs: Annotated[int, Interval(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


def read_request(kind: Kind, body: object) -> tuple[Body, list[Prompt]]:
    """The parameters and prompts of a JSON body (one for chat); BadRequest for any missing, wrong or unsupported."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    form, text = (ChatBody, "messages") if kind == "chat" else (TextBody, "prompt")
    known = {text, *(parameter.name for parameter in fields(form))}
    for name in given.keys() - known:
        if name not in OFF:
            name = name[:80]  # a search for a name that is alike takes seconds for millions of letters
            raise BadRequest(f"unknown parameter {name!r}; {suggest(name, known)}", name)
        value = given[name]
        if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF[name]):
            raise BadRequest(f"{name} is not supported here; leave it out", name, code="unsupported_parameter")
    prompts = _messages(given) if kind == "chat" else _prompts(given.get("prompt"))
    try:
        values = {name: given[name] for name in given.keys() & known - {text}}
        asked = build(form, SourcedYaml(values, {(): "request"}))
    except UserError as error:
        why = str(error).replace("request: ", "")
        raise BadRequest(why[:1000], re.split(r"[:.\[]", why, maxsplit=1)[0][:80]) from error
    if (responses := len(prompts) * asked.n) > MOST_RESPONSES:
        raise BadRequest(
            f"{len(prompts)} prompts with n = {asked.n} ask for {responses} responses; at most {MOST_RESPONSES} in one "
            "request: send several",
            "prompt",
        )
    return asked, prompts


def _messages(given: Mapping[str, object]) -> list[Any]:
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
    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    if isinstance(prompts, list) and prompts and all(is_ids(one) or (one and isinstance(one, str)) for one in prompts):
        return prompts
    wrong = "prompt must be a text, a list of texts, token ids, or a list of lists of token ids, none of them empty"
    raise BadRequest(wrong, "prompt")


def is_ids(value: object) -> bool:
    """True for a list of whole numbers that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


# Answers


@dataclass
class ResponseChoice:
    """One response so far: its index among the choices of its answer, the length of its prompt, its tokens."""

    index: int
    prompt_tokens: int
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(event.text for event in self.events)


class AnswerWriter:
    """Writes the answer to one request, whole or as chunks.

    The `tokenizer` is for the texts of single tokens; `stop_ids` have no log-probability in an answer, as they have no
    text.
    """

    def __init__(self, asked: Body, model: str, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self._asked = asked
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._chat = isinstance(asked, ChatBody)
        self._shows_usage = asked.stream_options.get("include_usage", False)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head: JSON = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[ResponseChoice]) -> JSON:
        """The answer at once."""
        written = []
        for choice in choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            said: JSON = {"message": message} if self._chat else {"text": choice.text}
            ends: JSON = {"index": choice.index, "finish_reason": choice.events[-1].finish}
            written.append({**ends, "logprobs": self._log_probs(choice.events), **said})
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": written, "usage": self._usage(choices)}

    def first_chunk(self, choice: ResponseChoice) -> JSON | None:
        """The speaker, before a chat's first words; None of a text completion."""
        said: JSON = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
        return self._chunk([{**said, "logprobs": None, "finish_reason": None}]) if self._chat else None

    def chunk(self, choice: ResponseChoice, event: TokenEvent) -> JSON | None:
        """The addition of a token; None: nothing that can be shown yet."""
        if not event.text and event.finish is None and self._asked.alternatives is None:
            return None
        log_probs = self._log_probs([event], len(choice.text) - len(event.text))
        said: JSON = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        return self._chunk([{"index": choice.index, "logprobs": log_probs, "finish_reason": event.finish, **said}])

    def last_chunk(self, choices: Sequence[ResponseChoice]) -> JSON | None:
        """The counts of tokens, where they are asked for."""
        return {**self._chunk([]), "usage": self._usage(choices)} if self._shows_usage else None

    def _chunk(self, choices: list[JSON]) -> JSON:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, **({"usage": None} if self._shows_usage else {})}

    def _usage(self, choices: Sequence[ResponseChoice]) -> JSON:
        """Tokens of the prompts, each counted once, and of all responses, end tokens included."""
        prompts = sum(choice.prompt_tokens for choice in choices[:: self._asked.n])
        responses = sum(len(choice.events) for choice in choices)
        return {"prompt_tokens": prompts, "completion_tokens": responses, "total_tokens": prompts + responses}

    def _log_probs(self, events: Sequence[TokenEvent], offset: int = 0) -> JSON | None:
        if self._asked.alternatives is None:
            return None
        shown = []
        offsets = []
        for event in events:
            if event.token not in self._stop_ids:
                shown.append(event)
                offsets.append(offset)
            offset += len(event.text)
        if self._chat:
            return {"content": list(map(self._token_log_prob, shown)), "refusal": None}
        top = [{self._name(token): _finite(value) for token, value in event.alternatives} for event in shown]
        return {
            "tokens": [self._name(event.token) for event in shown],
            "token_logprobs": [event.log_prob for event in shown],
            "top_logprobs": top if self._asked.alternatives else None,
            "text_offset": offsets,
        }

    def _token_log_prob(self, event: TokenEvent) -> JSON:
        sampled, *alternatives = (
            {"token": self._name(token), "logprob": _finite(value), "bytes": self._bytes(token)}
            for token, value in [(event.token, event.log_prob), *event.alternatives]
        )
        return {**sampled, "top_logprobs": alternatives}

    def _bytes(self, token: int) -> list[int]:
        """A token's bytes, also where they are half a character, which byte-level vocabularies spell in letters."""
        name = self._name(token)
        raw = str(self._tokenizer.convert_ids_to_tokens(token))
        return [BYTES[letter] for letter in raw] if "\ufffd" in name and BYTES.keys() >= {*raw} else list(name.encode())

    def _name(self, token: int) -> str:
        """A token's text by itself, as vLLM names it."""
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _finite(log_prob: float) -> float:
    """A log-probability for JSON, which has no infinity: impossible tokens have OpenAI's number for them."""
    return max(log_prob, -9999.0)

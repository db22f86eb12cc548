"""JSON bodies of OpenAI's chat and text completions to settings; what is not supported is refused in words. No HTTP here."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from alignment.data.rows.fields import BadRow
from alignment.data.rows.messages import messages_field
from alignment.data.rows.records import Messages
from alignment.errors import UserError, suggest
from alignment.generation import SamplingConfig

Body = Mapping[str, object]  # as it came: name of a parameter -> value
Kind = Literal["chat", "completions"]
MOST_CHOICES = 128  # as OpenAI's
MOST_RESPONSES = 512  # of one request: prompts times n
MOST_STOPS = 16
MOST_CHARACTERS = 4 * 2**20  # of a prompt
CHARACTERS_PER_TOKEN = 16  # four times those of English text: a prompt with more on average is not worth encoding
MOST_ALTERNATIVES = 20  # as OpenAI's
IGNORED = {  # say who asks and how it is billed or stored
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store",
}  # fmt: skip
OFF = {  # parameter -> the values that ask for nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "audio": (), "prediction": (), "verbosity": (),
    "reasoning_effort": (), "web_search_options": (), "suffix": ("",), "echo": (False,), "best_of": (1,),
}  # fmt: skip
SAMPLING = {  # parameters beyond OpenAI's, as vLLM names them -> ours
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty", "min_tokens": "min_new_tokens",
}  # fmt: skip
COMMON = {"model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "logprobs"}
OWN: dict[Kind, set[str]] = {"chat": {"messages", "max_completion_tokens", "top_logprobs"}, "completions": {"prompt"}}


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


@dataclass(frozen=True)
class CompletionRequest:
    """What a client asks for.

    Attributes:
        kind: chat or completions.
        prompts: messages, texts or token ids; chat has exactly one.
        n: choices for each prompt.
        max_tokens: longest response; None: the server's default.
        sampling: settings of `SamplingConfig` without length and seed.
        seed: None: another one for each request.
        stop: texts that end a response.
        alternatives: so many likeliest tokens beside each token; None: no log-probabilities.
        stream: send tokens as they come.
        include_usage: a streamed response ends with the counts of tokens.
    """

    kind: Kind
    prompts: tuple[str | Messages | list[int], ...]
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
    given: Body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    known = COMMON | OWN[kind] | set(SAMPLING) | set(OFF)
    for name, value in given.items():
        if name not in known:
            name = name[:80]  # a search for a name that is alike takes seconds for millions of letters
            raise BadRequest(f"unknown parameter {name!r}; {suggest(name, COMMON | OWN[kind] | set(SAMPLING))}", name)
        if name in OFF and not any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF[name]
        ):
            raise BadRequest(f"{name} is not supported here; leave it out", name, code="unsupported_parameter")
    alternatives = (
        _chat_alternatives(given) if kind == "chat" else _whole(given, "logprobs", None, 0, MOST_ALTERNATIVES)
    )
    stream = _switch(given, "stream")
    prompts = (_messages(given),) if kind == "chat" else tuple(_prompts(given))
    n = _whole(given, "n", 1, 1, MOST_CHOICES) or 1
    if len(prompts) * n > MOST_RESPONSES:
        raise BadRequest(
            f"{len(prompts)} prompts with n = {n} ask for {len(prompts) * n} responses; at most {MOST_RESPONSES} in one "
            "request: send several",
            "prompt",
        )
    return CompletionRequest(
        kind,
        prompts,
        n=n,
        max_tokens=_max_tokens(given, kind),
        sampling=_sampling(given),
        seed=_whole(given, "seed", None, -(2**63), 2**63 - 1),
        stop=_stop(given),
        alternatives=alternatives,
        stream=stream,
        include_usage=_include_usage(given, stream),
    )


def _messages(given: Body) -> Messages:
    if "messages" not in given:
        raise BadRequest("messages is missing", "messages")
    try:
        messages = messages_field(given, "messages")
    except BadRow as bad:
        raise BadRequest(f"messages: {bad}", "messages") from bad
    if messages[-1]["role"] == "assistant":
        raise BadRequest("messages must end with a message of someone else than the assistant", "messages")
    return messages


def _prompts(given: Body) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of texts, token ids, or a list of lists of token ids."""
    value = given.get("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(token) is int for token in value)):
        value = [value]
    wrong = "prompt must be a text, a list of texts, token ids, or a list of lists of token ids, none of them empty"
    if not isinstance(value, list) or not value:
        raise BadRequest(wrong, "prompt")
    for prompt in value:
        ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not ids and not (isinstance(prompt, str) and prompt):
            raise BadRequest(wrong, "prompt")
    return value


def _max_tokens(given: Body, kind: Kind) -> int | None:
    newer = _whole(given, "max_completion_tokens", None, 1) if kind == "chat" else None
    older = _whole(given, "max_tokens", None, 1)
    if newer is not None and older is not None and newer != older:
        raise BadRequest("max_tokens and max_completion_tokens name different lengths; give one", "max_tokens")
    return older if newer is None else newer


def _chat_alternatives(given: Body) -> int | None:
    wanted = _switch(given, "logprobs")
    count = _whole(given, "top_logprobs", None, 0, MOST_ALTERNATIVES)
    if count and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return (count or 0) if wanted else None


def _sampling(given: Body) -> dict[str, Any]:
    """Settings for `SamplingConfig`, whose own checks of their ranges count."""
    settings: dict[str, Any] = {}
    whole = {each.name for each in fields(SamplingConfig) if isinstance(each.default, int)}
    for name, ours in {"temperature": "temperature", "top_p": "top_p", **SAMPLING}.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise BadRequest(f"{name} must be a number, got {value!r}", name)
        if ours in whole and value != int(value):
            raise BadRequest(f"{name} must be a whole number, got {value!r}", name)
        settings[ours] = int(value) if ours in whole else float(value)
        try:
            SamplingConfig(max_new_tokens=10_000_000, **{ours: settings[ours]})
        except ValueError as error:
            raise BadRequest(str(error).replace(ours, name), name) from error
    return settings


def _stop(given: Body) -> tuple[str, ...]:
    value = given.get("stop", [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest("stop must be a text or a list of texts, none of them empty", "stop")
    if len(texts) > MOST_STOPS:
        raise BadRequest(f"stop has {len(texts)} texts; at most {MOST_STOPS}", "stop")
    return tuple(texts)


def _include_usage(given: Body, stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise BadRequest("stream_options may hold include_usage only", "stream_options")
    if options and not stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    return _switch(options, "include_usage")


def _switch(given: Body, name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {value!r}", name)
    return value


def _whole(given: Body, name: str, default: int | None, least: int, most: float = math.inf) -> int | None:
    value = given.get(name, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
        raise BadRequest(f"{name} must be a whole number {limits}, got {value!r}", name)
    return value


Encode = Callable[[str | Messages], list[int]]


def encode_prompt(prompt: str | Messages | list[int], encode: Encode, *, vocabulary: int, positions: int) -> list[int]:
    """Token ids of a prompt.

    Args:
        encode: the ids of a text or of messages.
        vocabulary: rows of the model's token table.
        positions: most tokens of a prompt.

    Raises:
        BadRequest: an id that is none, a prompt that the tokenizer or the chat template refuses, or one so long that it
            is not encoded.
    """
    param = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    if isinstance(prompt, list) and param == "prompt":
        ids = cast("list[int]", prompt)
        if len(ids) <= positions and (wrong := [token for token in ids if not 0 <= token < vocabulary]):
            raise BadRequest(f"prompt: {wrong[0]} is no token id; they are 0 to {vocabulary - 1}", "prompt")
        return ids
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

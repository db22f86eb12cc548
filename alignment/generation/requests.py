"""Requests to the decoding engine and their responses token by token, as ids and text. No tensors and no model here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Interval

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, Rule, Settings, Share

FinishReason = Literal["stop", "length", "error"]
NewTokens = Annotated[int, Interval(ge=1, le=10_000_000)]
DRAWS_MADE_AT_ONCE = 64
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # in place of an incomplete UTF-8 character in a decoded text
ROOM_FOR_LEAST = Rule(
    "min_new_tokens",
    lambda c: c.min_new_tokens > c.max_new_tokens,
    "must be at most max_new_tokens, {self.max_new_tokens}, got {self.min_new_tokens}",
)


@dataclass(frozen=True)
class SamplingConfig(Settings):
    """Settings of sampling.

    Attributes:
        max_new_tokens: longest response, end token included.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all.
        seed: together with the number of a row it fixes that row's random numbers.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all, 0.05 to 0.1 is usual.
        repetition_penalty: divides positive and multiplies negative logits of earlier tokens; 1 is off, 1.2 is usual.
        no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
        min_new_tokens: no stop token before this number of others.
    """

    max_new_tokens: NewTokens = 64
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    seed: NonNegativeInt = 0
    min_p: Share = 0.0
    repetition_penalty: PositiveFloat = 1.0
    no_repeat_ngram_size: NonNegativeInt = 0
    min_new_tokens: NonNegativeInt = 0

    RULES = (ROOM_FOR_LEAST,)

    @property
    def needs_history(self) -> bool:
        """True where the distribution depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0


@dataclass(frozen=True)
class DecodingRequest:
    """A request for one response.

    Attributes:
        prompt: token ids, not empty; for an encoder-decoder model the encoder's input.
        sampling: lengths, temperature, filters, logits processors, seed; requests with different ones decode side by
            side.
        row: together with `sampling.seed` it fixes the random numbers of this request.
        stop_ids: tokens that end the response; the one that does is its last token.
        stop: texts that end the response; needs an engine with a tokenizer. The text of the response is cut before the
            first one that occurs, its tokens reach to the one that completed it. Before `sampling.min_new_tokens`
            tokens none is looked for.
        adapter: name of the one of the model's adapters that acts on this request, see `load_adapters`; None: none.
    """

    prompt: Sequence[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    row: int = 0
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has at least one token")
        check_stop(self.stop)


def check_stop(stop: Sequence[str]) -> None:
    """Raise ValueError for stop strings that are no list of texts."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop must be a list of texts, none of them empty, got {stop!r}")


class TokenEvent(NamedTuple):
    """One new token of one request.

    Attributes:
        request: the number that `DecodingEngine.add` gave.
        token: its id.
        log_prob: its natural-log probability in the distribution it was drawn from, after temperature, filters and
            processors; 0 for the likeliest token where the temperature is 0.
        text: new text, where the engine has a tokenizer: whole characters only, nothing of a stop token, and nothing
            that might be the beginning of a stop string. A token may have none, a later one more. Of a request that
            ends with an error, the reason.
        finish: why the response ends with this token: "stop" (a stop token or string), "length", or "error" (there is
            no distribution to draw it from, so it is no part of the response); None: it goes on.
    """

    request: int
    token: int
    log_prob: float
    text: str = ""
    finish: FinishReason | None = None


def token_failure(number: int) -> str:
    """The error of a response whose token `number`, counted from 1, has no distribution to be drawn from."""
    return (
        f"the logits of token {number} of the response are not finite, so it cannot be drawn: weights of the model or "
        "of its adapter hold NaN or infinity, or numbers overflow in float16 (bfloat16 and float32 have the range), or "
        "divided by a temperature near 0"
    )


def check_failed(failed: Mapping[int, int]) -> None:
    """Raise UserError where there are failed responses: number of the prompt -> of the token."""
    if failed:
        first = min(failed)
        more = f" (and {len(failed) - 1} more prompts)" if len(failed) > 1 else ""
        raise UserError(f"prompt {first}{more}: {token_failure(failed[first])}")


class RunningRequest:
    """A request with its response so far.

    Attributes:
        tokens, log_probs: of the response so far.
        text: the text so far, where the engine has a tokenizer.
        drawn: tokens drawn on the device, of which the newest may not have been looked at yet.
        finish: why it has ended; None: it waits or runs.
    """

    def __init__(self, number: int, request: DecodingRequest, text: "IncrementalText | None" = None):
        self.number = number
        self.request = request
        self.text = text
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.drawn = 0
        self.finish: FinishReason | None = None
        self._stops = frozenset(request.stop_ids)
        self._limit = request.sampling.max_new_tokens
        self._generator = np.random.default_rng([request.sampling.seed, request.row])
        self._draws: list[float] = []

    @property
    def steps_left(self) -> int:
        """Tokens that may still be drawn."""
        return self._limit - self.drawn

    def uniform_at(self, steps_ahead: int) -> float:
        """The random number in [0, 1) for the token `steps_ahead` steps from now, a function of seed and row alone."""
        position = self.drawn + steps_ahead
        while position >= len(self._draws):
            self._draws += self._generator.random(DRAWS_MADE_AT_ONCE).tolist()
        return self._draws[position]

    def fail(self, token: int) -> TokenEvent:
        """End with an error: the log-probability of a drawn token is not finite."""
        self.finish = "error"
        return TokenEvent(self.number, token, math.nan, text=token_failure(len(self.tokens) + 1), finish="error")

    def extend(self, token: int, log_prob: float) -> None:
        """Add a drawn token without looking at the text."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self._stops:
            self.finish = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish = "length"

    def accept(self, token: int, log_prob: float) -> TokenEvent:
        """Add a drawn token; `finish` of the event is why the response ends with it, or None."""
        self.extend(token, log_prob)
        new = ""
        if self.text is not None and self.finish != "stop":
            new = self.text.push(token, check_stop=len(self.tokens) >= self.request.sampling.min_new_tokens)
            self.finish = "stop" if self.text.stopped else self.finish
        if self.text is not None and self.finish is not None:
            new += self.text.flush()
        return TokenEvent(self.number, token, log_prob, new, self.finish)


class IncrementalText:
    """The text of a response while its tokens arrive: whole characters only, cut before the first stop string.

    Only tokens since the last whole character, and those before them that it may depend on, are decoded again.
    `stopped`: a stop string has occurred.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip = skip_special_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._tokens: list[int] = []
        self._context = self._decoded = 0  # tokens from `_context` on are decoded; before `_decoded` all is in `text`
        self._returned = 0  # characters of `text` that were handed out
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, check_stop: bool = True) -> str:
        """The text that a further token makes certain; with `check_stop` a stop string it completes ends the text."""
        self._tokens.append(token)
        new, complete = self._new_text()
        if self._stop and check_stop and self._cut(new):
            return self._hand_out(len(self.text))
        if new and complete:
            self.text += new
            self._context = self._decoded
            self._decoded = len(self._tokens)
        return self._hand_out(len(self.text) - self._held_back())

    def flush(self) -> str:
        """The rest, when no token follows."""
        if not self.stopped:
            self.text += self._new_text()[0]
            self._context = self._decoded = len(self._tokens)
        return self._hand_out(len(self.text))

    def _new_text(self) -> tuple[str, bool]:
        """The text behind `text`, and True where it ends with a whole character."""
        before, now = (
            self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""
            for tokens in (self._tokens[self._context : self._decoded], self._tokens[self._context :])
        )
        return now[len(before) :], not now.endswith(UNFINISHED)

    def _cut(self, new: str) -> bool:
        """True where a stop string ends in the new text; `text` is then cut before it."""
        text = self.text + new
        searched = len(self.text)
        starts = ((stop, max(0, searched - len(stop) + 1)) for stop in self._stop)
        positions = [position for stop, start in starts if (position := text.find(stop, start)) >= 0]
        if positions:
            self.text = text[: min(positions)]
            self.stopped = True
        return self.stopped

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _hand_out(self, end: int) -> str:
        new = self.text[self._returned : end]
        self._returned = max(self._returned, end)
        return new

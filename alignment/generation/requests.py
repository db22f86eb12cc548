"""What is asked of the decoding engine, and what it answers token by token. No tensors and no model here: see engine.py."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from alignment.errors import UserError
from alignment.generation.sampling import SamplingConfig
from alignment.generation.stop_strings import IncrementalText

FinishReason = Literal["stop", "length", "error"]
DRAWS_MADE_AT_ONCE = 64


@dataclass(frozen=True)
class DecodingRequest:
    """One response that is wanted.

    Attributes:
        prompt: token ids, not empty; for an encoder-decoder model the encoder's input.
        sampling: lengths, temperature, filters, logits processors, seed; requests with different ones decode side by side.
        row: together with `sampling.seed` it fixes the random numbers of this request.
        stop_ids: tokens that end the response; the one that does is its last token.
        stop: texts that end the response; needs an engine with a tokenizer. The text of the response is cut before the
            first one that occurs, its tokens reach to the one that completed it. Before `sampling.min_new_tokens`
            tokens none is looked for.
        alternatives: with each token so many of the likeliest tokens and their log-probabilities.
        log_probs: of which distribution: "sampled", exactly the one drawn from (temperature, filters and processors
            applied; 0 for the likeliest token where the temperature is 0), or "model", the softmax of its logits.
    """

    prompt: Sequence[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    row: int = 0
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    alternatives: int = 0
    log_probs: Literal["sampled", "model"] = "sampled"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has at least one token")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a list of texts, none of them empty, got {self.stop!r}")
        if self.alternatives < 0:
            raise ValueError(f"alternatives must be 0 (none) or above, got {self.alternatives}")


class TokenEvent(NamedTuple):
    """One new token of one request.

    Attributes:
        request: the number that `DecodingEngine.add` gave.
        token: its id.
        log_prob: its natural-log probability; see `DecodingRequest.log_probs`.
        alternatives: the likeliest tokens with their log-probabilities, the likeliest first.
        text: what is new in the text, where the engine has a tokenizer: whole characters only, nothing of a stop
            token, and nothing that might be the beginning of a stop string. A token may have none, a later one more.
            Of a request that ends with an error, what failed.
        finish: why the response ends with this token: "stop" (a stop token or string), "length", or "error" (there is
            no distribution to draw it from, so it is no part of the response); None: it goes on.
    """

    request: int
    token: int
    log_prob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    text: str = ""
    finish: FinishReason | None = None


def token_failure(number: int) -> str:
    """The error of a response whose token `number`, counted from 1, has no distribution to be drawn from."""
    return (
        f"the logits of token {number} of the response are not finite, so it cannot be drawn: weights of the model or of its "
        "adapter hold NaN or infinity, or numbers overflow in float16 (bfloat16 and float32 have the range), or divided by "
        "a temperature near 0"
    )


def check_failed(failed: Mapping[int, int]) -> None:
    """Refuse responses that have failed.

    Args:
        failed: number of the prompt -> of the token, as for `token_failure`.

    Raises:
        UserError: there is one.
    """
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

    def __init__(self, number: int, request: DecodingRequest, text: IncrementalText | None = None):
        self.number, self.request, self.text = number, request, text
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.drawn = 0
        self.finish: FinishReason | Literal["cancelled"] | None = None
        self._stops, self._limit = frozenset(request.stop_ids), request.sampling.max_new_tokens
        self._generator = np.random.default_rng([request.sampling.seed, request.row])
        self._draws: list[float] = []

    @property
    def steps_left(self) -> int:
        """Tokens that may still be drawn."""
        return self.request.sampling.max_new_tokens - self.drawn

    def upcoming_draw(self, steps_ahead: int) -> float:
        """The uniform number of the token drawn so many steps from now: the row of `uniforms` for its seed and row."""
        position = self.drawn + steps_ahead
        while position >= len(self._draws):
            self._draws += self._generator.random(DRAWS_MADE_AT_ONCE).tolist()
        return self._draws[position]

    def fail(self, token: int) -> TokenEvent:
        """End with an error: the log-probability of a drawn token is not finite."""
        self.finish = "error"
        return TokenEvent(self.number, token, math.nan, text=token_failure(len(self.tokens) + 1), finish="error")

    def extend(self, token: int, log_prob: float) -> None:
        """`accept` without an event, where no text is wanted."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self._stops:
            self.finish = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish = "length"

    def accept(self, token: int, log_prob: float, alternatives: tuple[tuple[int, float], ...] = ()) -> TokenEvent:
        """Add a drawn token; the event says whether the response ends with it."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        sampling, new = self.request.sampling, ""
        finish: FinishReason | None = "length" if len(self.tokens) >= sampling.max_new_tokens else None
        if token in self._stops:
            finish = "stop"
        elif self.text is not None:
            new = self.text.push(token, check_stop=len(self.tokens) >= sampling.min_new_tokens)
            finish = "stop" if self.text.stopped else finish
        if finish is not None and self.text is not None:
            new += self.text.flush()
        self.finish = finish
        return TokenEvent(self.number, token, log_prob, alternatives, new, finish)

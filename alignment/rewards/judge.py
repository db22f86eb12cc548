"""Scores from an HTTP service: a judge of its own protocol, or a chat model that is asked for a number.

No key, prompt or response is written to a message or a log.
"""

import contextlib
import functools
import http.client
import json
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from alignment.errors import UserError
from alignment.rewards.combine import SampledTexts, TextReward
from alignment.rewards.specs import JudgeSpec, ServiceSpec, plain_url
from alignment.settings import PATTERN_SECONDS, compile_pattern, slow_pattern

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses after which the same request may succeed
MAX_ANSWER_BYTES = 1 << 20
CACHED = 100_000  # scores kept in memory
NUMBER = r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?!\w|[.,]\d)"
RANGE = re.compile(rf"{NUMBER}\s*(?:[-\u2013\u2014]|to)\s*\d+(?:\.\d+)?", re.IGNORECASE)  # 1-10
SCALE = re.compile(
    rf"(?<=[\d*_`)\]])\s*(?:/|\b(?:out )?of\b)\s*[*`]*{NUMBER}|\b(?:out|scale) of {NUMBER}", re.IGNORECASE
)  # /10, out of 10
BETWEEN = r"[ \t*_`\"':=()\[\]]*"
FORMS = (  # of a score, in the order of trust
    re.compile(rf"\[\[\s*({NUMBER})\s*\]\]"),  # as in MT-bench
    re.compile(rf"\b(?:score|rating|grade)\b{BETWEEN}(?:\b(?:is|of)\b{BETWEEN})?({NUMBER})", re.IGNORECASE),
    re.compile(f"({NUMBER})"),
)


class RequestFailed(Exception):
    """No score.

    Attributes:
        pause: the service's wish in seconds before another try; None where none would help.
        answer: beginning of the body that came with a refusal; not for logs of judges, since it may repeat texts.
    """

    def __init__(self, why: str, pause: float | None = None, answer: str = ""):
        super().__init__(why)
        self.pause = pause
        self.answer = answer


def judge_reward(spec: JudgeSpec) -> TextReward:
    """An HTTP judge as a reward; None where it gave no score. Finished scores are kept and not asked for again."""
    source = (
        f"{plain_url(spec.url)} "
        f"{'without a key' if spec.key_variable is None else f'with the key in {spec.key_variable}'}"
    )

    @functools.lru_cache(CACHED)
    def score(body: str) -> float:
        return read_score(spec, send_json(spec, body.encode()))

    def score_or_why(body: str) -> float | str:
        try:
            return score(body)
        except RequestFailed as error:
            return f"{error} from {source}"

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        bodies = [request_body(spec, samples, row) for row in range(len(samples.responses))]
        distinct = list(dict.fromkeys(bodies))
        with ThreadPoolExecutor(spec.requests) as pool:
            outcomes = dict(zip(distinct, pool.map(score_or_why, distinct), strict=True))
        scores = [outcomes[body] for body in bodies]
        samples.failures.update(outcome for outcome in scores if isinstance(outcome, str))
        return [None if isinstance(outcome, str) else outcome for outcome in scores]

    return reward


def request_body(spec: JudgeSpec, samples: SampledTexts, row: int) -> str:
    """The JSON that is posted for one response; equal responses to equal prompts give the same."""
    prompt = samples.prompts[row]
    response = samples.responses[row]
    extra = samples.columns[row] if samples.columns else {}
    columns = {name: extra.get(name) for name in spec.columns}
    if spec.template is None:
        body: dict[str, object] = {"prompt": prompt, "response": response, "columns": columns}
    else:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        question = spec.template.format(**{**columns, "prompt": text, "response": response})
        body = {"model": spec.model, "messages": [{"role": "user", "content": question}], "temperature": 0}
    return json.dumps(body, ensure_ascii=False, sort_keys=True, default=str)


# The request


def send_json(service: ServiceSpec, body: bytes | None, *, text_too: bool = False) -> object:
    """The decoded JSON answer to a posted body of JSON, or without one to a GET; None where the answer is empty.

    Half a surrogate pair in it, which models of bytes do send and no file can hold, is U+FFFD.

    Tries again after no connection, a time-out, an answer that is no JSON, and the statuses of `RETRIED`. The pause
    before the first retry is `backoff_seconds`, doubled for each further one, times a factor in [0.5, 1]; a longer
    Retry-After counts, and one above `max_backoff_seconds` is a failure.

    Args:
        text_too: an answer may also be a text, which is returned.

    Raises:
        RequestFailed: no usable answer; the message holds neither key nor body.
    """
    for attempt in range(service.retries):
        try:
            return _send_once(service, body, text_too=text_too)
        except RequestFailed as error:
            if error.pause is None or error.pause > service.max_backoff_seconds:
                raise
            longest = min(service.max_backoff_seconds, service.backoff_seconds * 2.0**attempt)
            time.sleep(max(error.pause, longest * random.uniform(0.5, 1.0)))
    return _send_once(service, body, text_too=text_too)


def _send_once(service: ServiceSpec, body: bytes | None, *, text_too: bool) -> object:
    """One try, given up where it takes longer than the time-out, however slowly the answer comes."""
    parts = urlsplit(service.url)
    deadline = time.monotonic() + service.timeout_seconds
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if service.key_variable is not None:
        headers["Authorization"] = f"Bearer {_key(service.key_variable)}"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with contextlib.closing(kind(parts.netloc, timeout=service.timeout_seconds)) as connection:
            connection.connect()
            with _shut_at(deadline, connection.sock):
                connection.request("GET" if body is None else "POST", target, body, headers)
                answer = connection.getresponse()
                received = answer.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(type(error).__name__, 0.0) from error
    except ValueError:  # of a header, whose value the error shows
        raise RequestFailed("a header that cannot be sent") from None
    if len(received) > MAX_ANSWER_BYTES:
        raise RequestFailed(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    beginning = received[:500].decode("utf-8", "replace").strip()
    if answer.status in RETRIED:
        wish = (answer.getheader("Retry-After") or "").strip()
        raise RequestFailed(f"status {answer.status}", float(wish) if wish.isdecimal() else 0.0, beginning)
    if not 200 <= answer.status < 300:
        raise RequestFailed(f"status {answer.status}", answer=beginning)
    try:
        text = json.dumps(json.loads(received), ensure_ascii=False) if received.strip() else "null"
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        if text_too:
            return received.decode("utf-8", "replace")
        raise RequestFailed("the answer is no JSON", 0.0) from error


@contextlib.contextmanager
def _shut_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """A block that ends at the deadline, with TimeoutError; a socket's own time-out begins anew with each byte."""

    def shut() -> None:
        with contextlib.suppress(OSError):  # the other side has closed it already
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), shut)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if time.monotonic() >= deadline:
            raise TimeoutError from None


def _key(variable: str) -> str:
    """The key in a variable, without the line break that a file it came from may end in."""
    return os.environ.get(variable, "").strip()


def check_key(service: ServiceSpec, name: str) -> None:
    """Refuse a service, by its name in the message, whose key is not in the environment or cannot be sent."""
    variable = service.key_variable
    if variable is None:
        return
    key = _key(variable)
    if not key:
        raise UserError(f"{name}: the environment has no {variable}, the judge's key; set it")
    if not (key.isascii() and key.isprintable()):
        fault = "has line breaks, control characters or letters beyond ASCII; set one line"
        raise UserError(f"{name}: the key in {variable} {fault}")


# The answer


def read_score(spec: JudgeSpec, answer: object) -> float:
    """The score in a service's answer; RequestFailed where it holds none, or one outside of `low` and `high`."""
    try:
        if spec.protocol == "json":
            value = answer["score"]  # type: ignore[index]  # what is no mapping has no score: TypeError
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RequestFailed("a score that is no number")
            score = float(value)
        else:
            text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
            score = stated_score(text) if spec.pattern is None else _last_match(spec.pattern, text)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        raise RequestFailed("an answer without a score") from None
    low = -math.inf if spec.low is None else spec.low
    high = math.inf if spec.high is None else spec.high
    if not math.isfinite(score) or not low <= score <= high:
        raise RequestFailed("a score outside of low and high")
    return score


def stated_score(text: str) -> float:
    """The score in a judge's words, read as `JudgeSpec.pattern` says for null."""
    without_scales = SCALE.sub("", RANGE.sub("", text))
    for form in FORMS:
        if scores := {float(digits) for digits in form.findall(without_scales)}:
            if len(scores) > 1:
                raise RequestFailed("different numbers of which none is marked as the score (set pattern)")
            return scores.pop()
    raise RequestFailed("an answer without a score")


def _last_match(pattern: str, text: str) -> float:
    try:
        return float([match[1] for match in compile_pattern(pattern).finditer(text, timeout=PATTERN_SECONDS)][-1])
    except TimeoutError:
        raise RequestFailed(slow_pattern(pattern)) from None

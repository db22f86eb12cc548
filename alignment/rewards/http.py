"""JSON over HTTP with a time-out for the whole request, and a bounded number of retries with pauses."""

import contextlib
import email.utils
import http.client
import json
import os
import random
import socket
import threading
import time
from urllib.parse import urlsplit

from alignment.rewards.specs import JudgeSpec

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses after which the same request may succeed
MAX_ANSWER_BYTES = 1 << 20


class RequestFailed(Exception):
    """No answer after all retries, or one that no retry would change."""


class _Unanswered(Exception):
    """One try failed; `pause_seconds` is the service's wish."""

    def __init__(self, why: str, pause_seconds: float = 0.0):
        super().__init__(why)
        self.pause_seconds = pause_seconds


def post_json(service: JudgeSpec, body: bytes) -> object:
    """The decoded JSON answer to a posted body of JSON.

    Tries again after no connection, a time-out, an answer that is no JSON, and the statuses of `RETRIED`. A Retry-After
    header, in seconds or as a date, lengthens the pause; where it asks for more than `max_backoff_seconds` the request
    fails. The pause before the first retry is `backoff_seconds`, doubled for each further one, times a factor in [0.5, 1].

    Raises:
        RequestFailed: no usable answer; the message holds neither key nor body.
    """
    attempt = 0
    while True:
        try:
            return _post_once(service, body)
        except _Unanswered as error:
            if attempt == service.retries or error.pause_seconds > service.max_backoff_seconds:
                raise RequestFailed(str(error)) from error
            longest = min(service.max_backoff_seconds, service.backoff_seconds * 2.0**attempt)
            time.sleep(max(error.pause_seconds, longest * random.uniform(0.5, 1.0)))
        attempt += 1


def _post_once(service: JudgeSpec, body: bytes) -> object:
    """One try.

    Raises:
        _Unanswered: another try may succeed.
        RequestFailed: none would.
    """
    parts = urlsplit(service.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=service.timeout_seconds)) as connection:
            answer, received = _exchange(connection, service, body)
    except (OSError, http.client.HTTPException) as error:
        raise _Unanswered(type(error).__name__) from error
    except ValueError:  # of a header, whose value the error shows
        raise RequestFailed("a header that cannot be sent") from None
    if len(received) > MAX_ANSWER_BYTES:
        raise RequestFailed(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    if answer.status in RETRIED:
        raise _Unanswered(f"status {answer.status}", retry_after(answer.getheader("Retry-After") or "", time.time()))
    if not 200 <= answer.status < 300:
        raise RequestFailed(f"status {answer.status}")
    try:
        return json.loads(received)
    except (ValueError, RecursionError) as error:
        raise _Unanswered("the answer is no JSON") from error


def _exchange(
    connection: http.client.HTTPConnection, service: JudgeSpec, body: bytes
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer to one request, closed in the middle where it takes longer than the time-out, however slowly it comes.

    Raises:
        OSError, HTTPException: no whole answer in time.
        ValueError: a header that cannot be sent.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if service.key_variable is not None:
        headers["Authorization"] = f"Bearer {_key(service.key_variable)}"
    began = time.monotonic()
    connection.connect()
    sock, late = connection.sock, threading.Event()

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, service.timeout_seconds - (time.monotonic() - began)), give_up)
    timer.start()
    try:
        parts = urlsplit(service.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, headers)
        answer = connection.getresponse()
        received = answer.read(MAX_ANSWER_BYTES + 1)
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError
    return answer, received


def _key(variable: str) -> str:
    """The key in a variable, without the line break that a file it came from may end in."""
    return os.environ.get(variable, "").strip()


def key_problem(variable: str) -> str:
    """The fault of the key in an environment variable; '' where it can be sent."""
    key = _key(variable)
    if not key:
        return f"the environment has no {variable}, the judge's key; set it"
    if not (key.isascii() and key.isprintable()):
        return f"the key in {variable} has line breaks, control characters or letters beyond ASCII; set one line"
    return ""


def retry_after(header: str, now: float) -> float:
    """Seconds that a Retry-After header asks to wait, given in seconds or as a date; 0 without one that can be read.

    Args:
        header: its value.
        now: seconds since the epoch.
    """
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError, OverflowError):
        return 0.0

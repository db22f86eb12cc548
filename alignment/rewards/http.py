"""JSON over HTTP with time-outs for the whole request, and a bounded number of retries with pauses."""

import contextlib
import email.utils
import http.client
import json
import os
import random
import re
import socket
import ssl
import threading
import time
from dataclasses import KW_ONLY, dataclass
from urllib.parse import parse_qsl, urlsplit

from alignment.errors import SECRET

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses after which the same request may succeed
MAX_ANSWER_BYTES = 1 << 20
SECRET_PARAMETER = re.compile(r"(?:^|[_-])(?:key|code|auth|sig|signature|pass|pwd|jwt)$", re.IGNORECASE)  # of a query


class RequestFailed(Exception):
    """No answer after all retries, or one that no retry would change."""


class _Unanswered(Exception):
    """One try failed; `pause_seconds` is what the service asked to wait for."""

    def __init__(self, why: str, pause_seconds: float = 0.0):
        super().__init__(why)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class Endpoint:
    """A service and how patiently it is asked.

    Attributes:
        url: http or https.
        key_variable: environment variable with the bearer token; None: none is sent.
        timeout_seconds: for one request, from the connection to the last byte of its answer.
        retries: further tries.
        backoff_seconds: pause before the first of them; doubled for each further one, times a factor in [0.5, 1].
        max_backoff_seconds: longest pause.
    """

    url: str
    key_variable: str | None = None
    timeout_seconds: float = 60.0
    _: KW_ONLY
    retries: int = 5
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0


def post_json(endpoint: Endpoint, body: bytes) -> object:
    """The decoded JSON answer to a posted body of JSON.

    Tries again after no connection, a time-out, an answer that is no JSON, and the statuses of `RETRIED`. A Retry-After
    header, in seconds or as a date, lengthens the pause; where it asks for more than `max_backoff_seconds` the request
    fails.

    Raises:
        RequestFailed: no usable answer; the message holds neither key nor body.
    """
    why = ""
    for attempt in range(endpoint.retries + 1):
        try:
            return _post_once(endpoint, body)
        except _Unanswered as error:
            why = str(error)
            if attempt == endpoint.retries or error.pause_seconds > endpoint.max_backoff_seconds:
                break
            longest = min(endpoint.max_backoff_seconds, endpoint.backoff_seconds * 2.0**attempt)
            time.sleep(max(error.pause_seconds, longest * random.uniform(0.5, 1.0)))
    raise RequestFailed(why)


def _post_once(endpoint: Endpoint, body: bytes) -> object:
    """One try.

    Raises:
        _Unanswered: another try may succeed.
        RequestFailed: none would.
    """
    connection = _connection(endpoint)
    try:
        try:
            answer, received = _exchange(connection, endpoint, body)
        except (OSError, http.client.HTTPException) as error:
            raise _Unanswered(type(error).__name__) from error
        except ValueError:  # of a header, whose value the error shows
            raise RequestFailed("a header that cannot be sent") from None
        if len(received) > MAX_ANSWER_BYTES:
            raise RequestFailed(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        if answer.status in RETRIED:
            raise _Unanswered(
                f"status {answer.status}", retry_after(answer.getheader("Retry-After") or "", time.time())
            )
        if not 200 <= answer.status < 300:
            raise RequestFailed(f"status {answer.status}")
        try:
            return json.loads(received)
        except (ValueError, RecursionError) as error:
            raise _Unanswered("the answer is no JSON") from error
    finally:
        connection.close()


def _exchange(
    connection: http.client.HTTPConnection, endpoint: Endpoint, body: bytes
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer to one request, closed in the middle where it takes longer than the time-out, however slowly it comes.

    Raises:
        OSError, HTTPException: no whole answer in time.
    """
    began = time.monotonic()
    connection.connect()
    sock, late = connection.sock, threading.Event()

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, endpoint.timeout_seconds - (time.monotonic() - began)), give_up)
    timer.start()
    try:
        connection.request("POST", _target(endpoint.url), body, _headers(endpoint))
        answer = connection.getresponse()
        received = answer.read(MAX_ANSWER_BYTES + 1)
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError
    return answer, received


def _connection(endpoint: Endpoint) -> http.client.HTTPConnection:
    parts = urlsplit(endpoint.url)
    host, seconds = parts.hostname or "", endpoint.timeout_seconds
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=seconds, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, parts.port, timeout=seconds)


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if endpoint.key_variable is not None:
        headers["Authorization"] = f"Bearer {_key(endpoint.key_variable)}"
    return headers


def _key(variable: str) -> str:
    """The key in a variable, without the line break that a file it came from may end in."""
    return os.environ.get(variable, "").strip()


def key_problem(variable: str) -> str:
    """Why the key in an environment variable cannot be sent; empty where it can."""
    key = _key(variable)
    if not key:
        return f"the environment has no {variable}, the judge's key; set it"
    if not (key.isascii() and key.isprintable()):
        return f"the key in {variable} has line breaks, control characters or letters beyond ASCII; set one line"
    return ""


def url_problem(url: str) -> str:
    """The fault of a service's URL, such as a part that is probably a key; empty without one. Shows no key."""
    way_out = "name an environment variable in key_variable, whose key is sent as a bearer token"
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, names, good = urlsplit(""), [], False
    if "@" in parts.netloc:
        return f"the URL holds a password or a user name; {way_out}"
    if secret := [name for name in names if SECRET.match(name) or SECRET_PARAMETER.search(name)]:
        return f"the URL holds a key in its parameter {secret[0]!r}; {way_out}"
    return "" if good else f"{plain_url(url)!r} is no URL such as https://host/score"


def plain_url(url: str) -> str:
    """A URL without what may be secret: its user, query and fragment."""
    return re.sub(r"//[^/]*@|[?#].*", lambda found: "//" if found[0].startswith("//") else "", url, flags=re.DOTALL)


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

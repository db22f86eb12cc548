"""The thread that runs the model, and the HTTP routes of OpenAI's protocol over it.

Requests of all clients decode side by side in the one thread. Starlette (extra `serve`) is imported when an app is
built.
"""

import asyncio
import json
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from alignment.data.rows.records import Messages
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation.engine import DecodingEngine
from alignment.generation.requests import DecodingRequest, SamplingConfig, TokenEvent
from alignment.serving.protocol import (
    JSON,
    AnswerWriter,
    BadRequest,
    Body,
    ChatBody,
    Kind,
    Prompt,
    ResponseChoice,
    is_ids,
    read_request,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

MOST_BYTES = 16 * 2**20  # of a body: more text than any model's positions hold
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
STUCK_SECONDS = 60.0  # a step that takes longer: nobody is answered before its end
MOST_CHARACTERS = 4 * 2**20  # of a prompt
CHARACTERS_PER_TOKEN = 16  # four times those of English text: a prompt with more on average is not worth encoding
T = TypeVar("T")
Receiver = Callable[[TokenEvent | BadRequest], object]  # called in the model's thread, so it must not block


class ModelThread:
    """Decodes the requests of all clients side by side in one thread, which owns the engine.

    A context manager: leaving it ends the thread after its current step; requests that still run get an error.

    Attributes:
        alive: True while requests are answered.
    """

    def __init__(self, make_engine: Callable[[], DecodingEngine]):
        """Start the thread; `make_engine` is called again after a failed step, whose engine may hold half of it."""
        self._make_engine = make_engine
        self._engine = make_engine()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._receivers: dict[int, Receiver] = {}  # by the request's number in the engine
        self.alive = True
        self._lock = threading.Lock()  # nothing is ordered after `alive` is unset under the lock
        self._began: float | None = None  # the present step or order; None between two
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ModelThread":
        return self

    def __exit__(self, *error: object) -> None:
        self._order(self._close)
        self._thread.join()

    @property
    def running(self) -> int:
        """Requests that have not finished, of those that the thread has taken."""
        return len(self._receivers)

    @property
    def queued(self) -> int:
        """Groups of requests, and cancellations, that the thread takes after its present step."""
        return self._orders.qsize()

    @property
    def step_seconds(self) -> float:
        """Seconds that the present step, or the taking of a request, has lasted so far; 0 between two."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, requests: Sequence[DecodingRequest], receivers: Sequence[Receiver]) -> Callable[[], None]:
        """Hand requests over; the function returned forgets those that have not finished.

        Each receiver gets its request's tokens, of which the last one has a `finish`, or an error, also where the
        thread has ended.
        """
        taken: list[tuple[int, Receiver]] = []
        self._order(lambda: self._add(requests, receivers, taken))
        return lambda: self._order(lambda: self._cancel(taken))

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            if self.alive:
                return self._orders.put(order)
        order()

    def _close(self) -> None:
        with self._lock:
            self.alive = False

    def _work(self) -> None:
        try:
            while self.alive:
                with suppress(queue.Empty):
                    while self.alive:
                        self._timed(self._orders.get(block=not self._engine.unfinished))
                if self.alive and self._engine.unfinished:
                    self._timed(self._step)
        finally:
            self._close()
            self._fail_all("the server stops")
            while not self._orders.empty():
                self._orders.get()()

    def _timed(self, part: Callable[[], None]) -> None:
        self._began = time.monotonic()
        part()
        self._began = None

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:  # the next request may be well: out of memory, for one
            self._fail_all(f"the model failed: {type(error).__name__}: {error}")
            self._engine = self._make_engine()
            return
        for event in events:
            receive = self._receivers.get(event.request)
            if event.finish is not None:
                self._receivers.pop(event.request, None)
            if receive is not None:  # else it was cancelled since the token was drawn
                _tell(receive, BadRequest(event.text, status=500) if event.finish == "error" else event)

    def _add(
        self, requests: Sequence[DecodingRequest], receivers: Sequence[Receiver], taken: list[tuple[int, Receiver]]
    ) -> None:
        for request, receive in zip(requests, receivers, strict=True):
            if not self.alive:
                _tell(receive, BadRequest("the server stops", status=500))
                continue
            try:
                request_id = self._engine.add(request)
            except (UserError, ValueError) as error:
                _tell(receive, BadRequest(str(error)))
            except Exception as error:  # it must not end the thread: out of memory, for one
                _tell(receive, BadRequest(f"the model failed: {type(error).__name__}: {error}", status=500))
            else:
                self._receivers[request_id] = receive
                taken.append((request_id, receive))

    def _cancel(self, taken: Sequence[tuple[int, Receiver]]) -> None:
        for request_id, receive in taken:
            if self._receivers.get(request_id) is receive:  # a new engine counts from the beginning
                del self._receivers[request_id]
                self._engine.cancel(request_id)

    def _fail_all(self, message: str) -> None:
        receivers = list(self._receivers.values())
        self._receivers = {}
        for receive in receivers:
            _tell(receive, BadRequest(message, status=500))


def _tell(receive: Receiver, event: TokenEvent | BadRequest) -> None:
    with suppress(RuntimeError):  # the event loop of this client has ended
        receive(event)


# The model and what is asked of it


@dataclass(frozen=True)
class ServedModel:
    """The model as the routes see it."""

    name: str  # in requests and answers
    tokenizer: Tokenizer  # for the texts of single tokens; used by the event loop alone
    encode: Callable[[str | Messages], list[int]]  # ids of a text or of messages; called from several threads
    stop_ids: tuple[int, ...]  # tokens that end a response
    vocabulary: int  # rows of the token table
    positions: int  # longest prompt and response together, tokens; of an encoder-decoder, longest response
    reads_apart: bool = False  # an encoder reads the prompts, so they take none of the positions
    max_tokens: int = 512  # longest chat response where a request names none
    adapters: Mapping[str, int] = field(default_factory=dict)  # name in requests -> positions that its prefix takes

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; BadRequest also for one so long that it is not encoded."""
        if is_ids(prompt):
            ids = cast("list[int]", prompt)
            if wrong := [token for token in ids if not 0 <= token < self.vocabulary]:
                raise BadRequest(f"prompt: {wrong[0]} is no token id; they are 0 to {self.vocabulary - 1}", "prompt")
            return ids
        param = "prompt" if isinstance(prompt, str) else "messages"
        size = len(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
        if size > (most := min(CHARACTERS_PER_TOKEN * self.positions, MOST_CHARACTERS)):
            raise BadRequest(
                f"{param}: {size} characters, of which at most {most} are read: the model has {self.positions} "
                "positions; shorten the prompt",
                param,
                code="context_length_exceeded",
            )
        try:
            ids = self.encode(cast("str | Messages", prompt))
        except UserError as error:
            raise BadRequest(str(error), param) from error
        if not ids:
            raise BadRequest("the prompt has no token", param)
        return ids

    def requests(self, asked: Body, prompts: Sequence[list[int]]) -> list[DecodingRequest]:
        """The `n` requests for each prompt, in the order of the answer's choices.

        With a seed, choice i has the random numbers of row i, as the i-th prompt of `generate` has.

        Raises:
            BadRequest: a prompt that, with the response, does not fit the model's positions.
        """
        chat = isinstance(asked, ChatBody)
        seed = secrets.randbits(48) if asked.seed is None else asked.seed % 2**64
        stop = (asked.stop,) if isinstance(asked.stop, str) else asked.stop
        requests = []
        adapter = asked.model if asked.model in self.adapters else None
        positions = self.positions - self.adapters.get(asked.model or "", 0)
        for ids in prompts:
            room = positions - (0 if self.reads_apart else len(ids))
            longest = asked.longest or max(1, min(self.max_tokens if chat else 16, room))  # 16 is OpenAI's
            if room < longest:
                raise BadRequest(
                    f"the prompt has {len(ids)} tokens and {longest} may follow; the model has {positions} positions: "
                    "shorten the prompt or lower max_tokens",
                    "messages" if chat else "prompt",
                    code="context_length_exceeded",
                )
            if asked.min_tokens > longest:
                raise BadRequest(f"min_tokens is above max_tokens, {longest}", "min_tokens")
            sampling = SamplingConfig(
                longest,
                asked.temperature,
                asked.top_k,
                asked.top_p,
                seed,
                asked.min_p,
                asked.repetition_penalty,
                min_new_tokens=asked.min_tokens,
            )
            requests += [
                DecodingRequest(ids, sampling, row, self.stop_ids, stop, asked.alternatives or 0, "model", adapter)
                for row in range(len(requests), len(requests) + asked.n)
            ]
        return requests


class Answer:
    """The tokens of one client's requests as they arrive: the `choices` so far; `close` cancels the unfinished."""

    def __init__(self, thread: ModelThread, requests: Sequence[DecodingRequest]):
        self.choices = [ResponseChoice(index, len(request.prompt)) for index, request in enumerate(requests)]
        self._arrived: asyncio.Queue[tuple[ResponseChoice, TokenEvent | BadRequest]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def receiver(choice: ResponseChoice) -> Receiver:
            return lambda event: loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, event))

        self.close = thread.submit(requests, [receiver(choice) for choice in self.choices])

    async def events(self) -> AsyncIterator[tuple[ResponseChoice, TokenEvent]]:
        """Each token with its choice, which already holds it; BadRequest where the model could not answer."""
        unfinished = len(self.choices)
        while unfinished:
            choice, event = await self._arrived.get()
            if isinstance(event, BadRequest):
                raise event
            choice.events.append(event)
            unfinished -= event.finish is not None
            yield choice, event

    async def finished(self) -> None:
        """Wait for all tokens; errors as in `events`."""
        async for _ in self.events():
            pass


# Routes


def build_app(served: ServedModel, thread: ModelThread, *, key: str | None = None, remote: bool = False) -> "Starlette":
    """The application; see `check_client` for `key`, which /health needs not, and `remote`."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    about: JSON = {"object": "model", "created": 0, "owned_by": "alignment"}
    descriptions: dict[str, JSON] = {
        name: {"id": name, **about, "parent": served.name if name in served.adapters else None}
        for name in (served.name, *served.adapters)
    }

    async def health(request: "Request") -> "ASGIApp":
        seconds = thread.step_seconds
        if not thread.alive:
            raise BadRequest("the model's thread has ended", status=503)
        if seconds > STUCK_SECONDS:
            message = f"the model's step takes {seconds:.0f} s so far; nobody is answered before its end"
            raise BadRequest(message, status=503)
        load = {"running": thread.running, "queued": thread.queued, "step_seconds": round(seconds, 3)}
        return json_response({"status": "ok", **load})

    async def models(request: "Request") -> "ASGIApp":
        return json_response({"object": "list", "data": list(descriptions.values())})

    async def model(request: "Request") -> "ASGIApp":
        name = request.path_params["name"]
        check_name(name, served)
        return json_response(descriptions[name])

    def route(path: str, answer: "Callable[[Request], Awaitable[ASGIApp]]", method: str = "GET") -> Route:
        async def checked(request: "Request") -> "ASGIApp":
            check_client(request, None if path == "/health" else key, remote)
            return await answer(request)

        return Route(path, checked, methods=[method])

    async def failed(request: "Request", error: Exception) -> "Response":
        if not isinstance(error, BadRequest):
            status = getattr(error, "status_code", 500)
            error = BadRequest(getattr(error, "detail", "the server failed"), status=status)
        return json_response(error.body, error.status)

    routes = [
        route("/health", health),
        route("/v1/models", models),
        route("/v1/models/{name:path}", model),
        route("/v1/chat/completions", partial(answer_completion, "chat", served, thread), "POST"),
        route("/v1/completions", partial(answer_completion, "completions", served, thread), "POST"),
    ]
    return Starlette(routes=routes, exception_handlers={BadRequest: failed, 404: failed, 405: failed, 500: failed})


async def answer_completion(kind: Kind, served: ServedModel, thread: ModelThread, request: "Request") -> "ASGIApp":
    """The answer to a POST of a completion, whole or as a stream."""
    from starlette.responses import StreamingResponse

    if kind == "chat" and served.reads_apart:
        raise BadRequest(f"{served.name} is an encoder-decoder model, which has no chat; use /v1/completions")
    asked, prompts = read_request(kind, await json_body(request))
    check_name(asked.model, served)

    async def encode() -> list[list[int]]:  # each by a call of its own, so that other requests come between them
        return [await asyncio.to_thread(served.prompt_ids, prompt) for prompt in prompts]

    answer = Answer(thread, served.requests(asked, await while_connected(request, encode())))
    writer = AnswerWriter(asked, asked.model or served.name, served.tokenizer, served.stop_ids)
    if asked.stream:
        headers = {"Cache-Control": "no-cache"}
        events = stream_events(answer, writer)
        return closing(answer, StreamingResponse(events, media_type="text/event-stream", headers=headers))
    try:
        await while_connected(request, answer.finished())
    finally:
        answer.close()
    return json_response(writer.whole(answer.choices))


def check_name(name: str | None, served: ServedModel) -> None:
    """Refuse another model's name; None: the request names none."""
    if name not in (None, served.name, *served.adapters):
        message = f"the model {name!r} is not served here; {', '.join(map(repr, (served.name, *served.adapters)))} is"
        raise BadRequest(message, "model", code="model_not_found", status=404)


def check_client(request: "Request", key: str | None, remote: bool) -> None:
    """Refuse clients without the key and, on the loopback interface, names of other hosts.

    Args:
        key: that clients have to send as a bearer token; None: no key.
        remote: other machines may connect. Where not, a page of another site that has its name resolve to this machine
            is known by that name in the Host header.
    """
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    if not remote and (name if name and port.isdecimal() else host) not in LOCAL_NAMES:
        raise BadRequest(f"the host {host!r} is not served here", status=403)
    given = request.headers.get("authorization", "").encode()
    if key is not None and not secrets.compare_digest(given, f"Bearer {key}".encode()):
        raise BadRequest("no valid key: send Authorization: Bearer KEY", code="invalid_api_key", status=401)


async def json_body(request: "Request") -> object:
    """The JSON in a request's body.

    A form of another site's page can send text to this address, but no JSON without asking first; so the type is
    checked.
    """
    from starlette.requests import ClientDisconnect

    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the body must be JSON: send Content-Type: application/json", status=415)
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > MOST_BYTES:
                raise BadRequest(f"the body has more than {MOST_BYTES} bytes", status=413)
    except ClientDisconnect:
        raise BadRequest("the client has gone", status=499) from None
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()  # an escape may be half a surrogate pair, which no text holds
        return body
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def json_response(body: JSON, status: int = 200) -> "Response":
    """A response with a JSON body."""
    from starlette.responses import JSONResponse

    return JSONResponse(body, status)


async def while_connected(request: "Request", work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is canceled when the client goes away: BadRequest then."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BadRequest("the client has gone", status=499)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def closing(answer: Answer, response: "ASGIApp") -> "ASGIApp":
    """A response after which the answer is closed, however it ends: also if the client leaves before its first byte."""

    async def send_and_close(scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            await response(scope, receive, send)
        finally:
            answer.close()

    return send_and_close


async def stream_events(answer: Answer, writer: AnswerWriter) -> AsyncIterator[str]:
    """The answer as server-sent events."""

    async def bodies() -> AsyncIterator[JSON | None]:
        for choice in answer.choices:
            yield writer.first_chunk(choice)
        try:
            async for choice, event in answer.events():
                yield writer.chunk(choice, event)
        except BadRequest as error:
            yield error.body
        else:
            yield writer.last_chunk(answer.choices)

    async for body in bodies():
        if body is not None:
            yield f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"

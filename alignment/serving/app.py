"""The HTTP routes of OpenAI's protocol over a `ModelThread`. Starlette (extra `serve`) is imported when an app is built."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from alignment.data.rows.records import Messages
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.generation.requests import DecodingRequest, SamplingConfig, TokenEvent
from alignment.serving.model_thread import ModelThread, ServingError
from alignment.serving.protocol import (
    JSON,
    AnswerWriter,
    BadRequest,
    CompletionRequest,
    Encode,
    Kind,
    ResponseChoice,
    encode_prompt,
    error_body,
    read_request,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

MOST_BYTES = 16 * 2**20  # of a body: more text than any model's positions hold
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
STUCK_SECONDS = 60.0  # a step that takes longer: nobody is answered for as long
GONE = "the client has gone"
T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """The model as the routes see it.

    Attributes:
        name: in requests and answers.
        tokenizer: for the texts of single tokens; used by the event loop alone.
        encode: ids of a text or of messages; called from several threads.
        stop_ids: tokens that end a response.
        vocabulary: rows of the token table.
        positions: longest prompt and response together, tokens; of an encoder-decoder, longest response.
        reads_apart: an encoder reads the prompts, so they take none of the positions.
        max_tokens: longest chat response where a request names none.
    """

    name: str
    tokenizer: Tokenizer
    encode: Encode
    stop_ids: tuple[int, ...]
    vocabulary: int
    positions: int
    reads_apart: bool = False
    max_tokens: int = 512

    def prompt_ids(self, prompt: str | Messages | list[int]) -> list[int]:
        """Token ids of a prompt; see `encode_prompt`."""
        return encode_prompt(prompt, self.encode, vocabulary=self.vocabulary, positions=self.positions)


def decoding_requests(
    served: ServedModel, asked: CompletionRequest, prompts: Sequence[list[int]]
) -> list[DecodingRequest]:
    """The `n` requests for each prompt, in the order of the answer's choices.

    With a seed, choice i has the random numbers of row i, as the i-th prompt of `generate` has.

    Args:
        prompts: token ids of each of `asked.prompts`.

    Raises:
        BadRequest: a prompt that, with the response, does not fit the model's positions.
    """
    seed = secrets.randbits(48) if asked.seed is None else asked.seed % 2**64
    requests = []
    for ids in prompts:
        room = served.positions - (0 if served.reads_apart else len(ids))
        default = min(served.max_tokens if asked.kind == "chat" else 16, room)  # 16 is OpenAI's
        new_tokens = default if asked.max_tokens is None else asked.max_tokens
        if room < max(new_tokens, 1):
            raise BadRequest(
                f"the prompt has {len(ids)} tokens and {max(new_tokens, 1)} may follow; the model has {served.positions} "
                "positions: shorten the prompt or lower max_tokens",
                "messages" if asked.kind == "chat" else "prompt",
                code="context_length_exceeded",
            )
        if asked.sampling.get("min_new_tokens", 0) > new_tokens:
            raise BadRequest(f"min_tokens is above max_tokens, {new_tokens}", "min_tokens")
        sampling = SamplingConfig(max_new_tokens=new_tokens, seed=seed, **asked.sampling)
        alternatives = asked.alternatives or 0
        requests += [
            DecodingRequest(ids, sampling, row, served.stop_ids, asked.stop, alternatives, log_probs="model")
            for row in range(len(requests), len(requests) + asked.n)
        ]
    return requests


class Answer:
    """The tokens of one client's requests as they arrive; closing it cancels the unfinished ones."""

    def __init__(self, thread: ModelThread, requests: Sequence[DecodingRequest]):
        self.choices = [ResponseChoice(index, len(request.prompt)) for index, request in enumerate(requests)]
        self._thread, self._open = thread, len(requests)
        self._arrived: asyncio.Queue[tuple[ResponseChoice, TokenEvent | ServingError]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def receiver(choice: ResponseChoice) -> Callable[[TokenEvent | ServingError], None]:
            return lambda event: loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, event)) and None

        self._tickets = thread.submit(requests, [receiver(choice) for choice in self.choices])

    async def events(self) -> AsyncIterator[tuple[ResponseChoice, TokenEvent]]:
        """Each token with its choice, which already holds it.

        Raises:
            ServingError: the model could not answer.
        """
        while self._open:
            choice, event = await self._arrived.get()
            if isinstance(event, ServingError):
                raise event
            choice.events.append(event)
            self._open -= event.finish is not None
            yield choice, event

    async def finished(self) -> None:
        """Wait for all tokens; errors as in `events`."""
        async for _ in self.events():
            pass

    def close(self) -> None:
        """Cancel the unfinished requests."""
        if self._open:
            self._thread.cancel(self._tickets)


class Service:
    """Answers requests; a method per route."""

    def __init__(self, served: ServedModel, thread: ModelThread):
        self._served, self._thread = served, thread
        self._description: JSON = {"id": served.name, "object": "model", "created": 0, "owned_by": "alignment"}

    async def health(self, request: "Request") -> "ASGIApp":
        """200 while requests are answered; 503 where the model's thread has ended or its present step does not end."""
        thread, seconds = self._thread, self._thread.step_seconds
        if not thread.alive:
            raise BadRequest("the model's thread has ended", status=503)
        if seconds > STUCK_SECONDS:
            raise BadRequest(
                f"the model's present step takes {seconds:.0f} s already, and nobody is answered before its end",
                status=503,
            )
        found = {"running": thread.running, "queued": thread.queued, "step_seconds": round(seconds, 3)}
        return json_response({"status": "ok", **found})

    async def models(self, request: "Request") -> "ASGIApp":
        """The one model."""
        return json_response({"object": "list", "data": [self._description]})

    async def model(self, request: "Request") -> "ASGIApp":
        """A model by its name."""
        self._check_name(request.path_params["name"])
        return json_response(self._description)

    async def chat(self, request: "Request") -> "ASGIApp":
        """POST /v1/chat/completions."""
        if self._served.reads_apart:
            name = self._served.name
            raise BadRequest(f"{name} is an encoder-decoder model, which has no chat; use /v1/completions")
        return await self._complete("chat", request)

    async def completions(self, request: "Request") -> "ASGIApp":
        """POST /v1/completions."""
        return await self._complete("completions", request)

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            message = f"the model {name!r} is not served here; {self._served.name!r} is"
            raise BadRequest(message, "model", code="model_not_found", status=404)

    async def _complete(self, kind: Kind, request: "Request") -> "ASGIApp":
        from starlette.responses import StreamingResponse

        asked = read_request(kind, await json_body(request))
        self._check_name(asked.model)
        prompts = await while_connected(request, self._encode(asked))
        answer = Answer(self._thread, decoding_requests(self._served, asked, prompts))
        writer = AnswerWriter(asked, self._served.name, self._served.tokenizer, self._served.stop_ids)
        if asked.stream:
            events = stream_events(answer, writer, include_usage=asked.include_usage)
            headers = {"Cache-Control": "no-cache"}
            return closing(answer, StreamingResponse(events, media_type="text/event-stream", headers=headers))
        try:
            await while_connected(request, answer.finished())
        except ServingError as error:
            raise BadRequest(str(error), status=error.status) from error
        finally:
            answer.close()
        return json_response(writer.whole(answer.choices))

    async def _encode(self, asked: CompletionRequest) -> list[list[int]]:
        """Token ids of all prompts, each encoded by a call of its own, so that other requests come between them."""
        return [await asyncio.to_thread(self._served.prompt_ids, prompt) for prompt in asked.prompts]


def closing(answer: Answer, response: "ASGIApp") -> "ASGIApp":
    """A response after which the answer is closed, however it ends: also where the client goes away before its first byte."""

    async def send_and_close(scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            await response(scope, receive, send)
        finally:
            answer.close()

    return send_and_close


async def while_connected(request: "Request", work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is canceled when the client goes away.

    Raises:
        BadRequest: the client has gone.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BadRequest(GONE, status=499)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def stream_events(answer: Answer, writer: AnswerWriter, *, include_usage: bool) -> AsyncIterator[str]:
    """The answer as server-sent events."""

    async def bodies() -> AsyncIterator[JSON | None]:
        for choice in answer.choices:
            yield writer.first_chunk(choice)
        try:
            async for choice, event in answer.events():
                yield writer.chunk(choice, event)
        except ServingError as error:
            yield error_body(str(error), status=error.status)
        else:
            yield writer.last_chunk(answer.choices) if include_usage else None

    async for body in bodies():
        if body is not None:
            yield f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


def json_response(body: JSON, status: int = 200) -> "Response":
    """A response with a JSON body."""
    from starlette.responses import JSONResponse

    return JSONResponse(body, status)


async def json_body(request: "Request") -> object:
    """The JSON in a request's body.

    A form of another site's page can send text to this address, but no JSON without asking first; so the type is checked.

    Raises:
        BadRequest: another type, too large, no JSON, a text that UTF-8 cannot hold, or a client that goes away.
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
        raise BadRequest(GONE, status=499) from None
    try:
        text = content.decode()
        body = json.loads(text)
        if "\\u" in text:  # an escape may be half a surrogate pair, which has no place in a text
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def check_client(request: "Request", key: str | None, remote: bool) -> None:
    """Refuse clients without the key and, on the loopback interface, names of other hosts.

    Args:
        key: that clients have to send as a bearer token; None: no key.
        remote: other machines may connect. Where not, a page of another site that has its name resolve to this machine is
            known by that name in the Host header.
    """
    host = request.headers.get("host", "")
    if not remote and without_port(host) not in LOCAL_NAMES:
        raise BadRequest(f"the host {host!r} is not served here", status=403)
    given = request.headers.get("authorization", "").encode()
    if key is not None and not secrets.compare_digest(given, f"Bearer {key}".encode()):
        raise BadRequest("no valid key: send Authorization: Bearer KEY", code="invalid_api_key", status=401)


def without_port(host: str) -> str:
    """The name in a Host header."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host


def build_app(served: ServedModel, thread: ModelThread, *, key: str | None = None, remote: bool = False) -> "Starlette":
    """The application.

    Args:
        key: that clients have to send as a bearer token, except for /health; None: no key.
        remote: other machines may connect.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    service = Service(served, thread)

    async def failed(request: "Request", error: Exception) -> "Response":
        status = getattr(error, "status_code", 500)
        return json_response(error_body(str(getattr(error, "detail", "the server failed")), status=status), status)

    def route(path: str, answer: "Callable[[Request], Awaitable[ASGIApp]]", method: str = "GET") -> Route:
        async def checked(request: "Request") -> "ASGIApp":
            try:
                check_client(request, None if path == "/health" else key, remote)
                return await answer(request)
            except BadRequest as bad:
                body = error_body(str(bad), status=bad.status, param=bad.param, code=bad.code)
                return json_response(body, bad.status)

        return Route(path, checked, methods=[method])

    routes = [
        route("/health", service.health),
        route("/v1/models", service.models),
        route("/v1/models/{name:path}", service.model),
        route("/v1/chat/completions", service.chat, "POST"),
        route("/v1/completions", service.completions, "POST"),
    ]
    return Starlette(routes=routes, exception_handlers={404: failed, 405: failed, 500: failed})

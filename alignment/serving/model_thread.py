"""The one thread that runs the model: requests come in from any thread, tokens go out as they are drawn. No HTTP here."""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

from alignment.errors import UserError
from alignment.generation.requests import DecodingRequest, TokenEvent


class RequestDecoder(Protocol):
    """What the thread needs of `DecodingEngine`."""

    @property
    def unfinished(self) -> int: ...
    def add(self, request: DecodingRequest) -> int: ...
    def cancel(self, number: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...


class ServingError(RuntimeError):
    """The model could not answer a request; `wrong_input` says whether the request is to blame."""

    def __init__(self, message: str, *, wrong_input: bool = False):
        super().__init__(message)
        self.wrong_input = wrong_input


Receive = Callable[[TokenEvent | ServingError], None]  # called in the model's thread, so it must not block


class ModelThread:
    """Decodes the requests of all clients side by side in one thread, which owns the engine.

    A context manager: leaving it ends the thread; requests that still run get a `ServingError`.
    """

    def __init__(self, make_engine: Callable[[], RequestDecoder]):
        """Start the thread.

        Args:
            make_engine: a new engine over the loaded model; called again after a failed step, whose engine may hold
                half of it.
        """
        self._make_engine, self._engine = make_engine, make_engine()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets = count(1)
        self._receivers: dict[int, tuple[int, Receive]] = {}  # number in the engine -> ticket, receiver
        self._numbers: dict[int, int] = {}  # ticket -> number in the engine
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ModelThread":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.is_alive() and not self._closing

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return len(self._receivers)

    def submit(self, requests: Sequence[DecodingRequest], receivers: Sequence[Receive]) -> list[int]:
        """Hand requests over; their tickets.

        Each receiver gets its request's tokens, of which the last one has a `finish`, or a `ServingError`.
        """
        tickets = [next(self._tickets) for _ in requests]
        for ticket, request, receive in zip(tickets, requests, receivers, strict=True):
            self._orders.put(
                lambda ticket=ticket, request=request, receive=receive: self._add(ticket, request, receive)
            )
        return tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        """Forget requests, so that their rows are free; those that have finished are no error."""
        self._orders.put(lambda: self._cancel(tickets))

    def close(self) -> None:
        """End the thread after its current step."""
        self._closing = True
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        while not self._closing:
            self._take_orders()
            if self._closing or not self._engine.unfinished:
                continue
            try:
                events = self._engine.step()
            except Exception as error:  # the next request may be well: out of memory, for one
                self._fail_all(f"the model failed: {type(error).__name__}: {error}")
                self._engine = self._make_engine()
                continue
            for event in events:
                self._hand_out(event)
        self._fail_all("the server stops")

    def _take_orders(self) -> None:
        """Carry out all orders; wait for one where there is nothing to decode."""
        wait = not self._engine.unfinished
        while not self._closing:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if order is not None:
                order()

    def _add(self, ticket: int, request: DecodingRequest, receive: Receive) -> None:
        try:
            number = self._engine.add(request)
        except (UserError, ValueError) as error:
            receive(ServingError(str(error), wrong_input=True))
            return
        self._receivers[number], self._numbers[ticket] = (ticket, receive), number

    def _cancel(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if (number := self._numbers.pop(ticket, None)) is not None:
                del self._receivers[number]
                self._engine.cancel(number)

    def _hand_out(self, event: TokenEvent) -> None:
        if event.request not in self._receivers:  # cancelled since it was drawn
            return
        ticket, receive = self._receivers[event.request]
        if event.finish is not None:
            del self._receivers[event.request], self._numbers[ticket]
        with suppress(RuntimeError):  # the event loop of this client has ended
            receive(event)

    def _fail_all(self, message: str) -> None:
        receivers = [receive for _, receive in self._receivers.values()]
        self._receivers.clear()
        self._numbers.clear()
        for receive in receivers:
            with suppress(RuntimeError):
                receive(ServingError(message))

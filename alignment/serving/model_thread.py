"""The one thread that runs the model: requests come in from any thread, tokens go out as they are drawn. No HTTP here."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

from alignment.errors import UserError
from alignment.generation.requests import DecodingRequest, TokenEvent


class RequestDecoder(Protocol):
    """The part of `DecodingEngine` that the thread calls."""

    @property
    def unfinished(self) -> int: ...
    def add(self, request: DecodingRequest) -> int: ...
    def cancel(self, number: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...


class ServingError(RuntimeError):
    """The model could not answer a request; with `wrong_input` the request is to blame."""

    def __init__(self, message: str, *, wrong_input: bool = False):
        super().__init__(message)
        self.wrong_input, self.status = wrong_input, 400 if wrong_input else 500


STOPS = "the server stops"
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
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ModelThread":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """True while requests are answered."""
        return self._thread.is_alive() and not self._closing

    @property
    def running(self) -> int:
        """Requests that have not finished, of those that the thread has taken."""
        return len(self._receivers)

    @property
    def queued(self) -> int:
        """Requests and cancellations that the thread has not taken; it takes them between two steps."""
        return self._orders.qsize()

    @property
    def step_seconds(self) -> float:
        """Seconds that the present step has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, requests: Sequence[DecodingRequest], receivers: Sequence[Receive]) -> list[int]:
        """Hand requests over; their tickets.

        Each receiver gets its request's tokens, of which the last one has a `finish`, or a `ServingError`, also where the
        thread has ended.
        """
        tickets = [next(self._tickets) for _ in requests]
        for ticket, request, receive in zip(tickets, requests, receivers, strict=True):
            self._orders.put(
                lambda ticket=ticket, request=request, receive=receive: self._add(ticket, request, receive)
            )
        if not self.alive:  # also while it is ending: it may have looked at the queue for the last time
            self._refuse_orders()
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
        try:
            while not self._closing:
                self._take_orders()
                if not self._closing and self._engine.unfinished:
                    self._step()
        finally:
            self._closing = True
            self._fail_all(STOPS)
            self._refuse_orders()

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            events = self._engine.step()
        except Exception as error:  # the next request may be well: out of memory, for one
            self._fail_all(f"the model failed: {type(error).__name__}: {error}")
            self._engine = self._make_engine()
            return
        finally:
            self._step_began = None
        for event in events:
            self._hand_out(event)

    def _refuse_orders(self) -> None:
        """Answer the requests that nobody will take."""
        with suppress(queue.Empty):
            while True:
                if (order := self._orders.get_nowait()) is not None:
                    order()
        self._orders.put(None)  # the thread may still wait for the one that `close` has put

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
        if self._closing:
            return _tell(receive, ServingError(STOPS))
        try:
            number = self._engine.add(request)
        except (UserError, ValueError) as error:
            return _tell(receive, ServingError(str(error), wrong_input=True))
        except Exception as error:  # it must not end the thread: out of memory, for one
            return _tell(receive, ServingError(f"the model failed: {type(error).__name__}: {error}"))
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
        _tell(receive, ServingError(event.text) if event.finish == "error" else event)

    def _fail_all(self, message: str) -> None:
        receivers = [receive for _, receive in self._receivers.values()]
        self._receivers.clear()
        self._numbers.clear()
        for receive in receivers:
            _tell(receive, ServingError(message))


def _tell(receive: Receive, event: TokenEvent | ServingError) -> None:
    with suppress(RuntimeError):  # the event loop of this client has ended
        receive(event)

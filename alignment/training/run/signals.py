"""Stop requests by signal, handled at the end of an update. A second signal ends the process at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Number of the signal that was received, or 0."""

    number: int = 0


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While open, SIGTERM and SIGINT are recorded instead of ending the process; the second one ends it.

    Outside the main thread, where Python cannot handle signals, they keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def record(number: int, frame: FrameType | None) -> None:
        request.number = number
        for kind in kinds:
            signal.signal(kind, signal.SIG_DFL)

    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, record) for kind in kinds]
    try:
        yield request
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)

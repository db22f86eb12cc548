"""A function over many inputs, in several processes, with results in order and few inputs in flight."""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from alignment.errors import UserError

Input = TypeVar("Input")
Result = TypeVar("Result")

AHEAD = 2  # inputs in flight for each process

_function: Callable[[Any], Any] | None = None  # of a worker: inherited by fork, never pickled


def map_in_order(function: Callable[[Input], Result], inputs: Iterable[Input], processes: int) -> Iterator[Result]:
    """`function` of each input, in order; with several processes, each takes the next input when it is free.

    The processes are forks of this one: they have the function and what it holds, such as a tokenizer, without copying
    or loading it. Inputs and results are pickled. A single process calls the function here.

    Raises:
        UserError: the system ended one of the processes.
    """
    if processes <= 1:
        yield from map(function, inputs)
        return
    flying: deque[Future[Any]] = deque()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (function,)) as pool:
        try:
            for each in inputs:
                flying.append(pool.submit(_call, each))
                if len(flying) > AHEAD * processes:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {processes} processes that prepare data was ended by the system, most likely for lack of memory; "
                "set data.processes to a smaller number"
            ) from error
        finally:
            for future in flying:
                future.cancel()


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    gc.freeze()  # what the parent had made is not looked at again, so its pages stay shared
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork, and every core has a process


def _call(argument: object) -> object:
    assert _function is not None
    return _function(argument)

"""Chat templates rendered in a process of their own, under limits of time and memory.

A template comes with a checkpoint and is a program. Jinja's sandbox keeps it from files and code, but not from endless
loops, `2 ** 10 ** 9` or 20 GB of text, and such a step inside the interpreter can be interrupted from outside only.
So one helper process renders all templates. The kernel ends it when a template uses more than `CPU_SECONDS`, and memory
beyond `MEMORY_BYTES` fails there. A dialogue is a line of JSON each way. Nothing but template and messages decides a
text, so what was rendered a moment ago is not rendered again.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

CPU_SECONDS = 1.0
MEMORY_BYTES = 2**30
MAX_CHARACTERS = 50_000_000
TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s of processor time, which no chat template needs"
# What `strftime_now` answers, always: the date that Llama 3.2's template takes where there is no clock. With today's
# date a run that is resumed tomorrow, or a model that is served later, would read other tokens than it was trained on.
TEMPLATE_DATE = datetime(2024, 7, 26)


class RenderError(ValueError):
    """A template failed."""


class TemplateEnded(RenderError):
    """A template was ended for what it used."""


Cut = tuple[int, bool]  # number of messages, and True to write the assistant's header after them


class RenderTask(NamedTuple):
    """Messages, oldest first, the texts that are wanted of them, and definitions of the tools that they may use."""

    messages: Sequence[Mapping[str, object]]
    cuts: tuple[Cut, ...]
    tools: Sequence[Mapping[str, object]] | None = None


def render_tasks(
    template: str, tasks: Sequence[RenderTask], variables: Mapping[str, object]
) -> list[list[str] | RenderError]:
    """The texts of each task that `tokenizer.apply_chat_template(messages, tokenize=False)` gives, or its first error.

    Only `strftime_now` differs. `variables` are the special tokens, which a template sees too.
    """
    return [_render(template, json.dumps([task, variables], default=str)) for task in tasks]


@lru_cache(maxsize=64)  # a single dialogue is often asked for several times in a row
def _render(template: str, request: str) -> list[str] | RenderError:
    try:
        answer = json.loads(_process.render(template, request))
    except TemplateEnded as error:
        return error
    if "error" in answer:
        return (TemplateEnded if answer["ended"] else RenderError)(answer["error"])
    return answer["texts"]


class _Process:
    """The helper process; started when first needed, and again after it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.owner = 0  # a forked child must not write into its parent's pipe
        self.template: str | None = None  # the one that the helper holds

    def render(self, template: str, request: str) -> str:
        with self.lock:
            if self.process is None or self.owner != os.getpid():
                self._start()
            process = self.process
            assert process is not None and process.stdin is not None and process.stdout is not None
            known = template == self.template
            try:
                print(json.dumps(None if known else template), request, sep="\t", file=process.stdin, flush=True)
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            except BaseException:  # a signal between question and answer: the next question must not get this answer
                self.stop()
                raise
            if not line:
                code = self.stop()
                raise TemplateEnded(TOO_SLOW if code == -signal.SIGPROF else f"its process ended with code {code}")
            self.template = template
        return line

    def stop(self) -> int:
        """End the helper process where it has not ended itself, and return its exit code."""
        process = self.process
        self.process = None
        self.template = None
        if process is None or self.owner != os.getpid():
            return 0
        process.kill()
        process.communicate()
        return process.returncode

    def _start(self) -> None:
        start = f"import sys; sys.path[:] = {sys.path!r}; from alignment.data.text.rendering import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.owner = os.getpid()
        self.template = None


_process = _Process()
atexit.register(_process.stop)


def serve() -> None:
    """Run the helper process: a line of JSON in, a line of JSON out, until there are no more."""
    import resource

    from transformers.utils.chat_template_utils import _compile_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes our input
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere than on Linux only the time is limited
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = ""
    for line in sys.stdin:
        new, request = map(json.loads, line.split("\t"))
        template = template if new is None else new
        task, variables = request
        compiled = partial(_compile_jinja_template, template)  # cached; a template may fail here, too
        print(json.dumps(_answer(compiled, RenderTask(*task), variables)), flush=True)


def _answer(compiled: Callable[[], Any], task: RenderTask, variables: Mapping[str, object]) -> dict[str, Any]:
    """{"texts": [...]}, or {"error": ..., "ended": ...} of the first that failed; each text has its own time limit."""
    texts = []
    first: Mapping[str, Any] = task.messages[0] if task.messages else {}
    variables = {**variables, **first.get("chat_template_kwargs", {})}
    try:
        for end, open_turn in task.cuts:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            template = compiled()
            messages = task.messages[:end]
            template.globals["strftime_now"] = TEMPLATE_DATE.strftime
            text = template.render(
                messages=messages, tools=task.tools, documents=None, add_generation_prompt=open_turn, **variables
            )
            if len(text) > MAX_CHARACTERS:
                raise MemoryError
            texts.append(text)
        return {"texts": texts}
    except MemoryError:
        return {"error": "it takes more memory than any chat template needs", "ended": True}
    except RecursionError:
        return {"error": "it calls itself without end, or is nested too deeply", "ended": True}
    except Exception as error:  # whatever the template did wrong is the template's
        named = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
        return {"error": named[:2000], "ended": False}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

"""Chat templates rendered in a process of their own, under limits of time and memory.

A template comes with a checkpoint and is a program. Jinja's sandbox keeps it from files and code, but not from endless
loops, `2 ** 10 ** 9` or 20 GB of text, and such a step inside the interpreter can be interrupted from outside only.
So one helper process renders all templates. The kernel ends it when a template uses more than `CPU_SECONDS`, and memory
beyond `MEMORY_BYTES` fails there. A text costs one line of JSON each way, some ten microseconds; since nothing but
template and messages decides it, a text that was rendered a moment ago is not rendered again.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

CPU_SECONDS = 1.0
MEMORY_BYTES = 2**30
MAX_CHARACTERS = 50_000_000
# What `strftime_now` answers, always: the date that Llama 3.2's template takes where there is no clock. With today's
# date a run that is resumed tomorrow, or a model that is served later, would read other tokens than it was trained on.
TEMPLATE_DATE = datetime(2024, 7, 26)


class RenderError(ValueError):
    """A template failed, or was ended for what it used."""


def render_template(template: str, messages: Sequence[Mapping[str, object]], **variables: Any) -> str:
    """The text that `tokenizer.apply_chat_template(messages, tokenize=False)` gives, but for its `strftime_now`.

    Args:
        template: Jinja text.
        messages: dicts of plain values.
        variables: what else the template sees: `add_generation_prompt` and the special tokens.

    Raises:
        RenderError: the template fails, or takes more time or memory than is allowed.
    """
    return _render(template, json.dumps({"messages": messages, "variables": variables}, default=str))


@lru_cache(maxsize=16)  # one row asks for the same few texts several times
def _render(template: str, request: str) -> str:
    return _process.render(template, request)


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
                raise RenderError(_why_ended(self.stop(kill=False)))
            self.template = template
        answer = json.loads(line)
        if "error" in answer:
            raise RenderError(answer["error"])
        return answer["text"]

    def stop(self, *, kill: bool = True) -> int:
        """End the helper process, or wait for the end that it has come to, and return its exit code."""
        process, self.process, self.template = self.process, None, None
        if process is None or self.owner != os.getpid():
            return 0
        if kill:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # what was left to write has no reader any more
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _start(self) -> None:
        start = f"import sys; sys.path[:] = {sys.path!r}; from alignment.data.text.rendering import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self.owner, self.template = os.getpid(), None


_process = _Process()
atexit.register(_process.stop)


def _why_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} s of processor time, which no chat template needs"
    return f"the process that rendered it ended with code {code}"


def serve() -> None:
    """What the helper process does: a line of JSON in, a line of JSON out, until there are no more."""
    import resource

    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes our input
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere than on Linux only the time is limited
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = ""
    for line in sys.stdin:
        new, request = map(json.loads, line.split("\t"))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            template = template if new is None else new
            _compile_jinja_template(template).globals["strftime_now"] = TEMPLATE_DATE.strftime
            texts, _ = render_jinja_template([request["messages"]], chat_template=template, **request["variables"])
            if len(texts[0]) > MAX_CHARACTERS:
                raise MemoryError
            answer = json.dumps({"text": texts[0]})
        except MemoryError:
            answer = json.dumps({"error": "it takes more memory than any chat template needs"})
        except RecursionError:
            answer = json.dumps({"error": "it calls itself without end, or is nested too deeply"})
        except Exception as error:  # whatever the template did wrong is the template's
            named = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
            answer = json.dumps({"error": named[:2000]})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)

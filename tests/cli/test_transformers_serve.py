"""An exported directory behind `transformers serve`, as docs/run/serving.md has it: answers are those of `generate`."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import pytest

from alignment import generate, load_model, load_tokenizer
from alignment.adapters import LoRASpec, attach, save_adapter
from alignment.cli import main
from tests.adapters.tiny_models import disturb

# The server tokenizes a template's text as it is, so the BOS that is trained on here has to be in it.
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Where is the spa?"}]
SECONDS = 240  # to start, on a busy machine


@contextmanager
def transformers_serve(directory, log):
    """The address of a server of this directory, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = os.path.join(os.path.dirname(sys.executable), "transformers")
    command = [program, "serve", str(directory), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def wait_for(address, server, log):
    end = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


@pytest.mark.slow
def test_an_exported_adapter_answers_behind_transformers_serve_as_here(write_checkpoint, tmp_path):
    base = write_checkpoint(tmp_path / "base", "llama")
    (tmp_path / "base/chat_template.jinja").write_text(CHAT)
    model = disturb(attach(load_model(base), LoRASpec(rank=2)))
    save_adapter(model, tmp_path / "adapter", base=base)
    code = main(["export", "--model", base, "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "out")])
    assert code == 0
    expected, before = (
        generate(network, load_tokenizer(base), [MESSAGES], temperature=0, max_new_tokens=8).texts[0]
        for network in (model, load_model(base))
    )
    assert expected != before
    with transformers_serve(tmp_path / "out", tmp_path / "log") as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        answer = client.chat.completions.create(
            model=str(tmp_path / "out"), messages=MESSAGES, max_tokens=8, temperature=0
        )
    assert answer.choices[0].message.content == expected

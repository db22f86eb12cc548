"""Directories as an attacker would write them, made anew from good ones; and a process of its own to open each in."""

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

SECONDS = 20  # wall time for one command; the slowest is a template that is ended after a second of processor time
MEMORY = 3 * 2**30  # bytes beyond what the tests' own process has


class Outcome(NamedTuple):
    """How a command ended: its exit code, or None where it had to be killed, and what it wrote."""

    code: int | None
    text: str
    seconds: float


class Folder:
    """A good directory to spoil, files outside it that nobody may read, and a file that hostile code would write."""

    def __init__(self, root: Path, good: Path | None):
        self.root, self.path, self.outside, self.canary = root, root / "given", root / "elsewhere", root / "executed"
        self.outside.mkdir(parents=True)
        if good is None:
            self.path.mkdir()
        else:
            shutil.copytree(good, self.path)

    def write(self, name: str, content: Any) -> None:
        """A file's bytes, text, or value as JSON."""
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    def change(self, name: str, **changes: Any) -> None:
        """Some keys of a JSON file."""
        self.write(name, {**json.loads((self.path / name).read_text()), **changes})

    def move_out(self, name: str) -> Path:
        """Put a file into the folder outside, and say where it is now."""
        shutil.move(self.path / name, self.outside / name)
        return self.outside / name

    def link_out(self, name: str) -> None:
        """Replace a file by a link to it, outside."""
        (self.path / name).symlink_to(self.move_out(name))

    def unread(self) -> bool:
        """Whether no file outside was read: its time of access is still the one that `watch` gave it."""
        return all(path.stat().st_atime == 0 for path in self.outside.iterdir())

    def watch(self) -> None:
        """Set back the files' times of access."""
        for path in self.outside.iterdir():
            os.utime(path, (0, 1))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory, tokenizer) -> Path:
    """A tiny model of an architecture that runs as transformers' class, in two shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from alignment.data.tokenizers.tokenizer import save_tokenizer

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("foreign")
    config = AutoConfig.for_model(
        "stablelm", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size="40KB")
    save_tokenizer(tokenizer, directory)
    return directory


@pytest.fixture(scope="session")
def good(checkpoints, foreign, tmp_path_factory) -> dict[str, Path | None]:
    """The directories that are spoilt, by name; `none` is an empty one."""
    from alignment.adapters import LoRASpec, PrefixSpec, attach, save_adapter
    from alignment.models.huggingface.checkpoint import load_language_model

    found: dict[str, Path | None] = {"native": Path(checkpoints["llama"]), "foreign": foreign, "none": None}
    for name, spec in (("lora", LoRASpec(rank=4)), ("prefix", PrefixSpec(tokens=4))):
        found[name] = tmp_path_factory.mktemp(name)
        model = attach(load_language_model(checkpoints["llama"]), spec)
        save_adapter(model, found[name], base=checkpoints["llama"])
        config = found[name] / "adapter_config.json"  # copies lie elsewhere: the base by its whole path
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": checkpoints["llama"]})
        )
    return found


@pytest.fixture(scope="session")
def warm() -> None:
    """Whatever a command imports is imported here, once, and not in every fork."""
    import peft  # noqa: F401
    from transformers import AutoTokenizer, StableLmForCausalLM  # noqa: F401

    from alignment.cli import main

    main(["generate", "--model", "/nowhere/at/all", "--prompt", "a"])


@pytest.fixture
def run_apart(tmp_path, warm) -> Callable[..., Outcome]:
    """Runs the command line in a forked process that may take `MEMORY` bytes and `SECONDS`."""

    def run(*arguments: str) -> Outcome:
        output = tmp_path / "output.txt"
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _command(arguments, output)
        while time.monotonic() < start + SECONDS:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return Outcome(os.waitstatus_to_exitcode(status), output.read_text(), time.monotonic() - start)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Outcome(None, output.read_text(), time.monotonic() - start)

    return run


def _command(arguments: tuple[str, ...], output: Path) -> None:
    """What the forked process does; it never returns."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 99
    try:
        from alignment.cli import main

        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        code = main(list(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture
def folder_of(tmp_path) -> Callable[[Path | None], Folder]:
    """A `Folder` made from a good directory."""
    return lambda good: Folder(tmp_path / "world", good)

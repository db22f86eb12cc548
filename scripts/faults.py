"""Stops, kills and damaged files, on tiny models: whatever happens, a run started again ends as an undisturbed one.

python scripts/faults.py [stops | damage] [--only ppo/lora] [--kills 40]      one row per cell; exit 1 where one fails

stops   each method with all weights, LoRA and a prefix: SIGTERM early, in the middle, late, and while the model is
        written; SIGKILL at operations on files, spread over the whole run
damage  each file of the newest checkpoint halved, emptied, changed by one bit, deleted

A cell is a forked child: the parent has imported everything, has one thread, and never trains.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate.tracking  # noqa: F401 - so that no child has to
import torch
import torch.utils.tensorboard
from measuring import write_checkpoint

from alignment import files
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms import dpo, reward, sft
from alignment.algorithms.ppo import ppo
from alignment.cli import explain, terminate
from alignment.data.config import DataConfig
from alignment.hotel_world.datasets import RowCounts, write_world
from alignment.loading import load_model, load_tokenizer
from alignment.models import safetensors_files as model_files
from alignment.training import OptimConfig, Run, TrainingConfig, latest_checkpoint
from alignment.training.backends import state_files

STEPS = 4
METHODS = {
    "sft": (sft, sft.SFTConfig, "demonstrations"),
    "reward": (reward, reward.RewardConfig, "comparisons"),
    "dpo": (dpo, dpo.DPOConfig, "comparisons"),
    "ppo": (ppo, ppo.PPOConfig, "prompts"),
}
ADAPTERS = {"full": None, "lora": LoRASpec(rank=2), "prefix": PrefixSpec(tokens=2)}
DROPOUT = LoRASpec(rank=2, dropout=0.1)  # refused in DPO and PPO
MODEL = {
    "model_type": "llama", "max_position_embeddings": 512, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
TIMES = ("second", "mfu")  # in the names of metrics that a clock makes
WRITERS = ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir")


# Children


def in_child(work: Callable[[], Any], log: Path) -> int:
    """Do `work` in a forked child as a command would, its output in `log`; the exit code, -9 for SIGKILL."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with open(log, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        signal.signal(signal.SIGTERM, terminate)
        work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except Exception as error:
        traceback.print_exc()
        code = explain(error, debug=False)
    finally:
        sys.stderr.flush()
        os._exit(code)


class Operations:
    """Counts what the main thread does to files, and sends this process a signal before one of them."""

    def __init__(self, number: int = 0, kind: int = signal.SIGKILL, under: str = ""):
        self.number, self.kind, self.under, self.count = number, kind, under, 0

    def install(self) -> "Operations":
        """Put a counting call in the place of each operation, in this process."""
        for name in WRITERS:
            setattr(os, name, self.counted(getattr(os, name)))
        files.exchange = self.counted(files.exchange)
        for module in (state_files, model_files, import_module("alignment.adapters.attach")):
            module.save_file = self.counted(module.save_file)
        shutil.rmtree = self.counted(shutil.rmtree)
        return self

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and self.under in str(arguments):
                self.count += 1
                if self.count == self.number:
                    if real.__name__ in ("save_file", "wrapped_save_file"):
                        Path(arguments[1]).write_bytes(b"half of it")
                    os.kill(os.getpid(), self.kind)
            return real(*arguments, **options)

        return call


def stop_in(step: int) -> None:
    """Let SIGTERM come in update `step` of whatever run this process does."""
    log = Run.log

    def log_and_stop(self: Run, number: int, metrics: Any) -> None:
        log(self, number, metrics)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.log = log_and_stop


# Runs


class Bench:
    """Tiny data and models, and what undisturbed runs make of them."""

    def __init__(self, folder: Path):
        self.folder, self.cells, self.failed, self.whole = folder, 0, 0, {}
        sizes = {"pretrain": 12, "pretrain_heldout": 1, "demonstrations": 8, "comparisons": 8, "comparisons_heldout": 1}
        found = write_world(folder / "world", sizes=RowCounts(**sizes, prompts=8, prompts_eval=1))
        self.rows = {name: str(path) for name, path in found.items()}
        self.start, self.reward_model = str(folder / "start"), str(folder / "judge" / "model")
        self.must(self.write_start, "start")
        load_tokenizer(self.start), load_model(self.start)  # what libraries import on first use comes here, in no child
        config = self.config("reward", "full", folder / "judge")
        self.must(lambda: reward.run(config), "judge")

    def write_start(self) -> None:
        """A model with random weights."""
        texts = (json.loads(line)["text"] for line in Path(self.rows["pretrain"]).read_text().splitlines())
        write_checkpoint(Path(self.start), MODEL, texts, 300)

    def config(self, method: str, adapter: str, output: Path, **training: Any) -> Any:
        """A run of four updates with all state that a method has, dropout in LoRA where it is allowed included."""
        _, kind, rows = METHODS[method]
        own: dict[str, Any] = {}
        if method == "ppo":
            own = {
                "reward_model": self.reward_model,
                "max_new_tokens": 3,
                "epochs": 1,
                "minibatches": 1,
                "kl_target": 0.1,
            }
        return kind(
            policy=self.start,
            data=DataConfig(train=self.rows[rows], max_length=448),
            output=str(output),
            adapter=DROPOUT if adapter == "lora" and method in ("sft", "reward") else ADAPTERS[adapter],
            optim=OptimConfig(learning_rate=3e-3),
            training=TrainingConfig(**{"batch_size": 2, "max_steps": STEPS, **training}),
            **own,
        )

    def must(self, work: Callable[[], Any], name: str) -> None:
        """Do `work` in a child, which has to end well."""
        log = self.folder / f"{name}.log"
        if in_child(work, log):
            raise SystemExit(f"{name} failed undisturbed:\n{log.read_text()}")

    def undisturbed(self, method: str, adapter: str) -> tuple[str, Any]:
        """Hash and metrics of a run that nothing stops."""
        name = f"{method}-{adapter}"
        if name not in self.whole:
            config = self.config(method, adapter, self.folder / name)
            self.must(lambda: METHODS[method][0].run(config), name)
            self.whole[name] = result_of(self.folder / name)
        return self.whole[name]

    def run(self, config: Any, before: Callable[[], Any] = lambda: None) -> tuple[int, str]:
        """Run a method in a child; its exit code and what it said."""
        module = next(module for module, kind, _ in METHODS.values() if isinstance(config, kind))
        log = self.folder / "cell.log"
        code = in_child(lambda: (before(), module.run(config)), log)
        return code, log.read_text()

    def finish(self, config: Any, expected: tuple[str, Any]) -> list[str]:
        """Start a run again until it is done; what is not as in an undisturbed one."""
        code, said = self.run(config)
        if code:
            return [f"the next start ended with {code}: {said.strip().splitlines()[-1:]}"]
        output = Path(config.output)
        wrong = [
            "weights" if index == 0 else "metrics" for index in (0, 1) if result_of(output)[index] != expected[index]
        ]
        hidden = [str(path.relative_to(output)) for path in output.rglob(".*") if path.name != ".lock"]
        return [f"other {name}" for name in wrong] + [f"left over: {name}" for name in hidden]

    def report(self, cell: str, problems: list[str]) -> None:
        """Print a cell's row."""
        self.cells += 1
        self.failed += bool(problems)
        print(f"{cell:44} {'; '.join(problems) or 'ok'}", flush=True)


def result_of(output: Path) -> tuple[str, Any]:
    """Hash of the written weights, and the metrics without what the clock decides."""
    (weights,) = (output / "model").glob("*.safetensors")
    text = (output / "metrics.jsonl").read_text()
    lines = [
        {k: v for k, v in json.loads(line).items() if not any(part in k for part in TIMES)}
        for line in text.splitlines()
    ]
    return hashlib.sha256(weights.read_bytes()).hexdigest(), lines


# Cells


def stops(bench: Bench, method: str, adapter: str, kills: int) -> None:
    """SIGTERM at four moments, SIGKILL at `kills` operations."""
    expected = bench.undisturbed(method, adapter)
    name, output = f"{method} {adapter}", bench.folder / "cell"
    moments: dict[str, Callable[[], Any]] = {
        f"SIGTERM in update {step}": lambda step=step: stop_in(step) for step in (1, STEPS // 2, STEPS)
    }
    moments["SIGTERM while the model is written"] = Operations(3, signal.SIGTERM, under=".model.partial").install
    for moment, before in moments.items():
        shutil.rmtree(output, ignore_errors=True)
        config = bench.config(method, adapter, output)
        code, _ = bench.run(config, before)
        problems = [] if code == 143 else [f"exit {code}"]
        if latest_checkpoint(output / "checkpoints") is None:
            problems.append("no checkpoint")
        bench.report(f"{name}: {moment}", problems + bench.finish(config, expected))

    def counting() -> None:
        operations = Operations().install()
        METHODS[method][0].run(config)
        (bench.folder / "count").write_text(str(operations.count))

    shutil.rmtree(output, ignore_errors=True)
    config = bench.config(method, adapter, output, save_every_steps=1, keep_last_checkpoints=1)
    bench.must(counting, "counting")
    total = int((bench.folder / "count").read_text())
    for number in sorted({1 + round(place * (total - 1) / max(1, kills - 1)) for place in range(kills)}):
        shutil.rmtree(output, ignore_errors=True)
        code, said = bench.run(config, Operations(number).install)
        problems = [] if code == -signal.SIGKILL else [f"exit {code}: {said[-200:]}"]
        if (output / "model").exists() and result_of_model(output) != expected[0]:
            problems.append("half a model")
        bench.report(f"{name}: SIGKILL at operation {number} of {total}", problems + bench.finish(config, expected))


def result_of_model(output: Path) -> str:
    """Hash of the weights that lie in `output/model`; '' where there are none."""
    return "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in (output / "model").glob("*.safetensors"))


def damage(bench: Bench, method: str) -> None:
    """Each file of the newest checkpoint in four ways, met with `keep_last_checkpoints=1`, the least there is to go on from."""
    expected = bench.undisturbed(method, "full")
    stopped, output = bench.folder / f"stopped-{method}", bench.folder / "cell"
    bench.run(bench.config(method, "full", stopped, save_every_steps=1), lambda: stop_in(STEPS - 1))
    newest = Path("checkpoints") / f"step-{STEPS - 1:06d}"
    for file in sorted(path.relative_to(stopped / newest) for path in (stopped / newest).rglob("*") if path.is_file()):
        for fault in (halve, empty, flip, Path.unlink):
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(stopped, output)
            fault(output / newest / file)
            config = bench.config(method, "full", output, save_every_steps=1, keep_last_checkpoints=1)
            problems = met(bench, config, output / newest, file, deleted=fault is Path.unlink)
            bench.report(f"{method}: {file} {fault.__name__}", problems + bench.finish(config, expected))


def met(bench: Bench, config: Any, newest: Path, file: Path, *, deleted: bool) -> list[str]:
    """What goes wrong when a run that finds this damage goes on for one update, and is stopped."""
    problems = []
    refused = deleted and file.name != "manifest.json"
    if refused:  # it might only have been mislaid: that is the user's to say
        code, said = bench.run(config)
        if code != 2 or f"{newest.name}/{file} is missing" not in said:
            problems.append(f"exit {code}, not named: {said[-200:]}")
        shutil.rmtree(newest)
    code, said = bench.run(config, lambda: stop_in(STEPS - 1))
    if code != 143:
        problems.append(f"exit {code}: {said[-200:]}")
    if not refused and f"{newest.name}/{file}" not in said:
        problems.append(f"not named: {said[-200:]}")
    left = sorted(path.name for path in newest.parent.iterdir())
    wanted = [newest.name] if refused else [f"damaged-{newest.name}", newest.name]
    return problems + ([] if left == wanted else [f"checkpoints are {left}"])


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def main() -> int:
    """Run the cells asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "stops", "damage"], default="all")
    parser.add_argument("--only", default="", help="method or method/adapter, such as ppo/lora")
    parser.add_argument("--kills", type=int, default=40, help="operations at which a run is killed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        wanted = [(method, adapter) for method in METHODS for adapter in ADAPTERS]
        for method, adapter in wanted if arguments.what in ("all", "stops") else []:
            if arguments.only in ("", method, f"{method}/{adapter}"):
                stops(bench, method, adapter, arguments.kills)
        for method in ("sft", "ppo") if arguments.what in ("all", "damage") else ():
            if arguments.only in ("", method):
                damage(bench, method)
        print(f"{bench.cells} cells, {bench.failed} failed")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

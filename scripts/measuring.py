"""What several of these scripts need: processes for runs, turns, medians, memory, random checkpoints, prompts and ends.

The library is imported by functions alone, for trl's side of bench_ppo.py runs in an environment without it.
"""

import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
Result = TypeVar("Result")


def in_process(
    function: Callable[..., Any], *arguments: Any, python: str | Path = sys.executable, **variables: str
) -> Any:
    """The result of a script's function, run in a process of its own with these environment variables; JSON both ways."""
    module = Path(function.__code__.co_filename).stem
    code = f"import json, sys, {module} as script; found = script.{function.__name__}(*json.loads(sys.argv[1]))"
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    command = [str(python), "-c", f"{code}; print(json.dumps(found))", json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module}.{function.__name__} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def take_turns(calls: Mapping[str, Callable[[], Result]], rounds: int, *, warm_up: int = 0) -> dict[str, list[Result]]:
    """Results of each call, round by round, after `warm_up` rounds that are not counted."""
    found: dict[str, list[Result]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            result = call()
            if number >= warm_up:
                found[name].append(result)
    return found


def seconds_of(call: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of a call, until the device is done with it."""
    began = time.perf_counter()
    call()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - began


def matrix_rate(device: str, dtype: Any) -> float:
    """Operations a second of a large matrix product, the best of several: the machine's floor."""
    import torch

    side = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = take_turns({"product": lambda: seconds_of(lambda: a @ b, device)}, 60, warm_up=4)
    return 2 * side**3 / min(times["product"])


def medians(figures: Sequence[Mapping[str, float]], keys: Iterable[str]) -> dict[str, Any]:
    """Medians over rounds, each with the lowest and the highest under KEY_spread."""
    row: dict[str, Any] = {}
    for key in keys:
        values = [one[key] for one in figures]
        row[key] = round(statistics.median(values), 3)
        row[f"{key}_spread"] = [round(min(values), 3), round(max(values), 3)]
    return row


def seconds_row(seconds: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the rounds' seconds."""
    found = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {f"seconds_{name}": round(value, 5) for name, value in found.items()}


def ratios(
    over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]], keys: Iterable[str]
) -> dict[str, float]:
    """Medians over rounds of one side's figures over the other's."""
    pairs = list(zip(over, under, strict=True))
    return {key: round(statistics.median(a[key] / b[key] for a, b in pairs), 3) for key in keys}


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes; getrusage's maximum would count the process that started this one, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> int:
    """Free what can be freed and forget the peak so far; the bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    texts: Iterable[str],
    vocabulary: int,
    *,
    seed: int = 0,
    change: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Write a random model of this config.json and a byte-level BPE trained on the texts; return the tokenizer.

    Args:
        config: without the ids of special tokens; `vocab_size` is the tokenizer's where it is not given, and `dtype` float32.
        vocabulary: tokens in all; few texts may give fewer.
        change: called with the model, whose config has the ids of special tokens, before it is written; without gradient.
    """
    import torch

    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe
    from alignment.models.build import build_language_model
    from alignment.models.huggingface.checkpoint import save_model

    tokenizer = train_bpe(texts, vocabulary)
    special: dict[str, Any] = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    torch.manual_seed(seed)
    model = build_language_model({"vocab_size": len(tokenizer), **config, **special})
    with torch.no_grad():
        change(model)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model.to(getattr(torch, config.get("dtype", "float32"))), directory)
    save_tokenizer(tokenizer, directory)
    return tokenizer


def write_reward_model(directory: Path, policy: Path, dtype: Any = None) -> None:
    """Write a reward model with a policy's trunk, in the type of its files or another, and a random head."""
    import torch

    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.loading import load_tokenizer
    from alignment.models.huggingface.checkpoint import load_scalar_model, save_model

    torch.manual_seed(1)
    directory.mkdir(exist_ok=True)
    save_model(load_scalar_model(policy, dtype, new_head="normal"), directory)
    save_tokenizer(load_tokenizer(str(policy)), directory)


def matrix_weights(checkpoint: Path) -> int:
    """Numbers in the matrices that every token is multiplied with; the embedding counts once, as the head."""
    from alignment.models.huggingface.checkpoint import load_language_model

    return sum(x.numel() for x in load_language_model(checkpoint).parameters() if x.ndim == 2)


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Write JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def padded(rows: Iterable[Sequence[int]], side: str, device: str = "cpu") -> tuple[Any, Any]:
    """input_ids and attention_mask [B, T] of rows of tokens, padded with 0 on this side."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row) for row in rows]
    columns = (ids, [torch.ones_like(row) for row in ids])
    ids, mask = (pad_sequence(column, batch_first=True, padding_side=side).to(device) for column in columns)
    return ids, mask


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 16 to 64 random tokens."""
    generator = random.Random(0)
    return [[generator.randrange(10, 600) for _ in range(generator.randint(16, 64))] for _ in range(count)]


def log_normal_ends(count: int, mean: float, longest: int, sigma: float) -> list[int]:
    """Lengths of responses, log-normal in [1, longest], scaled until their mean reaches `mean`; sigma: of the logarithm."""
    generator = random.Random(0)
    draws = [generator.lognormvariate(0, sigma) for _ in range(count)]
    scale, ends = mean / 2, [0]
    while statistics.mean(ends) < mean:
        scale *= 1.01
        ends = [min(longest, max(1, round(scale * draw))) for draw in draws]
    return ends

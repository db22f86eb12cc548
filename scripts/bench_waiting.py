"""What it costs that idle OpenMP threads spin or sleep, alone and beside busy processes; JSON lines on standard output.

    python scripts/bench_waiting.py [--size nano] [--busy 0 1] [--rounds N] [--spins 0 1000 10000 300000] [--threads 1 2]

Each run is a process of its own: updates of a random model of this size on 64 documents of 16 to 128 tokens, forward,
backward and AdamW. 300000 spins are libgomp's default, 0 is OMP_WAIT_POLICY=passive. `seconds` is the median update,
`slowest` the slowest one; both are medians over rounds. alignment/thread_waiting.py holds what the library chooses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def main() -> None:
    """Run the chosen settings by turns; called by itself with --updates, the updates of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="nano")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="processes that compute beside it")
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 1000, 10_000, 300_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.updates:
        return print(json.dumps(update_seconds(options.size, options.updates)))
    runs = [(threads, spins) for threads in options.threads for spins in (options.spins if threads > 1 else [0])]
    for busy in options.busy:
        found: dict[tuple[int, int], list[list[float]]] = {run: [] for run in runs}
        with busy_processes(busy):
            for _ in range(options.rounds):
                for threads, spins in runs:
                    found[threads, spins].append(run_once(options.size, threads, spins))
        for (threads, spins), rounds in found.items():
            row = {"bench": "waiting", "size": options.size, "busy": busy, "threads": threads, "spins": spins}
            row["seconds"] = round(statistics.median(map(statistics.median, rounds)), 4)
            row["slowest"] = round(statistics.median(map(max, rounds)), 4)
            print(json.dumps(row), flush=True)


def run_once(size: str, threads: int, spins: int) -> list[float]:
    """Seconds of each update of one run."""
    command = [sys.executable, __file__, "--size", size, "--updates", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(spins)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that do nothing but compute, while open."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def update_seconds(size: str, updates: int) -> list[float]:
    """Seconds of each update, after two that are not counted."""
    sys.path.insert(0, str(Path(__file__).parent))
    import random

    import torch
    from bench import SIZES

    from alignment.models.build import build_language_model
    from alignment.ragged import Ragged

    shape = {key: value for key, value in SIZES[size].items() if key != "vocabulary"}
    config = {"model_type": "llama", "vocab_size": 640, "max_position_embeddings": 512, "tie_word_embeddings": True}
    config |= {"num_key_value_heads": shape.get("num_attention_heads", 4), **shape}
    model = build_language_model(config)
    generator = random.Random(0)
    lengths = [generator.randint(16, 128) for _ in range(64)]
    batch = Ragged.build([[generator.randrange(10, 600) for _ in range(length)] for length in lengths])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds = []
    for _ in range(updates + 2):
        began = time.perf_counter()
        optimizer.zero_grad()
        (-model(batch=batch).log_probs.mean()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


if __name__ == "__main__":
    main()

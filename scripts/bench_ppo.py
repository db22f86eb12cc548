"""Speed and memory of PPO iterations, ours and `trl.experimental.ppo`'s, on the same networks, prompts, machine and run.

    python scripts/bench_ppo.py [--sizes nano micro] [--ends none log-normal] [--rounds N] [--environment DIR] [--table]

trl 1.12 is the last release with PPO. It gets a virtual environment of its own, made in --environment where it is missing,
with the torch and transformers of this one. Ours and trl's runs take turns in processes of their own (bench_ppo_runs.py):
an iteration samples a response to each of 64 prompts, scores it, and takes 4 passes of one update each, of policy and value
model. `none`: all responses have 48 tokens. `log-normal`: each ends by the end token after a number of tokens of its own,
25 in the mean and 64 at most, the same ones on both sides.

One JSON line per implementation: medians over rounds of the seconds of an iteration and of its parts (sampling; scoring:
reference, reward model, value model and, in ours, the policy; update: in ours of policy and value one after the other), the
processor seconds, peak memory of the process, each with the lowest and the highest, and MFU: 2 operations per weight of a
matrix product and real token for sampling, reference, reward and value model, and 6 for each update of policy and value
model, over what a large product reaches in the same run. `ratios`: theirs over ours in seconds, above 1 ours is faster,
and ours over theirs in memory, medians over rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench import SIZES, make_checkpoint, matrix_weights
from bench_model import matrix_rate
from bench_ppo_runs import Settings

from alignment.data.tokenizers.load import save_tokenizer
from alignment.hotel_world.datasets import RowCounts, write_world
from alignment.loading import load_tokenizer
from alignment.models.huggingface.checkpoint import load_scalar_model, save_model

TRL = "1.12.0"
ROOT = Path(__file__).resolve().parent.parent
MEAN_END, LONGEST_END, SIGMA = 25, 64, 0.6  # tokens of a response with log-normal ends; deviation of their logarithm
NEW_TOKENS = 48  # without ends
KEYS = ("seconds", "cpu_seconds", "sampling", "scoring", "update", "peak_mb")


def main() -> None:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano", "micro"])
    parser.add_argument("--ends", nargs="+", choices=["none", "log-normal"], default=["none", "log-normal"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=2, help="counted ones in each run, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=0, help="prompts of a forward of trl's updates; 0: all")
    parser.add_argument("--environment", type=Path, default=ROOT / "runs" / "bench" / f"trl-{TRL}", help="trl's own")
    parser.add_argument("--table", action="store_true", help="print the figures as a table at the end")
    options = parser.parse_args()
    pythons = {"alignment": Path(sys.executable), "trl": make_environment(options.environment)}
    rate = matrix_rate("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_world(folder / "world", sizes=RowCounts(pretrain=800))["pretrain"]
        for size in options.sizes:
            policy = make_checkpoint(folder / size, text, size)
            reward = make_reward_model(policy, folder / f"{size}-reward")
            for ends in options.ends:
                settings = settings_of(policy, reward, ends, options)
                figures = take_turns(pythons, settings, folder / "settings.json", options.rounds)
                work = operations(settings, matrix_weights(policy))
                for impl in figures:
                    row = {"bench": "ppo", "impl": impl, "size": size, "ends": ends, "threads": torch.get_num_threads()}
                    row |= {"rounds": options.rounds, **summary(figures[impl])}
                    row["mfu"] = round(work / row["seconds"] / rate, 3)
                    if impl == "trl":
                        row["ratios"] = ratios(figures["alignment"], figures["trl"])
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if options.table:
        print_table(rows)


def make_environment(directory: Path) -> Path:
    """The Python of a virtual environment with trl 1.12, beside the torch and transformers of this one.

    torch comes first and by its version, so that the others find it there.
    """
    python = directory / "bin" / "python"
    probe = [str(python), "-c", "from importlib.metadata import version; print(version('trl'), version('psutil'))"]
    if python.exists() and subprocess.run(probe, capture_output=True, text=True).stdout.startswith(TRL):
        return python
    print(f"making {directory}: torch, transformers and trl {TRL} (some minutes)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={version('torch').split('+')[0]}"], check=True, stdout=sys.stderr)
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("trl")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints))
        file.flush()
        wanted = [f"trl=={TRL}", f"transformers=={version('transformers')}", "datasets", "psutil"]
        subprocess.run([*pip, "--constraint", file.name, *wanted], check=True, stdout=sys.stderr)
    return python


def make_reward_model(policy: Path, directory: Path) -> Path:
    """A reward model with the policy's trunk and a random head."""
    torch.manual_seed(1)
    model = load_scalar_model(policy, new_head="normal")
    directory.mkdir()
    save_model(model, directory)
    save_tokenizer(load_tokenizer(str(policy)), directory)
    return directory


def settings_of(policy: Path, reward: Path, ends: str, options: argparse.Namespace) -> Settings:
    """What both run: prompts of 16 to 64 random tokens."""
    generator = random.Random(0)
    prompts = [[generator.randrange(10, 600) for _ in range(generator.randint(16, 64))] for _ in range(options.prompts)]
    forced = ends != "none"
    return Settings(
        policy=str(policy), reward=str(reward), prompts=prompts, epochs=options.epochs, iterations=options.iterations,
        ends=log_normal_ends(options.prompts, MEAN_END, LONGEST_END) if forced else None,
        new_tokens=LONGEST_END if forced else NEW_TOKENS, micro_batch=options.micro_batch,
    )  # fmt: skip


def log_normal_ends(count: int, mean: float, longest: int, *, seed: int = 0) -> list[int]:
    """Lengths of responses, log-normal in [1, longest], scaled until their mean reaches `mean`."""
    generator = random.Random(seed)
    draws = [generator.lognormvariate(0, SIGMA) for _ in range(count)]
    scale, ends = mean / 2, [0]
    while statistics.mean(ends) < mean:
        scale *= 1.01
        ends = [min(longest, max(1, round(scale * draw))) for draw in draws]
    return ends


def take_turns(
    pythons: dict[str, Path], settings: Settings, file: Path, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Figures of each implementation, round by round."""
    file.write_text(json.dumps(asdict(settings)))
    figures: dict[str, list[dict[str, float]]] = {impl: [] for impl in pythons}
    for number in range(rounds):
        for impl in pythons if number % 2 == 0 else reversed(pythons):
            figures[impl].append(run(impl, pythons[impl], file))
    return figures


def run(impl: str, python: Path, settings: Path) -> dict[str, float]:
    """Figures of one run in a process of its own."""
    command = [str(python), str(Path(__file__).with_name("bench_ppo_runs.py")), impl, str(settings)]
    environment = dict(os.environ)
    if impl != "alignment":
        environment.pop("PYTHONPATH", None)  # of another environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def operations(settings: Settings, weights: int) -> float:
    """Useful operations of an iteration: 4 forwards, and `epochs` updates of two networks at 3 forwards each."""
    ends = settings.ends or [settings.new_tokens] * len(settings.prompts)
    tokens = sum(map(len, settings.prompts)) + sum(ends)
    return 2 * weights * tokens * (4 + settings.epochs * 2 * 3)


def summary(figures: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, with the lowest and the highest."""
    row: dict[str, Any] = {}
    for key in [*KEYS, *(key for key in ("policy", "value") if key in figures[0])]:
        values = [one[key] for one in figures]
        row[key] = round(statistics.median(values), 3)
        row[f"{key}_spread"] = [round(min(values), 3), round(max(values), 3)]
    return row


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds: theirs over ours in time, ours over theirs in memory."""
    pairs = list(zip(ours, theirs, strict=True))
    found = {key: statistics.median(b[key] / a[key] for a, b in pairs) for key in KEYS[:-1]}
    found["peak_mb"] = statistics.median(a["peak_mb"] / b["peak_mb"] for a, b in pairs)
    return {key: round(value, 3) for key, value in found.items()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """The figures as a Markdown table."""
    print("\n| model | ends | | iteration | sampling | scoring | updates | MFU | peak memory | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        parts = " | ".join(f"{row[key]:.2f} s" for key in ("seconds", "sampling", "scoring", "update"))
        ratio = f"{row['ratios']['seconds']:.2f}x" if "ratios" in row else ""
        print(
            f"| {row['size']} | {row['ends']} | {row['impl']} | {parts} | {row['mfu']:.2f} | {row['peak_mb']:,.0f} MB "
            f"| {ratio} |"
        )


if __name__ == "__main__":
    main()

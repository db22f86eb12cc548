"""Speed of decoding beside transformers' `generate`, on the same weights, prompts, machine and run.

    python scripts/bench_generation.py [--sizes nano micro] [--settings full ends] [--rounds N] [--temperature T]

Ours, transformers with its dynamic cache and transformers with its static cache take turns in one process, after a round
that is not counted. JSON lines on standard output: medians over rounds of seconds, with the lowest and the highest; MFU,
2 operations per weight of a matrix product and real token, prompts and responses, over what a large product reaches in the
same run. Padding earns nothing. `ratio` above 1: ours is faster.

`full`: one batch (64 rows nano, 16 micro) of prompts of 16 to 64 tokens, 64 new tokens each, no early end.
`ends`: a queue of 256 such prompts whose responses have log-normal lengths, mean 25, cut at 64. Nobody knows them in
advance: ours ends a row at its length, transformers by a stopping criterion for each row, in batches of as many rows as
ours has cache rows, sorted by the length of their prompts, as a careful user would, so that little is padding.

With temperature 0 the tokens of all three must be equal, or the script fails. A response may differ from where two
tokens' logits are within 1e-3 in float64; such responses are counted (`near_ties`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch
from bench import SIZES

from alignment.generation.engine import DecodingEngine
from alignment.generation.requests import DecodingRequest
from alignment.generation.sampling import SamplingConfig
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from alignment.ragged import Ragged

SETTINGS = ("full", "ends")
ROWS = {"nano": 64, "micro": 16}
VOCABULARY, MOST_NEW, PADDING = 640, 64, 2
QUEUE, MEAN_END, SIGMA = 256, 25, 0.8
NEAR = 1e-3  # difference of logits that rounding may turn around

Tokens = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Prompts, the tokens that each is answered with, and how many are decoded side by side."""

    prompts: list[list[int]]
    ends: list[int]
    rows: int
    temperature: float

    @property
    def tokens(self) -> int:
        """Tokens that a model must at least be run on: the last of a response is not read."""
        return sum(map(len, self.prompts)) + sum(self.ends) - len(self.ends)


def main() -> None:
    """Run the chosen settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy, tokens are compared; else sampled")
    options = parser.parse_args()
    rate = measuring.matrix_rate("cpu", torch.float32)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            save_model(random_model(size), Path(name))
            for setting in options.settings:
                workload = build_workload(setting, ROWS[size], options.temperature)
                contestants = build_contestants(Path(name), workload)
                exact = load_language_model(Path(name)).double().eval()
                rounds = run_rounds(contestants, workload, options.rounds, exact)
                row = {"bench": f"generation {setting}", "size": size}
                report(row, workload, rounds, measuring.matrix_weights(Path(name)) / rate)


def random_model(size: str) -> Any:
    """A Llama with random weights; larger than as drawn, so that which token is likeliest does not hang on rounding."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": PADDING}
    model = build_language_model({**SIZES[size], **special, "vocab_size": VOCABULARY})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def build_workload(setting: str, rows: int, temperature: float) -> Workload:
    """`full` or `ends`, described above; its prompts come with the shortest first."""
    count = rows if setting == "full" else QUEUE
    ends = [MOST_NEW] * rows if setting == "full" else measuring.log_normal_ends(QUEUE, MEAN_END, MOST_NEW, SIGMA)
    return Workload(sorted(measuring.random_prompts(count), key=len), ends, rows, temperature)


def build_contestants(checkpoint: Path, workload: Workload) -> dict[str, Callable[[], Tokens]]:
    """Functions that generate the workload's responses, by name."""
    from transformers import AutoModelForCausalLM

    mine = load_language_model(checkpoint).eval()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    return {
        "alignment": partial(generate_ours, mine, workload),
        "transformers dynamic": partial(generate_theirs, theirs, workload, None),
        "transformers static": partial(generate_theirs, theirs, workload, "static"),
    }


def generate_ours(model: Any, workload: Workload) -> Tokens:
    """Responses of the engine: a request for each prompt."""
    engine = DecodingEngine(model, max_rows=workload.rows)
    numbers = [
        engine.add(DecodingRequest(prompt, SamplingConfig(end, workload.temperature), row=i))
        for i, (prompt, end) in enumerate(zip(workload.prompts, workload.ends, strict=True))
    ]
    found = engine.run()
    return [found[number].tokens for number in numbers]


def generate_theirs(model: Any, workload: Workload, cache: str | None) -> Tokens:
    """Responses of transformers, one batch of similar prompts after the other, multiplied as PyTorch itself does."""
    responses = []
    for start in range(0, len(workload.prompts), workload.rows):
        ends = workload.ends[start : start + workload.rows]
        ids, mask = measuring.padded(workload.prompts[start : start + workload.rows], "left")
        width = ids.shape[1]
        settings: dict[str, Any] = {"do_sample": workload.temperature > 0, "eos_token_id": None}
        if workload.temperature:
            settings |= {"temperature": workload.temperature, "top_k": 0}
        if min(workload.ends) < MOST_NEW:
            last = width + torch.tensor(ends)
            settings["stopping_criteria"] = [lambda ids, scores, last=last, **_: ids.shape[1] >= last]
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MOST_NEW, pad_token_id=PADDING,
            cache_implementation=cache, **settings,
        )  # fmt: skip
        responses += [row[:end] for row, end in zip(written[:, width:].tolist(), ends, strict=True)]
    return responses


def run_rounds(
    contestants: dict[str, Callable[[], Tokens]], workload: Workload, rounds: int, model: Any
) -> dict[str, list[tuple[float, int]]]:
    """Seconds and near ties of every contestant's rounds, after one that is not counted; model: in float64, to tell ties.

    Raises:
        SystemExit: greedy tokens differ.
    """
    wanted: Tokens = []

    def measured(name: str, generate: Callable[[], Tokens]) -> tuple[float, int]:
        nonlocal wanted
        began = time.perf_counter()
        tokens = generate()
        seconds = time.perf_counter() - began
        if [len(row) for row in tokens] != workload.ends:
            raise SystemExit(f"{name}: responses have other lengths than asked for")
        wanted = tokens if name == "alignment" else wanted
        pairs = list(zip(workload.prompts, wanted, tokens, strict=True))
        different = [(prompt, one, other) for prompt, one, other in pairs if one != other]
        wrong = [] if workload.temperature else [each for each in different if not is_near_tie(model, *each)]
        if wrong:
            raise SystemExit(f"{name}: {len(wrong)} of {len(tokens)} greedy responses differ from ours")
        return seconds, len(different)

    calls = {name: partial(measured, name, generate) for name, generate in contestants.items()}
    return measuring.take_turns(calls, rounds, warm_up=1)


def is_near_tie(model: Any, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Whether the first tokens in which two greedy responses differ have nearly the same logit; model: in float64."""
    first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    logits = model.prefill(Ragged.build([prompt + one[:first]]), model.new_cache(1, len(prompt) + first))[0]
    return abs(float(logits[one[first]] - logits[other[first]])) < NEAR


def report(
    row: dict[str, Any], workload: Workload, measured: dict[str, list[tuple[float, int]]], weight_seconds: float
) -> None:
    """One line for each contestant; weight_seconds: weights of the model over operations a second."""
    row |= {"rows": workload.rows, "threads": torch.get_num_threads(), "temperature": workload.temperature}
    ours = [seconds for seconds, _ in measured["alignment"]]
    for name, rounds in measured.items():
        seconds, ties = zip(*rounds, strict=True)
        median = statistics.median(seconds)
        line = {**row, "impl": name, "rounds": len(rounds), **measuring.seconds_row(seconds)}
        line["new_tokens_per_second"] = round(sum(workload.ends) / median, 1)
        line["mfu"] = round(2 * workload.tokens * weight_seconds / median, 3)
        if name != "alignment":
            ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, ours, strict=True))
            line |= {"ratio": round(ratio, 3), "near_ties": max(ties)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

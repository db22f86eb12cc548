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
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import SIZES
from bench_model import matrix_rate

from alignment.generation.engine import DecodingEngine
from alignment.generation.requests import DecodingRequest
from alignment.generation.sampling import SamplingConfig
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from alignment.ragged import Ragged

ROWS = {"nano": 64, "micro": 16}
VOCABULARY, MOST_NEW, PADDING = 640, 64, 2
QUEUE, MEAN_END, SIGMA = 256, 25, 0.8
NEAR = 1e-3  # difference of logits that rounding may turn around

Generate = Callable[[], list[list[int]]]


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
    parser.add_argument("--settings", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy, tokens are compared; else sampled")
    options = parser.parse_args()
    rate = matrix_rate("cpu", torch.float32)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            save_model(random_model(size), Path(name))
            for setting in options.settings:
                workload = WORKLOADS[setting](ROWS[size], options.temperature)
                contestants = build_contestants(Path(name), workload)
                exact = load_language_model(Path(name)).double().eval()
                report(size, setting, workload, run_rounds(contestants, workload, options.rounds, exact), rate)


def random_model(size: str) -> Any:
    """A Llama with random weights; larger than as drawn, so that which token is likeliest does not hang on rounding."""
    torch.manual_seed(0)
    config: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    config |= {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": PADDING,
        "tie_word_embeddings": True,
        **SIZES[size],
    }
    model = build_language_model(config | {"num_key_value_heads": config["num_attention_heads"]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def full(rows: int, temperature: float) -> Workload:
    """One batch without early ends."""
    return Workload(draw_prompts(rows), [MOST_NEW] * rows, rows, temperature)


def ends(rows: int, temperature: float) -> Workload:
    """A queue whose responses end at log-normal lengths; the mean is that after the cut."""
    generator = random.Random(1)
    normal = [generator.gauss(0, 1) for _ in range(QUEUE)]
    location, lengths = 0.0, [0]
    while statistics.mean(lengths) < MEAN_END:
        location += 0.005
        lengths = [min(MOST_NEW, max(1, round(math.exp(location + SIGMA * x)))) for x in normal]
    return Workload(draw_prompts(QUEUE), lengths, rows, temperature)


WORKLOADS: dict[str, Callable[[int, float], Workload]] = {"full": full, "ends": ends}


def draw_prompts(count: int) -> list[list[int]]:
    """Prompts of 16 to 64 tokens."""
    generator = random.Random(0)
    return [[generator.randrange(10, 600) for _ in range(generator.randint(16, 64))] for _ in range(count)]


def build_contestants(checkpoint: Path, workload: Workload) -> dict[str, Generate]:
    """What generates the workload's responses, by name."""
    from transformers import AutoModelForCausalLM

    mine = load_language_model(checkpoint).eval()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    return {
        "alignment": lambda: generate_ours(mine, workload),
        "transformers dynamic": lambda: generate_theirs(theirs, workload, None),
        "transformers static": lambda: generate_theirs(theirs, workload, "static"),
    }


def generate_ours(model: Any, workload: Workload) -> list[list[int]]:
    """Responses of the engine: a request for each prompt, shorter prompts first."""
    engine = DecodingEngine(model, max_rows=workload.rows)
    numbers = {}
    for i in by_length(workload.prompts):
        sampling = SamplingConfig(workload.ends[i], workload.temperature)
        numbers[i] = engine.add(DecodingRequest(workload.prompts[i], sampling, row=i))
    found = engine.run()
    return [found[numbers[i]].tokens for i in range(len(workload.prompts))]


def generate_theirs(model: Any, workload: Workload, cache: str | None) -> list[list[int]]:
    """Responses of transformers, one batch of similar prompts after the other, multiplied as PyTorch itself does."""
    order, responses = by_length(workload.prompts), {}
    for start in range(0, len(order), workload.rows):
        batch = order[start : start + workload.rows]
        prompts = [workload.prompts[i] for i in batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lengths = torch.tensor([workload.ends[i] for i in batch])
        settings: dict[str, Any] = {"do_sample": workload.temperature > 0, "eos_token_id": None}
        if workload.temperature:
            settings |= {"temperature": workload.temperature, "top_k": 0}
        if min(workload.ends) < MOST_NEW:
            settings["stopping_criteria"] = [RowEnds(width, lengths)]
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MOST_NEW, pad_token_id=PADDING,
            cache_implementation=cache, **settings,
        )  # fmt: skip
        for i, row in zip(batch, written[:, width:].tolist(), strict=True):
            responses[i] = row[: workload.ends[i]]
    return [responses[i] for i in range(len(order))]


class RowEnds:
    """A stopping criterion of transformers: each row ends at a length of its own."""

    def __init__(self, width: int, lengths: torch.Tensor):
        self.ends = width + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Which rows have ended, [B]."""
        return input_ids.shape[1] >= self.ends


def by_length(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Indices of prompts, the shortest first."""
    return sorted(range(len(prompts)), key=lambda i: len(prompts[i]))


def run_rounds(
    contestants: dict[str, Generate], workload: Workload, rounds: int, model: Any
) -> dict[str, list[tuple[float, int]]]:
    """Seconds and near ties of every contestant's rounds, after one that is not counted; model: in float64, to tell ties.

    Raises:
        SystemExit: greedy tokens differ.
    """
    measured: dict[str, list[tuple[float, int]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        wanted = None
        for name, generate in contestants.items():
            began = time.perf_counter()
            tokens = generate()
            seconds = time.perf_counter() - began
            if [len(row) for row in tokens] != workload.ends:
                raise SystemExit(f"{name}: responses have other lengths than asked for")
            wanted = tokens if wanted is None else wanted
            different = [i for i, pair in enumerate(zip(wanted, tokens, strict=True)) if pair[0] != pair[1]]
            if workload.temperature == 0:
                wrong = [i for i in different if not is_near_tie(model, workload.prompts[i], wanted[i], tokens[i])]
                if wrong:
                    raise SystemExit(f"{name}: {len(wrong)} of {len(tokens)} greedy responses differ from ours")
            if number:
                measured[name].append((seconds, len(different)))
    return measured


def is_near_tie(model: Any, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Whether the first tokens in which two greedy responses differ have nearly the same logit; model: in float64."""
    first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    logits = model.prefill(Ragged.build([prompt + one[:first]]), model.new_cache(1, len(prompt) + first))[0]
    return abs(float(logits[one[first]] - logits[other[first]])) < NEAR


def report(
    size: str, setting: str, workload: Workload, measured: dict[str, list[tuple[float, int]]], rate: float
) -> None:
    """One line for each contestant."""
    weights = sum(parameter.numel() for parameter in random_model(size).parameters() if parameter.ndim == 2)
    ours = [seconds for seconds, _ in measured["alignment"]]
    for name, rounds in measured.items():
        seconds = [each for each, _ in rounds]
        median = statistics.median(seconds)
        row: dict[str, Any] = {"bench": f"generation {setting}", "impl": name, "size": size, "rows": workload.rows}
        row |= {"threads": torch.get_num_threads(), "temperature": workload.temperature, "rounds": len(rounds)}
        row |= {"seconds_median": median, "seconds_min": min(seconds), "seconds_max": max(seconds)}
        row["new_tokens_per_second"] = round(sum(workload.ends) / median, 1)
        row["mfu"] = round(2 * weights * workload.tokens / median / rate, 3)
        if name != "alignment":
            ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
            row |= {"ratio": round(statistics.median(ratios), 3), "near_ties": max(ties for _, ties in rounds)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

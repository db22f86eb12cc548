"""Attention below quadratic cost beside full attention: time and memory against length, and quality at equal training.

Cost is that of one encoder layer on the CPU, forward and backward over one document: processor time, the least of two, and the peak of
the tensors allocated (torch's profiler). The exponent p of cost ~ length^p is fitted by least squares to the logarithms.
Quality is the loss, nats, of an encoder that recalls the first tokens of a document at its end; all tokens are random, so
that guessing costs log(64) = 4.16. Every part trains on the same batches with the same AdamW.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ablate import Settings, heads_of, spread, update
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from alignment.config.load import packaged_folder
from alignment.files import write_json, write_text
from alignment.models.init_weights import InitSpec, initialize
from alignment.models.language_model import MaskedLanguageModel
from alignment.models.layers import AttentionSpec, BlockSpec, LayerNormSpec, LearnedPositionsSpec, PlainFeedForwardSpec
from alignment.models.layers.sparse import BlockSparseSpec
from alignment.models.transformer import TransformerSpec
from alignment.pipeline.stages import load_stage_file
from alignment.ragged import Ragged
from alignment.training.optim import build_optimizer, learning_rate_at

parts: Any = load_stage_file(packaged_folder("recipes") / "history/efficient.py")
LENGTHS = (512, 1024, 2048, 4096, 8192)
REPEATS = 2
VOCABULARY = 64  # kinds of tokens in documents; one more stands where the first ones are to be recalled
RECALLED = 8  # tokens
HELD_OUT = 64  # documents


@dataclass(frozen=True)
class Part:
    """A row: its label, (heads, head_dim, max_positions) -> its specification, and whether the fused kernel is left out."""

    label: str
    spec: Callable[[int, int, int], Any]
    unfused: bool = False


@dataclass(frozen=True)
class Found:
    """The measurements of a row: one for each length, and the loss for each seed."""

    name: str
    label: str
    lengths: Sequence[int]
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


def _full(heads: int, head_dim: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True, causal=False, window=window
    )


def _bigbird(heads: int, head_dim: int, longest: int) -> BlockSparseSpec:
    return BlockSparseSpec(_full(heads, head_dim), block=8, random=1, max_positions=longest, seed=0)


PARTS = {
    "full": Part("Full", lambda heads, width, longest: _full(heads, width)),
    "unfused": Part("Full, all scores in memory", lambda heads, width, longest: _full(heads, width), unfused=True),
    "window": Part("Window (16 to each side)", lambda heads, width, longest: _full(heads, width, window=17)),
    "linformer": Part(
        "Linformer (32 mixtures)", lambda heads, width, longest: parts.LinformerSpec(heads, width, 32, longest)
    ),
    "performer": Part("Performer (64 features)", lambda heads, width, longest: parts.PerformerSpec(heads, width, 64)),
    "nystrom": Part("Nyströmformer (32 landmarks)", lambda heads, width, longest: parts.NystromSpec(heads, width, 32)),
    "lsh": Part(
        "LSH (chunks of 16, 4 rounds)", lambda heads, width, longest: parts.LSHSpec(heads, width, 16, 4, longest)
    ),
    "bigbird": Part("BigBird (blocks of 8, 1 random)", _bigbird),
}


def run(names: Sequence[str], settings: Settings, output: Path) -> None:
    """Measure the rows, and write efficient.json and efficient.md as they come."""
    rows = []
    for name in names:
        found = Found(name, PARTS[name].label, LENGTHS)
        for length in LENGTHS:
            seconds, megabytes = cost(PARTS[name], settings.width, length)
            found.seconds.append(seconds)
            found.megabytes.append(megabytes)
        if not PARTS[name].unfused:  # the arithmetic is that of the fused one
            found.loss.extend(train(PARTS[name], settings, seed) for seed in range(settings.seeds))
        rows.append(found)
        print(" | ".join(cells(found)), flush=True)
        write_json(output / "efficient.json", {"settings": asdict(settings), "rows": [asdict(row) for row in rows]})
        write_text(output / "efficient.md", table(rows))
    print("\n" + table(rows))


def encoder(part: Part, settings: Settings, seed: int) -> MaskedLanguageModel:
    """An encoder for documents of `settings.tokens`, its weights fresh."""
    torch.manual_seed(seed)
    width, heads = settings.width, heads_of(settings.width)
    block = BlockSpec(
        part.spec(heads, width // heads, settings.tokens),
        PlainFeedForwardSpec(4 * width, "gelu", bias=True),
        LayerNormSpec(1e-5),
    )
    spec = TransformerSpec(
        VOCABULARY + 1, width, settings.tokens, (block,) * settings.layers, LayerNormSpec(1e-5), InitSpec(width**-0.5, width**-0.5),
        tied_head=True, positions=LearnedPositionsSpec(settings.tokens),
    )  # fmt: skip
    return initialize(MaskedLanguageModel(spec.build(), nn.Linear(width, VOCABULARY + 1, bias=False), config={}))


def cost(part: Part, width: int, length: int) -> tuple[float, float]:
    """Seconds, and megabytes at the peak, of one layer forward and backward over one document."""
    model = encoder(part, Settings(width=width, layers=1, tokens=length), seed=0).train()
    batch = Ragged.build([torch.randint(VOCABULARY, (length,)).tolist()])

    def once() -> None:
        model.trunk(batch).sum().backward()
        model.zero_grad()

    with sdpa_kernel(SDPBackend.MATH) if part.unfused else nullcontext():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            once()
        seconds = []
        for _ in range(REPEATS):
            began = time.process_time()
            once()
            seconds.append(time.process_time() - began)
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return min(seconds), peak / 1e6


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """p of cost ~ length^p, by least squares on the logarithms."""
    logs = (torch.tensor(list(values), dtype=torch.float64).log().tolist() for values in (lengths, costs))
    return statistics.linear_regression(*logs).slope


def recall(settings: Settings, count: int, generator: torch.Generator) -> Ragged:
    """Documents of random tokens whose last ones are the first ones again, masked and to be predicted."""
    rows = torch.randint(VOCABULARY, (count, settings.tokens), generator=generator)
    labels = rows[:, :RECALLED].flatten()
    rows[:, -RECALLED:] = VOCABULARY
    asked = [[False] * (settings.tokens - RECALLED) + [True] * RECALLED] * count
    return replace(Ragged.build(rows.tolist(), asked), labels=labels)


def train(part: Part, settings: Settings, seed: int) -> float:
    """Loss on documents that no seed trains on, after training."""
    model = encoder(part, settings, seed)
    optimizer = build_optimizer(model, settings.optim)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, settings.steps + 1):
        batch = recall(settings, settings.batch, generator)
        update(model, optimizer, batch, learning_rate_at(step, settings.optim, settings.steps))
    batch = recall(settings, HELD_OUT, torch.Generator().manual_seed(10_000))
    with torch.no_grad():
        return -model.eval()(batch=batch).log_probs.mean().item()


def cells(row: Found) -> list[str]:
    """The row of the table."""
    ends = [
        f"{values[0]:.{digits}f} / {values[-1]:.{digits}f} | {exponent(row.lengths, values):.2f}"
        for values, digits in ((row.seconds, 3), (row.megabytes, 0))
    ]
    return [row.label, *ends, spread(row.loss) if row.loss else "–"]


def table(rows: Sequence[Found]) -> str:
    """All rows in markdown."""
    ends = f"{LENGTHS[0]} / {LENGTHS[-1]:,} tokens"
    columns = ["attention", f"seconds, {ends}", "exponent", f"MB, {ends}", "exponent", "recall, nats"]
    head = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(cells(row))} |" for row in rows)]) + "\n"

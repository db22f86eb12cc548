"""Training of a system that translates, on each task anew, judged by exact match; the systems' pages call it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.files import write_json
from alignment.pipeline.stages import load_stage_file
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from alignment.statistics.winrate import win_rate

HERE = Path(__file__).parent
pairs: Any = load_stage_file(HERE / "pairs.py")
descent: Any = load_stage_file(HERE / "descent.py")
LETTERS = "abcdefghijklmnopqrst"


@dataclass(frozen=True)
class TranslationConfig(Settings):
    """Settings of one system on all tasks.

    Attributes:
        output: directory of `results.json`, and of `alignment.png` where the system has alignments.
        width: of all layers; the recipe's widths give the systems the same number of parameters.
        tasks: copy, reversal, transliteration; each is learned from fresh weights.
        lengths, longer: least and most letters of a source in training, and of the longer held-out sources.
        held_out: sources of each of the two tests.
        steps, batch_size, learning_rate, seed: of the training.
    """

    output: str
    width: PositiveInt
    tasks: list[Literal["copy", "reversal", "transliteration"]] = field(
        default_factory=lambda: ["copy", "reversal", "transliteration"]
    )
    lengths: tuple[PositiveInt, PositiveInt] = (3, 8)
    longer: tuple[PositiveInt, PositiveInt] = (9, 12)
    held_out: PositiveInt = 300
    steps: PositiveInt = 500
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 4e-3
    seed: NonNegativeInt = 0


def run(config: TranslationConfig, build: Callable[[int, int], nn.Module]) -> Path:
    """Train and judge a system on every task; write `results.json` and return its path.

    Args:
        build: (vocabulary, width) -> module: (source, before) -> logits, alignment or None.
    """
    results: dict[str, Any] = {"tasks": {}}
    maps = {}
    for task in config.tasks:
        torch.manual_seed(config.seed)
        model = build(pairs.VOCABULARY, config.width)
        started = time.process_time()
        loss = train(model, config, task)
        found = {"loss": loss, "seconds": time.process_time() - started}
        for name, lengths in (("held_out", config.lengths), ("longer", config.longer)):
            batch = pairs.sample_pairs(
                Random(f"{config.seed}/{task}/{name}"), task, lengths, config.held_out, held_out=True
            )
            right, alignment = judge(model, batch)
            found[name] = asdict(win_rate(right.float().tolist()))
            if alignment is not None:
                found[name] |= alignment_shares(alignment, batch)
                if name == "held_out":
                    maps[task] = (batch, alignment)
        results["tasks"][task] = found
        results["parameters"] = descent.parameter_count(model)
    results["seconds"] = sum(found["seconds"] for found in results["tasks"].values())
    if maps:
        draw(Path(config.output) / "alignment.png", maps)
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def train(model: nn.Module, config: TranslationConfig, task: str) -> float:
    """Teacher forcing on new pairs in every step; the cross-entropy of the last steps, nats per symbol."""
    rng = Random(f"{config.seed}/{task}")

    def loss_of(_: int) -> Tensor:
        batch = pairs.sample_pairs(rng, task, config.lengths, config.batch_size, held_out=False)
        logits, _ = model(batch.source, batch.before)
        return F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=pairs.PAD)

    model.train()
    return descent.descend(loss_of, [{"params": model.parameters()}], config.steps, learning_rate=config.learning_rate)


@torch.no_grad()
def judge(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
    """True for each source whose greedy translation is the target, [B], and the alignment to the true target [B, T, S]."""
    model.eval()
    written = torch.full_like(batch.target[:, :1], pairs.START)
    for _ in range(batch.target.shape[1]):  # what comes after the end is not compared
        logits, _ = model(batch.source, written)
        written = torch.cat([written, logits[:, -1].argmax(-1, keepdim=True)], 1)
    right = (written[:, 1:] == batch.target) | (batch.target == pairs.PAD)
    return right.all(1), model(batch.source, batch.before)[1]


def alignment_shares(alignment: Tensor, batch: Any) -> dict[str, float]:
    """Share of the attention within one place of each target letter's origin, and the same share of uniform attention.

    Of a copy the origins are the diagonal, of a reversal the anti-diagonal.
    """
    places = torch.arange(batch.source.shape[1])
    near = (places - batch.origin[..., None]).abs() <= 1  # [B, T, S]
    source_mask, letters = (batch.source != pairs.PAD)[:, None], batch.origin >= 0
    uniform = (near & source_mask).sum(-1) / source_mask.sum(-1)
    return {
        "alignment_share": float((alignment * near).sum(-1)[letters].mean()),
        "uniform_share": float(uniform[letters].mean()),
    }


def draw(path: Path, maps: dict[str, tuple[Any, Tensor]]) -> None:
    """The alignment of the longest source of each task: a row for each target letter, a column for each source letter."""
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(3.4 * len(maps), 4.2), layout="constrained")
        for axes, (task, (batch, alignment)) in zip(
            figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True
        ):
            row = int((batch.source != pairs.PAD).sum(1).argmax())
            source, target = (
                [LETTERS[token - pairs.LETTERS[0]] if token in pairs.LETTERS else "." for token in tokens if token]
                for tokens in (batch.source[row].tolist(), batch.target[row].tolist())
            )
            axes.imshow(alignment[row, : len(target), : len(source)].numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_xticks(range(len(source)), source)
            axes.set_yticks(range(len(target)), target)
            axes.set(title=task, xlabel="source", ylabel="target")
            axes.xaxis.tick_top()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)

"""A small GPT trained on characters by a plain loop and by our stack, taking turns: loss and time of both in one run.

    python scripts/nanogpt.py [--threads 1] [--seeds 3] [--steps 2000] [--text FILE] [--output runs/nanogpt]

The settings are those that nanoGPT's README gives for a CPU (`shakespeare_char`: 4 layers, 4 heads, width 128, windows of 64
characters, 12 a batch, 2,000 updates, no dropout), for which it names a validation loss of 1.88 and three minutes. `Plain`
is a decoder of that architecture with nothing but torch. Both begin with the same weights, see the same windows in the same
order and the same learning rates; blocks of updates alternate, so that a busy machine is busy for both. A time has
everything from the windows' places to the changed weights; evaluation is not in it. Milliseconds are the processor's time, of
all threads, which other programs on the machine lengthen less than the clock's; minutes are the clock's. The validation
loss is over all windows of the last tenth.

Source: github.com/karpathy/nanoGPT (README and config/train_shakespeare_char.py); Radford et al. 2019.
"""

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ablate import build
from torch import Tensor, nn

from alignment.algorithms.sft import language_loss_fn
from alignment.config.load import data_folder
from alignment.files import write_json
from alignment.models.init_weights import InitSpec
from alignment.models.language_model import LanguageModel
from alignment.models.layers import AttentionSpec, BlockSpec, LayerNormSpec, LearnedPositionsSpec, PlainFeedForwardSpec
from alignment.models.transformer import TransformerSpec
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig
from alignment.training.engine import Engine
from alignment.training.optim import learning_rate_at
from alignment.training.terms import Term

WIDTH, LAYERS, HEADS, WINDOW, BATCH = 128, 4, 4, 64, 12
OPTIM = OptimConfig(
    1e-3, weight_decay=0.1, betas=(0.9, 0.99), warmup_steps=100, min_learning_rate_ratio=0.1, max_grad_norm=1.0
)


# The plain side


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); query, key and value are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        rows, length, _ = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, H, T, D / H] each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Plain(nn.Module):
    """A decoder over rectangles of tokens [B, T]; its head is the token table."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the labels, nats."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def copy_weights(plain: Plain, ours: LanguageModel) -> None:
    """Give the plain decoder our weights."""
    trunk: Any = ours.trunk
    pairs: list[tuple[Any, Any]] = [
        (plain.tokens, trunk.embed),
        (plain.positions, trunk.positions),
        (plain.norm, trunk.norm),
    ]
    blocks: list[Any] = list(plain.blocks)
    for theirs, own in zip(blocks, trunk.blocks, strict=True):
        attention, feedforward = own.attention, own.feedforward
        joined = torch.cat([part.weight for part in (attention.query, attention.key, attention.value)])
        theirs.query_key_value.weight.copy_(joined)
        pairs += [(theirs.norm_1, own.attention_norm), (theirs.norm_2, own.feedforward_norm)]
        pairs += [(theirs.output, attention.output), (theirs.up, feedforward.up), (theirs.down, feedforward.down)]
    for theirs, own in pairs:
        theirs.weight.copy_(own.weight)


# Both sides as functions


@dataclass(frozen=True)
class Side:
    """One implementation: an update on the windows at some places of the text, and the loss of windows [n, T + 1]."""

    update: Callable[[list[int], int], float]
    loss: Callable[[Tensor], float]
    parameters: int


def plain_side(plain: Plain, text: Tensor, steps: int) -> Side:
    """The plain decoder with torch's AdamW as it comes."""
    weights = list(plain.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, OPTIM.learning_rate, OPTIM.betas)

    def update(places: list[int], step: int) -> float:
        windows = torch.stack([text[place : place + WINDOW + 1] for place in places])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, OPTIM, steps)
        loss = plain(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, OPTIM.max_grad_norm)
        optimizer.step()
        return loss.item()

    return Side(update, lambda windows: plain(windows[:, :-1], windows[:, 1:]).item(), sum(map(Tensor.numel, weights)))


def our_side(model: LanguageModel, text: Tensor, steps: int) -> Side:
    """Our model, and the engine that every stage trains with; logs and checkpoints are off."""
    engine = Engine(model.train(), OPTIM, TrainingConfig(batch_size=BATCH, max_steps=steps), total_steps=steps)
    loss_fn = language_loss_fn(engine.model)

    def update(places: list[int], step: int) -> float:
        windows = torch.stack([text[place : place + WINDOW + 1] for place in places])
        return engine.update(Term([batch_of(windows)], loss_fn))["loss"]

    def loss(windows: Tensor) -> float:
        return -model(batch=batch_of(windows)).log_probs.mean().item()

    return Side(update, loss, sum(map(Tensor.numel, model.parameters())))


def batch_of(windows: Tensor) -> Ragged:
    """Windows [B, T + 1] as documents of T tokens, behind each of which the next character is predicted."""
    batch = Ragged.build(windows[:, :-1].tolist())
    count = windows[:, 1:].numel()
    rows = torch.arange(len(windows)).repeat_interleave(WINDOW)
    return replace(
        batch,
        target_index=torch.arange(count) + 1,
        target_rows=rows,
        labels=windows[:, 1:].flatten(),
        weight=float(count),
    )


def gpt_spec(vocabulary: int) -> TransformerSpec:
    """The same architecture in our terms."""
    attention = AttentionSpec(HEADS, HEADS, WIDTH // HEADS, (WIDTH // HEADS) ** -0.5, bias=False, output_bias=False)
    norm = LayerNormSpec(1e-5, bias=False)
    block = BlockSpec(attention, PlainFeedForwardSpec(4 * WIDTH, "gelu", bias=False), norm)
    init = InitSpec(std=0.02, residual_std=0.02 / (2 * LAYERS) ** 0.5)
    return TransformerSpec(
        vocabulary, WIDTH, WINDOW, (block,) * LAYERS, norm, init, tied_head=True, positions=LearnedPositionsSpec(WINDOW)
    )


# The measurement


def measure(text: str, *, steps: int, block: int, seed: int) -> dict[str, dict[str, Any]]:
    """Weights, milliseconds of an update by block, seconds, first and validation loss of both sides."""
    kinds = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([kinds[character] for character in text])
    training, held_out = ids.split([len(ids) * 9 // 10, len(ids) - len(ids) * 9 // 10])
    model, plain = build(gpt_spec(len(kinds)), seed), Plain(len(kinds))
    copy_weights(plain, model)
    sides = {"ours": our_side(model, training, steps), "plain": plain_side(plain, training, steps)}
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(training) - WINDOW, (steps, BATCH), generator=generator).tolist()
    found: dict[str, dict[str, Any]] = {
        name: {"parameters": side.parameters, "milliseconds": [], "seconds": 0.0} for name, side in sides.items()
    }
    for turn, start in enumerate(range(0, steps, block)):
        own = range(start, min(start + block, steps))
        for name in sorted(sides, reverse=bool(turn % 2)):  # who goes first alternates, too
            began, worked = time.perf_counter(), time.process_time()
            losses = [sides[name].update(places[step], step + 1) for step in own]
            found[name]["milliseconds"].append(1000 * (time.process_time() - worked) / len(own))
            found[name]["seconds"] += time.perf_counter() - began
            found[name].setdefault("first_loss", losses[0])
    windows = held_out[: (len(held_out) - 1) // WINDOW * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW)
    with torch.no_grad():
        for name, side in sides.items():
            parts = [(side.loss(part), len(part)) for part in windows.split(64)]
            found[name]["validation_loss"] = sum(loss * count for loss, count in parts) / len(windows)
    return found


def report(runs: list[dict[str, dict[str, Any]]]) -> str:
    """The table: medians over all blocks, the smallest and the largest; validation losses of every seed."""
    lines = [
        "| | weights | processor ms an update, median | blocks, least to most | minutes for all | validation loss |",
        "|---|" + "---|" * 5,
    ]
    for name in runs[0]:
        blocks = [value for run in runs for value in run[name]["milliseconds"]]
        whole = statistics.median(run[name]["seconds"] for run in runs) / 60
        losses = ", ".join(f"{run[name]['validation_loss']:.4f}" for run in runs)
        lines.append(
            f"| {name} | {runs[0][name]['parameters']:,} | {statistics.median(blocks):.2f} | {min(blocks):.2f} to "
            f"{max(blocks):.2f} | {whole:.2f} | {losses} |"
        )
    pairs = [
        pair for run in runs for pair in zip(run["plain"]["milliseconds"], run["ours"]["milliseconds"], strict=True)
    ]
    rates = sorted(plain / ours for plain, ours in pairs)
    low, high = rates[len(rates) // 10], rates[-1 - len(rates) // 10]
    return "\n".join(lines) + (
        f"\n\nplain over ours, block by block: {statistics.median(rates):.3f} (four fifths of them {low:.3f} to {high:.3f})"
    )


def main() -> None:
    """Print a line of JSON for each seed and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=data_folder() / "tinyshakespeare" / "train.txt.gz")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--block", type=int, default=50, help="updates of a turn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/nanogpt"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = arguments.text.read_bytes()
    text = (gzip.decompress(data) if arguments.text.suffix == ".gz" else data).decode("utf-8")
    runs = []
    for seed in range(arguments.seeds):
        runs.append(measure(text, steps=arguments.steps, block=arguments.block, seed=seed))
        print(json.dumps({"seed": seed, "threads": arguments.threads, **runs[-1]}), flush=True)
        write_json(arguments.output / f"threads_{arguments.threads}.json", runs)
    print("\n" + report(runs))


if __name__ == "__main__":
    main()

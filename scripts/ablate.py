"""Train the same small decoder with one part exchanged at a time, and print what each costs and gains.

    python scripts/ablate.py [--rows vanilla swiglu rope] [--steps 2000] [--seeds 3] [--text FILE] [--output runs/ablate]

One text, character by character, its last tenth held out; the same windows in the same order, the same AdamW and the same
seeds in every row. Loss is nats per character on the held-out part, after an eighth of the steps and at the end, the mean
over seeds with their standard deviation. Operations are one forward's, per token, counted from the specification; steps/s is
one over the median step of this machine. Rows are written as they come, to ablation.json and ablation.md.
Nothing is tuned per row: a part that wants another learning rate looks worse here than it is. Rows: ablate_rows.py.
"""

import argparse
import gzip
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from ablate_rows import ROWS, Row, heads_of, vanilla
from torch import Tensor, nn

from alignment.analysis import forward_operations
from alignment.config.load import data_folder
from alignment.files import write_json, write_text
from alignment.models.init_weights import initialize
from alignment.models.language_model import LanguageModel
from alignment.models.transformer import TransformerSpec
from alignment.ragged import Ragged
from alignment.training.optim import OptimConfig, build_optimizer, learning_rate_at

EVALUATED = 256  # documents of the held-out part, spread evenly; fewer where it is shorter


@dataclass(frozen=True)
class Settings:
    """What all rows have in common; shape and length of training are nanoGPT's for a CPU."""

    steps: int = 2000
    seeds: int = 3
    width: int = 128
    layers: int = 4
    batch: int = 12  # documents
    tokens: int = 64  # of a document
    learning_rate: float = 1e-3
    device: str = "cpu"

    @property
    def optim(self) -> OptimConfig:
        """AdamW and its schedule."""
        return OptimConfig(
            self.learning_rate, weight_decay=0.1, betas=(0.9, 0.99), warmup_steps=self.steps // 20,
            min_learning_rate_ratio=0.1,
        )  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of its characters: what is trained on, and documents held out."""

    training: Tensor
    held_out: list[list[int]]
    vocabulary: int


@dataclass(frozen=True)
class Result:
    """One row of the table; a value per seed where there are several."""

    name: str
    label: str
    parts: tuple[str, ...]
    parameters: int
    operations_per_token: float
    steps_per_second: list[float] = field(default_factory=list)
    early_loss: list[float] = field(default_factory=list)
    final_loss: list[float] = field(default_factory=list)


def main() -> None:
    arguments, settings = read_arguments()
    corpus = read_corpus(arguments.text, settings.tokens)
    held_out = sum(map(len, corpus.held_out)) - len(corpus.held_out)
    print(f"{len(corpus.training)} characters to train on, {held_out} to predict held out, {corpus.vocabulary} kinds")
    results: list[Result] = []
    for name in arguments.rows:
        results.append(measure(ROWS[name], corpus, settings))
        print(line(results[-1]), flush=True)
        about = {"text": str(arguments.text), "characters": len(corpus.training), "held_out": held_out}
        write(results, {**about, **asdict(settings), "optim": asdict(settings.optim)}, arguments.output)
    print("\n" + table(results))


def read_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line, checked."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=data_folder() / "tinyshakespeare" / "train.txt.gz")
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    for name in ("steps", "seeds", "width", "layers", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"))
    arguments = parser.parse_args()
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    if min(settings.steps, settings.seeds, settings.batch) < 1 or settings.tokens < 8:
        parser.error("--steps, --seeds and --batch must be at least 1, --tokens at least 8")
    if settings.layers < 2 or settings.layers % 2:
        parser.error(f"--layers {settings.layers}: give an even number, for one row halves it")
    if settings.width < 32 or settings.width % (2 * heads_of(settings.width)):
        parser.error(f"--width {settings.width}: give at least 32, a multiple of {2 * heads_of(settings.width)}")
    if not arguments.text.is_file():
        parser.error(f"{arguments.text} is not there; set ALIGNMENT_DATA, or give --text FILE")
    return arguments, settings


def read_corpus(path: Path, tokens: int) -> Corpus:
    """Read a text, plain or gzipped."""
    data = path.read_bytes()
    return corpus_of((gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8"), tokens)


def corpus_of(text: str, tokens: int) -> Corpus:
    """The first nine tenths to train on; of the last tenth whole documents of `tokens`, at most 256, spread evenly."""
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([characters[character] for character in text])
    cut = len(ids) * 9 // 10
    training, rest = ids[:cut], ids[cut:]
    count = len(rest) // tokens
    if count < 1 or len(training) <= tokens:
        raise SystemExit(f"the text has {len(text)} characters; its last tenth must hold {tokens}")
    chosen = torch.linspace(0, count - 1, min(count, EVALUATED)).long()
    return Corpus(training, rest[: count * tokens].view(count, tokens)[chosen].tolist(), len(characters))


def measure(row: Row, corpus: Corpus, settings: Settings) -> Result:
    """One row of the table: the same training once per seed."""
    spec = row.change(vanilla(corpus.vocabulary, settings.width, settings.layers, settings.tokens))
    parameters = sum(parameter.numel() for parameter in build(spec, seed=0).parameters())
    operations = forward_operations(spec, settings.tokens)
    result = Result(row.name, row.label, row.parts, parameters, operations)
    for seed in range(settings.seeds):
        speed, early, final = train(spec, corpus, settings, seed)
        result.steps_per_second.append(speed)
        result.early_loss.append(early)
        result.final_loss.append(final)
    return result


def build(spec: TransformerSpec, seed: int) -> LanguageModel:
    """The decoder `spec` describes, with fresh weights."""
    torch.manual_seed(seed)
    head = nn.Linear(spec.output_width or spec.width, spec.vocabulary, bias=False)
    return initialize(LanguageModel(spec.build(), head, config={}))


def train(spec: TransformerSpec, corpus: Corpus, settings: Settings, seed: int) -> tuple[float, float, float]:
    """Steps a second (by the median step), held-out loss after an eighth of the steps, and at the end."""
    model = build(spec, seed).to(settings.device)
    optimizer = build_optimizer(model, settings.optim)
    seconds, early, early_step = [], float("nan"), max(1, settings.steps // 8)
    for step, batch in enumerate(batches(corpus.training, settings, seed), 1):
        began = time.perf_counter()
        update(model, optimizer, batch.to(settings.device), learning_rate_at(step, settings.optim, settings.steps))
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if step == early_step:
            early = held_out_loss(model, corpus, settings)
    return 1 / statistics.median(seconds), early, held_out_loss(model, corpus, settings)


def batches(training: Tensor, settings: Settings, seed: int) -> Iterator[Ragged]:
    """Windows at random places, the same for every row."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        places = torch.randint(len(training) - settings.tokens + 1, (settings.batch,), generator=generator)
        yield Ragged.build([training[place : place + settings.tokens].tolist() for place in places.tolist()])


def update(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Ragged, learning_rate: float) -> None:
    """One step of AdamW on the mean loss of a batch."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    output = model.train()(batch=batch)
    loss = -output.log_probs.mean()
    loss = loss if output.balance is None else loss + output.balance
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def held_out_loss(model: LanguageModel, corpus: Corpus, settings: Settings) -> float:
    """Mean over the held-out characters, nats, without what balances experts."""
    model.eval()
    rows, total, count = corpus.held_out, 0.0, 0
    for start in range(0, len(rows), settings.batch):
        log_probs = model(batch=Ragged.build(rows[start : start + settings.batch]).to(settings.device)).log_probs
        total, count = total - log_probs.double().sum().item(), count + len(log_probs)
    return total / count


COLUMNS = ("row", "parameters", "operations/token", "steps/s", "early loss", "final loss")


def cells(result: Result) -> list[str]:
    """What the table shows of a row."""
    return [
        result.label,
        f"{result.parameters:,}",
        f"{result.operations_per_token:,.0f}",
        f"{statistics.mean(result.steps_per_second):.1f}",
        spread(result.early_loss),
        spread(result.final_loss),
    ]


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; the mean alone where there is one."""
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def line(result: Result) -> str:
    """A row for the screen."""
    label, parameters, operations, speed, early, final = cells(result)
    return f"{label:62s} {parameters:>10s} {operations:>12s} {speed:>7s}/s  {early:>16s}  {final:>16s}"


def table(results: Sequence[Result]) -> str:
    """All rows in markdown."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(cells(result))} |" for result in results)]) + "\n"


def write(results: Sequence[Result], settings: dict[str, Any], output: Path) -> None:
    """Both files, whole each time."""
    write_json(output / "ablation.json", {"settings": settings, "rows": [summary(result) for result in results]})
    write_text(output / "ablation.md", table(results))


def summary(result: Result) -> dict[str, Any]:
    """A row as JSON: every seed's value, their mean and standard deviation (null for one seed)."""
    kept = asdict(result)
    for name in ("steps_per_second", "early_loss", "final_loss"):
        values = kept[name]
        std = statistics.stdev(values) if len(values) > 1 else None
        kept[name] = {"mean": statistics.mean(values), "std": std, "seeds": values}
    return kept


if __name__ == "__main__":
    main()

"""How far a recipe's results lie apart over seeds and runs, beside the intervals over prompts within one run.

    alignment run quickstart seed=1 --output runs/seed-1        # one run for each seed, or several of the same seed
    python scripts/spread.py runs/seed-0 runs/seed-1 runs/seed-2 [--output runs/spread.json]

Prints Markdown: each policy's figures, what the training stages ended at, and seconds and memory; every figure as its mean,
its smallest and largest value over the runs, and the value of each run in the order given. Runs nothing.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from alignment.errors import UserError
from alignment.files import write_json
from alignment.pipeline.recipe import flatten_numbers, read_json, read_metric

POLICY = ("win_rate", "gold", "proxy", "kl", "language_loss", "response_tokens", "ended_share")
Line = Literal["first", "last", "max"]
CURVES: dict[str, tuple[Line, ...]] = {  # column of metrics.jsonl -> which of its lines
    "loss": ("first", "last"), "held_out_loss": ("last",), "held_out_accuracy": ("last",), "accuracy": ("last",),
    "score": ("first", "last"), "gold_score": ("first", "last"), "kl": ("last", "max"), "ended_share": ("last",),
    "pretrain_loss": ("first", "last"), "first_ratio_error": ("max",),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One number of a stage, a value per run, and the mean half width of its 95 % interval over prompts within one run."""

    stage: str
    metric: str
    values: list[float]
    half_width: float | None = None

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        within = "" if self.half_width is None else f"± {self.half_width:.4g}"
        spread = (f"{x:.4g}" for x in (fmean(self.values), min(self.values), max(self.values)))
        return self.stage, self.metric, *spread, within, " · ".join(f"{x:.4g}" for x in self.values)


def main() -> None:
    """Read the runs named on the command line and print their spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of one recipe")
    parser.add_argument("--output", type=Path, help="the same as JSON")
    arguments = parser.parse_args()
    figures = read_figures(arguments.runs)
    head = ("stage", "metric", "mean", "smallest", "largest", "95 % over prompts", "each run")
    for row in (head, ("---",) * len(head), *(figure.row for figure in figures)):
        print(f"| {' | '.join(row)} |")
    if arguments.output is not None:
        write_json(arguments.output, {"runs": list(map(str, arguments.runs)), "figures": list(map(asdict, figures))})


def read_figures(runs: Sequence[Path]) -> list[Figure]:
    """Every figure that all runs have.

    Raises:
        UserError: a directory that no recipe wrote, or one whose stages are not those of the first.
    """
    stages = [read_json(run / "stages.json") for run in runs]
    for run, found in zip(runs, stages, strict=True):
        if not found:
            raise UserError(f"{run}: no stages.json here; give the --output of `alignment run`")
        if list(found) != list(stages[0]):
            raise UserError(f"{run}: has other stages than {runs[0]}; give finished runs of one recipe")
    figures = []
    for stage in stages[0]:
        figures += [*results(runs, stage), *curves(runs, stage)]
        for metric in ("seconds", "process_peak_megabytes"):  # up to the end of the stage
            if all(metric in found[stage] for found in stages):
                figures.append(Figure(stage, metric, [float(found[stage][metric]) for found in stages]))
    return figures


def results(runs: Sequence[Path], stage: str) -> Iterator[Figure]:
    """Figures of a stage's results.json; of a comparison of policies, those of each policy."""
    found = [flatten_numbers(shown(read_json(run / stage / "results.json"))) for run in runs]
    for metric in found[0]:
        prefix, _, last = metric.rpartition(".")
        if last in ("low", "high", "n", "wins", "losses", "ties") or not all(metric in each for each in found):
            continue
        bounds = [(each.get(f"{prefix}.low"), each.get(f"{prefix}.high")) for each in found]
        widths = [high - low for low, high in bounds if low is not None and high is not None]
        interval = fmean(widths) / 2 if last == "rate" and widths else None
        yield Figure(stage, metric, [each[metric] for each in found], interval)


def shown(content: dict[str, Any]) -> dict[str, Any]:
    """The figures that are worth a line: of a comparison of policies no samples and no parts of the gold reward."""
    if "models" not in content:
        return content
    kept = {}
    for name, model in content["models"].items():
        kept[name] = {key: model[key] for key in POLICY if model.get(key) is not None}
        if "gold" in kept[name]:
            kept[name]["gold"] = {"total": model["gold"]["total"]}
    return {"models": kept}


def curves(runs: Sequence[Path], stage: str) -> Iterator[Figure]:
    """First, last or largest values of what a training stage logged."""
    for metric, lines in CURVES.items():
        for line in lines:
            values = [read_metric(run / stage, metric, line) for run in runs]
            if None not in values:
                yield Figure(stage, f"{metric}, {line}", [value for value in values if value is not None])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error

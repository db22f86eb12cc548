"""How far a recipe's results lie apart over seeds and runs, beside the intervals over prompts within one run.

    alignment run quickstart seed=1 --output runs/seed-1        # one run for each seed, or several of the same seed
    python scripts/spread.py runs/seed-0 runs/seed-1 runs/seed-2 [--output runs/spread.json]

Prints Markdown: each policy's figures, what the training stages ended at, and seconds and memory; every figure as its mean,
its smallest and largest value over the runs, and the value of each run in the order given. A second table has each policy's
win rate with one 95 % interval over prompts and seeds, each run being a seed: of runs that judged the same prompts that of
`alignment.evaluation.seeds_win_rate`, from the verdicts in judgments.jsonl; of runs with prompts of their own Student's t of
the runs' rates. Runs nothing.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError
from alignment.evaluation import SeedsWinRate, merge_orders, read_judgments, seeds_win_rate, win_rate
from alignment.files import hash_of, write_json
from alignment.pipeline.recipe import flatten_numbers, read_json, read_metric
from alignment.statistics.seeds import crossed_interval

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
    rates = seeds_rates(arguments.runs)
    if rates:
        head = (
            "stage",
            "policy",
            "win rate",
            "95 % over prompts and seeds",
            "deviation of seeds",
            "prompts",
            "each seed",
        )
        print()
        for row in (head, ("---",) * len(head), *(rate_row(*key, rate) for key, rate in rates.items())):
            print(f"| {' | '.join(row)} |")
    if arguments.output is not None:
        content = {"runs": list(map(str, arguments.runs)), "figures": list(map(asdict, figures))}
        write_json(
            arguments.output, content | {"win_rates": {": ".join(key): asdict(own) for key, own in rates.items()}}
        )


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


def seeds_rates(runs: Sequence[Path]) -> dict[tuple[str, str], SeedsWinRate]:
    """Win rate of each policy of each stage over prompts and seeds, the runs being the seeds.

    `prompts` is 0 where each run has its own. Why there is none is said on standard error.
    """
    rates: dict[tuple[str, str], SeedsWinRate] = {}
    for stage in read_json(runs[0] / "stages.json") if len(runs) > 1 else ():
        folders = [run / stage for run in runs]
        if not all((folder / "responses.jsonl").is_file() for folder in folders):
            continue
        prompts = [[row.values["prompt"] for row in json_line_rows(folder / "responses.jsonl")] for folder in folders]
        if any(of_run != prompts[0] for of_run in prompts):
            rates |= {(stage, policy): rate for policy, rate in rates_of_own_prompts(folders).items()}
            continue
        verdicts = [read_verdicts(folder) for folder in folders]
        for policy in verdicts[0]:
            if all(policy in of_run for of_run in verdicts):
                table = np.array([of_run[policy][0] for of_run in verdicts], float)
                judged = ~np.isnan(table).any(0)
                tosses = sum(np.array(of_run[policy][1])[judged].sum() for of_run in verdicts)
                names = [hash_of(prompt) for prompt, known in zip(prompts[0], judged, strict=True) if known]
                rates[stage, policy] = seeds_win_rate(table[:, judged], inconsistent=int(tosses), clusters=names)
    return rates


def rates_of_own_prompts(folders: Sequence[Path]) -> dict[str, SeedsWinRate]:
    """Win rate of each policy over runs that differ in seed and in prompts: Student's t of their rates.

    The seeds' deviation is that of the rates without the mean variance over prompts within a run.
    """
    models = [read_json(folder / "results.json")["models"] for folder in folders]
    rates = {}
    for policy in models[0]:
        own = [model.get(policy, {}).get("win_rate") for model in models]
        if None in own or any("rates" in rate for rate in own):
            continue
        shares = [rate["rate"] for rate in own]
        variance = float(np.var(shares, ddof=1))
        parts = np.array([variance / len(shares), 0.0, 0.0])
        low, high, error, degrees = map(float, crossed_interval(fmean(shares), parts, (len(shares), len(shares))))
        left = variance - fmean((rate["standard_error"] or 0.0) ** 2 for rate in own)
        deviation = max(left, 0.0) ** 0.5
        rates[policy] = SeedsWinRate(fmean(shares), low, high, len(shares), 0, error, degrees, deviation, shares)
    return rates


def read_verdicts(folder: Path) -> dict[str, tuple[list[float | None], list[bool]]]:
    """Each policy's verdicts on the rows of responses.jsonl, both orders merged, and whether the orders contradict each other.

    A policy whose rate by these verdicts is not that of results.json is left out, and named on standard error.
    """
    log = folder / "judgments.jsonl"
    given = (
        {(hash_of(row.prompt), row.first, row.second): row.verdict for row in read_judgments(log)}
        if log.is_file()
        else {}
    )
    rows = [row.values or {} for row in json_line_rows(folder / "responses.jsonl")]
    results, verdicts = read_json(folder / "results.json"), {}
    for policy, model in results.get("models", {}).items():
        if "win_rate" not in model or "rates" in model["win_rate"]:
            continue
        texts = [(row["responses"][policy], row["responses"][results["baseline"]]) for row in rows]
        keys = [hash_of(row["prompt"]) for row in rows]
        first = [given.get((key, ours, theirs)) for key, (ours, theirs) in zip(keys, texts, strict=True)]
        second = [given.get((key, theirs, ours)) for key, (ours, theirs) in zip(keys, texts, strict=True)]
        merged = merge_orders(first, second).verdicts
        judged = [verdict for verdict in merged if verdict is not None]
        if not judged or abs(win_rate(judged).rate - model["win_rate"]["rate"]) > 1e-9:
            print(f"{folder}: judgments.jsonl has not the verdicts of {policy} in results.json", file=sys.stderr)
            continue
        tosses = [None not in pair and pair[0] != 1 - pair[1] for pair in zip(first, second, strict=True)]
        verdicts[policy] = merged, tosses
    return verdicts


def rate_row(stage: str, policy: str, rate: SeedsWinRate) -> tuple[str, ...]:
    """Cells of the second table, in percent."""
    shares = " · ".join(f"{100 * share:.1f}" for share in rate.rates)
    interval = f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
    prompts = f"{rate.prompts}, the same" if rate.prompts else "of each run"
    return stage, policy, f"{100 * rate.rate:.1f}", interval, f"{100 * rate.seed_deviation:.1f}", prompts, shares


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

"""The first sentences of a page: who won and how sure it is. Words alone; pages are in page.py and comparison.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.evaluation.diagnosis import PAIRS, SAMPLED, Diagnosis
from alignment.evaluation.report.html import format_cell, short_path
from alignment.evaluation.run_log import ENOUGH, RunLog, Series

HEADLINES = {  # stage -> metrics that say how well it went, the first one that is logged often enough counts
    **dict.fromkeys(SAMPLED, ("held_out_win_rate", "held_out_score", "score")),
    **dict.fromkeys((*PAIRS, "finetune"), ("held_out_accuracy", "accuracy")),
    "distill": ("held_out_reverse_kl", "reverse_kl", "loss"),
}
LOSSES = ("held_out_loss", "loss")  # of all other stages
LOWER_IS_BETTER = ("loss", "kl")
Rate = Mapping[str, float]


def overlap(one: Rate, other: Rate) -> bool:
    """True where two intervals (low, high) share a value, so that no difference is shown."""
    return one["low"] <= other["high"] and other["low"] <= one["high"]


def winner(results: Mapping[str, Any]) -> str:
    """Who won an evaluation of win rates and how sure that is; empty where nothing was judged."""
    rates = {name: model["win_rate"] for name, model in results.get("models", {}).items() if "win_rate" in model}
    if not rates:
        return ""
    best, *others = sorted(rates, key=lambda name: -rates[name]["rate"])
    rate, baseline = rates[best], results["baseline"]
    low, high = (f"{100 * rate[end]:.1f}" for end in ("low", "high"))
    share = f"{100 * rate['rate']:.1f} % of {rate['n']} prompts, ties counting half (95 %: {low} to {high})"
    if rate["low"] > 0.5:
        words = f"{best} is preferred to {baseline} in {share}"
    elif rate["high"] < 0.5:
        words = f"{baseline} is preferred to {best}, which wins {share}"
    else:
        words = f"Between {best} and {baseline} no difference is shown: {best} wins {share}, and that includes 50 %"
    if not others:
        return f"{words}."
    near = [name for name in others if overlap(rates[name], rate)]
    return f"{words}; of {len(rates)} policies it has the highest rate. {_near(best, near)}"


def _near(best: str, near: Sequence[str]) -> str:
    """The names whose intervals overlap that of the best one, in a sentence."""
    if not near:
        return f"{best}'s interval overlaps none of the others'."
    if len(near) == 1:
        return f"{near[0]}'s and {best}'s intervals overlap: no difference between them is shown."
    return f"The intervals of {joined(near)} overlap {best}'s: no difference from it is shown."


def joined(names: Sequence[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# Runs


def headline(runs: Sequence[RunLog]) -> str | None:
    """The metric that says how well runs went: of those that all have, the first that is logged often enough to judge."""
    known = [set(HEADLINES.get(run.stage, LOSSES)) & run.series.keys() for run in runs]
    shared = [name for name in HEADLINES.get(runs[0].stage, LOSSES) if all(name in names for names in known)]
    enough = [name for name in shared if all(run.series_of(name) for run in runs)]
    return next(iter(enough or shared), None)


def end_interval(series: Series) -> dict[str, float] | None:
    """Mean of a metric's last window with the 95 % interval that the scatter of updates leaves; None of too few updates."""
    if len(series.values) < ENOUGH:
        return None
    error = 1.96 * series.noise / series.width**0.5
    return {"value": series.last, "low": series.last - error, "high": series.last + error}


def course(run: RunLog, metric: str) -> str:
    """A metric from its first to its last updates, in words."""
    name, series = metric.replace("_", " ").capitalize(), run.series[metric]
    if len(series.values) < ENOUGH:
        return f"{name} was {series.values[0]:.3g} first and {series.values[-1]:.3g} last."
    verb = "rose" if series.increases() else "fell" if series.decreases() else "went, within its noise,"
    windows = f"means of the first {min(10, series.width)} and the last {series.width} logged"
    return f"{name} {verb} from {series.first:.3g} to {series.last:.3g} ({windows})."


def account(run: RunLog, finished: int, findings: Sequence[Diagnosis]) -> str:
    """What a run trained, on what, how it ended, its headline metric, and what doctor found, in a few sentences."""
    start, rows = run.setting("policy") or "a new model", run.setting("data.train")
    on = f" on {short_path(rows)}" if isinstance(rows, str) else " on a mixture" if rows else ""
    last = max((series.steps[-1] for series in run.series.values()), default=0)
    end = (
        f"it finished after {finished} updates"
        if finished
        else f"it has not finished; the last logged update is {last}"
    )
    words = [f"{run.stage} trained {short_path(start)}{on}; {end}."]
    if metric := headline([run]):
        words.append(course(run, metric))
    if findings:
        words.append(f"Doctor found: {joined([each.symptom for each in findings])}.")
    elif last >= ENOUGH:
        words.append("Doctor found none of the usual failures.")
    return " ".join(words)


def better_run(runs: Mapping[str, RunLog], differing: Sequence[str]) -> str:
    """Which of several runs ends better in their headline metric, and whether the intervals overlap.

    Args:
        differing: keys of the settings that are not the same in all runs.
    """
    metric = headline(list(runs.values()))
    if metric is None:
        stages = joined(sorted({run.stage for run in runs.values()}))
        return f"No metric says which of these runs ({stages}) is better; compare their models by `alignment evaluate winrate`."
    name = metric.replace("_", " ")
    ends = {run: end_interval(log.series[metric]) for run, log in runs.items()}
    known = {run: end for run, end in ends.items() if end is not None}
    if len(known) < len(ends):
        return f"No difference in {name} is shown: it has fewer than {ENOUGH} logged values in a run, too few for an interval."
    held_out = metric.startswith("held_out") and all(log.setting("data.evaluation") for log in runs.values())
    measures = ("reward", "data.evaluation") if held_out else ("reward", "data.train", "data.evaluation")
    if scales := [key for key in differing if key.startswith(measures)]:
        return f"The runs do not measure {name} in the same way, so it says nothing about which is better: {joined(scales)} differ."
    sign = 1 if metric.rpartition("_")[2] in LOWER_IS_BETTER else -1
    best, *others = sorted(known, key=lambda run: sign * known[run]["value"])
    near = [run for run in others if overlap(known[run], known[best])]
    value, low, high = (format_cell(known[best][key]) for key in ("value", "low", "high"))
    end = f"{best} ends with the {'lowest' if sign > 0 else 'highest'} {name}, {value} (95 %: {low} to {high})."
    caution = "Intervals come from the scatter of updates within a run; runs of other seeds may end outside them."
    return f"{end} {_near(best, near)} {caution}"

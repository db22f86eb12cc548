"""The first sentences of a page: who won, and how sure it is. Words alone; pages are in page.py and comparison.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.reports.diagnosis import PAIRS, SAMPLED, diagnose
from alignment.reports.html import format_cell, short_path
from alignment.reports.run_log import ENOUGH, RunLog, Series

MAIN_METRICS = {  # stage -> metrics that say how well it went, the one that says most first; others have `LOSSES`
    **dict.fromkeys(SAMPLED, ("held_out_win_rate", "held_out_score", "score")),
    **dict.fromkeys((*PAIRS, "finetune"), ("held_out_accuracy", "accuracy")),
    "distill": ("reverse_kl",),
}
Results = Mapping[str, Any]  # of `evaluate winrate`, as in results.json
LOSSES = ("held_out_loss", "loss")


def joined(names: Sequence[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def preference_sentence(policy: str, rate: Mapping[str, float], baseline: str) -> str:
    """The preferred policy of two, in words and with the 95 % interval; no difference where that includes one half."""
    of_seeds = f" with {rate['seeds']} seeds each" if "seeds" in rate else ""
    share = (
        f"{100 * rate['rate']:.1f} % of {rate.get('prompts', rate['n'])} prompts{of_seeds}, ties counting half "
        f"(95 %: {100 * rate['low']:.1f} to {100 * rate['high']:.1f})"
    )
    if rate["low"] > 0.5:
        return f"{policy} is preferred to {baseline} in {share}"
    if rate["high"] < 0.5:
        return f"{baseline} is preferred to {policy}, which wins {share}"
    return f"Between {policy} and {baseline} no difference is shown: {policy} wins {share}, which includes 50 %"


def winner(results: Results) -> str:
    """Who won an evaluation of win rates and how sure that is; empty where nothing was judged."""
    rates = {name: model["win_rate"] for name, model in results.get("models", {}).items() if "win_rate" in model}
    best = max(rates, key=lambda name: rates[name]["rate"], default="")
    words = f"{preference_sentence(best, rates[best], results['baseline'])}." if rates else ""
    return (
        f"{words} Of {len(rates)} policies {best} has the highest rate. {overlaps(best, rates)}"
        if len(rates) > 1
        else words
    )


def overlaps(best: str, intervals: Mapping[str, Mapping[str, float]]) -> str:
    """The names whose intervals (low, high) share a value with that of the best one, so that no difference is shown."""
    low = intervals[best]["low"]
    high = intervals[best]["high"]
    near = [name for name, one in intervals.items() if one["low"] <= high and low <= one["high"] and name != best]
    return (
        f"No difference from {joined(near)} is shown: the intervals overlap."
        if near
        else "Its interval overlaps none of the others'."
    )


# Runs


def main_metric(runs: Sequence[RunLog]) -> str | None:
    """The metric that says how well runs went: of those that all have, the first logged often enough to judge."""
    of_all = set.intersection(*({*run.series} & {*MAIN_METRICS.get(run.stage, LOSSES)} for run in runs))
    names = [name for name in MAIN_METRICS.get(runs[0].stage, LOSSES) if name in of_all]
    return next((name for name in names if all(run.series_of(name) for run in runs)), names[0] if names else None)


def end_interval(series: Series) -> dict[str, float] | None:
    """Mean of a metric's last window with the 95 % interval from the scatter of updates; None of too few updates."""
    error = 1.96 * series.noise / series.width**0.5
    return (
        {"value": series.last, "low": series.last - error, "high": series.last + error}
        if len(series.values) >= ENOUGH
        else None
    )


def describe_run(run: RunLog) -> str:
    """A run in a few sentences: its start and rows, how it ended, its main metric, and what doctor found."""
    start = run.setting("policy") or "a new model"
    rows = run.setting("data.train")
    last = max((series.steps[-1] for series in run.series.values()), default=0)
    end = f"finished after {run.finished}" if run.finished else f"has not finished: there are {last}"
    symptoms = joined([finding.symptom for finding in diagnose(run)]) or (
        "none of the usual failures" if last >= ENOUGH else f"nothing, with fewer than {ENOUGH} updates to judge by"
    )
    return (
        f"{run.stage} trained {short_path(str(start))} on "
        f"{short_path(rows) if isinstance(rows, str) else 'several sources'}; it {end} updates. "
        f"{metric_change(run)}Doctor found {symptoms}."
    )


def metric_change(run: RunLog) -> str:
    """The main metric of a run from its first to its last updates, in words; empty where it has none."""
    metric = main_metric([run])
    if metric is None:
        return ""
    series = run.series[metric]
    verb = "rose" if series.increases() else "fell" if series.decreases() else "went, within its noise,"
    whole = (
        f"{verb} from {series.first:.3g} to {series.last:.3g} "
        f"(means of the first {min(10, series.width)} and the last {series.width} logged)"
    )
    few = f"was {series.first:.3g} first and {series.last:.3g} last"
    return f"{metric.replace('_', ' ').capitalize()} {whole if run.series_of(metric) else few}. "


def better_run(runs: Mapping[str, RunLog], differing: Sequence[str]) -> str:
    """The run of several that ends better in their main metric, and whether the intervals overlap.

    Args:
        differing: keys of the settings that are not the same in all runs.
    """
    metric = main_metric(list(runs.values()))
    if metric is None:
        return "No metric says which of these runs is better; compare their models by `alignment evaluate winrate`."
    known = {run: end for run, log in runs.items() if (end := end_interval(log.series[metric]))}
    name = metric.replace("_", " ")
    if len(known) < len(runs):
        return f"No difference in {name} is shown: a run has fewer than {ENOUGH} values of it, too few for an interval."
    held_out = metric.startswith("held_out") and all(log.setting("data.evaluation") for log in runs.values())
    measures = ("reward", "data.evaluation", *([] if held_out else ["data.train"]))
    if unlike := joined([key for key in differing if key.startswith(measures)]):
        return f"The runs differ in how {name} is measured ({unlike}), so it does not say which one is better."
    word, pick = ("lowest", min) if metric.endswith(("loss", "kl")) else ("highest", max)
    best = pick(known, key=lambda run: known[run]["value"])
    value, low, high = map(format_cell, known[best].values())
    symptoms = joined([finding.symptom for finding in diagnose(runs[best])])
    doubt = f"But doctor found {symptoms} in it, so read on. " if symptoms else ""
    return (
        f"{best} ends with the {word} {name}, {value} (95 %: {low} to {high}). {overlaps(best, known)} {doubt}"
        "Intervals come from the scatter of updates within a run; runs of other seeds may end outside them."
    )

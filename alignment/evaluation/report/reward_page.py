"""card.html: a reward model's card in one file that loads nothing else. The figures are computed in reward_card.py."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from alignment.evaluation.report.charts import Curve, path_chart, rate_chart
from alignment.evaluation.report.html import Chart, Row, Section, format_share, write_page

Card = Mapping[str, Any]  # a part of card.json

# Column of a table -> dotted key of the figures.
ACCURACY = {
    "accuracy": "accuracy", "always longer": "always_longer", "pairs": "accuracy.n", "prompts": "accuracy.prompts",
    "mean margin": "margin.mean", "deviation": "margin.deviation",
}  # fmt: skip
K_WAY = {
    "groups of K > 2": "groups", "picks a best one": "top_1", "low": "low", "high": "high", "by chance": "top_1_by_chance",
    "Kendall's tau": "kendall_tau_b",
}  # fmt: skip
CALIBRATION = {
    "ECE": "ece", "Brier": "brier", "temperature": "temperature", "ECE there": "calibrated.ece",
    "Brier there": "calibrated.brier",
}  # fmt: skip
BINS = {
    "predicted from": "low", "to": "high", "pairs": "pairs", "mean prediction": "predicted", "observed": "observed",
}  # fmt: skip
LENGTH = {
    "score per 100 tokens": "slope_per_100_tokens", "low": "low", "high": "high", "in deviations": "slope_in_deviations",
    "correlation": "correlation", "prefers the longer": "prefers_longer", "always longer": "always_longer",
    "accuracy, chosen longer": "chosen_longer", "accuracy, chosen shorter": "chosen_shorter",
}  # fmt: skip
ENSEMBLE = {
    "mean": "mean", "median": "median", "accuracy, members agree more": "accuracy_where_low",
    "accuracy, members agree less": "accuracy_where_high",
}  # fmt: skip
ROBUSTNESS = {
    "largest change": "largest", "in deviations of the scores": "largest_in_deviations", "mean change": "mean",
    "pairs that change order": "order_changes",
}  # fmt: skip
BEST_OF_N = {
    "KL bound": "kl", "true score": "gold", "low": "low", "high": "high", "gain over one": "gain", "gain, low": "gain_low",
    "gain, high": "gain_high", "reward model": "proxy", "prompts": "prompts",
}  # fmt: skip
FORMS = {
    "alone": "each text in a batch of its own",
    "other batches": "smaller batches",
    "reversed order": "the texts in reversed order",
    "padded right": "rectangles padded on the right",
    "padded left": "rectangles padded on the left",
}


def write_reward_page(path: Path, card: Card) -> Path:
    """Write a card as a self-contained HTML page and return its path. All text is escaped, and the page runs no script."""
    rate, model = card["accuracy"]["all"]["accuracy"], card["model"]
    trained = f", trained with {model['loss']}" if model["loss"] else ""
    summary = (
        f"Prefers the chosen response in {format_share(rate)} of {rate['n']} pairs. "
        f"A{'n' if model['architecture'] == 'encoder' else ''} {model['architecture']} of {model['parameters']:,} "
        f"parameters, held in {model['dtype']}{trained}."
    )
    sections = [
        _accuracy(card["accuracy"]),
        _calibration(card["calibration"]),
        _agreement(card["agreement"]),
        _length(card["length"]),
        _ensemble(card["ensemble"]),
        _robustness(card["robustness"]),
        _best_of_n(card["best_of_n"]),
        Section("rows", "Rows", "What was read, and what was left out.", notes=card["left_out"]),
    ]
    return write_page(
        path,
        "sections.html.jinja",
        kind="reward-model card",
        title=card["reward_model"],
        summary=summary,
        sections=sections,
    )


def _table(first: str, parts: Mapping[str, Card], columns: Mapping[str, str]) -> list[Row]:
    """One row for each part, its name in the column `first`; None where its figures lack a key."""
    return [
        {first: name, **{label: _pick(figures, key) for label, key in columns.items()}}
        for name, figures in parts.items()
    ]


def _pick(figures: Card, key: str) -> Any:
    found: Any = figures
    for part in key.split("."):
        found = None if found is None else found.get(part)
    return found


def _missing(part: Card) -> list[str]:
    return [part["missing"]] if "missing" in part else []


def _accuracy(parts: Card) -> Section:
    histogram = parts["all"]["margin"]["histogram"]
    middles = [(low + high) / 2 for low, high in pairwise(histogram["edges"])]
    shares = [count / sum(histogram["counts"]) for count in histogram["counts"]]
    margin = "score(chosen) \N{MINUS SIGN} score(rejected)"
    title = "Distribution of margins"
    svg = path_chart(title, [Curve("", middles, shares)], margin, "share of pairs")
    k_way = {name: figures["k_way"] for name, figures in parts.items() if figures["k_way"]}
    return Section(
        "accuracy",
        "Accuracy",
        "Share of pairs whose chosen response has the higher score, ties counting half.",
        [
            rate_chart("Accuracy", "95 % interval", {name: figures["accuracy"] for name, figures in parts.items()}),
            Chart(title, "pairs right of 0 are ordered as the annotators have them", svg),
        ],
        [_table("source", parts, ACCURACY), _table("source", k_way, K_WAY)],
        [f"Interval of all: {parts['all']['accuracy']['interval']}."],
    )


def _calibration(parts: Card) -> Section:
    charts = []
    for name, figures in parts.items():
        bins = [one for one in figures["bins"] if one["pairs"]]
        curves = [
            Curve("observed", [one["predicted"] for one in bins], [one["observed"] for one in bins], 0),
            Curve("perfect", [0.5, 1.0], [0.5, 1.0], 7),
        ]
        svg = path_chart(f"Reliability, {name}", curves, "predicted probability", "share of pairs")
        charts.append(Chart(f"Reliability, {name}", "below the line the model is too sure", svg))
    bins = [{label: one[key] for label, key in BINS.items()} for one in parts["all"]["bins"]]
    notes = [parts["all"]["temperature_missing"]] if "temperature_missing" in parts["all"] else []
    lead = (
        "The probability sigmoid(difference of scores) that the higher score is the chosen one, against how often it is. "
        "ECE: expected calibration error. The temperature divides differences so that they are calibrated on these pairs."
    )
    return Section("calibration", "Reliability", lead, charts, [_table("source", parts, CALIBRATION), bins], notes)


def _agreement(found: Card) -> Section:
    notes = [
        f"{key.replace('_', ' ').capitalize()}: {part['missing']}."
        for key, part in found.items()
        if isinstance(part, Mapping) and "missing" in part
    ]
    charts, tables = [], []
    if isinstance(found["by_strength"], list):
        strengths = {f"{one['from']:.3g} to {one['to']:.3g}": one["agreement"] for one in found["by_strength"]}
        charts.append(rate_chart("Agreement by strength of the preference", "95 % interval", strengths))
        tables.append([{"strength": name, "agreement": rate, "pairs": rate["n"]} for name, rate in strengths.items()])
    if "missing" not in found["votes"]:
        tables.append([{"votes": key.replace("_", " "), "value": value} for key, value in found["votes"].items()])
    if isinstance(found["people_for_chosen"], float):
        tables.append([{"annotators": "mean share for the chosen response", "value": found["people_for_chosen"]}])
    if "missing" not in found["annotators"]:
        people = found["annotators"].items()
        tables.append([{"annotator": name, "agreement": rate, "pairs": rate["n"]} for name, rate in people])
    lead = "How often the model agrees with the annotators, where they were sure and where they were not; and they with each other."
    return Section("agreement", "Agreement with annotators", lead, charts, tables, notes)


def _length(parts: Card) -> Section:
    labels = ("chosen longer", "chosen shorter", "always longer")
    rates = {label: parts["all"][label.replace(" ", "_")] for label in labels}
    missing = parts["all"].get("slope_missing")
    lead = (
        "Slope of score on response length within prompts, in tokens as the model reads them. Accuracy that falls where "
        "the chosen response is shorter speaks of a bias."
    )
    charts, notes = [rate_chart("Accuracy by length", "95 % interval", rates)], [missing] if missing else []
    return Section("length", "Length", lead, charts, [_table("source", parts, LENGTH)], notes)


def _ensemble(parts: Card) -> Section:
    lead, notes = "Deviation of the score difference over the members of the ensemble.", _missing(parts)
    tables = [] if notes else [_table("source", parts, ENSEMBLE)]
    return Section("ensemble", "Spread of the ensemble", lead, tables=tables, notes=notes)


def _robustness(found: Card) -> Section:
    tables, notes = [], _missing(found)
    if not notes:
        forms = {FORMS.get(name, f"weights in {name}"): figures for name, figures in found["forms"].items()}
        tables = [_table("form", forms, ROBUSTNESS)]
        notes = [
            f"{found['texts']} texts, {found['pairs']} pairs; beside batches of similar length in {found['held_in']}."
        ]
        notes += [f"{name}: not compared: {why}" for name, why in found["not_compared"].items()]
    lead = "The same texts scored in other ways. Scores should change by rounding alone, and pairs should keep their order."
    return Section("robustness", "Padding, batching and type", lead, tables=tables, notes=notes)


def _best_of_n(found: Card) -> Section:
    charts, tables, notes = [], [], _missing(found)
    if not notes:
        curve: Sequence[Card] = found["curve"]
        kl, axis = [one["kl"] for one in curve], "KL bound, nats"
        lines = {key: [one[key] for one in curve] for key in ("gold", "low", "high", "proxy")}
        true = [Curve(name, kl, lines[name], color) for name, color in (("gold", 0), ("low", 7), ("high", 7))]
        extent = f"n = {curve[0]['n']} to {curve[-1]['n']}; {found['gold']}"
        charts = [
            Chart("True score", extent, path_chart("True score of the best of n", true, axis, "true score")),
            Chart(
                "Reward model's score",
                "of its own picks",
                path_chart("Score of the best of n", [Curve("", kl, lines["proxy"])], axis, "score"),
            ),
        ]
        tables = [_table("n", {str(one["n"]): one for one in curve}, BEST_OF_N)]
        notes = [f"True score: {found['judge']}; {found['gold']}."]
        if found["policy"]:
            notes = [f"Policy: {found['policy']}; {found['ended_share']:.0%} of its samples ended. {notes[0]}"]
    lead = "The true score of the response that the model picks among n, over all subsets of the samples, by the bound on its KL."
    return Section("best-of-n", "Best of n", lead, charts, tables, notes)

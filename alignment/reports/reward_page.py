"""card.html: a reward model's card in one file that loads nothing else. The figures are computed in reward_card.py."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from alignment.reports.charts import Curve, path_chart, rate_chart
from alignment.reports.html import Chart, Section, cells, format_share, render_page, table_of

Card = Mapping[str, Any]  # a part of card.json

FORMS = {
    "alone": "each text in a batch of its own",
    "padded right": "rectangles padded on the right",
    "padded left": "rectangles padded on the left",
}


def write_reward_page(path: Path, card: Card) -> Path:
    """Write a card as a self-contained HTML page and return its path; all text is escaped, and no script runs."""
    sections = [
        _accuracy(card["accuracy"]),
        _calibration(card["calibration"]),
        _length(card["length"]),
        *([_robustness(card["robustness"])] if card["robustness"] else []),
        *([_best_of_n(card["best_of_n"])] if card["best_of_n"] else []),
        Section("rows", "Rows", "What was read, and what was left out.", notes=card["left_out"]),
    ]
    return render_page(
        path,
        kind="reward-model card",
        title=card["reward_model"],
        summary=card_summary(card),
        sections=sections,
    )


def card_summary(card: Card) -> str:
    """Accuracy of a reward model beside a coin, and what the model is."""
    rate = card["accuracy"]["all"]["accuracy"]
    model = card["model"]
    trained = f", trained with {model['loss']}" if model["loss"] else ""
    coin = (
        "" if rate["low"] > 0.5 else "; no difference from a coin is shown" if rate["high"] > 0.5 else ", below a coin"
    )
    return (
        f"Prefers the chosen response in {format_share(rate)} of {rate['n']} pairs{coin}. "
        f"A{'n' if model['architecture'] == 'encoder' else ''} {model['architecture']} of {model['parameters']:,} "
        f"parameters, held in {model['dtype']}{trained}."
    )


def card_section(name: str, card: Card) -> Section:
    """A section of another page that holds the main parts of a card."""
    return Section(
        re.sub(r"\W+", "-", f"reward-model-{name}"),
        f"Reward model: {name}",
        card_summary(card),
        [*_accuracy(card["accuracy"]).charts, *_length(card["length"]).charts],
        {f"Length, {name}": table_of(card["length"], "source")},
        card["left_out"],
        folded=_calibration(card["calibration"]).charts,
    )


def _accuracy(parts: Card) -> Section:
    histogram = parts["all"]["margin"]["histogram"]
    middles = [(low + high) / 2 for low, high in pairwise(histogram["edges"])]
    shares = [count / sum(histogram["counts"]) for count in histogram["counts"]]
    title = "Distribution of margins"
    margin = "score(chosen) \N{MINUS SIGN} score(rejected)"
    svg = path_chart(title, [Curve("", middles, shares)], margin, "share of pairs")
    table = {
        name: {"pairs": part["accuracy"]["n"], "prompts": part["accuracy"]["prompts"], **part, "k_way": {}}
        for name, part in parts.items()
    }
    k_way = {name: figures["k_way"] for name, figures in parts.items() if figures["k_way"]}
    return Section(
        "accuracy",
        "Accuracy",
        "Share of pairs whose chosen response has the higher score, ties counting half.",
        [
            rate_chart("Accuracy", "95 % interval", {name: figures["accuracy"] for name, figures in parts.items()}),
            Chart(title, "pairs right of 0 are ordered as the annotators have them", svg),
        ],
        [table_of(table, "source"), table_of(k_way, "source")],
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
    return Section(
        "calibration",
        "Reliability",
        "The probability sigmoid(difference of scores) that the higher score is the chosen one, against how often it "
        "is. ECE: expected calibration error.",
        charts,
        [table_of(parts, "source"), parts["all"]["bins"]],
    )


def _length(parts: Card) -> Section:
    labels = ("chosen longer", "chosen shorter", "always longer")
    rates = {label: parts["all"][label.replace(" ", "_")] for label in labels}
    return Section(
        "length",
        "Length",
        "Slope of score on response length within prompts, in tokens as the model reads them. Accuracy that falls "
        "where the chosen response is shorter speaks of a bias.",
        [rate_chart("Accuracy by length", "95 % interval", rates)],
        [table_of(parts, "source")],
        [parts["all"]["slope_missing"]] if "slope_missing" in parts["all"] else [],
    )


def _robustness(found: Card) -> Section:
    forms = {FORMS.get(name, f"weights in {name}"): figures for name, figures in found["forms"].items()}
    return Section(
        "robustness",
        "Padding, batching and type",
        "The same texts scored in other ways. Scores should change by rounding alone, and pairs should keep their "
        "order.",
        tables=[table_of(forms, "form")],
        notes=[
            f"{found['texts']} texts, {found['pairs']} pairs; beside batches of similar length in {found['held_in']}.",
            *(f"{name}: not compared: {why}" for name, why in found["not_compared"].items()),
        ],
    )


def _best_of_n(found: Card) -> Section:
    curve = found["curve"]
    axis = "KL bound, nats"
    kl, gold, low, high, proxy = ([one[key] for one in curve] for key in ("kl", "gold", "low", "high", "proxy"))
    true = [Curve("gold", kl, gold, 0), Curve("low", kl, low, 7), Curve("high", kl, high, 7)]
    extent = f"n = {curve[0]['n']} to {curve[-1]['n']}; higher is better"
    charts = [
        Chart("True score", extent, path_chart("True score of the best of n", true, axis, "true score")),
        Chart(
            "Reward model's score",
            "of its own picks",
            path_chart("Score of the best of n", [Curve("", kl, proxy)], axis, "score"),
        ),
    ]
    return Section(
        "best-of-n",
        "Best of n",
        "The true score of the response that the model picks among n, over all subsets of the samples, by the bound on "
        "its KL.",
        charts,
        [[dict(cells(one)) for one in curve]],
        [f"Policy: {found['policy']}; {found['ended_share']:.0%} of its samples ended. True score: {found['judge']}."],
    )

"""card.html: a reward model's card in one file that loads nothing else. The figures are computed in reward_card.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from alignment.evaluation.report.charts import Bar, Curve, bar_chart, path_chart
from alignment.evaluation.report.page import Chart, page_environment
from alignment.evaluation.winrate import WinRate
from alignment.files import write_text

Card = Mapping[str, Any]  # what stands in card.json
Row = Mapping[str, object]  # of a table: column -> value

FORMS = {
    "alone": "each text in a batch of its own",
    "other batches": "smaller batches",
    "reversed order": "the texts in reversed order",
    "padded right": "rectangles padded on the right",
    "padded left": "rectangles padded on the left",
}


@dataclass(frozen=True)
class Section:
    """A section of the page; `notes` say what is missing and why."""

    name: str
    title: str
    lead: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Sequence[Row]] = ()
    notes: Sequence[str] = field(default_factory=list)


def write_reward_page(path: Path, card: Card) -> Path:
    """Write a card as a self-contained HTML page and return its path. All text is escaped, and the page runs no script."""
    build = (_accuracy, _calibration, _agreement, _length, _ensemble, _robustness, _best_of_n, _rows)
    html = page_environment().get_template("sections.html.jinja").render(
        kind="reward-model card", title=card["reward_model"], summary=_summary(card),
        sections=[section(card) for section in build],
    )  # fmt: skip
    write_text(path, html)
    return Path(path)


def _summary(card: Card) -> str:
    rate, model = card["accuracy"]["all"]["accuracy"], card["model"]
    trained = f", trained with {model['loss']}" if model["loss"] else ""
    return (
        f"Prefers the chosen response in {_percent(rate)} of {rate['n']} pairs. "
        f"A{'n' if model['architecture'] == 'encoder' else ''} {model['architecture']} of {model['parameters']:,} "
        f"parameters, held in {model['dtype']}{trained}."
    )


def _percent(rate: Card) -> str:
    return f"{100 * rate['rate']:.1f} % [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"


def as_win_rate(rate: Card | None) -> WinRate | None:
    """A rate of the card as tables show it."""
    return (
        None
        if rate is None
        else WinRate(*(rate[key] for key in ("rate", "low", "high", "n", "wins", "losses", "ties")))
    )


def _bars(label: str, rates: Mapping[str, Card | None]) -> Chart:
    bars = [Bar(name, rate["rate"], (rate["low"], rate["high"])) for name, rate in rates.items() if rate is not None]
    return Chart(label, "95 % interval", bar_chart(label, bars, limits=(0, 1), percent=True, line_at=0.5))


def _accuracy(card: Card) -> Section:
    found = card["accuracy"]
    table = [
        {
            "source": name,
            "accuracy": as_win_rate(figures["accuracy"]),
            "always longer": as_win_rate(figures["always_longer"]),
            "pairs": figures["accuracy"]["n"],
            "prompts": figures["accuracy"]["prompts"],
            "mean margin": figures["margin"]["mean"],
            "deviation": figures["margin"]["deviation"],
        }
        for name, figures in found.items()
    ]
    k_way = [
        {
            "source": name,
            "groups of K > 2": figures["k_way"]["groups"],
            "picks a best one": figures["k_way"]["top_1"],
            "low": figures["k_way"]["low"],
            "high": figures["k_way"]["high"],
            "by chance": figures["k_way"]["top_1_by_chance"],
            "Kendall's tau": figures["k_way"]["kendall_tau_b"],
        }
        for name, figures in found.items()
        if figures["k_way"]
    ]
    bars = _bars("Accuracy", {name: figures["accuracy"] for name, figures in found.items()})
    return Section(
        "accuracy",
        "Accuracy",
        "Share of pairs whose chosen response has the higher score, ties counting half.",
        [bars, _margins(found["all"]["margin"]["histogram"])],
        [table, k_way],
        [f"Interval of all: {found['all']['accuracy']['interval']}."],
    )


def _margins(histogram: Card) -> Chart:
    edges, counts = histogram["edges"], histogram["counts"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    shares = [count / sum(counts) for count in counts]
    svg = path_chart(
        "Distribution of margins",
        [Curve("", middles, shares)],
        "score(chosen) \N{MINUS SIGN} score(rejected)",
        "share of pairs",
    )
    return Chart("Distribution of margins", "pairs right of 0 are ordered as the annotators have them", svg)


def _calibration(card: Card) -> Section:
    charts, table = [], []
    for name, figures in card["calibration"].items():
        bins = [one for one in figures["bins"] if one["pairs"]]
        curves = [
            Curve("observed", [one["predicted"] for one in bins], [one["observed"] for one in bins], 0),
            Curve("perfect", [0.5, 1.0], [0.5, 1.0], 7),
        ]
        svg = path_chart(f"Reliability, {name}", curves, "predicted probability", "share of pairs")
        charts.append(Chart(f"Reliability, {name}", "below the line the model is too sure", svg))
        calm = figures.get("calibrated") or {}
        table.append(
            {
                "source": name,
                "ECE": figures["ece"],
                "Brier": figures["brier"],
                "temperature": figures["temperature"],
                "ECE there": calm.get("ece"),
                "Brier there": calm.get("brier"),
            }
        )
    every = card["calibration"]["all"]["bins"]
    bins = [
        {
            "predicted from": one["low"],
            "to": one["high"],
            "pairs": one["pairs"],
            "mean prediction": one["predicted"],
            "observed": one["observed"],
        }
        for one in every
    ]
    missing = card["calibration"]["all"].get("temperature_missing")
    lead = (
        "The probability sigmoid(difference of scores) that the higher score is the chosen one, against how often it is. "
        "ECE: expected calibration error. The temperature divides differences so that they are calibrated on these pairs."
    )
    return Section("calibration", "Reliability", lead, charts, [table, bins], [missing] if missing else [])


def _agreement(card: Card) -> Section:
    found, notes, charts, tables = card["agreement"], [], [], []
    for key in ("by_strength", "votes", "people_for_chosen", "annotators"):
        if isinstance(found[key], Mapping) and "missing" in found[key]:
            notes.append(f"{key.replace('_', ' ').capitalize()}: {found[key]['missing']}.")
    if isinstance(found["by_strength"], list):
        strengths = {f"{one['from']:.3g} to {one['to']:.3g}": one["agreement"] for one in found["by_strength"]}
        charts.append(_bars("Agreement by strength of the preference", strengths))
        tables.append(
            [{"strength": name, "agreement": as_win_rate(rate), "pairs": rate["n"]} for name, rate in strengths.items()]
        )
    if "missing" not in found["votes"]:
        tables.append([{"votes": key.replace("_", " "), "value": value} for key, value in found["votes"].items()])
    if isinstance(found["people_for_chosen"], float):
        tables.append([{"annotators": "mean share for the chosen response", "value": found["people_for_chosen"]}])
    if "missing" not in found["annotators"]:
        tables.append(
            [
                {"annotator": name, "agreement": as_win_rate(rate), "pairs": rate["n"]}
                for name, rate in found["annotators"].items()
            ]
        )
    lead = "How often the model agrees with the annotators, where they were sure and where they were not; and they with each other."
    return Section("agreement", "Agreement with annotators", lead, charts, tables, notes)


def _length(card: Card) -> Section:
    table = [
        {
            "source": name,
            "score per 100 tokens": one.get("slope_per_100_tokens"),
            "low": one.get("low"),
            "high": one.get("high"),
            "in deviations": one.get("slope_in_deviations"),
            "correlation": one.get("correlation"),
            "prefers the longer": one.get("prefers_longer"),
            "always longer": as_win_rate(one["always_longer"]),
            "accuracy, chosen longer": as_win_rate(one["chosen_longer"]),
            "accuracy, chosen shorter": as_win_rate(one["chosen_shorter"]),
        }
        for name, one in card["length"].items()
    ]
    every = card["length"]["all"]
    rates = {
        "chosen longer": every["chosen_longer"],
        "chosen shorter": every["chosen_shorter"],
        "always longer": every["always_longer"],
    }
    missing = every.get("slope_missing")
    lead = (
        "Slope of score on response length within prompts, in tokens as the model reads them. Accuracy that falls where "
        "the chosen response is shorter speaks of a bias."
    )
    return Section(
        "length", "Length", lead, [_bars("Accuracy by length", rates)], [table], [missing] if missing else []
    )


def _ensemble(card: Card) -> Section:
    found, lead = card["ensemble"], "Deviation of the score difference over the members of the ensemble."
    if "missing" in found:
        return Section("ensemble", "Spread of the ensemble", lead, notes=[found["missing"]])
    table = [
        {
            "source": name,
            "mean": one["mean"],
            "median": one["median"],
            "accuracy, members agree more": as_win_rate(one["accuracy_where_low"]),
            "accuracy, members agree less": as_win_rate(one["accuracy_where_high"]),
        }
        for name, one in found.items()
    ]
    return Section("ensemble", "Spread of the ensemble", lead, tables=[table])


def _robustness(card: Card) -> Section:
    found, title = card["robustness"], "Padding, batching and type"
    lead = "The same texts scored in other ways. Scores should change by rounding alone, and pairs should keep their order."
    if "missing" in found:
        return Section("robustness", title, lead, notes=[found["missing"]])
    table = [
        {
            "form": FORMS.get(name, f"weights in {name}"),
            "largest change": one["largest"],
            "in deviations of the scores": one["largest_in_deviations"],
            "mean change": one["mean"],
            "pairs that change order": f"{one['order_changes']:.1%}".replace("%", " %"),
        }
        for name, one in found["forms"].items()
    ]
    notes = [f"{found['texts']} texts, {found['pairs']} pairs; beside batches of similar length in {found['held_in']}."]
    notes += [f"{name}: not compared: {why}" for name, why in found["not_compared"].items()]
    return Section("robustness", title, lead, tables=[table], notes=notes)


def _best_of_n(card: Card) -> Section:
    found, title = card["best_of_n"], "Best of n"
    lead = "The true score of the response that the model picks among n, over all subsets of the samples, by the bound on its KL."
    if "missing" in found:
        return Section("best-of-n", title, lead, notes=[found["missing"]])
    curve = found["curve"]
    kl, numbers = [one["kl"] for one in curve], [one["n"] for one in curve]
    lines = [
        Curve(name, kl, [one[key] for one in curve], color)
        for name, key, color in (("mean", "gold", 0), ("low", "low", 7), ("high", "high", 7))
    ]
    axis = "KL bound, nats"
    true = path_chart("True score of the best of n", lines, axis, "true score")
    proxy = path_chart("Score of the best of n", [Curve("", kl, [one["proxy"] for one in curve])], axis, "score")
    charts = [
        Chart("True score", f"n = {numbers[0]} to {numbers[-1]}; {found['gold']}", true),
        Chart("Reward model's score", "of its own picks", proxy),
    ]
    table = [
        {
            "n": str(one["n"]),
            "KL bound": one["kl"],
            "true score": one["gold"],
            "low": one["low"],
            "high": one["high"],
            "gain over one": one["gain"],
            "gain, low": one["gain_low"],
            "gain, high": one["gain_high"],
            "reward model": one["proxy"],
            "prompts": one["prompts"],
        }
        for one in curve
    ]
    policy = ""
    if found["policy"]:
        policy = f"Policy: {found['policy']}; {100 * found['ended_share']:.0f} % of its samples ended. "
    return Section(
        "best-of-n", title, lead, charts, [table], [f"{policy}True score: {found['judge']}; {found['gold']}."]
    )


def _rows(card: Card) -> Section:
    return Section("rows", "Rows", "What was read, and what was left out.", notes=card["left_out"])

"""Two published figures from this recipe's votes, and the order of their curves in words: a stage of this recipe.

Nothing is sampled or judged here. An interval is of 95 % and over prompts: the values of one prompt, over seeds and labelers,
are averaged first, being no independent evidence. It does not hold what other seeds would change; that is shown beside
it, seed by seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from alignment.errors import raise_all
from alignment.files import read_json_object, write_json
from alignment.loading import load_model
from alignment.planning.networks import parameter_count
from alignment.reports.charts import INK, SERIES, STYLE, Curve, empty_figure, inline_svg, label_list
from alignment.reports.html import Chart, Section, format_cell, render_page
from alignment.settings import PositiveFloat, Rule, Settings
from alignment.statistics.winrate import mean_interval

DRAWS = 2000  # of the bootstrap
GRID = 50  # values of the KL that frontiers are compared at

Values = Mapping[str, np.ndarray]  # policy -> [seeds, prompts]


class Estimates(NamedTuple):
    """Points with the interval around each: label, coordinates, intervals of y, points of single runs, number of the color."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[tuple[float, float]]
    runs: Sequence[tuple[float, float]] = ()
    color: int = 0


@dataclass(frozen=True)
class FiguresConfig(Settings):
    """Settings of the figures.

    Attributes:
        output: directory of results.json and report.html.
        votes: votes.json of each seed, see labelers.py.
        evaluations: results.json of the same seeds, of which the KL is read.
        baseline: the policy that all are compared with.
        sizes: name -> checkpoints of each seed, whose parameters are counted; ascending.
        methods: those of the first figure, from the one that was published highest; `METHOD SIZE` is a policy.
        panels: of labelers, whose votes are drawn.
        alike: pairs of methods that were published as about equal, which they are within `margin`.
        above: pairs of policies or methods of which the first was published above the second; a method at every size.
        frontiers: of the second figure, name -> policies; the first one was published above all others.
        margin: share of votes.
    """

    output: str
    votes: list[str]
    evaluations: list[str]
    baseline: str
    sizes: dict[str, list[str]]
    methods: list[str]
    panels: list[str]
    alike: list[tuple[str, str]]
    above: list[tuple[str, str]]
    frontiers: dict[str, list[str]]
    margin: PositiveFloat = 0.05

    RULES = (
        Rule(
            "votes",
            lambda c: not c.votes or len(c.votes) != len(c.evaluations),
            "and evaluations need one for each seed",
        ),
        Rule("frontiers", lambda c: len(c.frontiers) < 2, "must be two at least, which are compared"),
    )


def run(config: FiguresConfig) -> Path:
    """Write `results.json`, all numbers of the figures, and `report.html`; return the path of the results."""
    votes = [read_json_object(Path(path)) for path in config.votes]
    kl = read_kl(config)
    policies = [f"{method} {size}" for method in config.methods for size in config.sizes]
    drawn = [*policies, *(name for own in config.frontiers.values() for name in own), config.baseline]
    raise_all(
        f"{path}: has no votes on {name}"
        for path, own in zip(config.votes, votes, strict=True)
        for name in drawn
        if name not in own
    )
    values: dict[str, Values] = {
        panel: {name: np.array([own[name][panel] for own in votes]) for name in drawn}
        for panel in (*config.panels, "gold")
    }
    parameters = {size: parameter_count(load_model(found[0]))[0] for size, found in config.sizes.items()}
    order = {
        claim.text: {"about": claim.about} | {panel: check(values[panel], claim) for panel in config.panels}
        for claim in claims(config)
    }
    frontiers = compare_frontiers(config.frontiers, values["gold"], kl, config.baseline)
    results = {
        "seeds": len(votes),
        "prompts": values["gold"][config.baseline].shape[1],
        "parameters": parameters,
        "win_rate": {
            panel: {name: estimate(values[panel][name]) for name in [*policies, config.baseline]}
            for panel in config.panels
        },
        "held_out": {
            name: estimate(values[config.panels[1]][name] - values[config.panels[0]][name]) for name in policies
        },
        "order": order,
        "gold": {name: estimate(values["gold"][name]) for name in drawn},
        "kl": {name: found for name, found in kl.items() if name in drawn},
        "frontiers": frontiers,
    }
    results["sentences"] = [
        *order_sentences(config, order),
        *held_out_sentences(config, results),
        *frontier_sentences(frontiers),
    ]
    write_json(Path(config.output) / "results.json", results)
    write_page(config, results)
    return Path(config.output) / "results.json"


def read_kl(config: FiguresConfig) -> dict[str, list[float]]:
    """KL of each policy from the reference, a number for each seed; of the reference itself 0."""
    models = [read_json_object(Path(path))["models"] for path in config.evaluations]
    return {name: [own[name].get("kl", 0.0) for own in models] for name in models[0]}


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Mean of values [seeds, prompts], its 95 % interval over prompts, and the mean of each seed."""
    prompts = values.mean(0)
    low, high = mean_interval(prompts.tolist()) or [float(prompts.mean())] * 2
    return {"mean": float(values.mean()), "low": low, "high": high, "seeds": values.mean(1).tolist()}


# The order of the first figure


class Claim(NamedTuple):
    """A published relation of two policies."""

    first: str
    second: str
    about: str  # methods or sizes
    margin: float | None = None  # within which they are about equal; None: the first is above

    @property
    def text(self) -> str:
        """The relation as a formula."""
        return f"{self.first} {'~' if self.margin else '>'} {self.second}"

    @property
    def size(self) -> str | None:
        """The size that both policies have; None where they differ."""
        first, second = (name.rpartition(" ")[2] for name in (self.first, self.second))
        return first if first == second else None


def claims(config: FiguresConfig) -> Iterator[Claim]:
    """What was published: of methods at each size, of single policies, and that each method rises with size."""
    for pairs, margin in ((config.alike, config.margin), (config.above, None)):
        for first, second in pairs:
            for end in (f" {size}" for size in config.sizes) if first in config.methods else ("",):
                yield Claim(f"{first}{end}", f"{second}{end}", "methods", margin)
    for method in config.methods:
        for smaller, larger in pairwise(config.sizes):
            yield Claim(f"{method} {larger}", f"{method} {smaller}", "sizes")


def check(values: Values, claim: Claim) -> dict[str, Any]:
    """The difference of two policies, and whether the claim holds: yes, no, or open where the interval allows both."""
    found, margin = estimate(values[claim.first] - values[claim.second]), claim.margin
    low, high = found["low"], found["high"]
    if margin is None:
        holds, fails = low > 0, high < 0
    else:
        holds, fails = -margin < low <= high < margin, low > margin or high < -margin
    return {**found, "holds": "yes" if holds else "no" if fails else "open"}


def order_sentences(config: FiguresConfig, order: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """For each panel, how many of the relations of methods (at each size) and of sizes hold, and which do not."""
    known = {claim.text: claim for claim in claims(config)}
    for panel, about in product(config.panels, ("methods", "sizes")):
        held = {text: order[text][panel]["holds"] for text, claim in known.items() if claim.about == about}
        sentence = f"Order of {about}, as {panel} judge: {_count(held)} published relations hold"
        if about == "methods":
            at = {
                size: {text: word for text, word in held.items() if known[text].size == size} for size in config.sizes
            }
            sentence += f" ({', '.join(f'{_count(own)} at size {size}' for size, own in at.items())})"
        for word, what in (("no", "contradicted:"), ("open", "open within the intervals:")):
            those = ", ".join(f"{text} ({shown(order[text][panel])})" for text, own in held.items() if own == word)
            sentence += f"; {what} {those}" if those else ""
        yield f"{sentence}."


def _count(held: Mapping[str, str]) -> str:
    return f"{list(held.values()).count('yes')} of {len(held)}"


def held_out_sentences(config: FiguresConfig, results: Mapping[str, Any]) -> Iterator[str]:
    """How far the second panel's win rates differ from the first's."""
    gaps = results["held_out"]
    widest = max(gaps, key=lambda name: abs(gaps[name]["mean"]))
    mean = signed(100 * float(np.mean([gap["mean"] for gap in gaps.values()])), 1)
    yield (
        f"Win rates of {config.panels[1]} less those of {config.panels[0]}, in points: {mean} in the mean over policies, "
        f"{shown(gaps[widest])} at most ({widest})."
    )


def shown(difference: Mapping[str, Any]) -> str:
    """A difference of shares and its interval, in percentage points."""
    mean, low, high = (signed(100 * difference[key], 1) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def signed(value: float, digits: int) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


# The order of the second figure


def compare_frontiers(
    frontiers: Mapping[str, Sequence[str]], gold: Values, kl: Mapping[str, Sequence[float]], reference: str
) -> dict[str, Any]:
    """Reward of the first frontier less that of each other, at the same KL, with its interval.

    A frontier is the highest reward that one of its policies reaches at or below a KL, linear between policies, from the
    reference at 0 on. `mean` is over the KL from 0 to where the shorter of both ends. The bootstrap draws prompts, the same
    for all; the KL of a policy, its mean over prompts and seeds, is held.
    """
    rng, count = np.random.default_rng(0), gold[reference].shape[1]
    shares = np.vstack([np.full(count, 1 / count), rng.multinomial(count, np.full(count, 1 / count), DRAWS) / count])
    distance, heights = {}, {}
    for name, policies in frontiers.items():
        found = sorted((float(np.mean(kl[policy])), policy) for policy in policies)
        distance[name] = np.array([0.0, *(each for each, _ in found)])
        rewards = np.stack([gold[policy].mean(0) for policy in [reference, *(policy for _, policy in found)]])
        heights[name] = np.maximum.accumulate(shares @ rewards.T, axis=1)  # [1 + DRAWS, policies]; the first is no draw
    first, *others = frontiers
    return {
        f"{first} over {other}": _compare(*((distance[name], heights[name]) for name in (first, other)))
        for other in others
    }


Frontier = tuple[
    np.ndarray, np.ndarray
]  # KL of its policies, [policies], and their rewards in each draw, [draws, policies]


def _compare(first: Frontier, other: Frontier) -> dict[str, Any]:
    grid = np.linspace(0, min(first[0][-1], other[0][-1]), GRID)
    ours, theirs = (np.stack([np.interp(grid, x, row) for row in rows]) for x, rows in (first, other))
    leads = ours - theirs  # [1 + DRAWS, GRID]
    low, high = np.quantile(leads[1:], (0.025, 0.975), axis=0)
    mean_low, mean_high = np.quantile(leads[1:].mean(1), (0.025, 0.975))
    holds = "yes" if mean_low > 0 else "no" if mean_high < 0 else "open"
    return {
        "mean": float(leads[0].mean()), "low": float(mean_low), "high": float(mean_high), "holds": holds,
        "to_kl": float(grid[-1]), "above_share": float((low[1:] > 0).mean()), "below_share": float((high[1:] < 0).mean()),
    }  # fmt: skip


def frontier_sentences(frontiers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """For each pair of frontiers, whether the first is above the other."""
    words = {"yes": "is above", "no": "is below", "open": "is not told apart from"}
    for names, found in frontiers.items():
        first, other = names.split(" over ")
        mean, low, high = (signed(found[key], 2) for key in ("mean", "low", "high"))
        yield (
            f"Reward over KL: {first} {words[found['holds']]} {other}: {mean} [{low}, {high}] gold points in the mean up to "
            f"{found['to_kl']:.1f} nats; above at {found['above_share']:.0%} of the way, below at {found['below_share']:.0%}."
        )


# The page


def write_page(config: FiguresConfig, results: Mapping[str, Any]) -> Path:
    """Both figures, the sentences, and every number as a table."""
    colors = {method: number for number, method in enumerate(config.methods)}
    charts = [
        Chart(
            f"Preferred to {config.baseline}: {panel}",
            "share of comparisons won, over the policy's parameters; bar: 95 % interval over prompts, pale dots: single seeds",
            estimate_chart(
                f"Share of comparisons won against {config.baseline}, {panel}",
                [size_curve(results, panel, method, config, color) for method, color in colors.items()],
                "parameters", "win rate", counts=True, line_at=0.5,
            ),
        )
        for panel in config.panels
    ]  # fmt: skip
    curves = [frontier_curve(results, name, config, color) for color, name in enumerate(config.frontiers)]
    note = f"gold reward over KL from {config.baseline}; bar: 95 % interval over prompts, pale dots: single seeds; left and high is better"
    title = "Reward over KL"
    second = Chart(title, note, estimate_chart(f"{title} from {config.baseline}", curves, "KL, nats", "gold reward"))
    rates = [
        {"policy": name, "parameters": f"{results['parameters'][name.split()[-1]]:,}"}
        | {panel: rate_cell(results["win_rate"][panel][name]) for panel in config.panels}
        | {f"{panel}, seeds": seeds_cell(results["win_rate"][panel][name]) for panel in config.panels}
        for name in results["win_rate"][config.panels[0]]
    ]
    rewards = [
        {"policy": name, "KL": float(np.mean(results["kl"].get(name, [0.0]))), "gold": number_cell(results["gold"][name]),
         "seeds": " · ".join(format_cell(value) for value in results["gold"][name]["seeds"])}
        for own in config.frontiers.values() for name in own
    ]  # fmt: skip
    relations = [
        {"published": claim}
        | {key: value for panel in config.panels for key, value in relation_cells(panel, found[panel]).items()}
        for claim, found in results["order"].items()
    ]
    sections = [
        Section("order", "Does the published order hold?", points=results["sentences"]),
        Section("sizes", "Preference over size", "After Ouyang et al. 2022, figure 1.", charts=charts),
        Section("frontiers", "Reward over KL", "After Rafailov et al. 2023, figure 2.", charts=[second]),
        Section("relations", "Every published relation", "Difference of win rates in percentage points; yes where its interval is "
                "on the published side, no where it is on the other, open where it allows both.", tables=[relations]),
        Section("numbers", "Numbers", tables=[rates, rewards]),
    ]  # fmt: skip
    summary = (
        f"{results['seeds']} seeds, {results['prompts']} prompts, the same for all. An interval is over prompts; what other seeds "
        "would change is not in it, and single seeds are shown."
    )
    return render_page(Path(config.output) / "report.html", kind="figures", title="Two figures of the field, drawn again",
                       summary=summary, sections=sections)  # fmt: skip


def estimate_chart(
    label: str,
    estimates: Sequence[Estimates],
    x_label: str,
    y_label: str,
    *,
    counts: bool = False,
    line_at: float | None = None,
) -> Markup:
    """Points joined by lines, with their intervals; single runs as pale dots.

    Args:
        counts: x are counts such as parameters, on a logarithmic axis, and y are shares, in percent.
        line_at: a level to compare with.
    """
    with mpl.rc_context(STYLE):
        figure, axes = empty_figure(270)
        for each in estimates:
            color = SERIES[each.color % len(SERIES)]
            axes.plot(*np.transpose(each.runs), color=color, linestyle="", marker="o", markersize=2.2, alpha=0.4)
            axes.plot(each.x, each.y, color=color, linewidth=1.2, marker="o", markersize=4)
            axes.vlines(each.x, *np.transpose(each.intervals), color=color, linewidth=1.6)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        if counts:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        if line_at is not None:
            axes.axhline(line_at, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
        return label_list([Curve(one.label, one.x, one.y, one.color) for one in estimates]) + inline_svg(figure, label)


def size_curve(results: Mapping[str, Any], panel: str, method: str, config: FiguresConfig, color: int) -> Estimates:
    """The win rates of a method's policies over their parameters; methods stand a little beside each other."""
    found = [results["win_rate"][panel][f"{method} {size}"] for size in config.sizes]
    x = [results["parameters"][size] * 1.04 ** (color - 2) for size in config.sizes]
    return _curve(method, x, found, [[at] * len(each["seeds"]) for at, each in zip(x, found, strict=True)], color)


def frontier_curve(results: Mapping[str, Any], name: str, config: FiguresConfig, color: int) -> Estimates:
    """The gold rewards of a frontier's policies over their KL, from the reference on."""
    policies = sorted(config.frontiers[name], key=lambda policy: np.mean(results["kl"][policy]))
    policies = [config.baseline, *policies]
    kl = [results["kl"][policy] for policy in policies]
    return _curve(
        name, [float(np.mean(each)) for each in kl], [results["gold"][policy] for policy in policies], kl, color
    )


def _curve(
    label: str, x: Sequence[float], found: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[float]], color: int
) -> Estimates:
    """Points at x, and those of each seed at `runs`."""
    dots = [point for at, each in zip(runs, found, strict=True) for point in zip(at, each["seeds"], strict=True)]
    return Estimates(
        label, x, [each["mean"] for each in found], [(each["low"], each["high"]) for each in found], dots, color
    )


def rate_cell(found: Mapping[str, Any]) -> dict[str, float]:
    """A rate with its interval, as a table shows it."""
    return {"rate": found["mean"], "low": found["low"], "high": found["high"]}


def number_cell(found: Mapping[str, Any]) -> str:
    """A number with its interval."""
    return f"{format_cell(found['mean'])} [{format_cell(found['low'])}, {format_cell(found['high'])}]"


def seeds_cell(found: Mapping[str, Any]) -> str:
    """The rate of each seed, in percent."""
    return " · ".join(f"{100 * value:.0f}" for value in found["seeds"])


def relation_cells(panel: str, found: Mapping[str, Any]) -> dict[str, str]:
    """The difference as a panel has it, and whether the relation holds."""
    agreeing = sum(np.sign(value) == np.sign(found["mean"]) for value in found["seeds"])
    return {
        panel: f"{found['holds']}: {shown(found)}",
        f"{panel}, seeds of this sign": f"{agreeing} of {len(found['seeds'])}",
    }

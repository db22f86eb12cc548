"""Ratings of several models (`alignment evaluate ratings`) from files of battles or a judged tournament."""

import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from alignment.data.rows.files import json_line_rows
from alignment.data.rows.records import Prompt
from alignment.errors import UserError, raise_all
from alignment.files import hash_of, write_figures
from alignment.judging.config import JudgeConfig
from alignment.judging.faults import judgment_figures, judgment_warnings
from alignment.judging.judges import build_judge, compare
from alignment.judging.judgments import Judgment
from alignment.judging.labeled_items import LabelColumns, read_votes
from alignment.reports.charts import Bar, Chart, bar_chart
from alignment.reports.html import Section, render_page
from alignment.reports.recipe_report import print_table
from alignment.settings import NonNegativeInt, PositiveFloat, Rule, Settings
from alignment.statistics.agreement import Figures
from alignment.statistics.ratings import MEAN, Ratings, bradley_terry_ratings, elo_ratings
from alignment.statistics.regression import Ties
from alignment.statistics.winrate import merge_orders
from alignment.training.run.directory import locked

# Our columns -> those of `LabelColumns`.
COLUMNS = {"model_a": "first_model", "model_b": "second_model", "outcome": "label", "cluster": "cluster"}
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan", re.I)
STYLE: dict[str, Callable[[str], int]] = {  # measured where a covariate's columns hold text
    "length": len,
    "headers": lambda text: len(re.findall(r"^#{1,6} ", text, re.M)),
    "lists": lambda text: len(re.findall(r"^\s*(?:[-*+]|\d+\.) ", text, re.M)),
    "bold": lambda text: len(re.findall(r"\*\*[^*\n]+\*\*", text)),
}


@dataclass(frozen=True, kw_only=True)
class TournamentConfig(JudgeConfig):
    """A judge, and responses of models to the same prompts, of which all pairs are judged in both orders.

    Attributes:
        responses: the responses.jsonl of an `evaluate winrate`.
    """

    responses: str


@dataclass(frozen=True)
class RatingsConfig(Settings):
    """Settings of ratings.

    Attributes:
        output: directory of results.json, ratings.html, and of the judgments of a tournament, which a later start reads
            again.
        battles: file, directory or glob of battles (.jsonl, .jsonl.gz, .csv, .json, .parquet): model_a, model_b, and
            outcome (1, 0.5, 0 for model_a) or winner (model_a, model_b, tie...); or judgments (first_model,
            second_model, verdict).
        tournament: responses and a judge instead of battles.
        columns: names of the columns where they are others: model_a, model_b, outcome, cluster. A winner may also be
            the name of a model, or of its column, such as left. Rows of one cluster, such as a prompt, are not
            independent; of judgments it is their `id`.
        method: bradley_terry, or elo, which counts the last battles most.
        ties: half (half a win for each side), davidson, rao_kupper; for bradley_terry.
        covariates: name -> the columns of model_a and of model_b of what ratings are to be held equal in: numbers, or
            texts, in which length, headers, lists and bold are measured. Each pair's value is (a - b) / (a + b).
        leave_out: models whose battles are left out.
        k: points that a battle moves at most, for elo.
        seed: of Elo's bootstrap.
    """

    output: str
    battles: str | None = None
    tournament: TournamentConfig | None = None
    columns: dict[str, str] = field(default_factory=dict)
    method: Literal["bradley_terry", "elo"] = "bradley_terry"
    ties: Ties = "half"
    covariates: dict[str, tuple[str, str]] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    k: PositiveFloat = 4.0
    seed: NonNegativeInt = 0

    RULES = (
        Rule(
            "battles",
            lambda c: (c.battles is None) == (c.tournament is None),
            "or a tournament must be given, one of them",
        ),
        Rule(
            "columns",
            lambda c: [name for name in c.columns if name not in COLUMNS],
            "are of model_a, model_b, outcome and cluster, not of {found}",
        ),
        Rule(
            "covariates",
            lambda c: c.covariates and (c.method == "elo" or c.tournament is not None),
            "are for method=bradley_terry and for battles of a file",
        ),
        Rule("ties", lambda c: c.method == "elo" and c.ties != "half", "other than half are for method=bradley_terry"),
    )


class Row(NamedTuple):
    """A battle."""

    model_a: str
    model_b: str
    outcome: float | None  # for model_a; None: there is none
    cluster: Hashable  # None: the row is its own
    covariates: tuple[float, ...] = ()  # in the config's order
    contradictory: bool = False  # a tie that stands for two orders of a judge that contradict each other


@locked
def run(config: RatingsConfig) -> Path:
    """Rate the models, print the table, and write `results.json` and `ratings.html`."""
    judging: Figures = {"warnings": []}
    if config.tournament is None:
        rows = read_battles(config)
    else:
        rows, judging = play_tournament(config.tournament, config)
    used = [r for r in rows if r.outcome is not None and not {r.model_a, r.model_b} & set(config.leave_out)]
    battles = [(row.model_a, row.model_b, row.outcome) for row in used if row.outcome is not None]
    clusters = None
    if any(row.cluster is not None for row in used):
        clusters = [(i,) if row.cluster is None else row.cluster for i, row in enumerate(used)]
    tossed = [row.contradictory for row in used]
    if any(tossed):
        judging["warnings"].append(
            f"a judge's two orders contradict each other on {sum(tossed)} of {len(used)} battles, which count half and "
            "narrow no interval"
        )
    for warning in judging["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if config.method == "elo":
        ratings = elo_ratings(battles, k=config.k, clusters=clusters, contradictory=tossed, seed=config.seed)
    else:
        columns = dict(zip(config.covariates, zip(*(row.covariates for row in used), strict=True), strict=False))
        ratings = bradley_terry_ratings(
            battles, ties=config.ties, covariates=columns, clusters=clusters, contradictory=tossed
        )
    counts = {
        "battles": len(used),
        "unused": len(rows) - len(used),
        "contradictory": sum(tossed),
        "clusters": clusters and len(set(clusters)),
    }
    results = {"method": config.method, "ties": config.ties, **counts, **rating_figures(ratings), **judging}
    path = write_figures(Path(config.output) / "results.json", results)
    table: list[dict[str, object]] = [
        {
            "model": name,
            "rank": figures["rank"],
            "rating": f"{figures['rating']:.0f} [{figures['low']:.0f}, {figures['high']:.0f}]",
            "battles": figures["battles"],
        }
        for name, figures in results["models"].items()
    ]
    _write_page(path.with_name("ratings.html"), results, table)
    print_table(table)
    print(f"{len(used)} battles used; {counts['unused']} not, which have no outcome, or a model of leave_out")
    return path


def rating_figures(ratings: Ratings) -> Figures:
    """Figures of each model, best first, effects of covariates and differences of all pairs, for `results.json`.

    A model's rank is 1 more than the number of models that are better at 5 %, all pairs of models being adjusted for.
    """
    differences = ratings.differences()
    worse = Counter(row.second for row in differences if row.p_holm < 0.05)
    return {
        "models": {
            model: {
                "rank": 1 + worse[model],
                "rating": rating,
                "low": low,
                "high": high,
                "battles": ratings.battles[model],
            }
            for (model, rating), (low, high) in zip(ratings.items(), ratings.intervals.values(), strict=True)
        },
        "effects": {name: effect._asdict() for name, effect in ratings.effects.items()},
        "tie": None if ratings.tie is None else ratings.tie._asdict(),
        "differences": [row._asdict() for row in differences],
    }


def _write_page(path: Path, results: Figures, table: list[dict[str, object]]) -> None:
    """A chart of the ratings as points above and below their mean, the table, and the differences of all pairs."""
    bars = [
        Bar(name, model["rating"] - MEAN, (model["low"] - MEAN, model["high"] - MEAN), 0)
        for name, model in results["models"].items()
    ]
    edge = 1.05 * max(abs(bound) for bar in bars for bound in bar.interval or ())
    chart = Chart(
        "Ratings",
        "points above the mean of the models, with 95 % intervals; 400 points are odds of 10 to 1",
        bar_chart("Ratings", bars, limits=(-edge, edge)),
    )
    sections = [
        Section(
            "ratings",
            "Ratings",
            "A rank is 1 more than the number of models that are better at 5 %, adjusted for all pairs after Holm.",
            charts=[chart],
            tables=[table],
        ),
        Section("differences", "Differences", "First minus second, in points.", tables=[results["differences"]]),
    ]
    summary = f"{len(bars)} models, {results['battles']} battles."
    render_page(path, kind="ratings", title=path.parent.name, summary=summary, sections=sections)


def read_battles(config: RatingsConfig) -> list[Row]:
    """The battles of a file; rows that are no battles are refused, with file:line.

    Judgments on the same two texts in both orders are one battle, as in `merge_orders`.
    """
    columns = LabelColumns({COLUMNS[role]: name for role, name in config.columns.items()})
    measured = [name for names in config.covariates.values() for name in names]
    votes = read_votes(str(config.battles), columns, battles=True, also=measured)
    measures = {
        name: STYLE[name] if name in STYLE and _holds_texts(votes, cells) else float
        for name, cells in config.covariates.items()
    }
    rows = list[Row]()
    places = dict[tuple[str | None, ...], int]()
    problems = list[str]()
    for vote in votes:
        cluster = vote.extra["cluster"] or (vote.extra.get("id") if "verdict" in vote.extra else None)
        try:
            covariates = tuple(_measure(measures[name], vote.extra, cells) for name, cells in config.covariates.items())
        except ValueError as error:
            problems.append(f"{vote.location}: {str(error)[:300]}")
            continue
        row = Row(str(vote.first_model), str(vote.second_model), vote.verdict, cluster, covariates)
        sides = (row.model_a, vote.first), (row.model_b, vote.second)
        here, turned = ((vote.judge, vote.id, *first, *second) for first, second in (sides, sides[::-1]))
        if turned in places and "verdict" in vote.extra:
            place = places.pop(turned)
            merged = merge_orders([rows[place].outcome], [row.outcome])
            rows[place] = rows[place]._replace(outcome=merged.verdicts[0], contradictory=merged.inconsistent > 0)
        else:
            places[here] = len(rows)
            rows.append(row)
    raise_all(problems)
    return rows


def _holds_texts(votes: Sequence[Judgment], columns: tuple[str, str]) -> bool:
    """True where some cell of the columns is neither a number nor empty."""
    cells = {str(vote.extra[column]).strip() for vote in votes for column in columns}
    return any(cell and not NUMBER.fullmatch(cell) for cell in cells)


def _measure(measure: Callable[[str], float], row: Mapping[str, object], columns: tuple[str, str]) -> float:
    """(a - b) / (a + b) of what is measured in two columns; 0 where both are 0.

    Source: the style control of Chatbot Arena, Li et al. 2024, lmsys.org/blog/2024-08-28-style-control.
    """
    cells = [row[column] for column in columns]
    if None in cells:
        raise ValueError(f"{columns[cells.index(None)]!r} is null: leave the row out, or the covariate")
    a, b = (measure(str(cell)) for cell in cells)
    return (a - b) / (abs(a) + abs(b)) if a or b else 0.0


def play_tournament(config: TournamentConfig, ratings: RatingsConfig) -> tuple[list[Row], Figures]:
    """All pairs of the models in a file of responses, judged in both orders; an item whose orders disagree counts half.

    Returns:
        The battles; and for the results the judge's calls, the figures of each pair's judgments, and warnings of the
        judge's faults.
    """
    if not Path(config.responses).is_file():
        raise UserError(f"{config.responses}: no such file; tournament.responses is that of an evaluate winrate")
    read = list(json_line_rows(Path(config.responses)))
    rows = [row.values or {} for row in read]
    if not rows or any(not {"id", "prompt", "responses"} <= row.keys() for row in rows):
        raise UserError(
            f"{config.responses}: its rows must have id, prompt and responses, as evaluate winrate writes them"
        )
    models = [name for name in rows[0]["responses"] if name not in ratings.leave_out]
    raise_all(
        f"{raw.location}: has responses of {', '.join(row['responses'])}, where the first row has "
        f"{', '.join(rows[0]['responses'])}; give every model's response in each row, or leave models out by "
        "`leave_out`"
        for raw, row in zip(read, rows, strict=True)
        if set(row["responses"]).difference(ratings.leave_out) != set(models)
    )
    prompts = [Prompt(row["prompt"], {}, row["id"]) for row in rows]
    judge = build_judge(config, Path(ratings.output))
    battles = list[Row]()
    figures = Figures()
    warnings = list[str]()
    for one, other in itertools.combinations(models, 2):
        sides = [row["responses"][one] for row in rows], [row["responses"][other] for row in rows]
        judged = compare(prompts, *sides, judge, max_failed_share=config.max_failed_share, models=(one, other))
        battles += [
            Row(one, other, verdict, hash_of(prompt.prompt), contradictory=is_toss)
            for prompt, verdict, is_toss in zip(prompts, judged.verdicts, judged.contradictory, strict=True)
        ]
        name = f"{one} against {other}"
        figures[name] = judgment_figures(judged)
        warnings += judgment_warnings(config, name, judged)
        if judged.failures:
            warnings.append(
                f"{name}: the judge failed on {judged.failures} of {len(rows)} prompts, which are no battles"
            )
    return battles, {"judging": judge.usage(), "warnings": warnings + judge.faults(), "comparisons": figures}

"""Items judged by people: two responses to a prompt with the votes of one or several people, from files of many forms.

Rows that need no mapping of columns, known by a column that only they have:

    verdict    judgments: id, prompt, first, second, verdict (1, 0.5, 0), judge, first_model, second_model
    outcome    battles: model_a, model_b, outcome (1, 0.5, 0)
    winner     votes: question_id, turn, model_a, model_b, winner (model_a, model_b, tie), judge
    chosen     comparisons: prompt, chosen, rejected, or whole dialogues as in HH-RLHF

Rows on one item, of the same id and sides in either order, are put together. Figures are in judge_run.py and
ratings_run.py.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

from alignment.data.config import OnBadRow
from alignment.data.rows.files import read_raw
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Comparison, Prompt
from alignment.errors import raise_all
from alignment.judging.inputs import print_tally
from alignment.judging.judgments import Judgment
from alignment.settings import PATTERN_SECONDS, Rule, Settings, Share, compile_pattern, refusal
from alignment.statistics.agreement import majority_label
from alignment.statistics.winrate import LOSS, TIE, WIN, Verdict

USUAL = {"first_model": ["model_a"], "second_model": ["model_b"], "cluster": ["cluster"], "label": ["label"]}
FORMS = {  # what is not as usual in rows that have this column
    "verdict": {
        **{name: [name] for name in ("id", "prompt", "first", "second", "first_model", "second_model", "subset")},
        "label": ["verdict"],
        "annotator": ["judge"],
    },
    "outcome": {"label": ["outcome"]},
    "winner": {"id": ["question_id", "turn"], "label": ["winner"], "annotator": ["judge"]},
}
OURS = {*USUAL, *FORMS["verdict"], "pair"}
SHARES = {"1": WIN, "1.0": WIN, "0.5": TIE, "0": LOSS, "0.0": LOSS}  # numbers in a column `verdict` or `outcome`
WORDS = {
    "first": WIN,
    "model_a": WIN,
    "left": WIN,
    "a": WIN,
    "tie": TIE,
    "draw": TIE,
    "both": TIE,
    "second": LOSS,
    "model_b": LOSS,
    "right": LOSS,
    "b": LOSS,
}

Values = Mapping[str, Any]  # of a row, by column


@dataclass(frozen=True)
class LabelColumns(Settings):
    """The columns of labeled rows, and the meaning of a label.

    Attributes:
        columns: ours -> the file's, where the form of the rows does not say: id, prompt, first and second (the
            responses), label (people's; several columns are several people), annotator (who gave it), first_model and
            second_model, or pair (one name for both), subset, cluster (equal for rows that are not independent; the
            prompt where there is none). Several columns of a text are joined.
        values: a label as it is written -> 1, 0.5 or 0 for the first response, beside 1, model_a or first, 2, model_b
            or second, the name of a model or of its column, tie, and 0 for a tie where there are 1 and 2; in a column
            `verdict` or `outcome` 1, 0.5 and 0 stand for themselves.
        annotators: regular expression that the whole name of a person matches whose labels count.
        on_bad_row: of comparisons: report all bad rows and stop, or skip and count them.
    """

    columns: dict[str, str | list[str]] = field(default_factory=dict)
    values: dict[str, Share] = field(default_factory=dict)
    annotators: str = ".*"
    on_bad_row: OnBadRow = "error"

    RULES = (
        Rule(
            "columns",
            lambda c: ", ".join(sorted(c.columns.keys() - OURS)),
            f"has no {{found}}; it has {', '.join(sorted(OURS))}",
        ),
        Rule("annotators", lambda c: refusal(compile_pattern, c.annotators)),
    )


@dataclass
class LabeledItem:
    """Two responses to one prompt; all verdicts are for the first.

    Attributes:
        prompt: its `row_id` is the item's id.
        first, second: the texts; "" where the rows have none.
        pair: names of both models, the first one first; "" where the rows do not say.
        votes: of people, by name. One who gave two that differ, in two orders, has voted for a tie.
        verdicts: of the judge in a file; True: of the order in which `first` was shown second.
    """

    prompt: Prompt
    first: str
    second: str
    pair: str
    subset: str
    cluster: str
    votes: dict[str, float] = field(default_factory=dict)
    verdicts: dict[bool, Verdict] = field(default_factory=dict)

    @property
    def label(self) -> Verdict:
        """The verdict of more than half of the people; None where there is none."""
        return majority_label(list(self.votes.values()))

    @property
    def mean_vote(self) -> Verdict:
        """Mean of people's verdicts; None without any."""
        return fmean(self.votes.values()) if self.votes else None


Items = dict[tuple[str, ...], LabeledItem]  # by id and sides


def add_items(source: str, config: LabelColumns, items: Items, *, by_judge: bool = False, subset: str = "") -> None:
    """Add the rows of a file, see `read_votes`, to `items`, those that are there or new ones.

    Args:
        by_judge: its labels are the judge's verdicts.
        subset: of rows that do not say.
    """
    people = compile_pattern(config.annotators)
    for vote in read_votes(source, config, strict=not by_judge):
        item, swapped = _item_of(items, vote, subset)
        verdict = 1 - vote.verdict if swapped and vote.verdict is not None else vote.verdict
        if by_judge:
            item.verdicts[swapped] = verdict
        elif verdict is not None and people.fullmatch(vote.judge, timeout=PATTERN_SECONDS):
            item.votes[vote.judge] = verdict if item.votes.get(vote.judge, verdict) == verdict else TIE


def _item_of(items: Items, vote: Judgment, subset: str) -> tuple[LabeledItem, bool]:
    """The item of a vote, known or new, and whether the vote has its sides in the other order."""
    sides = [vote.first, vote.second]
    models = [vote.first_model or "", vote.second_model or ""]
    key = (vote.id, *sorted(models if all(models) else sides))
    # of two models the alphabet's order, in all their items
    swapped = models != sorted(models) if all(models) else key in items and items[key].first != vote.first
    if key not in items:
        items[key] = LabeledItem(
            Prompt(vote.prompt, {}, vote.id),
            *(reversed(sides) if swapped else sides),
            pair=str(vote.extra["pair"]) or (" against ".join(key[1:]) if all(models) else ""),
            subset=str(vote.extra["subset"]) or subset,
            cluster=str(vote.extra["cluster"] or vote.extra.get("question_id") or vote.prompt or vote.id),
        )
    return items[key], swapped


def read_votes(
    source: str, config: LabelColumns, *, battles: bool = False, strict: bool = True, also: Collection[str] = ()
) -> list[Judgment]:
    """The votes of a file of any form, one per label of a row; `extra` is the row, with `pair`, `subset` and `cluster`.

    Args:
        battles: the rows must name two models, and numbers are shares of a win, in whichever column they are.
        strict: refuse labels that stand for nothing; else they are verdicts that cannot be read.
        also: further columns that the rows must have.

    Raises:
        UserError: rows that cannot be read or lack a column, and labels that stand for nothing, with file:line.
    """
    rows = _rows(source, config.on_bad_row)
    usual = USUAL | next((form for name, form in FORMS.items() if name in rows[0][1]), {})
    needed = {"label", "first_model", "second_model"} if battles else {"label"}
    columns = {ours: names for ours, names in usual.items() if ours in needed or rows[0][1].keys() >= set(names)}
    columns |= {ours: [column] if isinstance(column, str) else column for ours, column in config.columns.items()}
    used = {name for names in (*columns.values(), also) for name in names}
    raise_all(
        f"{at}: no column {name!r}; it has {', '.join(values)}: say in the config which are meant"
        for at, values in rows
        for name in sorted(used - values.keys())
    )
    labels = columns["label"]
    zero = {"0": TIE} if any(str(values[name]) == "2" for _, values in rows for name in labels) else {}
    are_shares = labels in (["verdict"], ["outcome"])
    numbers = SHARES if battles or are_shares else {"1": WIN, "2": LOSS, **zero}
    sides = ((WIN, "first_model"), (LOSS, "second_model"))
    usual_words = WORDS | {name.lower(): share for share, ours in sides for name in columns.get(ours, ())}
    way = "it is 1, 0.5, 0, a tie, or a model" if battles else "say in `values` what it stands for"
    votes = list[Judgment]()
    problems = list[str]()
    for at, values in rows:
        row = _row_of(at, values, columns)
        models = {str(model): share for share, ours in sides if (model := getattr(row, ours))}
        models = {model.lower(): share for model, share in models.items()} | models
        words = usual_words | (models | numbers if are_shares else numbers | models) | config.values
        for name in labels:
            label = "" if values[name] is None else str(values[name]).strip()
            word = label.lower()
            verdict = words.get(label, words.get(word, TIE if word.startswith("tie (") else None))
            if strict and verdict is None and word:
                problems.append(f"{at}: {name!r} is {values[name]!r}: {way}")
            votes.append(replace(row, verdict=verdict, judge=row.judge if row.judge and len(labels) == 1 else name))
    raise_all(problems)
    return votes


def _row_of(at: str, values: Values, columns: Mapping[str, Sequence[str]]) -> Judgment:
    """A row's responses, models and annotator, without its label."""
    text = defaultdict(str)
    for ours, names in columns.items():
        text[ours] = "\n\n".join(str(values[name]) for name in names if values[name] not in (None, ""))
    prompt = columns.get("prompt", ())
    return Judgment(
        id=text["id"] or (text["prompt"] if "annotator" in columns else "") or at,
        first=text["first"],
        second=text["second"],
        verdict=None,
        prompt=values[prompt[0]] if len(prompt) == 1 else text["prompt"],
        judge=text["annotator"],
        first_model=text["first_model"] or None,
        second_model=text["second_model"] or None,
        extra={**values, **{ours: text[ours] for ours in ("pair", "subset", "cluster")}},
        location=at,
    )


def _rows(source: str, on_bad_row: OnBadRow) -> list[tuple[str, Values]]:
    """Location and columns of each row; a comparison has its prompt apart, and its responses in alphabetical order."""
    raw = list(read_raw(source))
    raise_all((row.problem for row in raw if row.values is None) if raw else [f"{source}: no rows in this file"])
    rows: list[tuple[str, Values]] = [(row.location, row.values or {}) for row in raw]
    if not {"chosen", "rejected"} <= rows[0][1].keys():
        return rows
    records, tally = read_rows(source, "comparisons", on_bad_row=on_bad_row)
    print_tally("comparisons", tally)
    pairs = dict[str, dict[str, object]]()
    for pair in cast("list[Comparison]", records):
        (first, verdict), (second, _) = sorted([(pair.chosen, WIN), (pair.rejected, LOSS)])
        pairs[pair.row_id] = {"prompt": pair.prompt, "first": first, "second": second, "verdict": verdict}
    return [(at, {**values, **pairs[at]}) for at, values in rows if at in pairs]

"""Items that people have judged: two responses to a prompt with the votes of one or several people, from files of many forms.

Rows that need no mapping of columns, known by a column that only they have:

    verdict    judgments: id, prompt, first, second, verdict (1, 0.5, 0), judge, first_model, second_model
    winner     votes: question_id, turn, model_a, model_b, winner (model_a, model_b, tie), judge
    chosen     comparisons: prompt, chosen, rejected, or whole dialogues as in HH-RLHF

Rows on one item, of the same id and sides in either order, are put together. The figures are in judge_run.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

from alignment.data.config import OnBadRow
from alignment.data.rows.files import read_raw
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Comparison, Prompt
from alignment.errors import raise_all
from alignment.evaluation.agreement import majority_label
from alignment.evaluation.inputs import print_tally
from alignment.evaluation.winrate import LOSS, TIE, WIN, Verdict
from alignment.settings import PATTERN_SECONDS, Rule, Settings, Share, compile_pattern, refusal

PLAIN = ("id", "prompt", "first", "second", "first_model", "second_model", "subset")
OURS = {*PLAIN, "label", "annotator", "verdict", "pair", "cluster"}
FORMS = {
    "verdict": {**{name: [name] for name in PLAIN}, "label": ["verdict"], "annotator": ["judge"]},
    "winner": {
        "id": ["question_id", "turn"], "cluster": ["question_id"], "first_model": ["model_a"], "second_model": ["model_b"],
        "label": ["winner"], "annotator": ["judge"],
    },
}  # fmt: skip
SHARES = {"1": WIN, "1.0": WIN, "0.5": TIE, "0": LOSS, "0.0": LOSS}  # of a column `verdict`
WORDS = {
    "1": WIN, "first": WIN, "model_a": WIN, "left": WIN, "a": WIN, "tie": TIE, "draw": TIE, "both": TIE,
    "2": LOSS, "second": LOSS, "model_b": LOSS, "right": LOSS, "b": LOSS,
}  # fmt: skip

Values = Mapping[str, Any]  # of a row, by column


@dataclass(frozen=True)
class LabelColumns(Settings):
    """The columns of labeled rows, and the meaning of a label.

    Attributes:
        columns: ours -> the file's, where the form of the rows does not say: id, prompt, first and second (the responses),
            label (people's; several columns are several people), annotator (who gave it), verdict (the judge's),
            first_model and second_model, or pair (one name for both), subset, cluster (equal for rows that are not
            independent; the prompt where there is none). Several columns of a text are joined.
        values: a label as it is written -> 1, 0.5 or 0 for the first response, beside 1, model_a or first, 2, model_b or
            second, tie, and 0 for a tie where there are 1 and 2; in a column `verdict` 1, 0.5 and 0 stand for themselves.
        annotators: regular expression that the whole name of a person matches whose labels count.
        on_bad_row: of comparisons: report all bad rows and stop, or skip and count them.
    """

    columns: dict[str, str | list[str]] = field(default_factory=dict)
    values: dict[str, Share] = field(default_factory=dict)
    annotators: str = ".*"
    on_bad_row: OnBadRow = "error"

    RULES = (
        Rule("columns", lambda c: ", ".join(sorted(c.columns.keys() - OURS)),
             f"has no {{found}}; it has {', '.join(sorted(OURS))}"),
        Rule("annotators", lambda c: refusal(compile_pattern, c.annotators)),
    )  # fmt: skip


@dataclass
class LabeledItem:
    """Two responses to one prompt; all verdicts are for the first.

    Attributes:
        prompt: its `row_id` is the item's id.
        first, second: the texts, or the names of the models where there are no texts.
        pair: names of both models, the first one first; "" where the rows do not say.
        has_texts: False where a judge has nothing to read.
        votes: of people, by name. One who gave two that differ, in two orders, has voted for a tie.
        verdicts: of the judge in a file; True: of the order in which `first` was shown second.
    """

    prompt: Prompt
    first: str
    second: str
    pair: str
    subset: str
    cluster: str
    has_texts: bool
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
    """Add the rows of a file to `items`, those that are there or new ones.

    Args:
        by_judge: its labels are the judge's verdicts; its rows are of a known form, and `config.columns` are not theirs.
        subset: of rows that do not say.

    Raises:
        UserError: rows without the columns, and labels of people that stand for nothing, with file:line.
    """
    rows = _rows(source, config.on_bad_row)
    form = next((form for name, form in FORMS.items() if name in rows[0][1]), {})
    known = {ours: names for ours, names in form.items() if all(name in rows[0][1] for name in names)}
    mapped = {} if by_judge else {k: [own] if isinstance(own, str) else own for k, own in config.columns.items()}
    columns = {"label": ["label"], **known, **mapped}
    raise_all(
        f"{at}: no column {name!r}; it has {', '.join(values)}: say in `columns` which are meant"
        for at, values in rows
        for name in sorted({name for names in columns.values() for name in names} - values.keys())
    )
    labels, people, problems = columns["label"], compile_pattern(config.annotators), list[str]()
    twos = any(str(values[name]) == "2" for _, values in rows for name in labels)
    words = (SHARES if labels == ["verdict"] else WORDS | ({"0": TIE} if twos else {})) | config.values
    for at, values in rows:
        item, swapped = _item_of(items, values, columns, at, subset)
        for name in labels if by_judge else columns.get("verdict", ()):
            item.verdicts[swapped] = _verdict(values[name], words, swapped)
        for name in () if by_judge else labels:
            who = str(values[columns["annotator"][0]]) if "annotator" in columns and len(labels) == 1 else name
            verdict = _verdict(values[name], words, swapped)
            if verdict is None and values[name] not in (None, ""):
                problems.append(f"{at}: {name!r} is {values[name]!r}: say in `values` what it stands for")
            if verdict is not None and people.fullmatch(who, timeout=PATTERN_SECONDS):
                item.votes[who] = verdict if item.votes.get(who, verdict) == verdict else TIE
    raise_all(problems)


def _rows(source: str, on_bad_row: OnBadRow) -> list[tuple[str, Values]]:
    """Location and columns of each row; a comparison has its prompt apart, and its responses in alphabetical order."""
    raw = list(read_raw(source))
    raise_all((row.problem for row in raw if row.values is None) if raw else [f"{source}: no rows in this file"])
    rows: list[tuple[str, Values]] = [(row.location, row.values or {}) for row in raw]
    if not {"chosen", "rejected"} <= rows[0][1].keys():
        return rows
    records, tally = read_rows(source, "comparisons", on_bad_row=on_bad_row)
    print_tally("comparisons", tally)
    pairs = {record.row_id: cast("Comparison", record) for record in records}
    sides = {at: (pair, *sorted([(pair.chosen, WIN), (pair.rejected, LOSS)])) for at, pair in pairs.items()}
    return [
        (at, {**values, "prompt": pair.prompt, "first": first, "second": second, "verdict": verdict})
        for at, values in rows
        if at in sides
        for pair, (first, verdict), (second, _) in [sides[at]]
    ]


def _item_of(
    items: Items, values: Values, columns: Mapping[str, Sequence[str]], at: str, subset: str
) -> tuple[LabeledItem, bool]:
    """The item of a row, known or new, and whether the row has its sides in the other order."""
    filled = {
        ours: [values[name] for name in names if values[name] not in (None, "")] for ours, names in columns.items()
    }
    text = {ours: "\n\n".join(map(str, found)) for ours, found in filled.items()}
    models = [text.get("first_model", ""), text.get("second_model", "")]
    sides = [text.get("first", models[0]), text.get("second", models[1])]
    name = text.get("id", text.get("prompt", at) if "annotator" in columns else at)
    order = models if all(models) else sides
    key = (name, *sorted(order))
    # of two models the alphabet's order, in all their items
    swapped = models != sorted(models) if all(models) else key in items and items[key].first != sides[0]
    if key not in items:
        prompt = values[columns["prompt"][0]] if len(columns.get("prompt", ())) == 1 else text.get("prompt", "")
        items[key] = LabeledItem(
            Prompt(prompt, {}, name),
            *(reversed(sides) if swapped else sides),
            pair=text.get("pair", " against ".join(key[1:]) if all(models) else ""),
            subset=text.get("subset", subset),
            cluster=text.get("cluster", text.get("prompt", name)),
            has_texts="first" in text,
        )
    return items[key], swapped


def _verdict(label: object, words: Mapping[str, float], swapped: bool) -> Verdict:
    """The verdict for an item's first response; None where the label stands for none."""
    word = str(label).strip().lower()
    verdict = words.get("tie" if word.startswith("tie") else word)
    return 1 - verdict if swapped and verdict is not None else verdict

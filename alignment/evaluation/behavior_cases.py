"""Behavioral tests: their cases, from rows and from templates, and the rule by which a case passes; no model is loaded.

Models and rates are in behavior.py. Source: Ribeiro et al. 2020, arXiv:2005.04118 (CheckList).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml, read_yaml
from alignment.data.rows.files import read_raw
from alignment.errors import UserError, raise_all
from alignment.settings import NonNegativeFloat, PositiveInt, Rule, Settings

Label = str | int
Text = str | tuple[str, str]  # two texts: premise and hypothesis, or prompt and response
ROUNDING = 1e-6  # of probabilities: no change that is as large as the tolerance fails by its last digits
MAX_COMBINATIONS = 200_000  # of a template's lists
NOT_READ = ("id", "index", "description", "comment")  # keys that a row may have besides


@dataclass(frozen=True, kw_only=True)
class BehaviorCase(Settings):
    """One case of a test, which passes or fails as a whole; with `fill`, a template of many cases.

    Attributes:
        test: name of the test; its cases have the same rule.
        type: MFT (minimum functionality: the label of every text is right), INV (invariance: no text changes the answer to
            the first one), DIR (direction: a change in one direction alone is right, or is wrong).
        examples: texts, or pairs of texts; of INV and DIR the first is the original and the others are its variants.
        capability: what the test is about; failure rates are given for each.
        label: MFT: the expected label, or a list of those that pass.
        accept: MFT: label -> the labels that pass where it is expected.
        change: DIR: what the value of every variant does, compared with the original's.
        of: INV, DIR: weight of each label in that value, the sum of weight times probability; None: the probability of the
            label that is predicted for the original. A model that only scores has its score for a value.
        tolerance: INV, DIR: a smaller change of the value is none; in probability, or in the unit of the score.
        skip: INV, DIR: labels predicted for the original that make the case say nothing.
        fill: name in the examples, which are Jinja templates then -> its values; all combinations are cases. A value is a
            text, or names with texts (`{{ city.country }}`); `FILE#COLUMN` stands for the texts of a column of rows.
        where: condition in the same names, in Jinja; other combinations are left out. None: none is.
        max_cases: of more combinations so many are drawn, the same ones each time.
    """

    test: str
    type: Literal["MFT", "INV", "DIR"]
    examples: list[Text]
    capability: str = "all"
    label: Label | list[Label] | None = None
    accept: dict[str, list[Label]] = field(default_factory=dict)
    change: Literal["rises", "falls", "does not rise", "does not fall"] | None = None
    of: dict[str, float] | None = None
    tolerance: NonNegativeFloat = 0.1
    skip: list[Label] = field(default_factory=list)
    fill: dict[str, str | list[Label | dict[str, Label]]] = field(default_factory=dict)
    where: str | None = None
    max_cases: PositiveInt = 500

    RULES = (
        Rule("label", lambda c: c.type == "MFT" and c.label in (None, []), "must be given for MFT: the label, or a list"),
        Rule("change", lambda c: (c.type == "DIR") != (c.change is not None), "goes with DIR, which needs one"),
        Rule("examples", lambda c: len(c.examples) < (1 if c.type == "MFT" else 2),
             "must be a list of texts: one at least, of INV and DIR two, the original first"),
        Rule("fill", lambda c: [name for name, own in c.fill.items() if isinstance(own, str) and "#" not in own],
             "takes a list of values or FILE#COLUMN; see {found}"),
    )  # fmt: skip

    @property
    def accepted(self) -> list[str]:
        """The labels that pass, of MFT."""
        given = self.label if isinstance(self.label, list) else [] if self.label is None else [self.label]
        return [str(label) for each in given for label in self.accept.get(str(each), [each])]


def read_cases(sources: Sequence[str], expectations: str | None = None) -> list[BehaviorCase]:
    """The cases of files of rows and (.yaml) of tests by name; the mistakes of all rows at once, each with file:line.

    Args:
        expectations: YAML file, name of a test -> keys of a case that the rows of that test lack.
    """
    rules = SourcedYaml({}) if expectations is None else _read_sections(expectations)
    cases, problems = list[BehaviorCase](), list[str]()
    for row in [row for source in sources for row in _read_rows(source)]:
        given = {key: value for key, value in row.values.items() if value is not None and key not in NOT_READ}
        rule = rules.values.get(str(given.get("test")), {})
        places = {(key,): rules.location((given["test"], key)) for key in rule.keys() - given.keys()}
        try:
            case = build(BehaviorCase, SourcedYaml({**rule, **given}, {**row.locations, **places}))
            cases += fill_templates(case, row.location(("fill",))) if case.fill else [case]
        except UserError as error:
            problems.append(str(error))
    raise_all(dict.fromkeys(problems or ([] if cases else ["tests: there is no case in these files"])))
    return cases


def _read_rows(source: str) -> list[SourcedYaml]:
    """The rows of a file with their locations; of YAML its sections, each with the test that it is named after."""
    if not source.endswith((".yaml", ".yml")):
        rows = list(read_raw(source))
        raise_all(row.problem for row in rows if row.values is None)
        return [SourcedYaml(row.values, {(): row.location}) for row in rows]
    document = _read_sections(source)
    sections = {name: document.section((name,)) for name in document.values}
    return [SourcedYaml({"test": name, **own.values}, own.locations) for name, own in sections.items()]


def _read_sections(path: str) -> SourcedYaml:
    """A YAML file of sections by the name of a test."""
    document = read_yaml(path)
    sections = document.values.items() if isinstance(document.values, dict) else [("the file", None)]
    wrong = [name for name, section in sections if not isinstance(section, dict)]
    raise_all(f"{document.location((name,))}: {name} must be a section, under the name of a test" for name in wrong)
    return document


def fill_templates(template: BehaviorCase, location: str = "fill") -> list[BehaviorCase]:
    """The cases of a template; UserError with its location where there are none, or a name or the syntax is wrong."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    lists = [_read_column(values) if isinstance(values, str) else values for values in template.fill.values()]
    size = prod(map(len, lists))
    try:
        chosen = environment.compile_expression(template.where or "true", undefined_to_none=False)
        named = (
            dict(zip(template.fill, values, strict=True)) for values in product(*lists) if size <= MAX_COMBINATIONS
        )
        filled = [names for names in named if chosen(**names)]
        drawn = sorted(random.Random(0).sample(range(len(filled)), min(template.max_cases, len(filled))))
        pairs = [(text,) if isinstance(text, str) else text for text in template.examples]
        compiled = [[environment.from_string(piece) for piece in pair] for pair in pairs]
        texts = [[tuple(piece.render(filled[i]) for piece in pair) for pair in compiled] for i in drawn]
    except (TemplateError, TypeError) as error:
        raise UserError(f"{location}: {template.test}: a template cannot be filled: {error}") from error
    none = (
        f"{location}: {template.test}: no case; of {size} combinations (at most {MAX_COMBINATIONS}) `where` leaves none"
    )
    raise_all([] if texts else [none])
    return [replace(template, examples=[t if len(t) == 2 else t[0] for t in case], fill={}) for case in texts]


def _read_column(source: str) -> list[Label]:
    """The texts of a column, from `FILE#COLUMN`."""
    file, _, column = source.rpartition("#")
    rows = list(read_raw(file))
    raise_all(row.problem or f"{row.location}: no {column!r}" for row in rows if column not in (row.values or {}))
    return [row.values[column] for row in rows if row.values]


# The rule of a case


class Prediction(NamedTuple):
    """A model's answer to one text."""

    label: str | None  # None: the model only scores
    values: Mapping[str, float]  # probability of each label; of a model that only scores its `score`
    response: str | None = None  # that the label was given to


class CaseResult(NamedTuple):
    """A case after its rule."""

    failed: bool | None  # None: it says nothing, since no answer to it could fail, or its rule leaves it out
    excess: float = 0.0  # of the worst text: MFT: probability of wrong labels; else how far it is beyond the tolerance
    worst: int = 0  # number of that text


def judge_case(case: BehaviorCase, predictions: Sequence[Prediction]) -> CaseResult:
    """A case's result from the predictions for its texts, in order: it fails where one text does.

    MFT fails where a label is not accepted. INV fails where the label differs from the original's and the value by more than
    the tolerance; for a model that only scores, where the score does. DIR fails where the value falls by more than the
    tolerance and must not, or does not fall by more and must; likewise rises. The probability of a predicted label cannot
    fall below 0 nor rise above 1, so that an original within the tolerance of that bound says nothing.

    Source: Ribeiro et al. 2020, arXiv:2005.04118, section 2, and `expect.py` of their package checklist.
    """
    if case.type == "MFT":
        wrong = [1 - sum(one.values.get(label, 0.0) for label in case.accepted) for one in predictions]
        failed = [one.label not in case.accepted for one in predictions]
    else:
        first = predictions[0]
        weights = {"score": 1.0} if first.label is None else case.of or {first.label: 1.0}
        start, *others = (sum(weights[key] * one.values.get(key, 0.0) for key in weights) for one in predictions)
        room = {"does not fall": start, "does not rise": 1 - start}.get(case.change or "", 1.0)
        if first.label in [str(label) for label in case.skip] or (
            first.label and not case.of and room <= case.tolerance
        ):
            return CaseResult(None)
        needed, downwards = case.change in ("rises", "falls"), case.change in ("rises", "does not fall")
        changes = [abs(v - start) if case.type == "INV" else start - v if downwards else v - start for v in others]
        wrong = [0.0, *(change + (case.tolerance if needed else -case.tolerance) for change in changes)]
        kept = [first.label is not None and one.label == first.label and case.type == "INV" for one in predictions]
        failed = [
            not same and (over >= 0 if needed else over > ROUNDING) for over, same in zip(wrong, kept, strict=True)
        ]
        wrong[0], failed[0] = -float("inf"), False
    worst = max(range(len(wrong)), key=lambda number: (failed[number], wrong[number]))
    return CaseResult(any(failed), wrong[worst], worst)

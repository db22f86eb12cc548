"""Behavioral tests: their cases, from rows and from templates, and the rule by which a case passes; no model is loaded.

Models and rates are in behavior.py. Source: Ribeiro et al. 2020, arXiv:2005.04118 (CheckList).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml, read_yaml
from alignment.data.rows.files import read_raw
from alignment.errors import UserError, raise_all
from alignment.models.outputs import check_numbers
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
        type: MFT (minimum functionality: the label of every text is right), INV (invariance: no text changes the answer
            to the first one), DIR (direction: a change in one direction alone is right, or is wrong).
        examples: texts, or pairs of texts; of INV and DIR the first is the original and the others are its variants.
        capability: what the test is about; failure rates are given for each.
        label: MFT: the expected label, or a list of those that pass.
        accept: MFT: label -> the labels that pass where it is expected.
        change: DIR: what the value of every variant does, compared with the original's.
        of: INV, DIR: weight of each label in that value, the sum of weight times probability; None: the probability of
            the label that is predicted for the original. A model that only scores has its score for a value.
        tolerance: INV, DIR: a smaller change of the value is none; in probability, or in the unit of the score.
        skip: INV, DIR: labels predicted for the original that make the case say nothing.
        fill: name in the examples, which are Jinja templates then -> its values; all combinations are cases. A value is
            a text, or names with texts (`{{ city.country }}`).
        where: condition in the same names, in Jinja; other combinations are left out. None: none is.
        max_cases: of more combinations so many are drawn, the same ones each time.
    """

    test: str
    type: Literal["MFT", "INV", "DIR"]
    examples: list[Text]
    capability: str = "all"
    label: Label | list[Label] = field(default_factory=list)
    accept: dict[str, list[Label]] = field(default_factory=dict)
    change: Literal["rises", "falls", "does not rise", "does not fall"] | None = None
    of: dict[str, float] | None = None
    tolerance: NonNegativeFloat = 0.1
    skip: list[Label] = field(default_factory=list)
    fill: dict[str, list[Label | dict[str, Label]]] = field(default_factory=dict)
    where: str | None = None
    max_cases: PositiveInt = 500

    RULES = (
        Rule("label", lambda c: c.type == "MFT" and c.label == [], "must be given for MFT: the label, or a list"),
        Rule("change", lambda c: (c.type == "DIR") != (c.change is not None), "goes with DIR, which needs one"),
        Rule(
            "examples",
            lambda c: len(c.examples) < (1 if c.type == "MFT" else 2),
            "must be a list of texts: one at least, of INV and DIR two, the original first",
        ),
        Rule(
            "fill",
            lambda c: np.prod([float(len(values)) for values in c.fill.values()]) > MAX_COMBINATIONS,
            f"must have at most {MAX_COMBINATIONS} combinations; shorten the lists",
        ),
    )

    @property
    def accepted(self) -> list[str]:
        """The labels that pass, of MFT."""
        labels = self.label if isinstance(self.label, list) else [self.label]
        return [str(label) for expected in labels for label in self.accept.get(str(expected), [expected])]


def read_cases(sources: Sequence[str], expectations: str | None = None) -> list[BehaviorCase]:
    """The cases of files of rows and (.yaml) of tests by name; the mistakes of all rows at once, each with file:line.

    Args:
        expectations: YAML file, name of a test -> keys of a case that the rows of that test lack.
    """
    rules = {row.values["test"]: row for row in _read_rows(expectations)} if expectations else {}
    cases = list[BehaviorCase]()
    problems = list[str]()
    for row in chain.from_iterable(map(_read_rows, sources)):
        given = {key: value for key, value in row.values.items() if value is not None and key not in NOT_READ}
        rule = rules.get(str(given.get("test")), SourcedYaml({}))
        places = {(key,): rule.location((key,)) for key in rule.values.keys() - given.keys()}
        try:
            case = build(BehaviorCase, SourcedYaml({**rule.values, **given}, {**row.locations, **places}))
            cases += fill_templates(case, row.location(("fill",))) if case.fill else [case]
        except UserError as error:
            problems.append(str(error))
    raise_all(problems or ([] if cases else ["tests: there is no case in these files"]))
    return cases


def _read_rows(source: str) -> list[SourcedYaml]:
    """The rows of a file with their locations; of YAML its sections, each with the test that it is named after."""
    if not source.endswith((".yaml", ".yml")):
        rows = list(read_raw(source))
        raise_all(row.problem for row in rows if row.values is None)
        return [SourcedYaml(row.values, {(): row.location}) for row in rows]
    document = read_yaml(source)
    sections: dict[str, Any] = document.values if isinstance(document.values, dict) else {"the file": None}
    raise_all(
        f"{document.location((name,))}: {name} must be a section, under the name of a test"
        for name, section in sections.items()
        if not isinstance(section, dict)
    )
    return [
        SourcedYaml({"test": name, **section}, document.section((name,)).locations)
        for name, section in sections.items()
    ]


def fill_templates(template: BehaviorCase, location: str = "fill") -> list[BehaviorCase]:
    """The cases of a template; UserError with its location where there are none, or a name or the syntax is wrong."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        chosen = environment.compile_expression(template.where or "true", undefined_to_none=False)
        named = (dict(zip(template.fill, values, strict=True)) for values in product(*template.fill.values()))
        filled = [names for names in named if chosen(**names)]
        drawn = np.sort(np.random.default_rng(0).permutation(len(filled))[: template.max_cases])
        pairs = [(text,) if isinstance(text, str) else text for text in template.examples]
        compiled = [[environment.from_string(piece) for piece in pair] for pair in pairs]
        texts = [[tuple(piece.render(filled[i]) for piece in pair) for pair in compiled] for i in drawn]
    except (TemplateError, TypeError) as error:
        raise UserError(f"{location}: {template.test}: a template cannot be filled: {error}") from error
    raise_all([] if texts else [f"{location}: {template.test}: no case; `fill` and `where` leave no combination"])
    return [replace(template, examples=[t if len(t) == 2 else t[0] for t in case], fill={}) for case in texts]


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

    MFT fails where a label is not accepted. INV fails where the label differs from the original's and the value by more
    than the tolerance; for a model that only scores, where the score does. DIR fails where the value falls by more than
    the tolerance and must not, or does not fall by more and must; likewise rises. The probability of a predicted label
    cannot fall below 0 nor rise above 1, so that an original within the tolerance of that bound says nothing.

    Raises:
        UserError: a value is not finite, which no comparison would tell.

    Source: Ribeiro et al. 2020, arXiv:2005.04118, section 2, and `expect.py` of their package checklist.
    """
    given = torch.tensor([sum(one.values.values()) for one in predictions])
    check_numbers(given, lambda i: f"{case.test}: {case.examples[i]!r}", "the model's answer")
    if case.type == "MFT":
        excess = [1 - sum(one.values.get(label, 0.0) for label in case.accepted) for one in predictions]
        failed = [one.label not in case.accepted for one in predictions]
    else:
        first = predictions[0].label
        weights = {"score": 1.0} if first is None else case.of or {first: 1.0}
        values = np.array([sum(weights[key] * one.values.get(key, 0.0) for key in weights) for one in predictions])
        room = {"does not fall": values[0], "does not rise": 1 - values[0]}.get(case.change or "", 1.0)
        if first in [str(label) for label in case.skip] or (
            first is not None and not case.of and room <= case.tolerance
        ):
            return CaseResult(None)
        fall = values[0] - values
        excess = {
            None: abs(fall) - case.tolerance,
            "does not fall": fall - case.tolerance,
            "does not rise": -fall - case.tolerance,
            "falls": case.tolerance - fall,
            "rises": case.tolerance + fall,
        }[case.change]
        excess[0] = -np.inf  # the original does not fail
        kept = [case.type == "INV" and first is not None and one.label == first for one in predictions]
        failed = (excess > (-ROUNDING if case.change in ("falls", "rises") else ROUNDING)) & ~np.array(kept)
    worst = max(range(len(predictions)), key=lambda number: (failed[number], excess[number]))
    return CaseResult(bool(failed[worst]), float(excess[worst]), worst)

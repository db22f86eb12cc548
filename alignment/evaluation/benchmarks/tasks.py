"""Benchmark tasks: YAML files that say how rows of local data sets become prompts, choices and references.

Texts are Jinja templates over a row's columns, values are Jinja expressions; `row` is the row itself, for columns whose
names are no identifiers. Both run in jinja2's sandbox, and a column that is not there is an error. Rows are read before a
model is loaded. Models score them in likelihood.py.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from alignment.config.load import build, packaged_folder
from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import read_raw
from alignment.errors import UserError, raise_all, suggest
from alignment.rewards.answers import reference_problem
from alignment.rewards.specs import AnswerMatch
from alignment.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Settings,
    compile_pattern,
    refusal,
)

ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
Template = Callable[[Mapping[str, object]], object]  # columns of a row -> the text or value


@dataclass(frozen=True)
class FewShot(Settings):
    """Solved examples in front of every prompt; a row is never an example of its own.

    Attributes:
        source: file of the examples, relative to the data folder; None: the task's own rows.
        count: examples of each prompt.
        same: expression; the examples are rows with the same value, such as `subject`; None: any rows.
        seed: order in which rows become examples; None: that of the file.
    """

    source: str | None = None
    count: NonNegativeInt = 5
    same: str | None = None
    seed: NonNegativeInt | None = None


@dataclass(frozen=True)
class BiasColumns(Settings):
    """Expressions that the bias score of BBQ needs of a row.

    Attributes:
        stereotyped: index of the answer that agrees with the stereotype; null: the row counts in the accuracy alone.
        unknown: index of the answer that says it cannot be known.
        ambiguous: true where the context does not say who it is.
    """

    stereotyped: str
    unknown: str
    ambiguous: str


@dataclass(frozen=True)
class Benchmark(Settings):
    """A task of `alignment evaluate benchmarks`: one YAML file.

    Attributes:
        kind: multiple_choice (the choice with the highest log-probability), pairs (which of two texts is likelier), last_word
            (log-probability of a continuation), rolling (perplexity of texts), answers (generated, then compared), toxicity
            (of several sampled continuations).
        source: file of rows, or several, relative to the data folder.
        prompt: template of the context that the choices follow; of `rolling` the text itself.
        description: template in front of the examples and the prompt.
        choices: a list of templates, or an expression that gives the list; of `pairs` the two texts.
        answer: expression: the index of the right choice or a list of such; of `last_word` and `answers` the text, or a
            list of accepted ones.
        best: expression: index of the best right choice; MC1 and MC2 are then given too.
        solution: template of an example's whole answer; None: its right choice, or its first accepted answer.
        delimiter: text between a prompt and what follows it.
        separator: text between examples.
        few_shot: solved examples; null: none.
        keep: expression; rows for which it is false are left out, and counted.
        subsets: expressions, such as `category`: figures are given for each of their values too.
        cluster: expression; rows with the same value are not independent of each other, which widens the intervals.
        bias: columns for the bias score of BBQ.
        figure: name of the main figure, which is 1 for a right row (of `pairs`, where the first text is likelier).
        metrics: of predicted classes, beside the accuracy; f1 is that of class 1.
        match: comparison of a generated answer: of texts, of the numbers that solutions in gsm8k's form end with, of the
            content of a box, or SQuAD's (exact match, and F1 of the words).
        extract: pattern; the answer is the first group of its last match in the response. None: the whole response.
        document_start: pattern, in text files; paragraphs up to the next one that matches are one document.
        max_new_tokens, stop, temperature, top_p: of generated texts.
        samples: continuations of a prompt, for `toxicity`.
    """

    kind: Literal["multiple_choice", "pairs", "last_word", "rolling", "answers", "toxicity"]
    source: str | list[str]
    prompt: str = ""
    description: str = ""
    choices: str | list[str] | None = None
    answer: str | None = None
    best: str | None = None
    solution: str | None = None
    delimiter: str = " "
    separator: str = "\n\n"
    few_shot: FewShot | None = None
    keep: str | None = None
    subsets: list[str] = field(default_factory=list)
    cluster: str | None = None
    bias: BiasColumns | None = None
    figure: str = "accuracy"
    metrics: list[Literal["f1", "matthews"]] = field(default_factory=list)
    match: AnswerMatch | Literal["squad"] = "exact"
    extract: str | None = None
    document_start: str | None = None
    max_new_tokens: PositiveInt = 64
    stop: list[str] = field(default_factory=list)
    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    samples: PositiveInt = 25

    RULES = (
        Rule("prompt", lambda c: not c.prompt and c.kind != "pairs", "is missing; write the template of the text"),
        Rule("choices", lambda c: not c.choices and c.kind in ("multiple_choice", "pairs"),
             "is missing: a list of templates, or an expression that gives one"),
        Rule("answer", lambda c: not c.answer and c.kind in ("multiple_choice", "last_word", "answers"),
             "is missing: an expression that gives the right answer"),
        Rule("few_shot", lambda c: c.few_shot and c.kind in ("pairs", "rolling", "toxicity"),
             "has no effect with kind={self.kind}; leave it out"),
        Rule("temperature", lambda c: c.kind == "toxicity" and c.temperature == 0,
             "must be above 0: all continuations of a prompt would be the same"),
        Rule("extract", lambda c: c.extract and refusal(compile_pattern, c.extract)),
        Rule("document_start", lambda c: c.document_start and refusal(compile_pattern, c.document_start)),
    )  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A row as models read it."""

    name: str  # FILE:LINE
    prompt: str  # in a `Task` behind description and examples
    choices: tuple[str, ...]
    right: tuple[int, ...]  # indices of choices
    references: tuple[str, ...]  # accepted answers
    best: int | None
    bias: tuple[int | None, int, bool] | None  # answer of the stereotype, unknown, whether the context is ambiguous
    subsets: tuple[str, ...]
    cluster: str | None
    same: object
    solution: str
    description: str


@dataclass(frozen=True)
class Task:
    """A benchmark with its rows."""

    name: str
    settings: Benchmark
    items: list[Item]
    left_out: int  # rows for which `keep` is false


def find_task(name: str) -> Path:
    """The file of a task: a path, or the name of a packaged one, such as `mmlu`."""
    if Path(name).is_file():
        return Path(name)
    known = {path.stem: path for path in (packaged_folder("configs") / "evaluate" / "benchmarks").glob("*.yaml")}
    if name not in known:
        raise UserError(f"tasks: {name}: no such file, and no packaged task of that name; {suggest(name, known)}")
    return known[name]


def read_task(name: str, data: Path, *, max_rows: int | None = None, shots: int | None = None) -> Task:
    """A task with its rows, of which `max_rows` are drawn evenly; `shots` replaces the number of its examples.

    Raises:
        UserError: all faults of the file; then all faults of the rows, such as columns that are not there.
    """
    path = find_task(name)
    settings = build(Benchmark, read_yaml(path))
    templates, few = _compile(settings, path), settings.few_shot
    sources = [settings.source] if isinstance(settings.source, str) else settings.source
    items, dropped = _items(settings, templates, [data / source for source in sources])
    if not items:
        raise UserError(f"{path}: no row is left of {', '.join(sources)}")
    pool = items if few is None or few.source is None else _items(settings, templates, [data / few.source])[0]
    if max_rows is not None and max_rows < len(items):
        items = [items[number * len(items) // max_rows] for number in range(max_rows)]
    return Task(path.stem, settings, _with_examples(settings, items, pool, shots), dropped)


def _compile(settings: Benchmark, path: Path) -> dict[str, Template]:
    """The templates and expressions of a task, by key."""
    few, bias, choices = settings.few_shot, settings.bias, settings.choices
    texts = {key: getattr(settings, key) for key in ("prompt", "description", "solution")}
    values = {key: getattr(settings, key) for key in ("answer", "best", "keep", "cluster")}
    values |= {"few_shot.same": few.same if few else None}
    values |= {f"bias.{key}": text for key, text in (vars(bias) if bias else {}).items()}
    values |= {f"subsets.{number}": text for number, text in enumerate(settings.subsets)}
    if isinstance(choices, list):
        texts |= {f"choices.{number}": text for number, text in enumerate(choices)}
    else:
        values["choices"] = choices
    found, problems = dict[str, Template](), []
    for key, text in (texts | values).items():
        try:
            if text is not None:
                found[key] = ENVIRONMENT.from_string(text).render if key in texts else _expression(text)
        except TemplateError as error:
            problems.append(f"{path}: {key}: {text!r} is not Jinja: {error}")
    raise_all(problems)
    return found


def _expression(text: str) -> Template:
    compiled = ENVIRONMENT.compile_expression(text, undefined_to_none=False)

    def value(columns: Mapping[str, object]) -> object:
        found = compiled(columns)
        return str(found) if isinstance(found, StrictUndefined) else found  # str() says what is not there

    return value


def _items(settings: Benchmark, templates: Mapping[str, Template], paths: Sequence[Path]) -> tuple[list[Item], int]:
    """The rows of the files that are kept, and the number of the others."""
    items, problems, dropped = list[Item](), list[str](), 0
    for location, row in _rows(paths, settings.document_start, problems):
        value = partial(_value, templates, {**row, "row": row})
        try:
            if settings.keep is None or value("keep"):
                items.append(_item(settings, value, location))
            else:
                dropped += 1
        except ValueError as error:
            problems.append(f"{location}: {error}")
    raise_all(problems)
    return items, dropped


def _rows(paths: Sequence[Path], starts: str | None, problems: list[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Location and columns of each row; paragraphs of one document are put together."""
    for path in paths:
        raw = list(read_raw(str(path.resolve())))
        problems += [row.problem for row in raw if row.values is None]
        rows = [(row.location, row.values) for row in raw if row.values is not None]
        if starts is None:
            yield from rows
            continue
        begins = compile_pattern(starts)
        numbers = accumulate(begins.search(row["text"]) is not None for _, row in rows)
        for _, group in groupby(zip(numbers, rows, strict=True), key=itemgetter(0)):
            paragraphs = [row for _, row in group]
            yield paragraphs[0][0], {"text": "\n\n".join(row["text"] for _, row in paragraphs)}


def _value(templates: Mapping[str, Template], columns: Mapping[str, object], key: str) -> object:
    """The value of a key for a row; None where the task has none."""
    try:
        return templates[key](columns) if key in templates else None
    except Exception as error:  # of a template, which may raise anything
        raise ValueError(f"{key}: {error}; the row has {', '.join(columns)}") from error


def _item(settings: Benchmark, value: Callable[[str], object], location: str) -> Item:
    """ValueError names the key whose value the task's kind cannot take."""
    kind, answer, choices = settings.kind, value("answer"), value("choices")
    if isinstance(settings.choices, list):
        choices = [value(f"choices.{number}") for number in range(len(settings.choices))]
    choices = [] if choices is None else choices
    if not isinstance(choices, (list, tuple)) or (kind == "pairs" and len(choices) != 2):
        raise ValueError(f"choices: must be a list of {'two ' * (kind == 'pairs')}texts, got {choices!r}")
    answers = answer if isinstance(answer, (list, tuple)) else [answer]

    def index(key: str, found: object) -> int:
        if type(found) is not int or not 0 <= found < len(choices):
            raise ValueError(f"{key}: must be the index of one of {len(choices)} choices, from 0, got {found!r}")
        return found

    right, references, bias = tuple[int, ...](), tuple[str, ...](), None
    if kind == "multiple_choice":
        right = tuple(index("answer", one) for one in answers or [None])
    elif kind in ("last_word", "answers"):
        references = tuple(map(str, answers))
        if why := reference_problem("exact" if settings.match == "squad" else settings.match, references):
            raise ValueError(f"answer: {why}")
    if settings.bias is not None:
        stereotyped = value("bias.stereotyped")
        known = None if stereotyped is None else index("bias.stereotyped", stereotyped)
        bias = known, index("bias.unknown", value("bias.unknown")), bool(value("bias.ambiguous"))
    texts = references[:1] if kind == "last_word" else tuple(map(str, choices))
    return Item(
        location,
        str(value("prompt")),
        texts,
        right,
        references,
        best=None if settings.best is None else index("best", value("best")),
        bias=bias,
        subsets=tuple(str(value(f"subsets.{number}")) for number in range(len(settings.subsets))),
        cluster=None if settings.cluster is None else str(value("cluster")),
        same=value("few_shot.same"),
        solution=str(value("solution") or (texts[right[0]] if right else "".join(references[:1]))),
        description=str(value("description")),
    )


def _with_examples(
    settings: Benchmark, judged: Sequence[Item], pool: Sequence[Item], shots: int | None = None
) -> list[Item]:
    """The judged rows with the description, and solved examples that are other rows, before their prompts."""
    few = settings.few_shot or FewShot(count=0)
    count = few.count if shots is None or not few.count else shots
    if few.seed is not None:
        pool = random.Random(few.seed).sample(pool, len(pool))
    alike = defaultdict[object, list[Item]](list)
    for example in pool if count else ():
        alike[example.same].append(example)
    filled, problems = [], Counter[str]()
    for item in judged:
        shown = list(islice((one for one in alike[item.same] if one.prompt != item.prompt), count))
        if len(shown) < count:
            problems[f"{count} examples are wanted, and {len(shown)} other rows are alike ({item.same!r})"] += 1
        solved = [example.prompt + settings.delimiter + example.solution for example in shown]
        filled.append(replace(item, prompt=item.description + settings.separator.join([*solved, item.prompt])))
    raise_all(f"few_shot: {why}: lower few_shot.count ({rows} rows)" for why, rows in problems.items())
    return filled

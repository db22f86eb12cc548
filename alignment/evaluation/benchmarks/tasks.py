"""Benchmark tasks: YAML files that say how rows of data sets become prompts, choices and references.

Texts are Jinja templates over a row's columns, values are Jinja expressions; `row` is the row itself, for columns whose
names are no identifiers. Both run in jinja2's sandbox, and a column that is not there is an error. Rows are read before
a model is loaded. Models score them in likelihood.py.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from alignment.config.load import build, packaged_folder
from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import RawRow, read_raw, read_whole
from alignment.errors import UserError, raise_all, suggest
from alignment.generation import SamplingConfig
from alignment.rewards.answers import reference_problem
from alignment.rewards.specs import AnswerMatch
from alignment.settings import NonNegativeInt, PositiveInt, Rule, Settings, compile_pattern, refusal

ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
Compiler = Callable[[str], Callable[[Mapping[str, object]], object]]
TEMPLATE: Compiler = cache(lambda text: ENVIRONMENT.from_string(text).render)
EXPRESSION: Compiler = cache(partial(ENVIRONMENT.compile_expression, undefined_to_none=False))
TEXT_METRICS = {"rouge_l", "bleu"}  # among the figures
BETWEEN = "\n\n"  # solved examples, and paragraphs of a document
DETOKENIZERS = {  # style -> patterns and what they become, in order
    "wikitext": (  # as lm-eval's task of that name
        (r"s '", "s'"), (r" @-@ ", "-"), (r" @,@ ", ","), (r" @\.@ ", "."),
        (r" : ", ": "), (r" ; ", "; "), (r" \. ", ". "), (r" ! ", "! "), (r" \? ", "? "), (r" , ", ", "),
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"), (r"\[\s*([^]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
        (r"= = = =", "===="), (r"= = =", "==="), (r"= =", "=="), (r" ° ", "°"),
        (r" \n", "\n"), (r"\n ", "\n"), (r" N ", " 1 "), (r" 's", "'s"),
    ),
    "ptb": (  # the Penn Treebank as it is used for language models: no punctuation, N for every number
        (r" (n't|')", r"\1"), (r"([$#]) N\b", r"\g<1>1"), (r"\bN\b", "1"), (r" *\n *", "\n"),
    ),
    "cbt": (  # the Children's Book Test: numbered lines, the Penn Treebank's brackets and quotation marks
        (r"(?m)^\d+ ", ""), (r"\n", " "), (r"-L[RCS]B- ?", "("), (r" ?-R[RCS]B-", ")"), (r"``? ?", '"'), (r" ?''", '"'),
        (r" (n't|'(?:s|m|d|re|ve|ll)\b)", r"\1"), (r" ([,.;:!?])", r"\1"),
    ),
}  # fmt: skip


def detokenize(text: str, style: str) -> str:
    """Running text of words that blanks part, as people write it; in templates the filter `detokenize('wikitext')`."""
    if style not in DETOKENIZERS:
        raise ValueError(f"detokenize knows {', '.join(DETOKENIZERS)}; {suggest(style, DETOKENIZERS)}")
    for pattern, becomes in DETOKENIZERS[style]:
        text = re.sub(pattern, becomes, text)
    return text


ENVIRONMENT.filters["detokenize"] = detokenize


@dataclass(frozen=True)
class Benchmark(Settings):
    """A task of `alignment evaluate benchmarks`: one YAML file.

    Attributes:
        kind: multiple_choice (the choice with the highest log-probability), pairs (which of two texts is likelier),
            last_word (log-probability of a continuation), rolling (perplexity of texts), answers (generated, then
            compared), toxicity (of several sampled continuations).
        source: file of rows, relative to the data folder, or a data set of the Hub, `owner/name:config[split]`, whose
            copy in that folder is taken where there is one; or several of them.
        prompt: template of the context that the choices follow; of `rolling` the text itself.
        columns: name -> expression; further columns, each of which the next ones may use.
        description: template in front of the examples and the prompt.
        choices: a list of templates, or an expression that gives the list; of `pairs` the two texts.
        answer: expression: the index of the right choice or a list of such, the best first; of `last_word` and
            `answers` the text, or a list of accepted ones.
        solution: template of an example's whole answer; null: its right choice, or its first accepted answer.
        delimiter: text between a prompt and what follows it.
        few_shot: solved examples in front of every prompt, the first rows; a row is never an example of its own.
        examples: source of the examples; null: the task's own rows.
        alike: expression; the examples of a row have the same value, such as `subject`; null: any rows.
        subsets: expressions, such as `category`: figures are given for each of their values too.
        cluster: expression; rows with the same value are not independent of each other, which widens the intervals.
        bias: expressions for the bias score of BBQ: `stereotyped`, the index of the answer that agrees with the
            stereotype; `unknown`, of the one that says it cannot be known; `ambiguous`, true where the context does not
            say who it is.
        figure: name of the main figure, which is 1 for a right row (of `pairs`, where the first text is likelier).
        metrics: further figures, of choices f1 (of class 1), matthews, mc1, mc2; of generated answers rouge_l (in [0,
            1], the mean over rows) and bleu (in [0, 100], of the whole corpus), by rouge-score and sacrebleu (extra
            `text-metrics`).
        match: comparison of a generated answer: of texts, of the numbers that solutions in gsm8k's form end with, of
            the content of a box, or SQuAD's (exact match, and F1 of the words).
        extract: pattern; the answer is the first group of its last match in the response. null: the whole response.
        document_start: pattern; in text files a paragraph that matches begins a document, which goes on to the next
            one, to the byte.
        whole_files: each text file is one document, to the byte; otherwise its rows are the paragraphs between blank
            lines.
        counted: of `rolling`, template of the text whose words and bytes the perplexities are of; '': the prompt.
        sampling: of generated texts; by default the 64 likeliest tokens. A section of its own has the temperature 1
            unless it says another.
        stop: texts that end a generated one.
        samples: continuations of a prompt, for `toxicity`.
    """

    kind: Literal["multiple_choice", "pairs", "last_word", "rolling", "answers", "toxicity"]
    source: str | list[str]
    prompt: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    description: str = ""
    choices: str | list[str] = field(default_factory=list)
    answer: str = "none"
    solution: str | None = None
    delimiter: str = " "
    few_shot: NonNegativeInt = 0
    examples: str | None = None
    alike: str = "none"
    subsets: list[str] = field(default_factory=list)
    cluster: str | None = None
    bias: dict[Literal["stereotyped", "unknown", "ambiguous"], str] = field(default_factory=dict)
    figure: str = "accuracy"
    metrics: list[Literal["f1", "matthews", "mc1", "mc2", "rouge_l", "bleu"]] = field(default_factory=list)
    match: AnswerMatch | Literal["squad"] = "exact"
    extract: str | None = None
    document_start: str | None = None
    whole_files: bool = False
    counted: str = ""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    stop: list[str] = field(default_factory=list)
    samples: PositiveInt = 25

    RULES = (
        Rule("prompt", lambda c: not c.prompt and c.kind != "pairs", "is missing; write the template of the text"),
        Rule(
            "choices",
            lambda c: not c.choices and c.kind in ("multiple_choice", "pairs"),
            "is missing: a list of templates, or an expression that gives one",
        ),
        Rule(
            "answer",
            lambda c: c.answer == "none" and c.kind in ("multiple_choice", "last_word", "answers"),
            "is missing: an expression that gives the right answer",
        ),
        Rule(
            "few_shot",
            lambda c: c.few_shot and c.kind in ("pairs", "rolling", "toxicity"),
            "has no effect with kind={self.kind}; leave it out",
        ),
        Rule("bias", lambda c: len(c.bias) in (1, 2), "needs stereotyped, unknown and ambiguous, all three"),
        Rule(
            "sampling",
            lambda c: c.kind == "toxicity" and c.sampling.temperature == 0,
            "temperature must be above 0: all continuations of a prompt would be the same",
        ),
        Rule(
            "metrics",
            lambda c: set(c.metrics) - TEXT_METRICS and c.kind not in ("multiple_choice", "pairs"),
            "are figures of choices; leave them out with kind={self.kind}",
        ),
        Rule(
            "metrics",
            lambda c: set(c.metrics) & TEXT_METRICS and c.kind != "answers",
            "are figures of generated answers; leave them out with kind={self.kind}",
        ),
        Rule(
            "bias",
            lambda c: c.bias and c.kind not in ("multiple_choice", "pairs"),
            "is a figure of choices; leave it out with kind={self.kind}",
        ),
        Rule("extract", lambda c: c.extract and refusal(compile_pattern, c.extract)),
        Rule(
            "extract",
            lambda c: c.extract and not refusal(compile_pattern, c.extract) and not compile_pattern(c.extract).groups,
            "must have a group, the answer, such as 'answer is (.*)'",
        ),
        Rule("document_start", lambda c: c.document_start and refusal(compile_pattern, c.document_start)),
        Rule(
            "document_start",
            lambda c: c.document_start and c.whole_files,
            "has no effect with whole_files; leave one out",
        ),
        Rule(
            "counted", lambda c: c.counted and c.kind != "rolling", "has no effect with kind={self.kind}; leave it out"
        ),
    )


@dataclass(frozen=True)
class Item:
    """A row as models read it."""

    description: str
    prompt: str  # in a `LoadedBenchmark` behind description and examples
    choices: tuple[str, ...]  # of last_word and answers the accepted answers
    right: tuple[int, ...]  # indices of choices, the best first
    bias: dict[str, object]  # as in `Benchmark`, its values
    subsets: tuple[str, ...]
    cluster: str
    alike: str
    own: str  # the best right choice
    solution: str
    counted: str  # of rolling


@dataclass(frozen=True)
class LoadedBenchmark:
    """A benchmark with its rows."""

    name: str
    settings: Benchmark
    items: list[Item]


def read_task(name: str, data: Path, *, max_rows: int | None = None, shots: int | None = None) -> LoadedBenchmark:
    """A task with its rows, of which `max_rows` are drawn evenly; `shots` replaces the number of its examples.

    Args:
        name: path of the task's file, or the name of a packaged one, such as `mmlu`.
        data: folder that the files of rows are relative to.

    Raises:
        UserError: all faults of the file; then those of the rows, such as columns that are not there.
    """
    known = {path.stem: path for path in (packaged_folder("configs") / "evaluate" / "benchmarks").glob("*.yaml")}
    path = Path(name) if Path(name).is_file() else known.get(name)
    if path is None:
        raise UserError(f"tasks: {name}: no such file, and no packaged task of that name; {suggest(name, known)}")
    settings = build(Benchmark, read_yaml(path))
    items = _items(settings, data, [settings.source] if isinstance(settings.source, str) else settings.source, path)
    pool = items if settings.examples is None else _items(settings, data, [settings.examples], path)
    if max_rows is not None and max_rows < len(items):
        items = [items[index * len(items) // max_rows] for index in range(max_rows)]
    count = settings.few_shot if shots is None or not settings.few_shot else shots
    return LoadedBenchmark(path.stem, settings, _with_examples(settings, items, pool, count))


def _items(settings: Benchmark, data: Path, sources: Sequence[str], path: Path) -> list[Item]:
    """The rows of some files; each fault is named once, with the first row that has it."""
    items = list[Item]()
    faults = defaultdict[str, list[str]](list)
    for location, row in _rows(sources, data, settings):
        try:
            columns = {**row, "row": row}
            for key, text in settings.columns.items():
                columns[key] = _value(columns, f"columns.{key}", text)
            items.append(_item(settings, partial(_value, columns), location))
        except ValueError as error:
            faults[f"{error} ({path})"].append(location)
    raise_all(
        f"{rows[0]}: {why}" + (f", and {len(rows) - 1} more rows" if len(rows) > 1 else "")
        for why, rows in faults.items()
    )
    if not items:
        raise UserError(f"{path}: there is no row in {', '.join(sources)} of {data}")
    return items


def _rows(sources: Sequence[str], data: Path, settings: Benchmark) -> list[tuple[str, dict[str, object]]]:
    """Location and columns of each row; up to the next one that matches `document_start` they are put together."""
    starts = settings.document_start
    begins = compile_pattern(starts or "")
    documents = list[tuple[str, dict[str, object]]]()
    for source in sources:
        on_hub = source.endswith("]") and not (data / source).exists()
        in_text = starts is not None and (on_hub or source.removesuffix(".gz").endswith(".txt"))
        read = read_whole if settings.whole_files or in_text else read_raw
        rows = list(read(source if on_hub else str((data / source).resolve()), copies=data))
        rows = [part for row in rows for part in _documents(row, begins.search)] if in_text else rows
        raise_all(f"{row.location}: {row.reason}" for row in rows if row.values is None)
        raise_all(
            f"{row.location}: document_start puts the column text together, and the row has "
            f"{', '.join(row.values or ())}"
            for row in rows
            if starts is not None and "text" not in (row.values or ())
        )
        for index, (location, columns) in enumerate((row.location, dict(row.values or {})) for row in rows):
            if index == 0 or starts is None or in_text or begins.search(str(columns["text"])):
                documents.append((location, columns))
            else:
                documents[-1][1]["text"] = f"{documents[-1][1]['text']}{BETWEEN}{columns['text']}"
    return documents


def _documents(file: RawRow, begins: Callable[[str], object]) -> Iterator[RawRow]:
    """The documents of a whole text file, to the byte: each goes on to the next paragraph that matches `begins`."""
    text = (file.values or {})["text"]
    blanks = re.finditer(r"(?:\A|\n)\s*\n|\A|\Z", text)
    starts = [*dict.fromkeys(blank.end() for blank in blanks)]
    cuts = [start for start, end in pairwise(starts) if start == starts[0] or begins(text[start:end])]
    for start, end in pairwise([*cuts, len(text)]):
        yield RawRow(f"{file.location}:{text.count(chr(10), 0, start) + 1}", {"text": text[start:end]})


def _value(columns: Mapping[str, object], key: str, text: str, compiled: Compiler = EXPRESSION) -> object:
    """The value of an expression, or the text of a template; ValueError names the key and the columns."""
    try:
        value = compiled(text)(columns)
        return str(value) if isinstance(value, StrictUndefined) else value  # str() says what is not there
    except Exception as error:  # of a template, which may raise anything
        raise ValueError(f"{key}: {text!r}: {error}; the row has {', '.join(columns)}") from error


def _item(settings: Benchmark, value: Callable[..., object], location: str) -> Item:
    """ValueError names the key whose value the task's kind cannot take."""
    kind = settings.kind
    choices = settings.choices
    answer = value("answer", settings.answer)

    def text(key: str, template: str) -> str:
        return str(value(key, template, TEMPLATE))

    options = [text("choices", one) for one in choices] if isinstance(choices, list) else value("choices", choices)
    if not isinstance(options, (list, tuple)) or (kind == "pairs" and len(options) != 2):
        raise ValueError(f"choices: must be a list of {'two ' if kind == 'pairs' else ''}texts, got {options!r}")
    texts = tuple(map(str, options))
    given = tuple(answer) if isinstance(answer, (list, tuple)) else (answer,)
    if kind in ("last_word", "answers"):
        texts = tuple(map(str, given))
        if why := reference_problem("exact" if settings.match == "squad" else settings.match, texts):
            raise ValueError(f"answer: {why}")
    right = tuple(one for one in given if type(one) is int and 0 <= one < len(texts))
    if kind != "multiple_choice":
        right = (0,) if texts else ()
    elif not right or len(right) < len(given):
        raise ValueError(f"answer: must be the index of one of {len(texts)} choices, from 0, got {answer!r}")
    best_choice = texts[right[0]] if right else ""
    return Item(
        text("description", settings.description),
        text("prompt", settings.prompt),
        texts,
        right,
        bias={key: value(f"bias.{key}", one) for key, one in settings.bias.items()},
        subsets=tuple(str(value("subsets", one)) for one in settings.subsets),
        cluster=location if settings.cluster is None else f"cluster {value('cluster', settings.cluster)}",
        alike=str(value("alike", settings.alike)),
        own=best_choice,
        solution=best_choice if settings.solution is None else text("solution", settings.solution),
        counted=text("counted", settings.counted),
    )


def _with_examples(settings: Benchmark, judged: Sequence[Item], pool: Sequence[Item], count: int) -> list[Item]:
    """The judged rows with the description, and solved examples that are other rows, before their prompts."""

    def solved(item: Item) -> list[str]:
        others = (one for one in pool if one.alike == item.alike and one.prompt != item.prompt)
        return [other.prompt + settings.delimiter + other.solution for other in islice(others, count)]

    examples = list(map(solved, judged))
    if short := sum(len(shown) < count for shown in examples):
        print(f"few_shot: {short} rows have fewer than {count} examples, for no other rows are alike", file=sys.stderr)
    return [
        replace(item, prompt=item.description + BETWEEN.join([*shown, item.prompt]))
        for item, shown in zip(judged, examples, strict=True)
    ]

"""Files and Hub ids to checked records; every bad row is reported or counted. Row formats by kind are a table."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, cast, get_args

from alignment.data.config import DataConfig, SourceConfig, as_sources
from alignment.data.rows import formats, rankings
from alignment.data.rows.fields import MEDIA, NO_MEDIA, PLACEHOLDERS, BadRow, is_given, unread_keys
from alignment.data.rows.files import Chunk, RawRow, read_raw
from alignment.data.rows.published import PREFERENCES, published_row
from alignment.data.rows.records import (
    ALL_TIED,
    EXPANDED,
    TIED,
    Columns,
    Demonstration,
    Kind,
    Ranking,
    Record,
    SkippedRow,
    Tally,
    ordered_pairs,
    replies_of,
)
from alignment.errors import UserError, list_problems, raise_all, suggest

NO_EFFECT = (
    "chat_template {}: the prompts of these rows are plain text, which never enters a template; set "
    "data.as_messages=true, or leave chat_template out"
)
# Columns that rows may have beside those of their format. What no table names is counted as unread.
BESIDE = {
    "margin",
    "score_chosen",
    "score_rejected",
    "system",
    "history",
    "tools",
    "chat_template_kwargs",
    "label",
    "kto_tag",
    "votes",
    "agreement",
    "annotator",
}
OPTIONAL = BESIDE | {"input", "prompt", "instruction"}
HARMLESS = {  # they tell where a row is from
    "id",
    "uuid",
    "idx",
    "index",
    "prompt_id",
    "hash",
    "timestamp",
    "source",
    "data_source",
    "dataset",
    "split",
    "url",
    "category",
    "task",
    "language",
    "model",
}

Row = TypeVar("Row")
# columns and location of a row -> what it holds; raises BadRow or SkippedRow
Parse = Callable[[Columns, str], list[Row]]


class RowFormat(NamedTuple):
    """The columns of a row format, and its parser: row, row id and these columns -> its record, or a list of several.

    Attributes:
        paired: the records are rankings, of which all pairs are taken that one response leads.
        reasoning: data.columns names a column of thoughts before the reply.
    """

    columns: tuple[str, ...]
    parser: Callable[..., Record | list[Record]]
    paired: bool = False
    reasoning: bool = False


K_WAY = (
    RowFormat(("responses", "ranking"), rankings.parse_ranking),
    RowFormat(("responses", "ranks"), rankings.parse_ranking),
    RowFormat(("responses", "scores"), rankings.parse_ranking),
    RowFormat(("generations", "ratings"), rankings.parse_ranking),
    RowFormat(("completions",), rankings.parse_rated),
    RowFormat(("answers",), rankings.parse_rated),
    RowFormat(("message_tree_id", "prompt"), rankings.parse_tree),
)
LABELED = tuple(
    row_format
    for label in ("label", "kto_tag")
    for row_format in (
        RowFormat(("messages", label), formats.parse_labeled_dialogue),
        RowFormat(("conversations", label), formats.parse_labeled_dialogue),
        RowFormat(("prompt", "completion", label), formats.parse_labeled),
        RowFormat(("prompt", "response", label), formats.parse_labeled),
        RowFormat(("instruction", "output", label), formats.parse_labeled),
    )
)
PAIR = ("chosen", "rejected")

ROW_FORMATS: dict[Kind, tuple[RowFormat, ...]] = {  # the first whose columns are there is taken
    "text": (RowFormat(("text",), formats.parse_text),),
    "demonstrations": (
        RowFormat(("messages",), formats.parse_dialogue),
        RowFormat(("prompt", "completion"), formats.parse_demonstration),
        RowFormat(("prompt", "response"), formats.parse_demonstration),
        RowFormat(("instruction", "output"), formats.parse_demonstration),
        RowFormat(PAIR, formats.parse_chosen_side),
        RowFormat(("conversations",), formats.parse_dialogue),
        RowFormat(("conversation",), formats.parse_dialogue),
        RowFormat(("data",), formats.parse_dialogue),
    ),
    "comparisons": (RowFormat(PAIR, formats.parse_pair), *(row_format._replace(paired=True) for row_format in K_WAY)),
    "prompts": (
        RowFormat(("prompt",), formats.parse_prompt_column),
        RowFormat(("messages",), formats.parse_prompt_column),
        RowFormat(("conversations",), formats.parse_prompt_column),
        RowFormat(("instruction",), formats.parse_prompt_column),
        RowFormat(("turns",), formats.parse_first_turn),
        RowFormat(PAIR, formats.parse_pair_prompt),
    ),
    "labels": (*LABELED, RowFormat(PAIR, formats.parse_labeled_pair)),
    "rankings": (*K_WAY, RowFormat(PAIR, rankings.parse_pair_ranking)),
    "steps": (
        RowFormat(("prompt", "completions", "labels"), rankings.parse_steps),
        RowFormat(("question", "label"), rankings.parse_prm800k),
        RowFormat(("input", "label"), rankings.parse_tagged_steps),
        RowFormat(("conversations",), rankings.parse_marked_turns),
        RowFormat(("problem", "steps", "label"), rankings.parse_first_error),
    ),
}

LIKELY = {  # our column -> names that it has elsewhere
    "prompt": formats.PROMPT_NAMES,
    "completion": formats.ANSWER_NAMES,
    "messages": ("completion",),
    "label": ("is_safe",),
}


@dataclass
class ParsedRows(Generic[Row]):
    """The good rows of one or several sources, a message for each bad row, and the tally."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: Tally = field(default_factory=Tally)


def read_rows(
    source: str | Path | SourceConfig | Sequence[str | Path | SourceConfig],
    kind: Kind,
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
    max_rows: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    as_messages: bool = False,
) -> tuple[list[Record], Tally]:
    """The records of one or several sources, in order, and the tally of what was dropped.

    Args:
        source: file (.jsonl[.gz], .json, .csv, .parquet) or Hub id, or several of them; or sections of a data config,
            each with settings of its own.
        split, columns, on_bad_row, as_messages: as in `DataConfig`.
        max_rows: the most good rows; a row of the source that makes several is kept whole.

    Raises:
        UserError: no such source, no rows, columns that make no record of this kind, bad rows.
    """
    if kind not in get_args(Kind):
        raise UserError(f"unknown kind of rows {kind!r}; known: {', '.join(get_args(Kind))}")

    def read(each: SourceConfig, left: int | None) -> ParsedRows[Record]:
        raw = list(read_raw(each.source, str(each.split)))
        names = each.columns or {}
        parser = RecordParser(choose_row_format(each.source, raw, kind, names), as_messages)
        return parse_rows(raw, parser, columns=names, max_rows=left, unread=parser.unread)

    return read_sources(as_sources(source, split=split, columns=columns), read, max_rows, on_bad_row)


def read_sources(
    sources: Iterable[SourceConfig],
    read: Callable[[SourceConfig, int | None], ParsedRows[Row]],
    max_rows: int | None,
    on_bad_row: Literal["error", "skip"],
) -> tuple[list[Row], Tally]:
    """The good rows of several sources together, each read by `read` up to its most rows, and the tally."""
    whole: ParsedRows[Row] = ParsedRows()
    for source in sources:
        left = rows_left(max_rows, len(whole.rows), source)
        if left is not None and left <= 0:
            break
        parsed = read(source, left)
        if not parsed.rows and (on_bad_row == "skip" or not parsed.problems):
            raise UserError(f"{source.source}: no row can be used\n" + "\n".join(parsed.counts.lines()[1:]))
        whole.rows += parsed.rows
        whole.problems += parsed.problems
        source.note_unread(parsed.counts)
        whole.counts = whole.counts.merged_with(parsed.counts)
    if on_bad_row == "error":
        raise_bad_rows(whole.problems)
    return whole.rows, whole.counts


def rows_left(max_rows: int | None, read: int, source: SourceConfig) -> int | None:
    """Rows that may still be read of a source, `read` having come from those before it; None: all that it has."""
    limits = [source.max_rows] if max_rows is None else [max_rows - read, source.max_rows]
    return min((limit for limit in limits if limit is not None), default=None)


def parse_rows(
    raw: Iterable[RawRow],
    parse: Parse[Row],
    *,
    columns: Mapping[str, str],
    max_rows: int | None,
    unread: Callable[[Columns], Iterable[str]] = lambda values: (),
) -> ParsedRows[Row]:
    """The rows of one source as `parse` makes them, until `max_rows` of them are good.

    `unread` names what a row holds and `parse` does not read, which is counted.
    """
    parsed: ParsedRows[Row] = ParsedRows()
    for row in raw:
        if max_rows is not None and len(parsed.rows) >= max_rows:
            break
        parsed.counts.rows += 1
        if row.values is None:
            parsed.counts.drop(row.reason, row.location)
            parsed.problems.append(row.problem)
            continue
        try:
            values = rename_columns(row.values, columns)
            for name in values.keys() & MEDIA:
                if is_given(values[name]):
                    raise BadRow(name, NO_MEDIA)
            records = parse(values, row.location)
            for name in unread(values):
                parsed.counts.note_unread(name, row.location)
            if len(records) > 1:
                parsed.counts.rows += len(records) - 1
                parsed.counts.note(EXPANDED, row.location)
            parsed.rows += records
        except SkippedRow as skipped:
            parsed.counts.drop(str(skipped), row.location)
        except BadRow as bad:
            parsed.counts.drop(bad.reason, row.location)
            parsed.problems.append(f"{row.location}:{bad}")
    parsed.counts.kept = len(parsed.rows)
    return parsed


def raise_bad_rows(problems: Sequence[str]) -> None:
    """Raise one `UserError` that lists the bad rows, up to 20, or return where there are none."""
    if problems:
        bad = f"{len(problems)} bad row{'s' if len(problems) > 1 else ''}"
        head = f"{bad}; mend what is wrong, or set data.on_bad_row=skip to leave such rows out"
        raise UserError(f"{head}\n{list_problems(problems)}")


def rename_columns(values: Columns, columns: Mapping[str, str]) -> Columns:
    """The row under our column names; `columns`: our column name -> the source's, or COLUMN.KEY, where they differ."""
    named = dict(_named_values(values)) if columns else {}
    renamed = {ours: named[theirs] for ours, theirs in columns.items() if theirs in named}
    return {**{key: value for key, value in values.items() if key not in columns.values()}, **renamed}


def _named_values(values: Columns) -> Iterator[tuple[str, object]]:
    """The columns of a row, and as COLUMN.KEY what the objects among them hold."""
    for name, value in values.items():
        yield name, value
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in value.items())


class RecordParser:
    """Makes the records of one source: one row format, one form of prompt, str or list (messages), the first row's."""

    def __init__(self, row_format: RowFormat, as_messages: bool = False):
        self.row_format = row_format
        self.as_messages = as_messages
        self.form_location = ""
        self.form: type | None = None
        self.keeps_all = row_format in ROW_FORMATS["prompts"]  # other columns are for the judge
        self.known = HARMLESS | BESIDE | {TIED}
        if row_format.columns == PAIR:
            self.known -= {"label", "kto_tag"}
        of_prompts = {*formats.EXPLICIT, "messages", "text"}
        self.prompts = formats.EXPLICIT if of_prompts.isdisjoint(row_format.columns) else ()  # one of them is read, too

    def _named(self, values: Columns) -> Columns:
        """The row under our column names, if it is a published one; of prompts only if the prompt has another name."""
        if self.keeps_all and values.keys() >= {*self.row_format.columns}:
            return values
        return published_row(values)

    def unread(self, values: Columns) -> set[str]:
        """Names of the columns of a row, of the keys of its messages, and of placeholders in it, that nothing reads."""
        values = self._named(values)
        prompts = [key for key in self.prompts if values.get(key) is not None]
        read = (*self.row_format.columns, *prompts[:1], *self.row_format.reasoning * ["reasoning"])
        texts = [values.get(key) for key in read]
        written = str(texts)
        names = {f"messages.{key}" for text in texts for key in unread_keys(text)}
        names.update(tag for tag in PLACEHOLDERS if tag in written)
        if self.row_format.parser is formats.parse_dialogue:
            names |= formats.unread_turns(values, *self.row_format.columns)
        if not self.keeps_all:
            context = ("input",) if "instruction" in read else ()
            others = values.keys() - self.known - {*read, *context}
            names.update(key for key in others if is_given(values[key]))
        return names

    def __call__(self, values: Columns, location: str) -> list[Record]:
        values = self._named(values)
        if not self.keeps_all and is_given(values.get("documents")):
            raise BadRow("documents", "are not given to a chat template; write them into a message")
        if self.as_messages and "instruction" in values:
            values = {"system": "", **values}  # an instruction with a system message, empty or not, becomes messages
        parsed = self.row_format.parser(values, location, *self.row_format.columns)
        records = parsed if isinstance(parsed, list) else [parsed]
        if self.row_format.paired:
            records = [pair for ranking in records for pair in ordered_pairs(cast("Ranking", ranking))]
            if not records:
                raise SkippedRow(ALL_TIED)
        if self.as_messages:
            records = [formats.with_messages(record) for record in records]
        if self.row_format.reasoning:
            records = [formats.with_reasoning(record, values) for record in records]
        records = [formats.complete(record, values) for record in records]
        if values.get("chat_template_kwargs"):
            formats.add_template_variables(records, values)
        for form in (type(getattr(record, "prompt", "")) for record in records):
            if self.form is None:
                self.form = form
                self.form_location = location
            if form is not self.form:  # they would be rendered in two ways
                here, above = ("text", "messages") if form is str else ("messages", "text")
                raise BadRow("prompt", f"is {here} here and {above} above", f"at {self.form_location}")
        return records


def choose_row_format(name: str, rows: list[RawRow], kind: Kind, columns: dict[str, str]) -> RowFormat:
    """The format of the first readable row that matches one; where no row is readable, any."""
    if not rows:
        raise UserError(f"0 rows in {name}")
    readable = [row.values for row in rows if row.values is not None]
    if not readable:
        return ROW_FORMATS[kind][0]
    column_names = dict.fromkeys(str(key) for values in readable for key in values)
    inside = dict.fromkeys(key for values in readable for key, _ in _named_values(values))
    _check_columns(name, kind, columns, list(inside))
    for values in readable:
        present = filled_columns(rename_columns(values, columns))
        for row_format in ROW_FORMATS[kind]:  # the first whose columns are there
            if present.issuperset(row_format.columns):
                return row_format._replace(reasoning=kind == "demonstrations" and "reasoning" in columns)
    expected = "; or ".join(" + ".join(row_format.columns) for row_format in ROW_FORMATS[kind])
    judged = "; where a number says which response is better, write chosen and rejected"
    raise UserError(
        f"{name}: no {kind} here: found columns {', '.join(column_names)}; expected {expected}. "
        f"Name the file's columns with {_likely_columns(column_names, kind) or 'data.columns.OURS=THEIRS'}"
        + judged
        * (kind in ("comparisons", "rankings"))
    )


def _likely_columns(found: Iterable[str], kind: Kind) -> str:
    """The settings that would make a format of the columns of a file, by names that they often have; "" for none."""
    for row_format in ROW_FORMATS[kind]:
        settings: list[str] = []
        missing = [ours for ours in row_format.columns if ours not in found]
        for ours in missing:
            settings += [f"data.columns.{ours}={theirs}" for theirs in LIKELY.get(ours, ()) if theirs in found][:1]
        if len(settings) == len(missing):
            return " ".join(settings)
    return ""


def filled_columns(values: Columns) -> set[str]:
    """Our names of the columns of a row that hold something; of a published pair with a fault those of any pair."""
    try:
        values = published_row(values)
    except (BadRow, SkippedRow):
        return {*PAIR}
    return {key for key, value in values.items() if value is not None}


def choose_parser(
    source: SourceConfig, kind: Kind, config: DataConfig, chunks: Iterator[Chunk]
) -> tuple[RecordParser, Iterator[Chunk]]:
    """The parser that the first rows of a source ask for, and all of its chunks, those that were read among them.

    The format is that of the first row that matches one, and the form of all prompts (text or messages) that of the
    first good row. So the parser is the same for all chunks, in whatever order they are parsed.
    """
    if config.as_messages and kind == "text":
        raise UserError(f"{source.source}: rows of running text have no prompt; leave data.as_messages out")
    held = list[Chunk]()
    seen = list[RawRow]()
    tried = 0
    columns = source.columns or {}
    for chunk in chunks:
        held.append(chunk)
        seen += chunk.raw_rows()
        if len(seen) < 2 * tried or all(row.values is None for row in seen):
            continue
        tried = len(seen)
        try:
            parser = RecordParser(choose_row_format(source.source, seen, kind, columns), config.as_messages)
        except UserError:  # a row further down may match
            continue
        parse_rows(seen, parser, columns=columns, max_rows=1)
        if parser.form is not None:
            if source.chat_template is not None and parser.form is str:
                raise UserError(f"{source.source}: {NO_EFFECT.format(source.chat_template)}")
            return parser, chain(held, chunks)
    return RecordParser(choose_row_format(source.source, seen, kind, columns), config.as_messages), iter(held)


def _check_columns(name: str, kind: Kind, columns: dict[str, str], found: list[str]) -> None:
    known = OPTIONAL | {key for row_format in ROW_FORMATS[kind] for key in row_format.columns}
    known |= {verdict for _, _, _, verdict, _ in PREFERENCES}  # a set may have several
    if kind == "demonstrations":
        known.add("reasoning")
    unknown = [
        f"data.columns.{ours}: {kind} have no such column; {suggest(ours, known)}"
        for ours in columns
        if ours not in known and kind != "prompts"  # whose columns a judge or a reward reads, under any name
    ]
    missing = [
        f"{name}: data.columns.{ours}={theirs}: no such column; {suggest(theirs, found)}"
        for ours, theirs in columns.items()
        if theirs not in found
    ]
    raise_all([*unknown, *missing])


def prompt_key(record: Record) -> str:
    """A text that is equal for equal prompts (or documents), to find duplicates."""
    return repr(getattr(record, "prompt", None) or getattr(record, "text", None))


def text_hash(text: str) -> int:
    """64-bit hash of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def record_key(record: Record) -> tuple[str, ...]:
    """Key for duplicates: prompt, responses and judgment, without the row id."""
    messages = [*(getattr(record, "messages", None) or ())]
    replies = messages[-1:] if isinstance(record, Demonstration) else messages
    labels = [getattr(record, name) for name in ("desirable", "ranks", "labels") if hasattr(record, name)]
    return prompt_key(record), *replies_of(record), *map(repr, [*replies, *labels])


class HasRowId(Protocol):
    """A record or labeled row."""

    @property
    def row_id(self) -> str: ...


AnyRecord = TypeVar("AnyRecord", bound=HasRowId)


def overlap(train: Sequence[AnyRecord], evaluation: Sequence[AnyRecord], key: Callable[[AnyRecord], str]) -> list[str]:
    """Ids of the evaluation rows whose prompt (or text) is in the training rows too."""
    known = {key(row) for row in train}
    return [row.row_id for row in evaluation if key(row) in known]

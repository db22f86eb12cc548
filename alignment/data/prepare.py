"""From a data config to token sequences on disk in one call: read, tokenize, and refuse to go on with too little.

Every source of the config becomes a table of its own (table.py) in the cache (cache.py), chunk by chunk, so that memory
does not grow with the source; several processes may take the chunks of one source.
"""

import gc
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from alignment.data.cache import get_entry, table_key
from alignment.data.config import NO_STREAMING, DataConfig, Part, SourceConfig
from alignment.data.rows.files import Chunk, read_chunks, source_files
from alignment.data.rows.read import (
    AnyRecord,
    RecordParser,
    choose_parser,
    parse_rows,
    prompt_key,
    raise_bad_rows,
    rows_left,
    text_hash,
)
from alignment.data.rows.records import SHOWN_IDS, Kind, Tally, choose_turns
from alignment.data.table import (
    EncodedExamples,
    JoinedTables,
    Rows,
    Table,
    TableWriter,
    check_findings,
    encode_examples,
    tables_of,
)
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenize import PROMPT_CUT, RESPONSE_CUT, STEPS_CUT, TOKENIZE, Tokenize, tokenize_ordered_rankings
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.files import cache_directory, hash_of
from alignment.settings import refusal

if TYPE_CHECKING:
    from alignment.data.checks import Checks

Input = TypeVar("Input")
Result = TypeVar("Result")

HELD_OUT = "held out by data.evaluation_share"

CHUNK_BYTES = 4 * 2**20  # of a file of JSON lines
# smaller chunks where there would be fewer, so that all processes end together
LEAST_CHUNKS = 32
LEAST_BYTES = 2**18
AHEAD = 2  # chunks in flight for each process
LARGE_BYTES = 64 * 2**20  # from this size of a source, one process per core prepares it unless `data.processes` says
CHECKED_BYTES = 4 * 2**20  # of a source, whose rows are all checked; of a larger one as many, evenly drawn
BATCH_ROWS = 1024  # rows of one call of the tokenizer


class Preparation(NamedTuple):
    """The way from rows of one kind to examples."""

    name: str  # tells preparations apart that differ in nothing else of the key
    kind: Kind
    tokenize: Tokenize
    whole: bool = False  # True where `tokenize` must see all records at once


class Job(NamedTuple):
    """Settings and parts that each chunk of a source needs; one row in `checked`, a power of 2, is checked."""

    preparation: Preparation
    parser: RecordParser
    columns: Mapping[str, str]
    config: DataConfig
    tokenizer: Tokenizer
    checked: int = 1


@dataclass
class Prepared:
    """Prepared rows: counts of reading and of tokenizing, the first bad rows and their number."""

    read: Tally = field(default_factory=Tally)
    tokenized: Tally = field(default_factory=Tally)
    problems: list[str] = field(default_factory=list)
    checks: "Checks | None" = None
    encoded: EncodedExamples | None = None

    def merge(self, other: "Prepared") -> None:
        """Add the findings of later rows, but not their examples."""
        self.read = self.read.merged_with(other.read)
        self.tokenized = self.tokenized.merged_with(other.tokenized)
        self.problems = self.problems + other.problems
        if self.checks is not None and other.checks is not None:
            self.checks.merge(other.checks)
        self.checks = self.checks or other.checks

    def manifest(self, config: DataConfig, source: str) -> dict[str, Any]:
        """Content of the manifest: name of the source, tally, findings of the data doctor."""
        tally = self.read.followed_by(self.tokenized)
        findings = list[Any]()
        if self.checks is not None:
            findings = self.checks.findings(tally, max_cut_share=config.max_cut_share, max_length=config.max_length)
        return {"source": source, "tally": asdict(tally), "findings": list(map(asdict, findings))}


class _WrongRows(Exception):
    """A source with wrong rows, which are its argument."""


def prepare(config: DataConfig, kind: Kind, tokenizer: Tokenizer, part: Part = "train") -> tuple[Rows, Tally]:
    """Token sequences of one part of the data for decoders, `JoinedTables` of several sources, and the whole tally.

    Raises:
        UserError: bad rows, all of them at once; more rows lost than `config.max_lost_share`, or prompts or responses
            cut than `config.max_cut_share`; no data named for this part.
    """
    return prepare_with(preparation_of(kind), config, tokenizer, part=part)


def preparation_of(kind: Kind) -> Preparation:
    """The preparation of rows of one kind for decoders."""
    return Preparation(kind, kind, TOKENIZE[kind])


def prepare_with(
    preparation: Preparation, config: DataConfig, tokenizer: Tokenizer, *, part: Part
) -> tuple[Rows, Tally]:
    """`prepare` by another preparation. Of streamed training rows it is not known which prompts are held out too."""
    if config.streaming and part == "train":
        raise UserError(NO_STREAMING)
    examples = prepare_tables(preparation, config, tokenizer, part=part)
    if problem := refusal(require_enough, examples.tally, config, part):
        raise_all(filter(None, [problem, refusal(check_findings, examples, config.check)]))
    counts = examples.tally
    if config.evaluation_share is not None:
        views = [_view(cast(Table, table), config.evaluation_share, part) for table in tables_of(examples)]
        view = views[0] if len(views) == 1 else JoinedTables(views)
        _require_rows(view, config, part, len(examples))
        return view, view.tally
    if part == "evaluation" and not config.streaming:
        counts.trained_on = trained_on(prepare_tables(preparation, config, tokenizer, part="train"), examples)
    return examples, counts


def require_enough(counts: Tally, config: DataConfig, part: Part) -> Tally:
    """The tally, where the limits of the config allow what was lost and cut; see `Tally.require`."""
    name = ", ".join(source.source for source in config.sources(part))
    counts.require(config.max_lost_share, name, config.max_cut_share, (PROMPT_CUT, RESPONSE_CUT, STEPS_CUT))
    return counts


def prepare_tables(preparation: Preparation, config: DataConfig, tokenizer: Tokenizer, *, part: Part) -> Rows:
    """The tables of the sources of one part, from the cache or made; bad rows of all sources are raised at once."""
    names = config.source_names
    tables = list[Table]()
    problems = list[str]()
    read = 0
    for source in config.require_sources(part):
        left = rows_left(config.max_rows, read, source)
        if left is not None and left <= 0:
            break
        source_tokenizer = with_chat_template(tokenizer, source.chat_template)
        name = f"{preparation.kind}: {preparation.name}"
        key = table_key(source, config, source_tokenizer, name=name, max_rows=left)
        make = partial(_make, preparation, source, config, source_tokenizer, max_rows=left)
        try:
            entry = get_entry(cache_directory(config.cache), key, make)
            table = Table.open(entry.directory, entry.manifest, cached=entry.cached, notes=entry.notes)
            source.note_unread(table.tally)
            tables.append(table.changed(source=names.index(str(source.name))))
            read += table.manifest["read"]
        except _WrongRows as error:
            prepared: Prepared = error.args[0]
            problems += prepared.problems
            read += prepared.read.kept
    raise_bad_rows(problems)
    return tables[0] if len(tables) == 1 else JoinedTables(tables)


def _make(
    preparation: Preparation,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    max_rows: int | None,
) -> dict[str, Any]:
    """Fill the directory of a table, and return the content of its manifest."""
    size = sum(path.stat().st_size for path in source_files(source.source, str(source.split)) or [])
    chunks = read_chunks(source.source, str(source.split), min(CHUNK_BYTES, max(size // LEAST_CHUNKS, LEAST_BYTES)))
    parser, chunks = choose_parser(source, preparation.kind, config, chunks)
    job = Job(preparation, parser, source.columns or {}, config, tokenizer, 1 << (size // CHECKED_BYTES).bit_length())
    several = size >= LARGE_BYTES and sys.platform == "linux"  # a fork of a process with a window system may crash
    processes = config.processes or (len(os.sched_getaffinity(0)) if several else 1)
    prepared = Prepared()
    writer = TableWriter(directory)
    for chunk in _prepared_chunks(job, chunks, max_rows, processes):
        prepared.merge(chunk)
        if chunk.encoded is not None:
            writer.add(chunk.encoded)
    if not prepared.read.kept and not prepared.problems:
        raise UserError(f"{source.source}: no row can be used\n" + "\n".join(prepared.read.lines()[1:]))
    if prepared.problems:
        raise _WrongRows(prepared)
    return {
        **writer.close(),
        **prepared.manifest(config, source.source),
        "kind": preparation.name,
        "read": prepared.read.kept,
    }


def _prepared_chunks(job: Job, chunks: Iterator[Chunk], max_rows: int | None, processes: int) -> Iterator[Prepared]:
    """The chunks prepared, in order: one after another where rows are counted, else by several processes."""
    if job.preparation.whole:
        chunks = iter([Chunk(rows=tuple(row for chunk in chunks for row in chunk.raw_rows()))])
    if max_rows is None:
        yield from map_in_order(partial(prepare_chunk, job), chunks, processes)
        return
    while max_rows > 0 and (chunk := next(chunks, None)) is not None:
        done = prepare_chunk(job, chunk, max_rows)
        yield done
        max_rows -= done.read.kept


def map_in_order(function: Callable[[Input], Result], inputs: Iterable[Input], processes: int) -> Iterator[Result]:
    """`function` of each input, in order; each of several processes, forks of this one, takes the next when free."""
    if processes <= 1:
        yield from map(function, inputs)
        return
    flying: deque[Future[Any]] = deque()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), start_worker, (function,)) as pool:
        try:
            for argument in inputs:
                flying.append(pool.submit(_call, argument))
                if len(flying) > AHEAD * processes:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {processes} processes that prepare data was ended by the system, most likely for lack of "
                "memory; set data.processes to a smaller number"
            ) from error
        finally:
            for future in flying:
                future.cancel()


_function: Callable[[Any], Any] | None = None  # of a worker: inherited by fork with its tokenizer, never pickled


def start_worker(function: Callable[[Any], Any]) -> None:
    """Make this process, a fork of another, ready to call a function of its parent."""
    global _function
    _function = function
    gc.freeze()  # what the parent had made is not looked at again, so its pages stay shared
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork, and every core has a process


def _call(argument: object) -> object:
    assert _function is not None
    return _function(argument)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's collector of cycles, which finds none and takes about a third of the time of preparing rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def prepare_chunk(job: Job, chunk: Chunk, max_rows: int | None = None) -> Prepared:
    """Parse and tokenize one chunk; it is not tokenized where it has bad rows that end the run."""
    from alignment.data.checks import Checks

    unread = job.parser.unread
    parsed = parse_rows(chunk.raw_rows(), job.parser, columns=job.columns, max_rows=max_rows, unread=unread)
    done = Prepared(parsed.counts, problems=parsed.problems if job.config.on_bad_row == "error" else [])
    if done.problems:
        return done
    kind = job.preparation.kind
    tokenize = job.preparation.tokenize
    plain = tokenize in (TOKENIZE[kind], tokenize_ordered_rankings)  # others are checked where they are corrupted
    coder = job.tokenizer if plain else None
    done.checks = Checks(kind, coder, job.config.max_length, weight=job.checked, joined=plain)
    examples: list[Any] = []
    rows = choose_turns(parsed.rows, job.config.turns)
    step = len(rows) if job.preparation.whole else BATCH_ROWS
    for start in range(0, len(rows), max(1, step)):
        records = rows[start : start + step]
        made, counts = tokenize(records, job.tokenizer, job.config.max_length)
        done.tokenized = done.tokenized.merged_with(counts)
        done.checks.add(records, made)
        examples += made
    done.encoded = encode_examples(examples, {row.row_id: text_hash(prompt_key(row)) for row in rows})
    return done


def trained_on(train: Rows, held_out: Rows) -> list[str]:
    """Ids of held-out rows whose prompt (or text) also occurs in training, by 64 bits of its hash."""
    both = np.isin(held_out.column("prompt_hash"), train.column("prompt_hash"))
    return list(dict.fromkeys(held_out[int(row)].row_id for row in np.flatnonzero(both)))


# A share of the training rows that is held out. The hash depends on the prompt (or document) alone: equal prompts stay
# on one side, in whatever source they are; a row does not move when rows are added or reordered; a larger share holds
# out the rows of a smaller one too.


def held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """True for each row that is held out, by the hashes of prompts, uint64, [rows]."""
    return hashes < np.uint64(int(share * 2**64))


def rows_of_part(
    rows: Sequence[AnyRecord], counts: Tally, key: Callable[[AnyRecord], str], config: DataConfig, part: Part
) -> tuple[list[AnyRecord], Tally]:
    """The rows in memory that belong to a part, and the part's tally; `key`: a text that is equal for equal prompts."""
    hashes = np.array([text_hash(key(row)) for row in rows], np.uint64)
    chosen = held_out(hashes, config.evaluation_share or 0.0).tolist()
    sides = {side: [row for row, out in zip(rows, chosen, strict=True) if out == side] for side in (False, True)}
    part_rows = sides[part == "evaluation"]
    _require_rows(part_rows, config, part, len(rows))
    if part == "evaluation":
        return part_rows, Tally(len(part_rows), len(part_rows))
    return part_rows, _without(counts, len(sides[True]), [row.row_id for row in sides[True][:SHOWN_IDS]])


def _view(table: Table, share: float, part: Part) -> Table:
    """The examples of prepared training rows that belong to a part, in their order; the table on disk is the same."""
    out = held_out(table.column("prompt_hash"), share)
    view = table.select(np.flatnonzero(out == (part == "evaluation")), key=hash_of([table.key, share, part]))
    evaluation = view if part == "evaluation" else table.select(np.flatnonzero(out), key="")
    rows = np.unique(evaluation.column("record"), return_index=True)[1]  # the first example of each data row
    sizes: dict[str, Any] = {
        name: int(view.column(column).sum()) for name, column in (("documents", "documents"), ("tokens", "total"))
    }
    if part == "evaluation":  # rows that were dropped and cut, and findings, are reported of the training rows
        return view.changed(tally=Tally(len(rows), len(rows), **sizes), findings=[])
    counts = _without(table.tally, len(rows), [evaluation[int(row)].row_id for row in rows[:SHOWN_IDS]])
    return view.changed(tally=replace(counts, **sizes))


def _without(counts: Tally, number: int, first: list[str]) -> Tally:
    """A tally without `number` rows that are held out, the first of which have these names."""
    if not number:
        return replace(counts)
    noted = {**counts.noted, HELD_OUT: number}
    names = {**counts.first, HELD_OUT: first}
    return replace(counts, rows=counts.rows - number, kept=counts.kept - number, noted=noted, first=names)


def _require_rows(found: Sized, config: DataConfig, part: Part, rows: int) -> None:
    """Refuse a part without rows, of `rows` in all."""
    if not len(found):
        names = ", ".join(source.source for source in config.sources("train"))
        fewer = "no row is held out; raise it" if part == "evaluation" else "no row is left to train on; lower it"
        raise UserError(
            f"{names}: data.evaluation_share={config.evaluation_share:g} parts {rows} examples by their prompts, and "
            f"{fewer}, or name held-out rows by data.evaluation"
        )

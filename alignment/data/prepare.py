"""From a data config to token sequences on disk in one call: read, tokenize, and refuse to go on with too little.

Every source of the config becomes a table of its own (table.py) in the cache (cache.py), chunk by chunk, so that memory
does not grow with the source; several processes may take the chunks of one source. Texts for pretraining objectives:
pretraining/prepare.py; labeled rows: tasks/prepare.py.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment.data.cache import get_entry
from alignment.data.config import NO_STREAMING, DataConfig, Part, SourceConfig
from alignment.data.fingerprint import table_key
from alignment.data.parallel import map_in_order
from alignment.data.rows.files import Chunk, read_chunks
from alignment.data.rows.read import (
    RecordParser,
    choose_parser,
    parse_rows,
    prompt_key,
    raise_bad_rows,
    rows_left,
    text_hash,
)
from alignment.data.rows.records import Kind, Tally, choose_turns
from alignment.data.rows.sources import source_files
from alignment.data.table import Codec, EncodedExamples, JoinedTables, Rows, Table, TableWriter, encode_examples
from alignment.data.text.named_templates import with_chat_template
from alignment.data.tokenize import (
    PROMPT_CUT,
    RESPONSE_CUT,
    STEPS_CUT,
    TOKENIZE,
    RefusedRows,
    Tokenize,
    tokenize_ordered_rankings,
)
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import cache_directory

if TYPE_CHECKING:
    from alignment.data.checks import Checks

CHUNK_BYTES = 4 * 2**20  # of a file of JSON lines
LEAST_CHUNKS, LEAST_BYTES = 32, 2**18  # smaller chunks where there would be fewer, so that all processes end together
MOST_CHUNKS, MOST_BYTES = 1000, 64 * 2**20  # larger chunks where there would be more
LARGE_BYTES = 64 * 2**20  # from this size of a source, one process per core prepares it unless `data.processes` says
CHECKED_BYTES = 4 * 2**20  # of a source, whose rows are all checked; of a larger one as many, evenly drawn
BATCH_ROWS = 1024  # rows of one call of the tokenizer
SHOWN = 20  # bad rows that are kept of each chunk, to be shown


@dataclass(frozen=True)
class Preparation:
    """The way from rows of one kind to examples.

    Attributes:
        name: tells preparations apart that differ in nothing else of the key.
        kind: of the rows.
        tokenize: records, tokenizer and length -> rows of examples and their tally.
        codec: of rows that are no `Example`.
        whole: True where `tokenize` must see all records at once.
    """

    name: str
    kind: Kind
    tokenize: Tokenize
    codec: Codec | None = None
    whole: bool = False


@dataclass(frozen=True)
class Job:
    """Settings and parts that every chunk of a source needs."""

    preparation: Preparation
    parser: RecordParser
    columns: Mapping[str, str]
    config: DataConfig
    tokenizer: Tokenizer
    checked: int = 1  # one row in this many has its texts and tokens checked; a power of 2


@dataclass
class Prepared:
    """Prepared rows: counts of reading and of tokenizing, the first bad rows and their number, refused rows by reason."""

    read: Tally = field(default_factory=Tally)
    tokenized: Tally = field(default_factory=Tally)
    problems: list[str] = field(default_factory=list)
    bad: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)
    checks: "Checks | None" = None
    encoded: EncodedExamples | None = None

    def merge(self, other: "Prepared") -> "Prepared":
        """Add the findings of later rows, but not their examples."""
        self.read, self.tokenized = self.read.merged_with(other.read), self.tokenized.merged_with(other.tokenized)
        self.problems, self.bad = self.problems + other.problems, self.bad + other.bad
        for why, names in other.refused.items():
            self.refused.setdefault(why, []).extend(names)
        if self.checks is None or other.checks is None:
            self.checks = self.checks or other.checks
        else:
            self.checks.merge(other.checks)
        return self

    @property
    def tally(self) -> Tally:
        """CountTable of reading and tokenizing together."""
        return self.read.followed_by(self.tokenized)

    def findings(self, config: DataConfig) -> list[dict[str, Any]]:
        """Findings of the data doctor, each as the fields of a `Finding`."""
        if self.checks is None:
            return []
        limits = {"max_cut_share": config.max_cut_share, "max_length": config.max_length}
        return [asdict(each) for each in self.checks.findings(self.tally, **limits)]

    def is_wrong(self, config: DataConfig) -> bool:
        """True where rows are refused, or bad and bad rows end the run."""
        return bool(self.refused or (self.bad and config.on_bad_row == "error"))

    def raise_errors(self, config: DataConfig) -> None:
        """Raise the bad rows, then the refused ones."""
        if config.on_bad_row == "error":
            raise_bad_rows(self.problems, self.bad)
        if self.refused:
            raise RefusedRows(self.refused)


class _WrongRows(Exception):
    """A source with wrong rows, `found`."""

    def __init__(self, found: Prepared):
        self.found = found


def prepare(config: DataConfig, kind: Kind, tokenizer: Tokenizer, part: Part = "train") -> tuple[Rows, Tally]:
    """Token sequences of one part of the data (by kind, see examples.py), and the whole tally.

    Returns:
        A `Table`, or `JoinedTables` where the part has several sources; examples are read from disk when asked for.

    Raises:
        UserError: bad rows, all of them at once; more rows lost than `config.max_lost_share`, or prompts or responses
            cut than `config.max_cut_share`; no data named for this part.
    """
    return prepare_with(preparation_of(kind), config, tokenizer, part=part)


def preparation_of(kind: Kind) -> Preparation:
    """The preparation of rows of one kind for a stage that reads them as decoders do."""
    return Preparation(kind, kind, TOKENIZE[kind])


def prepare_with(
    preparation: Preparation, config: DataConfig, tokenizer: Tokenizer, *, part: Part
) -> tuple[Rows, Tally]:
    """Read and tokenize the rows of one part as `preparation` says; see `prepare`.

    Of streamed training rows it is not known which prompts are held out too.
    """
    if config.streaming and part == "train":
        raise UserError(NO_STREAMING)
    examples = prepare_tables(preparation, config, tokenizer, part=part)
    counts = require_enough(examples.tally, config, part)
    if config.evaluation_share is not None:
        from alignment.data.held_out import view_of_part

        examples = view_of_part(examples, config, part)
        return examples, examples.tally
    if part == "evaluation" and not config.streaming:
        train = prepare_tables(preparation, config, tokenizer, part="train")
        counts.trained_on = trained_on(train, examples)
    return examples, counts


def require_enough(counts: Tally, config: DataConfig, part: Part) -> Tally:
    """The tally, where the limits of the config allow what was lost and cut.

    Raises:
        UserError: more rows lost than `config.max_lost_share`, or cut than `config.max_cut_share`.
    """
    name = ", ".join(source.source for source in config.sources(part))
    counts.require(config.max_lost_share, name)
    counts.require_whole(config.max_cut_share, (PROMPT_CUT, RESPONSE_CUT, STEPS_CUT), name)
    return counts


def prepare_tables(preparation: Preparation, config: DataConfig, tokenizer: Tokenizer, *, part: Part) -> Rows:
    """The tables of the sources of one part, from the cache or made.

    Raises:
        UserError: bad rows of all sources at once, or rows that the template refuses.
    """
    cache, names = cache_directory(config.cache), config.source_names
    tables: list[Table] = []
    wrong = Prepared()
    for source in config.require_sources(part):
        read = wrong.read.kept + sum(table.manifest["read"] for table in tables)
        left = rows_left(config.max_rows, read, source)
        if left is not None and left <= 0:
            break
        try:
            own = with_chat_template(tokenizer, source.chat_template)
            table = prepare_source(preparation, source, config, own, max_rows=left, cache=cache)
            tables.append(table.changed(source=names.index(str(source.name))))
        except _WrongRows as error:
            wrong.merge(error.found)
    wrong.raise_errors(config)
    return tables[0] if len(tables) == 1 else JoinedTables(tables)


def prepare_source(
    preparation: Preparation,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_rows: int | None,
    cache: Path,
) -> Table:
    """The table of one source, from the cache or made; of several processes that ask for it, one makes it."""
    key, parts = table_key(source, config, tokenizer, name=preparation.name, max_rows=max_rows)

    def make(directory: Path) -> dict[str, Any]:
        return {**_make(preparation, source, config, tokenizer, max_rows=max_rows, directory=directory), "parts": parts}

    entry = get_entry(cache, key, make)
    codec = preparation.codec
    return Table(entry.directory, entry.manifest, codec=codec, cached=entry.cached, notes=entry.notes)


def _make(
    preparation: Preparation,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_rows: int | None,
    directory: Path,
) -> dict[str, Any]:
    """Fill the directory of a table, and return the content of its manifest."""
    size = sum(path.stat().st_size for path in source_files(source.source, str(source.split)) or [])
    even_bytes = min(CHUNK_BYTES, max(size // LEAST_CHUNKS, LEAST_BYTES))
    chunk_bytes = min(max(even_bytes, size // MOST_CHUNKS), MOST_BYTES)
    parser, chunks = choose_parser(
        source, preparation.kind, config, read_chunks(source.source, str(source.split), chunk_bytes)
    )
    job = Job(preparation, parser, source.columns or {}, config, tokenizer, 1 << (size // CHECKED_BYTES).bit_length())
    found, writer = Prepared(), TableWriter(directory)
    for chunk in _prepared_chunks(job, chunks, max_rows, processes_for(config, size)):
        found.merge(chunk)
        if chunk.encoded is not None:
            writer.add(chunk.encoded)
    if not found.read.kept and (config.on_bad_row == "skip" or not found.bad):
        raise UserError(f"{source.source}: no row can be used\n" + "\n".join(found.read.lines()[1:]))
    if found.is_wrong(config):
        raise _WrongRows(found)
    manifest = {"read": found.read.kept, "tally": asdict(found.tally), "notes": []}
    manifest |= {"findings": found.findings(config), "kind": preparation.name, "source": source.source}
    return {**writer.close(), **manifest}


def _prepared_chunks(job: Job, chunks: Iterator[Chunk], max_rows: int | None, processes: int) -> Iterator[Prepared]:
    """The chunks prepared, in order: one after another where rows are counted, else by several processes."""
    if job.preparation.whole:
        yield prepare_chunk(job, Chunk(rows=tuple(row for chunk in chunks for row in chunk.raw_rows())), max_rows)
    elif max_rows is None:
        yield from map_in_order(partial(prepare_chunk, job), chunks, processes)
    else:
        for chunk in chunks:
            if max_rows <= 0:
                return
            done = prepare_chunk(job, chunk, max_rows)
            max_rows -= done.read.kept
            yield done


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector of reference cycles from running, and restore it at the end.

    For work that makes many objects and no cycles: the collector looks at all of them again and again, which takes about
    a third of the time of preparing rows, and finds nothing.
    """
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

    parsed = parse_rows(chunk.raw_rows(), job.parser, columns=job.columns, max_rows=max_rows)
    done = Prepared(parsed.counts, problems=parsed.problems[:SHOWN], bad=len(parsed.problems))
    if done.is_wrong(job.config):
        return done
    kind, codec = job.preparation.kind, job.preparation.codec
    # the tokens of texts for an objective are checked where they are corrupted
    plain = job.preparation.tokenize in (TOKENIZE[kind], tokenize_ordered_rankings)
    done.checks = Checks(kind, job.tokenizer if plain else None, weight=job.checked)
    examples: list[Any] = []
    rows = choose_turns(parsed.rows, job.config.turns)
    step = len(rows) if job.preparation.whole else BATCH_ROWS
    for start in range(0, len(rows), max(1, step)):
        records = rows[start : start + step]
        try:
            made, counts = job.preparation.tokenize(records, job.tokenizer, job.config.max_length)
        except RefusedRows as error:
            done.merge(Prepared(refused=error.refused))
            continue
        done.tokenized = done.tokenized.merged_with(counts)
        done.checks.add(records, made)
        examples += made if codec is None else map(codec.encode, made)
    done.encoded = encode_examples(examples, {row.row_id: text_hash(prompt_key(row)) for row in rows})
    return done


def trained_on(train: Rows, held_out: Rows) -> list[str]:
    """Row ids of the held-out examples whose prompt (or text) a training example has too.

    Prompts are compared by hashes of 64 bits: among ten million prompts a false match has a chance of about 1e-12 each.
    """
    both = np.isin(held_out.column("prompt_hash"), train.column("prompt_hash"))
    return list(dict.fromkeys(held_out.row_id(int(row)) for row in np.flatnonzero(both)))


def processes_for(config: DataConfig, size: int) -> int:
    """Processes that prepare a source of `size` bytes: those asked for, else one, or for a large source one per core."""
    if config.processes is not None:
        return config.processes
    return len(os.sched_getaffinity(0)) if size >= LARGE_BYTES else 1

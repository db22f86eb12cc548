"""From a data config to token sequences on disk in one call: read, tokenize, and refuse to go on with too little.

Every source of the config becomes a table of its own (table.py) in the cache (cache.py), chunk by chunk, so that memory
does not grow with the source; several processes may take the chunks of one source. Texts for pretraining objectives:
pretraining/prepare.py; labeled rows: tasks/prepare.py.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alignment.data.cache import get_entry
from alignment.data.codecs import CODECS, Codec
from alignment.data.config import NO_STREAMING, DataConfig, Part, SourceConfig
from alignment.data.fingerprint import table_key
from alignment.data.rows.chunks import Chunk, open_source
from alignment.data.rows.files import source_files
from alignment.data.rows.read import RecordParser, parse_rows, prompt_key, raise_bad_rows, rows_left, text_hash
from alignment.data.rows.records import Kind, Record, Tally
from alignment.data.rows.turns import choose_turns
from alignment.data.table import JoinedTables, Rows, Table, TableWriter, encode_batch, joined_batch
from alignment.data.text.named_templates import with_chat_template
from alignment.data.tokenize import (
    PROMPT_CUT,
    RESPONSE_CUT,
    STEPS_CUT,
    RefusedRows,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_ordered_rankings,
    tokenize_prompts,
    tokenize_rankings,
    tokenize_steps,
    tokenize_texts,
)
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import cache_directory

Tokenize = Callable[[list[Any], Tokenizer, int], tuple[list[Any], Tally]]

TOKENIZE: dict[str, Tokenize] = {
    "text": tokenize_texts,
    "demonstrations": tokenize_demonstrations,
    "comparisons": tokenize_comparisons,
    "prompts": tokenize_prompts,
    "labels": tokenize_labels,
    "rankings": tokenize_rankings,
    "steps": tokenize_steps,
}

CHUNK_BYTES = 4 * 2**20  # of a file of JSON lines
LEAST_CHUNKS, LEAST_BYTES = 32, 2**18  # smaller chunks where there would be fewer, so that all processes end together
MOST_CHUNKS, MOST_BYTES = 1000, 64 * 2**20  # larger chunks where there would be more
LARGE_BYTES = 64 * 2**20  # from this size of a source, one process per core prepares it unless `data.processes` says
CHECKED_BYTES = 4 * 2**20  # of a source, whose rows are all checked; of a larger one as many, evenly drawn
BATCH_ROWS = 1024  # rows of one call of the tokenizer
SHOWN = 20  # bad rows that are kept of each chunk, to be shown


@dataclass(frozen=True)
class Preparation:
    """How rows of one kind become examples.

    Attributes:
        name: tells preparations apart that differ in nothing else of the key.
        kind: of the rows.
        tokenize: records, tokenizer and length -> examples and their tally.
        codec: how the examples are stored.
        whole: whether `tokenize` must see all records at once.
    """

    name: str
    kind: Kind
    tokenize: Tokenize
    codec: Codec[Any]
    whole: bool = False


@dataclass(frozen=True)
class Job:
    """What every chunk of a source needs."""

    preparation: Preparation
    parser: RecordParser
    columns: Mapping[str, str]
    config: DataConfig
    tokenizer: Tokenizer
    checked: int = 1  # one row in so many has its texts and tokens checked; a power of 2


@dataclass
class PreparedChunk:
    """A chunk's examples as an Arrow batch, and what was found on the way; counts of reading and of tokenizing."""

    read: Tally
    tokenized: Tally
    problems: list[str]
    bad: int
    refused: dict[str, list[str]]
    batch: Any = None
    names: Sequence[str] = ()
    checks: Any = None


class _BadRows(Exception):
    """A source with bad rows, or with rows that the tokenizer's template refuses."""

    def __init__(self, kept: int, problems: list[str], bad: int, refused: dict[str, list[str]]):
        self.kept, self.problems, self.bad, self.refused = kept, problems, bad, refused


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
    """How rows of one kind become the examples of a stage."""
    return Preparation(kind, kind, TOKENIZE[kind], CODECS[kind])


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
    tables: list[Table[Any]] = []
    problems: list[str] = []
    refused: dict[str, list[str]] = {}
    read = bad = 0
    for source in config.require_sources(part):
        left = rows_left(config.max_rows, read, source)
        if left is not None and left <= 0:
            break
        try:
            own = with_chat_template(tokenizer, source.chat_template)
            table = prepare_source(preparation, source, config, own, max_rows=left, cache=cache)
            tables.append(table.with_source(names.index(str(source.name))))
            read += table.manifest["read"]
        except _BadRows as error:
            read, bad = read + error.kept, bad + error.bad
            problems += error.problems
            merge_lists(refused, error.refused)
    raise_bad_rows(problems, bad)
    if refused:
        raise RefusedRows(refused)
    return tables[0] if len(tables) == 1 else JoinedTables(tables)


def prepare_source(
    preparation: Preparation,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_rows: int | None,
    cache: Path,
) -> Table[Any]:
    """The table of one source, from the cache or made; of several processes that ask for it, one makes it."""
    key, parts = table_key(source, config, tokenizer, name=preparation.name, max_rows=max_rows, cache=cache)

    def make(directory: Path) -> dict[str, Any]:
        return {**_make(preparation, source, config, tokenizer, max_rows=max_rows, directory=directory), "parts": parts}

    entry = get_entry(cache, key, make)
    return Table(entry.directory, preparation.codec, entry.manifest, cached=entry.cached, notes=entry.notes)


def _make(
    preparation: Preparation,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_rows: int | None,
    directory: Path,
) -> dict[str, Any]:
    """Fill the directory of a table; what its manifest says of it."""
    from alignment.data.checks import Checks

    size = _size(source)
    even_bytes = min(CHUNK_BYTES, max(size // LEAST_CHUNKS, LEAST_BYTES))
    chunk_bytes = min(max(even_bytes, size // MOST_CHUNKS), MOST_BYTES)
    parser, chunks = open_source(
        source, preparation.kind, skip_ties=config.skip_ties, as_messages=config.as_messages, size=chunk_bytes
    )
    job = Job(preparation, parser, source.columns or {}, config, tokenizer, 1 << (size // CHECKED_BYTES).bit_length())
    checks = Checks(preparation.kind, weight=job.checked)
    read, tokenized, problems, refused, bad = Tally(), Tally(), [], {}, 0
    writer = TableWriter(directory, preparation.codec)
    for done in _prepared_chunks(job, chunks, max_rows, processes_for(config, size)):
        read, tokenized, bad = read.merged_with(done.read), tokenized.merged_with(done.tokenized), bad + done.bad
        problems += done.problems
        merge_lists(refused, done.refused)
        if done.checks is not None:
            checks.merge(done.checks)
        if done.batch is not None:
            writer.add(done.batch, done.names)
    if not read.kept and (config.on_bad_row == "skip" or not bad):
        raise UserError(f"{source.source}: no row can be used\n" + "\n".join(read.lines()[1:]))
    if refused or (bad and config.on_bad_row == "error"):
        raise _BadRows(read.kept, problems if config.on_bad_row == "error" else [], bad, refused)
    tally = read.followed_by(tokenized)
    findings = checks.findings(tally, max_cut_share=config.max_cut_share, max_length=config.max_length)
    counts = {"read": read.kept, "tally": asdict(tally), "findings": [asdict(finding) for finding in findings]}
    return {**writer.close(), **counts, "notes": [], "kind": preparation.name, "source": source.source}


def _prepared_chunks(
    job: Job, chunks: Iterator[Chunk], max_rows: int | None, processes: int
) -> Iterator[PreparedChunk]:
    """The chunks prepared, in order: one after another where rows are counted, else by several processes."""
    if job.preparation.whole:
        yield prepare_chunk(job, Chunk(rows=tuple(row for chunk in chunks for row in chunk.raw_rows())), max_rows)
    elif max_rows is None:
        from alignment.data.parallel import map_in_order

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
def prepare_chunk(job: Job, chunk: Chunk, max_rows: int | None = None) -> PreparedChunk:
    """Parse and tokenize one chunk; it is not tokenized where it has bad rows that end the run."""
    parsed = parse_rows(chunk.raw_rows(), job.parser, columns=job.columns, max_rows=max_rows)
    done = PreparedChunk(parsed.counts, Tally(), parsed.problems[:SHOWN], len(parsed.problems), {})
    if parsed.problems and job.config.on_bad_row == "error":
        return done
    from alignment.data.checks import Checks

    kind = job.preparation.kind
    # the tokens of texts for an objective are checked where they are corrupted
    plain = job.preparation.tokenize in (TOKENIZE[kind], tokenize_ordered_rankings)
    done.checks = Checks(kind, job.tokenizer if plain else None, weight=job.checked)
    batches, names = [], {}
    rows = choose_turns(parsed.rows, job.config.turns)
    step = len(rows) if job.preparation.whole else BATCH_ROWS
    for start in range(0, len(rows), max(1, step)):
        records = rows[start : start + step]
        try:
            examples, counts = job.preparation.tokenize(records, job.tokenizer, job.config.max_length)
        except RefusedRows as error:
            merge_lists(done.refused, error.refused)
            continue
        done.tokenized = done.tokenized.merged_with(counts)
        done.checks.add(records, examples)
        batches.append(encode_batch(job.preparation.codec, examples, names, prompt_hashes(records)))
    done.batch, done.names = joined_batch(batches), list(names)
    return done


def merge_lists(into: dict[str, list[str]], more: Mapping[str, Sequence[str]]) -> None:
    """Append lists to the lists of the same key."""
    for key, values in more.items():
        into.setdefault(key, []).extend(values)


def prompt_hashes(records: Sequence[Record]) -> dict[str, int]:
    """64-bit hash of the prompt or text of each record, by row id."""
    return {record.row_id: text_hash(prompt_key(record)) for record in records}


def trained_on(train: Rows, held_out: Rows) -> list[str]:
    """Row ids of the held-out examples whose prompt (or text) a training example has too.

    Prompts are compared by hashes of 64 bits: among ten million prompts a false match has a chance of about 1e-12 each.
    """
    wanted = np.unique(held_out.column("prompt_hash"))
    found = np.zeros(len(wanted), bool)
    for batch in train.column_batches("prompt_hash"):
        found |= np.isin(wanted, batch)
    rows = np.flatnonzero(np.isin(held_out.column("prompt_hash"), wanted[found]))
    return list(dict.fromkeys(held_out.row_id(int(row)) for row in rows))


def processes_for(config: DataConfig, size: int) -> int:
    """Processes that prepare a source of so many bytes: those asked for, else one, or for a large source one per core."""
    if config.processes is not None:
        return config.processes
    return len(os.sched_getaffinity(0)) if size >= LARGE_BYTES else 1


def _size(source: SourceConfig) -> int:
    """Bytes of a source's files; 0 where it has none."""
    return sum(path.stat().st_size for path in source_files(source.source, str(source.split)) or [])

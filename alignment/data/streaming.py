"""Streaming: rows of a source that fits no disk, read, tokenized and shuffled window by window while a run goes on.

Rows are shuffled within windows of `data.shuffle_buffer` successive rows, and files are shuffled per epoch: rows that
lie far apart in one file never come close. Both orders are functions of (seed, epoch, number of the window), and a
window follows from the position where it begins: a checkpoint holds a few numbers, and a resumed run reads one window
again. In memory is one window, for each source of a mixture: about four bytes for each token of its rows and a hundred
for each row.

While a window is trained on, a process of its own reads and tokenizes the next one. Of several ranks each reads all
rows, tokenizes every so many-th chunk of them, and is given the others' chunks when the window begins: batches do not
depend on the number of ranks. Draws from several sources by weights are those of stream.py.
"""

import ctypes
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from alignment.data.batches import RowSequence
from alignment.data.config import DataConfig
from alignment.data.prepare import Job, Preparation, Prepared, prepare_chunk, require_enough, start_worker
from alignment.data.rows.files import Chunk, OpenSource, Position, RawRow, chunks_of, open_sources
from alignment.data.rows.read import choose_parser, raise_bad_rows
from alignment.data.rows.records import Tally
from alignment.data.stream import SourceChoices, mixing_shares, seed_of_source
from alignment.data.table import JoinedTables, Table
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import hash_of

Row = TypeVar("Row")
OrderState = dict[str, Any]  # of a `StreamedOrder`, JSON-like

FIRST_ROWS = 1024  # of each source: read before the run, to be checked
SELDOM = 2**20  # one row in this many is looked at by the data doctor after the first ones
CHUNK_ROWS = 256  # of a window, tokenized by one rank
# generators of different things draw differently
FILE_SALT = 715_104
WINDOW_SALT = 715_105


class File(NamedTuple):
    """A file or Hub data set, what its rows are prepared with, and the number of its source."""

    opened: OpenSource
    job: Job
    source: int


@dataclass
class StreamState:
    """State of the stream of some files."""

    epoch: int = 0  # passes over all files before it
    window: int = 0  # its number in the epoch
    file: int = 0  # number of the window's first file in the order of the epoch
    position: Position = None  # of the window's first row in this file
    taken: int = 0  # examples of the window before the next one
    before: Tally = field(default_factory=Tally)  # tally of the windows before
    last: int = -1  # epoch of the last example; -1 before the first
    noted: int = 0  # lost rows at the last note of them


class Share(NamedTuple):
    """The chunks of a window that one rank has prepared, each with the number of its source."""

    name: str  # of the window's first file
    total: int  # chunks of the window
    end: StreamState  # after the window
    chunks: Sequence[tuple[Prepared, int]]


class Ranks(NamedTuple):
    """A rank, their number, and a collective operation that gives all ranks' values of a picklable one, by rank."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]


ALONE = Ranks()


class Reader:
    """A process, a fork of this one, that reads shares of windows while this one goes on.

    It ends when nothing holds the reader any more, and with this process, however that ends.
    """

    def __init__(self, read: Callable[[StreamState], Share]):
        context = multiprocessing.get_context("fork")
        self._connection, far_end = context.Pipe()
        process = context.Process(target=_serve, args=(read, far_end, self._connection), daemon=True)
        process.start()
        far_end.close()  # the connection then ends with the process
        self.close = Finalize(self, _kill, (process,), exitpriority=0)  # before processes that are left are waited for

    def ask(self, state: StreamState) -> None:
        """Begin with a share; what was asked before must have been answered."""
        with suppress(OSError):  # the process has ended, and `answer` says so
            self._connection.send(state)

    def answer(self) -> Share:
        """The share that was asked for."""
        try:
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                "data.streaming: the process that reads the next rows was ended by the system, most likely for lack of "
                "memory; the same command goes on from the newest checkpoint, and a smaller data.shuffle_buffer needs "
                "less"
            ) from error
        if isinstance(reply, Exception):
            raise reply
        return reply


def _serve(read: Callable[[StreamState], Share], connection: Connection, far_end: Connection) -> None:
    """Answer each state with its share, or with the error that it met, as long as there is someone to answer."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: locks and GPU memory are held by forks too
    far_end.close()
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # they are for the run, which ends this process
        signal.signal(signal_number, signal.SIG_IGN)
    start_worker(read)
    with suppress(EOFError, OSError):
        while True:
            state = connection.recv()
            try:
                reply = read(state)
            except UserError as error:
                reply = error
            except Exception:  # of any type: it may be one that cannot be sent
                reply = RuntimeError(traceback.format_exc())
            connection.send(reply)


def _kill(process: multiprocessing.Process) -> None:
    process.kill()
    process.join()


class Window(RowSequence[Any]):
    """The examples of successive rows, in the `order` in which they are drawn; `end`: the state after them.

    `name` (of its first file), `tally` and `findings` are those of a table.
    """

    def __init__(self, rows: JoinedTables, order: np.ndarray, end: StreamState, manifest: dict[str, Any]):
        self.rows = rows
        self.order = order
        self.end = end
        self.name = manifest["source"]
        self.findings = manifest["findings"]
        self.tally = Tally(**manifest["tally"])

    def __len__(self) -> int:
        return len(self.order)

    def row_at(self, index: int) -> Any:
        return self.rows[int(self.order[index])]


class Cursor:
    """Gives out the examples of some files one after another, window by window.

    Args:
        seed: of the orders of files and rows; None: as the files are.
        name: of the files, for messages.
        check: called with each window that is read.
        note: called with lines of text on what was read.
        ranks: all of which take the same examples.
    """

    def __init__(
        self,
        files: Sequence[File],
        config: DataConfig,
        seed: int | None,
        *,
        ranks: Ranks = ALONE,
        name: str = "data.train",
        check: Callable[[Sequence[Any]], object] = lambda _: None,
        note: Callable[[str], object] = lambda _: None,
    ):
        self.files = files
        self.config = config
        self.seed = seed
        self.name = name
        self.check = check
        self.note = note
        self.ranks = ranks
        self.state = StreamState()
        self._window: Window | None = None
        self._open: tuple[StreamState, Iterator[RawRow]] | None = None  # end of the last window, and the rows behind it
        self._reader: Reader | None = None  # at work on the window after `_window`

    def take(self) -> tuple[Any, int]:
        """The next example, and its epoch."""
        while self.state.taken >= len(window := self.window()):
            counts = self.state.before.merged_with(window.tally)
            epoch = self.state.epoch
            if window.end.epoch > epoch:
                if self.state.last < epoch:
                    raise UserError(f"{self.name}: no row of a whole epoch can be used")
                self._describe(f"epoch {epoch + 1} has ended", counts)
            self.state = replace(window.end, before=counts, last=self.state.last, noted=self.state.noted)
            self._window = None
        self.state.taken += 1
        self.state.last = self.state.epoch
        return window[self.state.taken - 1], self.state.epoch

    def window(self) -> Window:
        """The window that is drawn from, read where it is not in memory."""
        if self._window is None:
            self._window = self._take_window()
            self.check(self._window)
            counts = self.state.before.merged_with(self._window.tally)
            if counts.rows:
                require_enough(counts, self.config, "train")
            if counts.lost >= 2 * max(1, self.state.noted):  # seldom, however many rows are lost
                self.state.noted = counts.lost
                self._describe(f"the first {counts.rows} rows", counts)
        return self._window

    def _take_window(self) -> Window:
        """The window of the present state; the process reading ahead has this rank's share and goes on to the next."""
        reader = self._reader
        self._reader = None  # one that has failed is not asked again
        try:
            share = self.read_share(self.state) if reader is None else reader.answer()
        except UserError as error:
            share = error  # of one rank, and raised on all
        window = self._join(share)
        if reader is None and window.end.epoch == self.state.epoch and sys.platform == "linux":
            self._open = None  # a fork would move on in the same open file
            reader = Reader(self.read_share)
        if reader is not None:
            reader.ask(window.end)
        self._reader = reader
        return window

    def _describe(self, when: str, counts: Tally) -> None:
        self.note(f"{self.name}: {when}: " + "; ".join(line.strip() for line in counts.lines()))

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, as `asdict` wrote it."""
        self.state = StreamState(**{**state, "before": Tally(**state["before"])})
        self._window = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def read(self) -> Window:
        """The window of the present state; a collective operation."""
        return self._join(self.read_share(self.state))

    def read_share(self, state: StreamState) -> Share:
        """This rank's share of the window of a state."""
        order = permutation(len(self.files), self.seed, FILE_SALT, state.epoch)
        left = self.config.shuffle_buffer
        count = 0
        name = ""
        chunks = list[tuple[Prepared, int]]()
        position = None
        end = StreamState(state.epoch + 1)
        for file_index, rows in self._rows_from(state, order):
            opened, job, source = self.files[order[file_index]]
            while left and (chunk := tuple(islice(rows, min(CHUNK_ROWS, left)))):
                if count % self.ranks.size == self.ranks.rank:
                    chunks.append((prepare_chunk(job, Chunk(rows=chunk)), source))
                name = name or opened.name
                left = left - len(chunk)
                count = count + 1
                position = chunk[-1].end
            if not left:
                end = StreamState(state.epoch, state.window + 1, file_index, position)
                self._open = (end, rows)
                break
        return Share(name, count, end, chunks)

    def _join(self, own: Share | UserError) -> Window:
        """The window of the present state, of the shares of all ranks; an error of any of them is raised on each."""
        heads = self.ranks.gather(own if isinstance(own, UserError) else own._replace(chunks=()))
        for head in heads:
            if isinstance(head, UserError):
                raise head
            if head[:2] != heads[0][:2]:
                raise UserError(f"{self.name}: ranks read other rows than each other; all must see the same files")
        assert isinstance(own, Share)
        prepared = Prepared()
        parts = list[Table]()
        for turn in range(-(-own.total // self.ranks.size)):  # not all at once: they may pass through a GPU's memory
            for done, source in chain.from_iterable(self.ranks.gather(list(own.chunks[turn : turn + 1]))):
                prepared.merge(done)
                if done.encoded is not None:
                    parts.append(Table(done.encoded, {}, source=source))
        raise_bad_rows(prepared.problems)
        joined = JoinedTables(parts)
        drawn = permutation(len(joined), self.seed, WINDOW_SALT, self.state.epoch, self.state.window)
        return Window(joined, drawn, own.end, prepared.manifest(self.config, own.name))

    def _rows_from(self, state: StreamState, order: np.ndarray) -> Iterator[tuple[int, Iterator[RawRow]]]:
        """The files from a state on: number in the order of the epoch, and the rows that are yet to be read."""
        start = (state.epoch, state.window)
        position = state.position
        following = self._open
        rest = following[1] if following and (following[0].epoch, following[0].window) == start else None
        self._open = None
        for file_index in range(state.file, len(order)):
            yield file_index, rest or self.files[order[file_index]].opened.read(position)
            rest = position = None


def permutation(count: int, seed: int | None, *numbers: int) -> np.ndarray:
    """An order of `count` things that (seed, numbers) decide; seed None: as they are, [count]."""
    return np.arange(count) if seed is None else np.random.default_rng([seed, *numbers]).permutation(count)


class StreamedRows(JoinedTables):
    """The `files` of each source under data.streaming. As a sequence: the first rows of each source, for checks."""

    def __init__(self, files: Sequence[Sequence[File]], config: DataConfig):
        few = replace(config, shuffle_buffer=min(FIRST_ROWS, config.shuffle_buffer))
        super().__init__([Cursor(group, few, seed=None).read() for group in files])
        self.files = files
        self.config = config
        require_enough(self.tally, config, "train")

    @property
    def key(self) -> str:
        """Hex digest of names and sizes of all files."""
        return hash_of([file.opened.version for files in self.files for file in files])

    @property
    def notes(self) -> list[str]:
        """Notes of a run on streaming."""
        return [
            f"streamed from {sum(map(len, self.files))} files or data sets, shuffled in windows of "
            f"{self.config.shuffle_buffer} rows; the counts above are of the first rows. All others are checked when "
            "they are read: a bad row may be found late in the run"
        ]


def open_stream(preparation: Preparation, config: DataConfig, tokenizer: Tokenizer) -> tuple[StreamedRows, Tally]:
    """The training rows of a config with `streaming`, and the tally of the first of them."""
    if preparation.whole:
        raise UserError(f"data.streaming: {preparation.name} needs all rows at once; set data.streaming=false")
    names = config.source_names
    files = []
    for source in config.require_sources("train"):
        opened = open_sources(source.source, str(source.split))
        rows = islice(
            (row for open_source in opened for row in open_source.read(None)), max(FIRST_ROWS, config.shuffle_buffer)
        )
        parser, _ = choose_parser(source, preparation.kind, config, chunks_of(rows))
        source_tokenizer = with_chat_template(tokenizer, source.chat_template)
        job = Job(preparation, parser, source.columns or {}, config, source_tokenizer)
        files.append([File(open_source, job, names.index(str(source.name))) for open_source in opened])
    rows = StreamedRows(files, config)
    counts = rows.tally
    for source in config.sources("train"):
        source.note_unread(counts)
    return rows, counts


class StreamedOrder(Generic[Row]):
    """Global batches of streamed rows, `data.mixing` being concatenate or weights.

    A batch is a function of its number. Batches asked for in order cost what their rows cost; any other batch is
    reached by reading all rows before it, or with `restore`.

    Args:
        batch_size: rows per batch, over all ranks.
        check: called with the examples of every window; raises where the model cannot take them.
        note: called with lines of text: what was dropped, and when an epoch ends.
        ranks: all of which ask for the same batches at the same time.
    """

    def __init__(
        self,
        rows: StreamedRows,
        *,
        batch_size: int,
        seed: int,
        ranks: Ranks = ALONE,
        check: Callable[[Sequence[Row]], object] = lambda _: None,
        note: Callable[[str], object] = lambda _: None,
    ):
        self.batch_size = batch_size
        self.seed = seed
        self.key = rows.key
        self._choices = None
        config = rows.config
        groups = [[file for files in rows.files for file in files]]
        names = ["data.train"]
        seeds = [seed]
        if config.mixing == "weights":
            groups = rows.files
            names = [str(source.name) for source in config.sources("train")]
            self._choices = SourceChoices(mixing_shares(config, [1] * len(groups)).tolist(), seed)
            seeds = [seed_of_source(seed, index) for index in range(len(groups))]
        groups = [[file._replace(job=file.job._replace(checked=SELDOM)) for file in files] for files in groups]
        self._cursors = [
            Cursor(files, config, cursor_seed, ranks=ranks, name=name, check=check, note=note)
            for files, cursor_seed, name in zip(groups, seeds, names, strict=True)
        ]
        self._last: tuple[int, list[tuple[Any, int]]] = (-1, [])  # the newest batch
        self._unread = self.state()

    def rows_at(self, step: int) -> list[Row]:
        """The rows of batch `step` (from 0)."""
        return [row for row, _ in self._batch(step)]

    def epochs_at(self, step: int) -> list[int]:
        """The epoch of its source, from 0, in which each row of batch `step` is seen."""
        return [epoch for _, epoch in self._batch(step)]

    def positions_at(self, step: int) -> list[int]:
        """Number of each row of batch `step`, counted over the whole run."""
        return list(range(step * self.batch_size, (step + 1) * self.batch_size))

    def _batch(self, step: int) -> list[tuple[Any, int]]:
        """The rows of a batch with their epochs."""
        if step < 0:
            raise IndexError(f"step {step} lies outside the stream")
        newest, rows = self._last
        if step < newest or (step == newest and not rows):  # after `restore` the newest batch has no rows yet
            self.restore(self._unread)
        while self._last[0] < step:
            next_step = self._last[0] + 1
            sources = [
                0 if self._choices is None else self._choices.at(position)[0]
                for position in self.positions_at(next_step)
            ]
            self._last = (next_step, [self._cursors[source].take() for source in sources])
        return self._last[1]

    def state(self) -> OrderState:
        """State for `restore`, which then gives the next batch."""
        cursors = [asdict(cursor.state) for cursor in self._cursors]
        return {"files": self.key, "step": self._last[0] + 1, "cursors": cursors}

    def restore(self, state: OrderState | None) -> None:
        """Go on where `state` says; None: at the first batch."""
        state = state or self._unread
        if state["files"] != self.key:
            raise UserError(
                "data.train: its files are not those of the checkpoint: names or sizes have changed, and a streamed "
                "run goes on at a position in them; restore the files, or begin in another output directory"
            )
        for cursor, cursor_state in zip(self._cursors, state["cursors"], strict=True):
            cursor.restore(cursor_state)
        self._last = (state["step"] - 1, [])

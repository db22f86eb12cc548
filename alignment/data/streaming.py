"""Streaming: rows of a source that fits no disk, read, tokenized and shuffled window by window while a run goes on.

Rows are shuffled within windows of `data.shuffle_buffer` successive rows, and files are shuffled per epoch; rows never move
between windows of a file. Rows that lie far apart in one file never come close; shuffle such a file before, or cut it into
many. Of a Hub data set the rows come as `datasets` streams them.

Both orders are functions of (seed, epoch, number of the window), and a window follows from the position where it begins. So
a checkpoint holds a few numbers, and a resumed run reads one window again. In memory is one window, for each source of a
mixture: about four bytes for each token of its rows and a hundred for each row, beside `BATCH_ROWS` rows that are being
read, and the first `FIRST_ROWS` of each source, by which rows are checked and shown before the run.

Every rank reads and tokenizes all rows and trains on its share of each batch, so that batches do not depend on the number of
ranks. Draws from several sources by weights are those of mixture.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.examples import RowSequence
from alignment.data.mixture import SourceChoices, mixing_shares, seed_of_source
from alignment.data.prepare import BATCH_ROWS, Job, Preparation, Prepared, prepare_chunk, require_enough
from alignment.data.rows.files import Chunk, OpenSource, Position, RawRow, open_sources
from alignment.data.rows.read import RecordParser, choose_parser
from alignment.data.rows.records import Kind, Tally
from alignment.data.table import EncodedSequence, JoinedTables
from alignment.data.text.named_templates import with_chat_template
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import hash_of

Row = TypeVar("Row")

FIRST_ROWS = 1024  # of each source: read before the run, to be checked
SELDOM = 2**20  # one row in this many is looked at by the data doctor after the first ones
FILE_SALT, WINDOW_SALT = 715_104, 715_105  # generators of different things draw differently


@dataclass(frozen=True)
class WindowStart:
    """The place where a window begins.

    Attributes:
        epoch: passes over all files before it.
        window: its number in the epoch.
        file: number of its first file in the order of the epoch.
        position: of its first row in this file.
    """

    epoch: int = 0
    window: int = 0
    file: int = 0
    position: Position = None


@dataclass(frozen=True)
class Window(RowSequence[Any]):
    """The examples of successive rows, in the order in which they are drawn.

    Attributes:
        end: start of the next one.
        prepared: counts and findings of its rows.
        name: of the first file or data set in it, '' where it has no row.
        config: by which its rows were prepared.
        rows: in the order of the files.
        order: in which they are drawn.
    """

    end: WindowStart
    prepared: Prepared = field(repr=False)
    name: str
    config: DataConfig = field(repr=False)
    rows: JoinedTables = field(repr=False)
    order: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.order)

    def row_at(self, index: int) -> Any:
        return self.rows[int(self.order[index])]

    @property
    def tally(self) -> Tally:
        """Of its rows."""
        return self.prepared.tally

    @property
    def manifest(self) -> dict[str, Any]:
        """Name and tally, as the manifest of a table has them."""
        return {"source": self.name, "tally": asdict(self.tally)}

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings of its rows, each as the fields of a `Finding`."""
        return self.prepared.findings(self.config)


@dataclass(frozen=True)
class File:
    """A file or Hub data set, and what its rows are prepared with."""

    opened: OpenSource
    job: Job
    source: int


class Windows:
    """Reads the windows of some files, each from its `WindowStart`; faster where it is the next one."""

    def __init__(self, files: Sequence[File], config: DataConfig, seed: int | None):
        """Read nothing yet.

        Args:
            seed: of both orders; None: as the files are.
        """
        self.files, self.config, self.seed = files, config, seed
        self._next: tuple[WindowStart, Iterator[RawRow]] | None = None  # where the last window ended

    def read(self, start: WindowStart) -> Window:
        """The window that begins at `start`.

        Raises:
            UserError: bad rows, with data.on_bad_row=error; rows that the chat template refuses.
        """
        order = permutation(len(self.files), self.seed, FILE_SALT, start.epoch)
        found, name, parts = Prepared(), "", list[EncodedSequence]()
        left, position, end = self.config.shuffle_buffer, None, WindowStart(start.epoch + 1)
        for number, rows in self._open_from(order, start):
            file = self.files[order[number]]
            while left and (chunk := tuple(islice(rows, min(BATCH_ROWS, left)))):
                done = prepare_chunk(file.job, Chunk(rows=chunk))
                found.merge(done)
                name, left = name or file.opened.name, left - len(chunk)
                if done.encoded is not None:
                    parts.append(EncodedSequence(done.encoded, file.job.preparation.codec, file.source))
                position = chunk[-1].end
            if not left:
                end = WindowStart(start.epoch, start.window + 1, number, position)
                self._next = (end, rows)
                break
        found.raise_errors(self.config)
        joined = JoinedTables(parts)
        drawn = permutation(len(joined), self.seed, WINDOW_SALT, start.epoch, start.window)
        return Window(end, found, name, self.config, joined, drawn)

    def _open_from(self, order: np.ndarray, start: WindowStart) -> Iterator[tuple[int, Iterator[RawRow]]]:
        """The files from `start` on: number in the order of the epoch, and the rows that are yet to be read."""
        following, self._next = self._next, None
        rest = following[1] if following is not None and following[0] == start else None
        position = start.position
        for number in range(start.file, len(order)):
            yield number, rest or self.files[order[number]].opened.read(position)
            rest = position = None


def permutation(count: int, seed: int | None, *numbers: int) -> np.ndarray:
    """An order of `count` things that (seed, numbers) decide; seed None: as they are, [count]."""
    return np.arange(count) if seed is None else np.random.default_rng([seed, *numbers]).permutation(count)


OrderState = dict[str, Any]  # of a `StreamedOrder`, or of a cursor in it, as JSON-like values


class Cursor:
    """Gives out the examples of some files one after another, window by window."""

    def __init__(
        self,
        windows: Windows,
        name: str,
        *,
        check: Callable[[Sequence[Row]], object] | None = None,
        note: Callable[[str], object] | None = None,
    ):
        """Begin with the first example of the first epoch.

        Args:
            name: of the files, for messages.
            check: called with each window that is read.
            note: called with lines of text on what was read.
        """
        self.windows, self.name, self.check, self.note = windows, name, check, note
        self.start, self.taken = WindowStart(), 0
        self.before = Tally()  # of the windows before this one
        self._window: Window | None = None
        self._noted = 0
        self._last = -1  # epoch of the last example

    def take(self) -> tuple[Any, int]:
        """The next example, and its epoch.

        Raises:
            UserError: as `Windows.read`; too many rows are lost; a whole epoch has no example.
        """
        while self.taken >= len(window := self.window()):
            self.before = self.before.merged_with(window.tally)
            if window.end.epoch > self.start.epoch:
                if self._last < self.start.epoch:
                    raise UserError(f"{self.name}: no row of a whole epoch can be used")
                self._describe(f"epoch {self.start.epoch + 1} has ended", self.before)
            self.start, self.taken, self._window = window.end, 0, None
        self.taken += 1
        self._last = self.start.epoch
        return window[self.taken - 1], self.start.epoch

    def window(self) -> Window:
        """The window that is drawn from, read where it is not in memory."""
        if self._window is None:
            self._window = self.windows.read(self.start)
            if self.check is not None:
                self.check(self._window)
            counts = self.before.merged_with(self._window.tally)
            if counts.rows:
                require_enough(counts, self.windows.config, "train")
            if counts.lost >= 2 * max(1, self._noted):  # seldom, however many rows are lost
                self._noted = counts.lost
                self._describe(f"the first {counts.rows} rows", counts)
        return self._window

    def _describe(self, when: str, counts: Tally) -> None:
        if self.note is not None:
            self.note(f"{self.name}: {when}: " + "; ".join(line.strip() for line in counts.lines()))

    def state(self) -> dict[str, Any]:
        """State for `restore`, as JSON-like values."""
        start, before = asdict(self.start), asdict(self.before)
        return {"start": start, "taken": self.taken, "before": before, "last": self._last, "noted": self._noted}

    def restore(self, state: OrderState) -> None:
        """Go on where `state` says."""
        start, self._window = WindowStart(**state["start"]), None
        self.start, self.taken, self._last = start, state["taken"], state["last"]
        self.before, self._noted = Tally(**state["before"]), state["noted"]


class StreamedRows(JoinedTables):
    """The examples of `data.train` under data.streaming. As a sequence: the first rows of each source, for checks.

    Attributes:
        files: of each source.
        config: with `streaming`.
        tally: of the first rows.
    """

    def __init__(self, files: Sequence[Sequence[File]], config: DataConfig):
        """Read the first rows of each source.

        Raises:
            UserError: as `Windows.read`; too few of them can be used.
        """
        few = replace(config, shuffle_buffer=min(FIRST_ROWS, config.shuffle_buffer))
        super().__init__([Windows(each, few, seed=None).read(WindowStart()) for each in files])
        self.files, self.config = files, config
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
            f"{self.config.shuffle_buffer} rows; the counts above are of the first rows. All others are checked when they "
            "are read: a bad row may be found late in the run"
        ]


def open_stream(preparation: Preparation, config: DataConfig, tokenizer: Tokenizer) -> tuple[StreamedRows, Tally]:
    """The training rows of a config with `streaming`, and the tally of the first of them.

    Raises:
        UserError: no such source, no rows, columns that make no record of this kind, bad rows among the first, a file
            that cannot be read row by row, or a preparation that needs all rows at once.
    """
    if preparation.whole:
        raise UserError(f"data.streaming: {preparation.name} needs all rows at once; set data.streaming=false")
    names, files = config.source_names, []
    for source in config.require_sources("train"):
        opened = open_sources(source.source, str(source.split))
        own = with_chat_template(tokenizer, source.chat_template)
        job = Job(preparation, _parser(opened, source, config, preparation.kind), source.columns or {}, config, own)
        files.append([File(each, job, names.index(str(source.name))) for each in opened])
    rows = StreamedRows(files, config)
    return rows, rows.tally


def _parser(opened: Sequence[OpenSource], source: SourceConfig, config: DataConfig, kind: Kind) -> RecordParser:
    """The parser that the first rows of a source ask for."""
    rows = islice((row for each in opened for row in each.read(None)), max(FIRST_ROWS, config.shuffle_buffer))
    chunks = (Chunk(rows=chunk) for chunk in iter(lambda: tuple(islice(rows, FIRST_ROWS)), ()))
    return choose_parser(source, kind, config, chunks)[0]


class StreamedOrder(Generic[Row]):
    """Global batches of streamed rows, `data.mixing` being concatenate or weights.

    A batch is a function of its number. Batches asked for in order cost what their rows cost; any other batch is reached
    by reading all rows before it, or with `restore`.

    Attributes:
        batch_size: rows per batch, over all ranks.
        seed: >= 0.
    """

    def __init__(
        self,
        rows: StreamedRows,
        *,
        batch_size: int,
        seed: int,
        check: Callable[[Sequence[Row]], object] | None = None,
        note: Callable[[str], object] | None = None,
    ):
        """Begin before the first batch; nothing is read yet.

        Args:
            check: called with the examples of every window; raises where the model cannot take them.
            note: called with lines of text: what was dropped, and when an epoch ends.
        """
        self.batch_size, self.seed, self.key = batch_size, seed, rows.key
        self._choices, groups, names = None, rows.files, [str(source.name) for source in rows.config.sources("train")]
        if rows.config.mixing == "weights":
            self._choices = SourceChoices(mixing_shares(rows.config, [1] * len(groups)).tolist(), seed)
            seeds = [seed_of_source(seed, number) for number in range(len(groups))]
        else:
            groups, names, seeds = [[file for files in groups for file in files]], ["data.train"], [seed]
        groups = [[replace(file, job=replace(file.job, checked=SELDOM)) for file in files] for files in groups]
        self._cursors = [
            Cursor(Windows(files, rows.config, own), name, check=check, note=note)
            for files, own, name in zip(groups, seeds, names, strict=True)
        ]
        self._last: tuple[int, list[tuple[Any, int]]] = (-1, [])  # the newest batch
        self._unread = self.state()

    def rows_at(self, step: int) -> list[Row]:
        """The rows of batch `step` (from 0).

        Raises:
            UserError: bad rows among those that are read for it, or rows that do not fit the model.
        """
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
        if step < self._last[0]:
            self.restore(self._unread)
        while self._last[0] < step:
            number = self._last[0] + 1
            sources = [0 if self._choices is None else self._choices.at(each)[0] for each in self.positions_at(number)]
            self._last = (number, [self._cursors[source].take() for source in sources])
        return self._last[1]

    def state(self) -> OrderState:
        """State for `restore`, which then gives the next batch."""
        cursors = [cursor.state() for cursor in self._cursors]
        return {"files": self.key, "step": self._last[0] + 1, "cursors": cursors}

    def restore(self, state: OrderState | None) -> None:
        """Go on where `state` says; None: at the first batch.

        Raises:
            UserError: the files are others, or have other sizes.
        """
        state = state or self._unread
        if state["files"] != self.key:
            raise UserError(
                "data.train: its files are not those of the checkpoint: names or sizes have changed, and a streamed run "
                "goes on at a position in them; restore the files, or begin in another output directory"
            )
        for cursor, each in zip(self._cursors, state["cursors"], strict=True):
            cursor.restore(each)
        self._last = (state["step"] - 1, [])

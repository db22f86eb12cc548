"""Settings of the data of a run: which sources, how they are mixed, and what happens to rows that do not fit.

Rows are read in rows/read.py; mixtures are drawn in stream.py.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from alignment.data.rows.files import find_rows, hub_source, suffix_of, unread_files
from alignment.data.rows.records import Tally, Turns
from alignment.errors import UserError
from alignment.settings import PositiveFloat, PositiveInt, Rule, Settings, Share, deferred_checks

Part = Literal["train", "evaluation"]
Mixing = Literal["concatenate", "proportional", "weights", "temperature"]
OnBadRow = Literal["error", "skip"]

NAME = re.compile(r"[\w.-]+")
NO_STREAMING = (
    "data.streaming: sft, reward, dpo and pretrain can train on rows that are not known as a whole, and this cannot; "
    "set data.streaming=false"
)


@dataclass(frozen=True)
class SourceConfig(Settings):
    """One source of rows, with the settings that are its own.

    Attributes:
        source: file or Hub id, as in `data.train`.
        name: in metrics and reports; None: made of the file's or the data set's name.
        weight: its share of the draws is its weight over the sum of all weights; with data.mixing=weights only.
        max_rows: the most good rows read of this source.
        columns: our column name -> the source's; None: data.columns.
        split: of a Hub data set that names none itself, or of a directory; None: data.split, or data.evaluation_split.
        chat_template: that renders the rows of this source, a built-in name or a file; None: that of the run.
    """

    source: str
    name: str | None = None
    weight: PositiveFloat | None = None
    max_rows: PositiveInt | None = None
    columns: dict[str, str] | None = None
    split: str | None = None
    chat_template: str | None = None

    RULES = (
        Rule("source", lambda c: not c.source, "names no file"),
        Rule(
            "name",
            lambda c: c.name is not None and not NAME.fullmatch(c.name),
            "may have letters, digits and _ . - only, got {self.name!r}",
        ),
    )

    def note_unread(self, counts: Tally) -> None:
        """Count the files of a directory that are of another split, or of none."""
        for name in unread_files(self.source, str(self.split)):
            counts.note(f"{self.source}: files that are not read, being not of the split '{self.split}'", name)


@dataclass(frozen=True)
class DataConfig(Settings):
    """The sources of rows, how they are mixed, and what happens to rows that do not fit.

    Attributes:
        train: file or Hub id (owner/name, owner/name[split], owner/name:config[split]), or a list of them, or of
            sections `{source, name, weight, max_rows, columns, split, chat_template}`.
        evaluation: held-out rows, given in the same ways; all of them are read, so these sources have no weights.
        evaluation_share: this share of the prompts of `train` is held out in place of `evaluation`, about 0.01 to 0.1;
            a hash of a row's prompt (or text) alone decides, so that all rows of one prompt are on one side, and added
            rows move no other. `max_rows` counts the rows of both sides; limits of lost and cut rows hold for both
            together.
        split: of a Hub data set that names none itself, or of a directory whose files are named after splits
            (train.jsonl, test-00000-of-00002.parquet, validation/0.csv); a directory without such names is read whole.
        evaluation_split: the same in `evaluation`; None: as `split`.
        mixing: which source the next row of `train` comes from. concatenate: all rows in one shuffle, each once per
            epoch. Else every row is a draw: proportional to the sources' sizes, by their weights, or by sizes to the
            power 1/temperature (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2); a source repeats its rows, each
            once per epoch of its own. An epoch of the mixture is a length alone: as many draws as the sources have rows
            together, each source counted up to `mixing_maximum`.
        mixing_maximum: a larger source counts as having this many rows: T5's K, FLAN's mixing rate maximum.
        temperature: 1 mixes in proportion to sizes, a high one equally.
        columns: our column name -> the file's.
        max_rows: the most good rows read of all sources together.
        on_bad_row: report all bad rows and stop, or skip and count them.
        max_length: tokens of prompt and response together.
        turns: of demonstrations of several assistant turns: train on all of them in one sequence; on the last one; or
            on each in an example of its own, after the prompt that generation renders (for chat templates that rewrite
            earlier turns).
        as_messages: make messages of prompts that are plain text, which then go through the chat template as
            `generate` and `chat` send theirs: Alpaca's instruction and input, the turns of an HH-RLHF
            dialogue, or the whole prompt, as the user's.
        max_lost_share: of the rows read.
        max_cut_share: of the rows kept: prompts without their beginning, or responses without their end.
        check: what the data doctor finds is noted in the run; its errors stop the run, are noted too, or it is off.
        processes: that read and tokenize rows side by side; None: one, or one per core for a source of 64 MB or more.
        cache: directory of prepared rows; None: ALIGNMENT_CACHE, else alignment/data in the user's cache directory.
        streaming: read and tokenize the rows of `train` while the run goes on, and keep nothing of them on disk, for
            data that does not fit it; a bad row is then found when it is reached. Needs training.max_steps: the number
            of rows is not known.
        shuffle_buffer: with streaming, rows that are read and shuffled together; two such windows are in memory.
    """

    train: str | list[str | SourceConfig]
    evaluation: str | list[str | SourceConfig] | None = None
    evaluation_share: Annotated[float, Interval(gt=0, lt=1)] | None = None
    split: str = "train"
    evaluation_split: str | None = None
    mixing: Mixing = "concatenate"
    mixing_maximum: PositiveInt | None = None
    temperature: PositiveFloat | None = None
    columns: dict[str, str] = field(default_factory=dict)
    max_rows: PositiveInt | None = None
    on_bad_row: OnBadRow = "error"
    max_length: Annotated[int, Ge(2)] = 1024
    turns: Turns = "all"
    as_messages: bool = False
    max_lost_share: Share = 0.5
    max_cut_share: Share = 0.5
    check: Literal["stop", "warn", "off"] = "stop"
    processes: PositiveInt | None = None
    cache: str | None = None
    streaming: bool = False
    shuffle_buffer: PositiveInt = 10_000

    RULES = (
        Rule("train", lambda c: not c.train or "" in (c.train, *c.train), "names no file"),
        Rule(
            "train",
            lambda c: _names_twice(c.sources("train")),
            "has two sources of the name {found}; give each its own",
        ),
        Rule(
            "mixing",
            lambda c: (
                c.mixing == "weights" and _names(source for source in c.sources("train") if source.weight is None)
            ),
            "is weights, which needs a weight for every source of data.train; none for: {found}",
        ),
        Rule(
            "mixing",
            lambda c: (
                c.mixing != "weights" and _names(source for source in c.sources("train") if source.weight is not None)
            ),
            "is {self.mixing}, which draws by no weights, and these sources have one: {found}; set "
            "data.mixing=weights, or take the weights out",
        ),
        Rule(
            "temperature", lambda c: c.mixing == "temperature" and c.temperature is None, "is missing: T5 found 2 best"
        ),
        Rule(
            "temperature",
            lambda c: c.mixing != "temperature" and c.temperature is not None,
            "says nothing with data.mixing={self.mixing}; set data.mixing=temperature",
        ),
        Rule(
            "mixing_maximum",
            lambda c: c.mixing_maximum is not None and c.mixing not in ("proportional", "temperature"),
            "says nothing with data.mixing={self.mixing}; it caps the sizes that data.mixing=proportional and "
            "temperature draw by (to read fewer rows, give a source max_rows)",
        ),
        Rule(
            "max_rows",
            lambda c: c.mixing != "concatenate" and c.max_rows is not None,
            "counts the rows of all sources in order, which leaves out the last ones of a mixture "
            "(data.mixing={self.mixing}); give each source its own max_rows",
        ),
        Rule(
            "evaluation",
            lambda c: _names_twice(c.sources("evaluation")),
            "has two sources of the name {found}; give each its own",
        ),
        Rule(
            "evaluation",
            lambda c: (
                c.evaluation_share is None and _names(source for source in c.sources("evaluation") if source.weight)
            ),
            "has weights ({found}), but held-out rows are all read and count alike; weight belongs to data.train",
        ),
        Rule("evaluation", lambda c: c.evaluation_share is None and _trained_split(c)),
        Rule(
            "evaluation_share",
            lambda c: c.evaluation_share is not None and c.evaluation is not None,
            "holds rows of data.train out, and data.evaluation names others; take one of them out",
        ),
        Rule(
            "evaluation_share",
            lambda c: c.evaluation_share is not None and c.streaming,
            "is chosen among rows that are all read before the run, which data.streaming does not do; name held-out "
            "rows by data.evaluation, or set data.streaming=false",
        ),
        Rule(
            "evaluation_split",
            lambda c: c.evaluation_share is not None and c.evaluation_split is not None,
            "is the split of data.evaluation; take it out, or data.evaluation_share, which holds rows of data.train "
            "out",
        ),
        Rule(
            "streaming",
            lambda c: c.streaming and c.mixing in ("proportional", "temperature"),
            "does not know the sizes of the sources, which data.mixing={self.mixing} draws by; give weights with "
            "data.mixing=weights, or set data.streaming=false",
        ),
        Rule(
            "streaming",
            lambda c: c.streaming and any(section.max_rows is not None for section in (c, *c.sources("train"))),
            "never ends the reading of data, as max_rows does: training.max_steps says how many rows are trained on; "
            "leave max_rows out, or set data.streaming=false",
        ),
    )

    def sources(self, part: Part) -> list[SourceConfig]:
        """The sources of one part, each with name, columns and split filled in; none where no data is named for it.

        With `evaluation_share` both parts have the sources of `train`.
        """
        if self.evaluation_share is not None:
            part = "train"
        if part == "train":
            return as_sources(self.train, split=self.split, columns=self.columns)
        return as_sources(self.evaluation or [], split=self.evaluation_split or self.split, columns=self.columns)

    def missing(self) -> Iterator[tuple[str, str]]:
        """The key, `train` or `evaluation`, of each missing source, and why; Hub data sets are not looked for."""
        for part in ("train", "evaluation"):
            for source in self.sources(part) if getattr(self, part) else ():
                try:
                    find_rows(source.source, str(source.split))
                except UserError as error:
                    yield part, str(error)

    def require_sources(self, part: Part) -> list[SourceConfig]:
        """The sources of one part.

        Raises:
            UserError: no data is named for it.
        """
        if not (sources := self.sources(part)):
            raise UserError(f"data.{part} names no file")
        return sources

    @property
    def evaluates(self) -> bool:
        """True where any rows are held out."""
        return self.evaluation is not None or self.evaluation_share is not None

    @property
    def source_names(self) -> list[str]:
        """Names of all sources, each once, first for `train`; `Example.source` is an index into them."""
        return list(
            dict.fromkeys(str(source.name) for part in ("train", "evaluation") for source in self.sources(part))
        )

    def unread(self, *names: Literal["mixing", "chat_template", "as_messages"]) -> list[str]:
        """The settings among `names` that are not at their defaults, for a command that follows none of them."""
        changed = {
            "mixing": self.mixing != "concatenate",
            "chat_template": any(source.chat_template is not None for source in self.sources("train")),
            "as_messages": self.as_messages,
        }
        return [
            "chat_template of a source" if name == "chat_template" else f"data.{name}"
            for name in names
            if changed[name]
        ]

    @property
    def logs_sources(self) -> bool:
        """True where metrics are logged for each source: some part has several, or one is named in the config."""
        named = any(isinstance(source, SourceConfig) and source.name for source in _listed(self.train, self.evaluation))
        return named or any(len(self.sources(part)) > 1 for part in ("train", "evaluation"))


def as_sources(
    named: str | Path | SourceConfig | Sequence[str | Path | SourceConfig],
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
) -> list[SourceConfig]:
    """Files and Hub ids as sources, each with a name, columns and a split.

    Args:
        named: one or several; a section of a config keeps what it says itself.
        split: of those that say none.
        columns: of those that say none.
    """
    with deferred_checks():  # of the sections as they were written
        sources = [entry if isinstance(entry, SourceConfig) else SourceConfig(str(entry)) for entry in _listed(named)]
        names = _default_names([source.source for source in sources])
        return [
            replace(
                source,
                name=source.name or name,
                split=source.split or split,
                columns=dict(columns or {}) if source.columns is None else source.columns,
            )
            for source, name in zip(sources, names, strict=True)
        ]


def _listed(*named: object) -> list[str | Path | SourceConfig]:
    """All that the arguments name, one or several each, in one list; None names nothing."""
    listed = []
    for argument in named:
        several = isinstance(argument, Sequence) and not isinstance(argument, str)
        listed += list(argument) if several else [] if argument is None else [argument]  # pyright: ignore
    return listed


def _default_names(sources: Sequence[str]) -> list[str]:
    """A short name for each source, its last part without the suffix; sources of the same name get numbers."""
    parts = [(hub_source(source, "") or [source.removesuffix(suffix_of(source))])[0].split("/") for source in sources]
    stems = [[re.sub(r"[^\w.-]+", "_", part) for part in path if re.search(r"[^\W_]", part)] for path in parts]
    names = [(stem or ["source"])[-1] for stem in stems]  # `*` of a glob names nothing
    return [
        f"{name}.{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _names(sources: Iterable[SourceConfig]) -> str:
    return ", ".join(str(source.name) for source in sources)


def _names_twice(sources: Sequence[SourceConfig]) -> str:
    """The names that several sources have."""
    names = [str(source.name) for source in sources]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _trained_split(data: DataConfig) -> str:
    """A message where the split of a Hub data set is trained and evaluated on; '' where none is."""
    trained = {hub_source(source.source, str(source.split)) for source in data.sources("train")}
    for source in data.sources("evaluation"):
        hub_name = hub_source(source.source, str(source.split))
        if hub_name is not None and hub_name in trained:
            return (
                f"reads {source.source} from the split '{hub_name[-1]}', which is trained on; name the held-out one: "
                f"data.evaluation_split=test, or data.evaluation={hub_name[0]}[test]"
            )
    return ""

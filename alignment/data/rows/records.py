"""The records that data rows become, one class per kind, and the tally of what was dropped and cut on the way."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any, Literal, TypedDict

from alignment.errors import UserError

Kind = Literal["text", "demonstrations", "comparisons", "prompts", "labels", "rankings", "steps"]
Columns = Mapping[str, object]  # a row as it was read: name of the column -> value
Tools = list[dict[str, Any]]  # definitions of functions that a model may call, JSON schemas as OpenAI writes them


class Turn(TypedDict):
    """The parts that every message has: who speaks (system, user, assistant or tool), and the words."""

    role: str
    content: str  # "" where an assistant message consists of tool calls alone


class Message(Turn, total=False):
    """One message of a dialogue, in the field names of OpenAI's protocol.

    Attributes:
        name: of the speaker, or of the tool that answered.
        tool_calls: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, arguments as an object.
        tool_call_id: of the call that a tool message answers.
        reasoning_content: the assistant's thoughts before its words; templates get them also as `thinking` and
            `reasoning`.
        chat_template_kwargs: of the first message: variables that the template gets with this dialogue.
    """

    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    reasoning_content: str
    chat_template_kwargs: dict[str, Any]


Messages = list[Message]  # oldest first


def is_plain(message: Message) -> bool:
    """True where a message is its text alone, without tool calls or reasoning."""
    return not (message.get("tool_calls") or message.get("reasoning_content"))


@dataclass(frozen=True, slots=True)
class Text:
    """One document to model, beginning to end."""

    text: str
    row_id: str


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt, plain text or messages, and the tools that its answer may call."""

    prompt: str | Messages
    tools: Tools | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Demonstration(Prompted):
    """A prompt and the response to imitate; the prompt may be the messages before the last assistant turn.

    Attributes:
        response: text of the (last) assistant turn.
        messages: the whole dialogue where more than one assistant turn is to be imitated, or where the last one holds
            tool calls or reasoning beside its text; else None.
        trained: which assistant turns of `messages` are to be imitated; None: all of them.
        apart: each assistant turn of `messages` becomes an example of its own, after the prompt that generation
            renders.
    """

    response: str
    row_id: str
    messages: Messages | None = None
    trained: tuple[bool, ...] | None = None
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Comparison(Prompted):
    """Two responses to one prompt, and optionally by how much (`margin`) the chosen one is better.

    Attributes:
        messages: (chosen, rejected) as assistant messages, where either holds tool calls or reasoning beside its text.
    """

    chosen: str
    rejected: str
    margin: float | None
    row_id: str
    messages: tuple[Message, Message] | None = None


@dataclass(frozen=True, slots=True)
class Prompt(Prompted):
    """A prompt to answer; `extra` holds the row's other columns, for the judge."""

    extra: dict[str, Any]
    row_id: str


@dataclass(frozen=True, slots=True)
class LabeledResponse(Prompted):
    """A response judged alone, as KTO's data: desirable or not."""

    response: str
    desirable: bool
    row_id: str


@dataclass(frozen=True, slots=True)
class Ranking(Prompted):
    """K >= 2 responses to one prompt.

    Attributes:
        ranks: place of each, 0 is best; equal places are ties.
        scores: what each was rated, where the row says; annotators' agreement is computed from them.
        margin: by how much the better of two leads.
    """

    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    row_id: str
    scores: tuple[float, ...] | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Steps(Prompted):
    """A response in steps, each labeled right or wrong (process supervision); `separator` follows each step's text."""

    steps: tuple[str, ...]
    labels: tuple[bool, ...]
    row_id: str
    separator: str = "\n"


Turns = Literal["all", "last", "each"]  # see `choose_turns`
Record = Text | Demonstration | Comparison | Prompt | LabeledResponse | Ranking | Steps

SHOWN_IDS = 3
EQUAL_PAIR = "chosen and rejected are identical"
EQUAL_RESPONSES = "two responses of one prompt are identical"
ALL_TIED = "all responses are tied, so no pair prefers one"
TIED = "(tied)"  # column of a published pair of which neither response is better
EXPANDED = "a row of several records: each counts as a row"


def replies_of(record: Record) -> tuple[str, ...]:
    """The responses of a record; of steps, their texts."""
    match record:
        case Comparison():
            return record.chosen, record.rejected
        case Demonstration() | LabeledResponse():
            return (record.response,)
        case Ranking():
            return record.responses
        case Steps():
            return record.steps
        case _:
            return ()


def choose_turns(rows: Sequence[Record], turns: Turns) -> list[Record]:
    """The rows, dialogues with the assistant's turns that are trained on; `turns` as in `DataConfig`."""
    chosen = list(rows)
    for index, row in enumerate(rows if turns != "all" else ()):
        if isinstance(row, Demonstration) and row.messages is not None:
            trained = row.trained or (True,) * sum(message["role"] == "assistant" for message in row.messages)
            if turns == "last":
                last = max(position for position, counts in enumerate(trained) if counts)
                trained = tuple(position == last for position in range(len(trained)))
            chosen[index] = replace(row, trained=trained, apart=True)
    return chosen


def single_turns(row: Demonstration) -> list[tuple[Demonstration, str | Message]]:
    """(row with the prompt, reply) of each turn that counts and has something before it.

    Of a row without `messages` they are the row and its own reply.
    """
    if row.messages is None:
        return [(row, row.response)]
    replies = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    trained = row.trained or (True,) * len(replies)
    return [
        (replace(row, prompt=row.messages[:index]), row.messages[index])
        for index, counts in zip(replies, trained, strict=True)
        if counts and index
    ]


def ordered_pairs(ranking: Ranking) -> Iterator[Comparison]:
    """Each response beside every worse one; the row id of each pair ends in their numbers: ROW[better>worse]."""
    for better, first in enumerate(ranking.ranks):
        for worse, second in enumerate(ranking.ranks):
            if first < second:
                row_id = f"{ranking.row_id}[{better}>{worse}]"
                chosen = ranking.responses[better]
                rejected = ranking.responses[worse]
                yield Comparison(ranking.prompt, chosen, rejected, ranking.margin, row_id)


class SkippedRow(Exception):
    """A row that is left out and counted, without being a bad one."""


@dataclass
class Tally:
    """Counts of one preparation: every row that is dropped or cut is counted here.

    Attributes:
        rows: rows read; each of several records in one row counts.
        documents, tokens: of the rows kept, once they are tokenized; a pair is two documents.
        dropped, cut, noted: rows that were lost, shortened, or used as they are, by reason.
        unread: rows with a column, or a key of messages, that nothing reads, by its name.
        first: the first few row ids of each reason.
        trained_on: ids of the held-out rows whose prompt (or text) is in the training rows too.
    """

    rows: int = 0
    kept: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    trained_on: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Rows dropped, all reasons together."""
        return sum(self.dropped.values())

    def _count(self, name: str, what: str, row_id: str) -> None:
        """Count a row in the table of this name."""
        table: dict[str, int] = getattr(self, name)
        table[what] = table.get(what, 0) + 1
        self.first[what] = [*self.first.get(what, ()), row_id][:SHOWN_IDS]

    drop = partialmethod(_count, "dropped")  # reason, row id: a row that is left out
    note_cut = partialmethod(_count, "cut")  # what, row id: a row that is kept, but cut
    note = partialmethod(_count, "noted")  # what, row id: a row that is used, and has something worth knowing
    note_unread = partialmethod(_count, "unread")  # name, row id: a row with a column or key that nothing reads

    def with_documents(self, documents: Iterable[Sequence[int]]) -> "Tally":
        """The tally of tokenized rows with the numbers of rows kept, of these documents and of their tokens."""
        sizes = [len(document) for document in documents]
        return replace(self, kept=self.rows - self.lost, documents=len(sizes), tokens=sum(sizes))

    def followed_by(self, later: "Tally") -> "Tally":
        """The tally of this step followed by `later`, which worked on the rows this one kept."""
        return replace(later, rows=self.rows, **self._reasons_with(later))

    def merged_with(self, other: "Tally") -> "Tally":
        """The tally of two sources together."""
        numbers = {name: getattr(self, name) + getattr(other, name) for name in ("rows", "kept", "documents", "tokens")}
        return Tally(**numbers, **self._reasons_with(other))

    def _reasons_with(self, other: "Tally") -> dict[str, Any]:
        tables = ("dropped", "cut", "noted", "unread")
        sums = {name: dict(Counter(getattr(self, name)) + Counter(getattr(other, name))) for name in tables}
        names = {**self.first, **other.first}
        first = {key: (self.first.get(key, []) + other.first.get(key, []))[:SHOWN_IDS] for key in names}
        return {**sums, "first": first}

    def require(self, max_lost_share: float, source: str, max_cut_share: float = 1.0, cuts: Sequence[str] = ()) -> None:
        """Refuse to go on with too little: no row, too many dropped, or too many kept rows with one of `cuts`."""
        cut = {kind: self.cut[kind] for kind in cuts if self.cut.get(kind, 0) > max_cut_share * self.kept}
        if not self.kept or self.lost > max_lost_share * self.rows:
            head = f"{self.lost} of {self.rows} rows were dropped (data.max_lost_share is {max_lost_share:g})"
            reasons = self._reasons(self.dropped, "dropped")
            way = "mend the rows, raise data.max_length where rows were too long, or raise data.max_lost_share"
        elif cut:
            head = f"too many of the {self.kept} rows do not fit (data.max_cut_share is {max_cut_share:g})"
            reasons = self._reasons(cut, "cut")
            way = "raise data.max_length, leave the long rows out, or raise data.max_cut_share"
        else:
            return
        raise UserError("\n".join([f"{source}: {head}", *reasons, way]))

    def lines(self) -> list[str]:
        """The tally as lines of text, for a terminal."""
        head = f"{self.kept} of {self.rows} rows kept"
        if self.documents:
            head += f", {self.documents} documents, {self.tokens} tokens"
        tables = {"dropped": self.dropped, "cut": self.cut, "noted": self.noted}
        lines = [head, *(line for verb, table in tables.items() for line in self._reasons(table, verb))]
        if self.unread:
            names = ", ".join(f"{name} ({rows})" for name, rows in sorted(self.unread.items()))
            lines.append(f"  columns and keys of messages that are not read (rows): {names}")
        if self.trained_on:
            shown = ", ".join(self.trained_on[:SHOWN_IDS]) + (", ..." if len(self.trained_on) > SHOWN_IDS else "")
            lines.append(f"  held out {len(self.trained_on)}: the prompt or text is also trained on ({shown})")
        return lines

    def _reasons(self, table: dict[str, int], verb: str) -> list[str]:
        return [
            f"  {verb} {count}: {reason} ({', '.join(self.first[reason])}{', ...' if count > SHOWN_IDS else ''})"
            for reason, count in table.items()
        ]

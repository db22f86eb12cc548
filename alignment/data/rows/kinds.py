"""The table of row formats: which columns make which records, kind by kind."""

from collections.abc import Callable
from dataclasses import dataclass

from alignment.data.rows import formats, rankings, steps
from alignment.data.rows.records import Columns, Kind, Record


@dataclass(frozen=True)
class RowFormat:
    """The columns of a row format, and its parser.

    Attributes:
        columns: that a row must have.
        parser: row, row id and these columns -> its record, or a list of several.
    """

    columns: tuple[str, ...]
    parser: Callable[..., Record | list[Record]]

    def parse(self, row: Columns, row_id: str) -> list[Record]:
        """The records of a row."""
        found = self.parser(row, row_id, *self.columns)
        return found if isinstance(found, list) else [found]


K_WAY = (
    RowFormat(("responses", "ranking"), rankings.parse_listed),
    RowFormat(("responses", "ranks"), rankings.parse_ranked),
    RowFormat(("responses", "scores"), rankings.parse_scored),
    RowFormat(("generations", "ratings"), rankings.parse_scored),
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
        RowFormat(("instruction", "output"), formats.parse_alpaca),
        RowFormat(PAIR, formats.parse_chosen_side),
        RowFormat(("conversations",), formats.parse_dialogue),
    ),
    "comparisons": (
        RowFormat(PAIR, formats.parse_pair),
        *(RowFormat(each.columns, rankings.pairs_parser(each.parser)) for each in K_WAY),
    ),
    "prompts": (
        RowFormat(("prompt",), formats.parse_prompt_column),
        RowFormat(("messages",), formats.parse_prompt_column),
        RowFormat(("conversations",), formats.parse_prompt_column),
        RowFormat(("instruction",), formats.parse_prompt_column),
        RowFormat(PAIR, formats.parse_pair_prompt),
    ),
    "labels": (*LABELED, RowFormat(PAIR, formats.parse_labeled_pair)),
    "rankings": (*K_WAY, RowFormat(PAIR, rankings.parse_pair_ranking)),
    "steps": (
        RowFormat(("prompt", "completions", "labels"), steps.parse_steps),
        RowFormat(("question", "label"), steps.parse_prm800k),
        RowFormat(("input", "label"), steps.parse_tagged_steps),
    ),
}


def match_format(kind: Kind, columns: set[str]) -> RowFormat | None:
    """The first format of `kind` whose columns are all there."""
    return next((row_format for row_format in ROW_FORMATS[kind] if columns.issuperset(row_format.columns)), None)


# Other names of a column, for advice.
ALIASES = {
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "response": ("answer", "output", "solution", "reply", "completion"),
    "chosen": ("preferred", "better"),
    "rejected": ("dispreferred", "worse"),
    "text": ("content", "document"),
}


def column_advice(kind: Kind, row: Columns) -> str:
    """Settings that name the columns of a row that matches no format of `kind`, for a message."""
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and kind in ("demonstrations", "prompts"):
        return f"data.columns.messages={lists[0]}"
    wanted = {"text": ["text"], "demonstrations": ["prompt", "response"], "prompts": ["prompt"]}
    names = {
        ours: next((alias for alias in ALIASES[ours] if alias in row), "COLUMN")
        for ours in wanted.get(kind, ["prompt", "chosen", "rejected"])
        if ours not in row
    }
    return " ".join(f"data.columns.{ours}={theirs}" for ours, theirs in names.items())

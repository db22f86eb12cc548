"""The table of row formats: which columns make which records, kind by kind."""

from collections.abc import Callable
from dataclasses import dataclass

from alignment.data.rows.formats import (
    demonstration_parser,
    dialogue_parser,
    parse_alpaca,
    parse_chosen_side,
    parse_comparison,
    parse_instruction_prompt,
    parse_pair_prompt,
    parse_text,
    prompt_parser,
)
from alignment.data.rows.labels import labeled_dialogue_parser, labeled_parser, parse_labeled_alpaca, parse_labeled_pair
from alignment.data.rows.rankings import (
    RANKING_COLUMNS,
    different_pair,
    pairs_parser,
    parse_pair_ranking,
    parse_rated_completions,
    parse_tree,
    ranking_parser,
)
from alignment.data.rows.records import Columns, Kind, Record
from alignment.data.rows.steps import parse_prm800k, parse_steps, parse_tagged_steps


@dataclass(frozen=True)
class RowFormat:
    """The columns of a row format, and its parser: (row, row_id) -> its record, or a list of several."""

    columns: tuple[str, ...]
    parse: Callable[[Columns, str], Record | list[Record]]


K_WAY_FORMATS = (
    *(RowFormat(columns, ranking_parser(*columns)) for columns in RANKING_COLUMNS),
    *(RowFormat((key,), parse_rated_completions(key)) for key in ("completions", "answers")),
    RowFormat(("message_tree_id", "prompt"), parse_tree),
)
LABEL_FORMATS = tuple(
    row_format
    for label in ("label", "kto_tag")
    for row_format in (
        *(RowFormat((key, label), labeled_dialogue_parser(key, label)) for key in ("messages", "conversations")),
        *(RowFormat(("prompt", key, label), labeled_parser(key, label)) for key in ("completion", "response")),
        RowFormat(("instruction", "output", label), parse_labeled_alpaca(label)),
    )
)

ROW_FORMATS: dict[Kind, tuple[RowFormat, ...]] = {  # the first whose columns are there is taken
    "text": (RowFormat(("text",), parse_text),),
    "demonstrations": (
        RowFormat(("messages",), dialogue_parser("messages")),
        RowFormat(("prompt", "completion"), demonstration_parser("completion")),
        RowFormat(("prompt", "response"), demonstration_parser("response")),
        RowFormat(("instruction", "output"), parse_alpaca),
        RowFormat(("chosen", "rejected"), parse_chosen_side),
        RowFormat(("conversations",), dialogue_parser("conversations")),
    ),
    "comparisons": (
        RowFormat(("chosen", "rejected"), different_pair(parse_comparison)),
        *(RowFormat(row_format.columns, pairs_parser(row_format.parse)) for row_format in K_WAY_FORMATS),
    ),
    "prompts": (
        RowFormat(("prompt",), prompt_parser("prompt")),
        RowFormat(("messages",), prompt_parser("messages")),
        RowFormat(("conversations",), prompt_parser("conversations")),
        RowFormat(("instruction",), parse_instruction_prompt),
        RowFormat(("chosen", "rejected"), parse_pair_prompt),
    ),
    "labels": (*LABEL_FORMATS, RowFormat(("chosen", "rejected"), parse_labeled_pair)),
    "rankings": (*K_WAY_FORMATS, RowFormat(("chosen", "rejected"), parse_pair_ranking)),
    "steps": (
        RowFormat(("prompt", "completions", "labels"), parse_steps),
        RowFormat(("question", "label"), parse_prm800k),
        RowFormat(("input", "label"), parse_tagged_steps),
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
    """How to name the columns of a row that matches no format of `kind`, for a message."""
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


def expected_columns(kind: Kind) -> str:
    """The formats of `kind`, for a message."""
    return "; or ".join(" + ".join(row_format.columns) for row_format in ROW_FORMATS[kind])

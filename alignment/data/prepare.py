"""From a data config to token sequences in one call: read, tokenise, and refuse to go on with too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from alignment.data.batches import tokenise_comparisons, tokenise_demonstrations, tokenise_prompts, tokenise_texts
from alignment.data.records import Counts, Kind
from alignment.data.sources import DataConfig, read_rows
from alignment.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENISE = {
    "text": tokenise_texts,
    "demonstrations": tokenise_demonstrations,
    "comparisons": tokenise_comparisons,
    "prompts": tokenise_prompts,
}


def prepare(
    config: DataConfig, kind: Kind, tokenizer: PreTrainedTokenizerBase, part: Literal["train", "evaluation"] = "train"
) -> tuple[list[Any], Counts]:
    """Token sequences of one part of the data (Example, PairExample or PromptExample, by kind), and the whole tally.

    Raises:
        UserError: bad rows, as `read_rows`; more rows lost than `config.max_lost_share`; no data named for this part.
    """
    source = config.train if part == "train" else config.evaluation
    if not source:
        raise UserError(f"data.{part} names no file")
    rows, reading = read_rows(
        source,
        kind,
        split=config.split,
        columns=config.columns,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
        skip_ties=config.skip_ties,
    )
    examples, making = TOKENISE[kind](rows, tokenizer, config.max_length)  # type: ignore[arg-type]
    counts = reading.then(making)
    counts.require(config.max_lost_share, source if isinstance(source, str) else ", ".join(source))
    return examples, counts

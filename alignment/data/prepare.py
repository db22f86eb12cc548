"""From a data config to token sequences in one call: read, tokenize, and refuse to go on with too little.

The kinds of rows in rows/kinds.py only. Texts for pretraining objectives: pretraining/prepare.py; labeled rows: tasks/prepare.py.
"""

from collections.abc import Callable
from typing import Any

from alignment.data.config import DataConfig, Part
from alignment.data.rows.read import overlap, prompt_key, read_rows
from alignment.data.rows.records import Kind, Tally
from alignment.data.rows.turns import choose_turns
from alignment.data.tokenize import (
    PROMPT_CUT,
    RESPONSE_CUT,
    STEPS_CUT,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_prompts,
    tokenize_rankings,
    tokenize_steps,
    tokenize_texts,
)
from alignment.data.tokenizers.tokenizer import Tokenizer

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


def prepare(config: DataConfig, kind: Kind, tokenizer: Tokenizer, part: Part = "train") -> tuple[list[Any], Tally]:
    """Token sequences of one part of the data (by kind, see examples.py), and the whole tally.

    Raises:
        UserError: bad rows, as `read_rows`; more rows lost than `config.max_lost_share`, or prompts or responses cut
            than `config.max_cut_share`; no data named for this part.
    """
    return prepare_with(TOKENIZE[kind], config, kind, tokenizer, part=part)


def prepare_with(
    tokenize: Tokenize, config: DataConfig, kind: Kind, tokenizer: Tokenizer, *, part: Part
) -> tuple[list[Any], Tally]:
    """Read and tokenize the rows of one part by `tokenize`; see `prepare`."""
    rows, read = _read_part(config, kind, part)
    examples, tokenized = tokenize(rows, tokenizer, config.max_length)
    counts = require_enough(read.followed_by(tokenized), config, part)
    if part == "evaluation":  # the training rows are read once more: text alone, which is quick beside tokenizing it
        counts.trained_on = overlap(_read_part(config, kind, "train")[0], rows, prompt_key)
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


def _read_part(config: DataConfig, kind: Kind, part: Part) -> tuple[list[Any], Tally]:
    rows, counts = read_rows(
        config.require_sources(part),
        kind,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
        skip_ties=config.skip_ties,
    )
    return choose_turns(rows, config.turns), counts

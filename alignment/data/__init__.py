"""Rows, tokens and batches: sources -> records -> ids -> ragged micro-batches. Knows no model, loss or optimiser."""

from alignment.data.batches import (
    Example,
    PairBatch,
    PairExample,
    PromptExample,
    collate,
    collate_pairs,
    tokenise_comparisons,
    tokenise_demonstrations,
    tokenise_prompts,
    tokenise_texts,
)
from alignment.data.prepare import prepare
from alignment.data.rows.read import DataConfig, read_rows
from alignment.data.rows.records import Comparison, Counts, Demonstration, Prompt, Text
from alignment.data.stream import Stream
from alignment.data.tokenizers.load import check_vocabulary, load_tokenizer, save_tokenizer, train_bpe

__all__ = [
    "Comparison",
    "Counts",
    "DataConfig",
    "Demonstration",
    "Example",
    "PairBatch",
    "PairExample",
    "Prompt",
    "PromptExample",
    "Stream",
    "Text",
    "check_vocabulary",
    "collate",
    "collate_pairs",
    "load_tokenizer",
    "prepare",
    "read_rows",
    "save_tokenizer",
    "tokenise_comparisons",
    "tokenise_demonstrations",
    "tokenise_prompts",
    "tokenise_texts",
    "train_bpe",
]

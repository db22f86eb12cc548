"""Rows, tokens and batches: sources -> records -> ids -> ragged micro-batches. Knows no model, loss or optimizer."""

from alignment.data.batches import (
    Example,
    PairBatch,
    PairExample,
    PromptExample,
    collate,
    collate_pairs,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_prompts,
    tokenize_texts,
)
from alignment.data.prepare import prepare
from alignment.data.rows.read import DataConfig, read_rows
from alignment.data.rows.records import Comparison, Demonstration, Prompt, Tally, Text
from alignment.data.stream import Stream
from alignment.data.tokenizers.load import check_vocabulary, load_tokenizer, save_tokenizer, train_bpe

__all__ = [
    "Comparison",
    "DataConfig",
    "Demonstration",
    "Example",
    "PairBatch",
    "PairExample",
    "Prompt",
    "PromptExample",
    "Stream",
    "Tally",
    "Text",
    "check_vocabulary",
    "collate",
    "collate_pairs",
    "load_tokenizer",
    "prepare",
    "read_rows",
    "save_tokenizer",
    "tokenize_comparisons",
    "tokenize_demonstrations",
    "tokenize_prompts",
    "tokenize_texts",
    "train_bpe",
]

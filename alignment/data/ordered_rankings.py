"""Rankings in which at least one response is better than another; what all of them tie in says nothing about an order."""

from collections.abc import Sequence

from alignment.data.encoder_inputs import encode_rankings
from alignment.data.examples import RankedExample
from alignment.data.rows.records import Ranking, Tally
from alignment.data.tokenize import tokenize_rankings
from alignment.data.tokenizers.tokenizer import Tokenizer

ALL_TIED = "all responses of the ranking are tied; only loss=rao_kupper learns from ties"


def tokenize_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[RankedExample], Tally]:
    """`tokenize_rankings` without those whose responses are all tied."""
    return _ordered(*tokenize_rankings(rows, tokenizer, max_length))


def encode_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[RankedExample], Tally]:
    """`encode_rankings`, of an encoder, without those whose responses are all tied."""
    return _ordered(*encode_rankings(rows, tokenizer, max_length))


def _ordered(examples: list[RankedExample], counts: Tally) -> tuple[list[RankedExample], Tally]:
    kept = [example for example in examples if len(set(example.ranks)) > 1]
    for example in examples:
        if len(set(example.ranks)) == 1:
            counts.drop(ALL_TIED, example.row_id)
    counts.kept = len(kept)
    return kept, counts.with_documents(ids for example in kept for ids in example.documents)

"""Rows of a reward model's card: read, tokenized for the model, and scored, also in other batches and with padding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.encoder_inputs import encode_comparisons, encode_ordered_rankings
from alignment.data.examples import Example
from alignment.data.rows.files import read_raw
from alignment.data.rows.read import choose_row_format, prompt_key, read_rows, rows_left
from alignment.data.rows.records import Comparison, Kind, Ranking, Tally
from alignment.data.tokenize import EQUAL_IN_RANKING, tokenize_comparisons, tokenize_ordered_rankings
from alignment.errors import UserError, raise_all
from alignment.evaluation.inputs import print_tally, refuse_mixture
from alignment.evaluation.reward_card import ScoredGroup
from alignment.models.classifiers import SequenceClassifier
from alignment.reward_model.ensemble import AdapterEnsemble
from alignment.reward_model.model import Encoded, RewardModel, score_encoded

Preference = Comparison | Ranking
BATCH_TOKENS = 16_384
PADDED_ROWS = 8  # of a padded batch, in the order of the rows, so that lengths differ


class EncodedRow(NamedTuple):
    """A record with its source and its responses as the model reads them, prompt included."""

    record: Preference
    source: str
    example: Example

    @property
    def texts(self) -> tuple[str, ...]:
        """The responses as they were read, of a comparison the chosen one first."""
        record = self.record
        return record.responses if isinstance(record, Ranking) else (record.chosen, record.rejected)


def read_preferences(data: DataConfig) -> tuple[list[tuple[str, list[Preference]]], Tally]:
    """Name and rows of each source of `data.train`: comparisons, or rankings where it has K responses per prompt.

    Raises:
        UserError: bad rows of all sources at once (with on_bad_row=error); settings of a mixture; no such source.
    """
    refuse_mixture(data)
    found: list[tuple[str, list[Preference]]] = []
    tally, problems, count = Tally(), [], 0
    for source in data.require_sources("train"):
        left = rows_left(data.max_rows, count, source)
        if left is not None and left <= 0:
            break
        options = {"on_bad_row": data.on_bad_row, "as_messages": data.as_messages}
        try:
            rows, counts = read_rows(source, _kind(source), max_rows=left, **options)
        except UserError as error:
            problems.append(str(error))
            continue
        found += [(str(source.name), cast("list[Preference]", rows))] if rows else []
        tally, count = tally.merged_with(counts), count + len(rows)
    raise_all(problems)
    print_tally("comparisons", tally)
    return found, tally


def _kind(source: SourceConfig) -> Kind:
    """The kind of a source's rows: comparisons where they have chosen and rejected, else rankings."""
    raw = list(read_raw(source.source, str(source.split)))
    row_format = choose_row_format(source.source, raw, "comparisons", source.columns or {})
    return "comparisons" if row_format.columns == ("chosen", "rejected") else "rankings"


def encode_preferences(
    sources: Sequence[tuple[str, list[Preference]]], model: RewardModel, max_length: int
) -> tuple[list[EncodedRow], Tally]:
    """The rows as the model reads them, with an encoder's special tokens where it is one; and the counts of dropped and cut rows.

    Raises:
        UserError: rows that the chat template, or an encoder, refuses.
    """
    encode_pairs = encode_comparisons if model.is_encoder else tokenize_comparisons
    encode_rankings = encode_ordered_rankings if model.is_encoder else tokenize_ordered_rankings
    encoded, tally = [], Tally()
    for name, records in sources:
        if isinstance(records[0], Comparison):
            pairs, counts = encode_pairs(cast("list[Comparison]", records), model.tokenizer, max_length)
            found = [replace(each, values={**each.values, "ranks": [0, 1]}) for each in pairs]
        else:
            found, counts = encode_rankings(cast("list[Ranking]", records), model.tokenizer, max_length)
        examples = {example.row_id: example for example in found}
        rows = [EncodedRow(each, name, examples[each.row_id]) for each in records if each.row_id in examples]
        whole = [row for row in rows if len(row.example.documents) == len(row.texts)]
        for row in rows:
            if len(row.example.documents) < len(row.texts):
                counts.drop(EQUAL_IN_RANKING, row.record.row_id)
        counts.kept = len(whole)
        encoded, tally = encoded + whole, tally.merged_with(counts)
    return encoded, tally


def as_encoded(example: Example, is_encoder: bool) -> list[Encoded]:
    """Ids and segments of each document; in an encoder's examples the mask marks the second text."""
    return [
        Encoded(ids, [int(flag) for flag in mask] if is_encoder else [0] * len(ids))
        for ids, mask in zip(example.documents, example.masks, strict=True)
    ]


def score_preferences(rows: Sequence[EncodedRow], model: RewardModel) -> list[ScoredGroup]:
    """The rows with the model's scores; a length is that of the response with its end token, of an encoder's text all."""
    texts = [text for row in rows for text in as_encoded(row.example, model.is_encoder)]
    raw = model.members_of_ids([text.ids for text in texts], segments=[text.segments for text in texts])
    members = model.calibration.apply(raw)
    scores, by_member = iter(model.combined(members).tolist()), iter(members.tolist())
    return [
        ScoredGroup(
            source=row.source,
            prompt=prompt_key(row.record),
            scores=[next(scores) for _ in row.texts],
            ranks=row.example.values["ranks"],
            lengths=[sum(mask) or len(mask) for mask in row.example.masks],
            human=row.record.scores if isinstance(row.record, Ranking) else None,
            strength=row.record.margin,
            members=[next(by_member) for _ in row.texts] if members.shape[1] > 1 else None,
        )
        for row in rows
    ]


# Scores of the same texts in other forms


def evenly_drawn_texts(
    rows: Sequence[EncodedRow], count: int, is_encoder: bool
) -> tuple[list[Encoded], list[tuple[int, int]]]:
    """The texts of at most `count` rows, spread evenly over them, and the indices of each ordered pair among them."""
    drawn = {round(position) for position in np.linspace(0, len(rows) - 1, min(count, len(rows)))} if count else set()
    texts, pairs = [], []
    for number in sorted(drawn):
        example, start = rows[number].example, len(texts)
        texts += as_encoded(example, is_encoder)
        ranks, positions = example.values["ranks"], range(len(example.documents))
        pairs += [(start + a, start + b) for a in positions for b in positions if ranks[a] < ranks[b]]
    return texts, pairs


def scores_in_other_forms(model: RewardModel, texts: Sequence[Encoded]) -> dict[str, Tensor]:
    """Raw scores of the texts by the form they are computed in, [n] each; "batched" is the form of every evaluation."""
    longest = max(len(text.ids) for text in texts)
    forms: dict[str, Callable[[], Tensor]] = {
        "batched": lambda: score_encoded(model.model, texts, BATCH_TOKENS),
        "alone": lambda: score_encoded(model.model, texts, 1),
        "other batches": lambda: score_encoded(model.model, texts, 2 * longest),
        "reversed order": lambda: score_encoded(model.model, texts[::-1], BATCH_TOKENS).flip(0),
        "padded right": lambda: _padded_scores(model, texts, "right"),
        "padded left": lambda: _padded_scores(model, texts, "left"),
    }
    return {name: model.combined(score()) for name, score in forms.items()}


@torch.no_grad()
def _padded_scores(model: RewardModel, texts: Sequence[Encoded], side: str) -> Tensor:
    """Raw scores of texts in rectangles of `PADDED_ROWS` rows with padding on one side, by each member, [n, k]."""
    device, found = next(model.model.parameters()).device, []
    for start in range(0, len(texts), PADDED_ROWS):
        group = texts[start : start + PADDED_ROWS]
        columns = (
            ([text.ids for text in group], model.tokenizer.pad_token_id or 0),
            ([[1] * len(text.ids) for text in group], 0),
            ([text.segments for text in group], 0),
        )
        rectangles = [
            pad_sequence([torch.tensor(row) for row in rows], True, fill, side).to(device) for rows, fill in columns
        ]
        found.append(_padded_logits(model.model, *rectangles).float().cpu())
    return torch.cat(found)


def _padded_logits(network: nn.Module, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The scores of a padded call, [B, k]."""
    if isinstance(network, AdapterEnsemble):
        return torch.cat([_padded_logits(member, ids, mask, segments) for member in network.models], -1)
    return (network(ids, mask, segments) if isinstance(network, SequenceClassifier) else network(ids, mask)).logits

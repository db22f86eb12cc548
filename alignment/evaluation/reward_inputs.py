"""What a reward model's card is made from: rows of each source with their annotations, tokenized for the model, and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.encoder_inputs import encode_comparisons, encode_ordered_rankings
from alignment.data.examples import Example
from alignment.data.rows.fields import BadRow, number_field
from alignment.data.rows.files import RawRow, read_raw
from alignment.data.rows.read import (
    RecordParser,
    choose_row_format,
    parse_rows,
    prompt_key,
    raise_bad_rows,
    rename_columns,
    rows_left,
)
from alignment.data.rows.records import Comparison, Ranking, Tally
from alignment.data.tokenize import EQUAL_IN_RANKING, tokenize_comparisons, tokenize_ordered_rankings
from alignment.errors import UserError
from alignment.evaluation.inputs import print_tally, refuse_mixture
from alignment.evaluation.reward_card import ScoredGroup
from alignment.reward_model.model import Encoded, RewardModel

Preference = Comparison | Ranking
VOTES = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5, "1": 1.0, "0": 0.0, "0.5": 0.5, "1.0": 1.0, "0.0": 0.0}


@dataclass(frozen=True)
class Annotation:
    """What a row says of its annotators.

    Attributes:
        votes: of each annotator: 1 for the chosen response, 0 for the rejected one, 0.5 for a tie.
        agreement: share of annotators who prefer the chosen response.
        annotator: who judged the row.
    """

    votes: tuple[float, ...] = ()
    agreement: float | None = None
    annotator: str | None = None


@dataclass
class PreferenceRows:
    """Rows of all sources.

    Attributes:
        records: comparisons, or rankings of K responses.
        sources: name of the source of each record.
        annotations: by row id; rows that say nothing of annotators have none.
        tally: what was dropped.
    """

    records: list[Preference] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    annotations: dict[str, Annotation] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class EncodedRow:
    """A record with its responses as the model reads them, prompt included."""

    record: Preference
    source: str
    example: Example

    @property
    def texts(self) -> tuple[str, ...]:
        """The responses as they were read."""
        return response_texts(self.record)


def response_texts(record: Preference) -> tuple[str, ...]:
    """The responses of a record, of a comparison the chosen one first."""
    return record.responses if isinstance(record, Ranking) else (record.chosen, record.rejected)


def read_preferences(data: DataConfig) -> PreferenceRows:
    """Every row of `data.train`, source by source: comparisons, or rankings where a source has K responses per prompt.

    Raises:
        UserError: bad rows of all sources at once (with on_bad_row=error); settings of a mixture; no such source.
    """
    refuse_mixture(data)
    rows, problems = PreferenceRows(), []
    for source in data.require_sources("train"):
        left = rows_left(data.max_rows, len(rows.records), source)
        if left is not None and left <= 0:
            break
        problems += _read_source(rows, source, left, as_messages=data.as_messages)
    if data.on_bad_row == "error":
        raise_bad_rows(problems)
    if not rows.records:
        raise UserError(f"{data.train}: no row can be used\n" + "\n".join(rows.tally.lines()[1:]))
    print_tally("comparisons", rows.tally, data.left_out("train"))
    return rows


def _read_source(rows: PreferenceRows, source: SourceConfig, max_rows: int | None, *, as_messages: bool) -> list[str]:
    """Add the rows of one source; returns a message for each bad row."""
    raw, columns = list(read_raw(source.source, str(source.split))), source.columns or {}
    row_format = choose_row_format(source.source, raw, "comparisons", columns)
    if row_format.columns != ("chosen", "rejected"):
        row_format = choose_row_format(source.source, raw, "rankings", columns)
    parser = RecordParser(row_format, skip_ties=True, as_messages=as_messages)
    parsed = parse_rows(raw, parser, columns=columns, max_rows=max_rows)
    rows.records += [cast("Preference", record) for record in parsed.rows]
    rows.sources += [str(source.name)] * len(parsed.rows)
    rows.tally = rows.tally.merged_with(parsed.counts)
    kept = {record.row_id for record in parsed.rows}
    problems = list(parsed.problems)
    for row in raw:
        try:
            if row.location in kept and (found := read_annotation(row, columns)) is not None:
                rows.annotations[row.location] = found
        except BadRow as bad:
            problems.append(bad.at(row.location))
    return problems


def read_annotation(row: RawRow, columns: Mapping[str, str]) -> Annotation | None:
    """The columns `votes`, `agreement` and `annotator` of a row of two responses; None where it has none of them.

    Raises:
        BadRow: a vote that is not 1, 0, 0.5, "chosen", "rejected" or "tie"; an agreement outside [0, 1].
    """
    values = rename_columns(row.values or {}, columns)
    votes, annotator, agreement = values.get("votes"), values.get("annotator"), number_field(values, "agreement")
    if votes is None and annotator is None and agreement is None:
        return None
    listed = list(votes.values()) if isinstance(votes, dict) else votes if isinstance(votes, list) else []
    if votes is not None and not isinstance(votes, list | dict):
        raise BadRow("votes", "must be a list with a vote of each annotator", repr(votes)[:40])
    if agreement is not None and not 0 <= agreement <= 1:
        raise BadRow("agreement", "must be a share of annotators, from 0 to 1", f"{agreement:g}")
    given = tuple(_vote(vote) for vote in listed if vote is not None)
    return Annotation(given, agreement, None if annotator is None else str(annotator))


def _vote(vote: object) -> float:
    if str(vote) not in VOTES:
        raise BadRow("votes", "holds 1 or chosen, 0 or rejected, 0.5 or tie for each annotator", repr(vote)[:40])
    return VOTES[str(vote)]


def encode_preferences(rows: PreferenceRows, model: RewardModel, max_length: int) -> tuple[list[EncodedRow], Tally]:
    """The rows as the model reads them, with an encoder's special tokens where it is one; and what was dropped and cut.

    Raises:
        UserError: rows that the chat template, or an encoder, refuses.
    """
    pairs = [record for record in rows.records if isinstance(record, Comparison)]
    rankings = [record for record in rows.records if isinstance(record, Ranking)]
    encode_pairs = encode_comparisons if model.is_encoder else tokenize_comparisons
    encode_rankings = encode_ordered_rankings if model.is_encoder else tokenize_ordered_rankings
    found_pairs, counts = encode_pairs(pairs, model.tokenizer, max_length)
    found_rankings, ranking_counts = encode_rankings(rankings, model.tokenizer, max_length)
    examples = {example.row_id: example for example in [*map(_as_ranking, found_pairs), *found_rankings]}
    counts, encoded = counts.merged_with(ranking_counts), []
    for record, source in zip(rows.records, rows.sources, strict=True):
        example = examples.get(record.row_id)
        if example is not None and len(example.documents) < len(response_texts(record)):
            counts.drop(EQUAL_IN_RANKING, record.row_id)
            counts.kept -= 1
        elif example is not None:
            encoded.append(EncodedRow(record, source, example))
    return encoded, counts


def _as_ranking(pair: Example) -> Example:
    return replace(pair, values={**pair.values, "ranks": [0, 1]})


def as_encoded(example: Example, is_encoder: bool) -> list[Encoded]:
    """Ids and segments of each document; in an encoder's examples the mask marks the second text."""
    return [
        Encoded(ids, [int(flag) for flag in mask] if is_encoder else [0] * len(ids))
        for ids, mask in zip(example.documents, example.masks, strict=True)
    ]


def response_tokens(example: Example) -> list[int]:
    """Tokens of each response with its end token; of an encoder's single text all of them."""
    return [sum(mask) or len(mask) for mask in example.masks]


def score_preferences(
    rows: Sequence[EncodedRow], model: RewardModel, annotations: Mapping[str, Annotation]
) -> list[ScoredGroup]:
    """The rows with the model's scores."""
    texts = [text for row in rows for text in as_encoded(row.example, model.is_encoder)]
    raw = model.members_of_ids([text.ids for text in texts], segments=[text.segments for text in texts])
    members = model.calibration.apply(raw)
    scores = iter(zip(model.combined(members).tolist(), members.tolist(), strict=True))
    groups = []
    for row in rows:
        found = [next(scores) for _ in row.example.documents]
        annotation = annotations.get(row.record.row_id, Annotation())
        strength = annotation.agreement if row.record.margin is None else row.record.margin
        groups.append(
            ScoredGroup(
                row_id=row.record.row_id,
                source=row.source,
                prompt=prompt_key(row.record),
                scores=[score for score, _ in found],
                ranks=row.example.values["ranks"],
                lengths=response_tokens(row.example),
                human=row.record.scores if isinstance(row.record, Ranking) else None,
                strength=strength,
                members=[each for _, each in found] if members.shape[1] > 1 else None,
            )
        )
    return groups


Votes = tuple[list[float], list[list[float]]]  # the model's verdict on each pair, and the annotators' votes on it


def votes_on_pairs(
    rows: Sequence[EncodedRow], groups: Sequence[ScoredGroup], annotations: Mapping[str, Annotation]
) -> Votes:
    """Pairs with votes: those in column `votes`, and rows of one pair by several annotators (column `annotator`)."""
    found: dict[tuple[str, frozenset[str]], tuple[str, float, list[float]]] = {}
    for row, group in zip(rows, groups, strict=True):
        annotation = annotations.get(row.record.row_id)
        if annotation is None or len(row.texts) != 2:
            continue
        given = list(annotation.votes) or ([1.0] if annotation.annotator is not None else [])
        best = row.texts[group.ranks.index(0)]
        lead = group.scores[group.ranks.index(0)] - group.scores[1 - group.ranks.index(0)]
        verdict = 1.0 if lead > 0 else 0.5 if lead == 0 else 0.0
        key = (group.prompt, frozenset(row.texts))
        first, _, votes = found.setdefault(key, (best, verdict, []))
        votes += given if best == first else [1 - vote for vote in given]
    judged = [(verdict, votes) for _, verdict, votes in found.values() if votes]
    return [verdict for verdict, _ in judged], [votes for _, votes in judged]


def by_annotator(groups: Sequence[ScoredGroup], annotations: Mapping[str, Annotation]) -> dict[str, list[ScoredGroup]]:
    """The groups by who judged them, the busiest annotator first."""
    found: dict[str, list[ScoredGroup]] = {}
    for group in groups:
        annotation = annotations.get(group.row_id)
        if annotation is not None and annotation.annotator is not None:
            found.setdefault(annotation.annotator, []).append(group)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))

"""Evaluation of a reward model on preferences: its accuracy, and its card (`alignment evaluate reward`).

Its figures are in reward_card.py, the page in reports/reward_page.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from alignment.data.batches import Example
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.encoder_inputs import encode_responses
from alignment.data.rows.files import read_raw
from alignment.data.rows.read import (
    Parse,
    ParsedRows,
    RecordParser,
    choose_row_format,
    parse_rows,
    prompt_key,
    read_sources,
)
from alignment.data.rows.records import Comparison, Prompt, Ranking, Tally, replies_of
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenize import EQUAL_IN_RANKING, tokenize_responses
from alignment.errors import UserError, raise_all
from alignment.files import write_figures
from alignment.generation import SamplingConfig
from alignment.hotel_world.gold import gold_score
from alignment.judging.inputs import check_hotel_prompts, print_tally, read_records, refuse_mixture
from alignment.judging.responses import sample_responses, score_responses
from alignment.loading import Checkpoint, best_device, find_directory
from alignment.models.encoder_decoder import DocumentClassifier
from alignment.models.model import check_lengths
from alignment.models.outputs import check_numbers
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.model import AdapterEnsemble, Encoded, score_encoded
from alignment.rewards.selection import powers_of_two
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings
from alignment.statistics.reward_card import (
    Figures,
    ScoredGroup,
    accuracy_figures,
    best_of_n_curve,
    length_figures,
    outcomes,
    pairs_of,
    reliability,
    score_changes,
)
from alignment.statistics.winrate import win_rate

Preference = Comparison | Ranking
PADDED_ROWS = 8  # of a padded batch, in the order of the rows, so that lengths differ


@dataclass(frozen=True)
class BestOfNConfig(Settings):
    """Settings of a best-of-n curve on a policy's samples.

    Attributes:
        policy: directory or Hub name of a decoder, usually the SFT policy.
        prompts: those longer than `prompts.max_length` tokens are truncated on the left.
        judge: gives the true score: gold (of the hotel data set, for its prompts only), or a second reward model that
            was trained on other rows (given as `judge_model`).
        judge_model: directory or Hub name, with judge=reward_model.
        samples: responses of each prompt, N; the curve has n = 1, 2, 4, ... up to N.
        max_new_tokens, temperature, seed: of the sampling.
        batch_size: responses sampled at the same time.
        chat_template: of the policy, a built-in one's name or a Jinja file; None: its tokenizer's own.
    """

    policy: str
    prompts: DataConfig
    judge: Literal["gold", "reward_model"]
    judge_model: str | None = None
    samples: Annotated[int, Interval(ge=2)] = 16
    max_new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt = 256
    seed: NonNegativeInt = 0
    chat_template: str | None = None

    RULES = (
        Rule(
            "judge_model",
            lambda c: c.judge == "reward_model" and c.judge_model is None,
            "must be a directory with judge=reward_model",
        ),
        Rule(
            "judge_model",
            lambda c: c.judge == "gold" and c.judge_model is not None,
            "says nothing with judge=gold; set judge=reward_model",
        ),
    )


@dataclass(frozen=True)
class RewardEvalConfig(Settings):
    """Settings of a reward model's evaluation on preferences: comparisons, or rankings of K responses.

    Attributes:
        reward_model: directory or Hub name; a decoder, an encoder, an adapter of either, or an ensemble.
        data: the rows, all of which are read; figures are given for each source of `data.train` too.
        output: directory of results.json, card.json and card.html.
        chat_template: a built-in one's name or a Jinja file; None: the tokenizer's own.
        weights: type that the reward model is held and computes in; auto: the checkpoint's.
        bins: of the reliability curve, of equal width.
        robustness_rows: rows, evenly drawn, whose texts are scored alone, padded, and in other types; 0: leave that
            out.
        dtypes: types to compare with the one that the model is held in; the model is loaded once more for each.
        best_of_n: sample a policy's responses and let the reward model pick; None: leave that out.
    """

    reward_model: str
    data: DataConfig
    output: str
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    bins: PositiveInt = 10
    robustness_rows: NonNegativeInt = 64
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = field(default_factory=lambda: ["float32", "bfloat16"])
    best_of_n: BestOfNConfig | None = None


def run(config: RewardEvalConfig) -> Path:
    """A reward model's accuracy with its 95 % interval, ties counting half, that of the longer response, and a card."""
    from alignment.reports.reward_page import write_reward_page  # matplotlib, which --help does not need

    output = Path(config.output)
    sources, tally = read_preferences(config.data)
    prompts = _read_prompts(config.best_of_n) if config.best_of_n else []
    model = _load(config, config.weights.dtype)
    rows, counts = encode_preferences(sources, model, config.data.max_length)
    raise_all([] if rows else [f"{config.data.train}: no comparison is left to score"])
    lengths = [(row.record.row_id, len(ids)) for row in rows for ids in row.example.documents]
    check_lengths(model.model, lengths, "lower data.max_length")
    groups = score_preferences(rows, model)
    weights = list(model.model.parameters())
    card: Figures = {
        "reward_model": config.reward_model,
        "model": {
            "architecture": "encoder" if model.is_encoder else "decoder",
            "parameters": sum(weight.numel() for weight in weights),
            "dtype": str(weights[0].dtype).removeprefix("torch."),  # the embedding's
            "loss": model.loss,
            "normalized": model.calibration.fitted,
        },
        "left_out": [*tally.lines(), *counts.lines()],
        **_figures(config, groups, model.calibration.gain),
        "best_of_n": _sampled_curve(config.best_of_n, config.weights, model, prompts) if config.best_of_n else {},
    }
    texts, pairs = sample_texts_evenly(rows, config.robustness_rows, model.is_encoder)
    scores = scores_in_other_forms(model, texts) if texts else {}
    del model, weights  # before it is loaded in other types
    card["robustness"] = _robustness(config, scores, texts, pairs, card["model"]["dtype"]) if texts else {}
    write_figures(output / "card.json", card)
    write_reward_page(output / "card.html", card)
    results = {**_results(rows, groups), "left_out": counts.lines(), "card": "card.json", "page": "card.html"}
    return write_figures(output / "results.json", results)


def _load(config: RewardEvalConfig, dtype: str) -> RewardModel:
    model = load_reward_model(config.reward_model, dtype, best_device(), quantize=config.weights.quantize)
    if model.loss == "steps":
        raise UserError(
            f"{config.reward_model}: a process reward model scores the steps of a response and none as a whole; "
            "alignment.load_reward_model(DIR).score_steps gives its scores"
        )
    return replace(model, tokenizer=with_chat_template(model.tokenizer, config.chat_template))


# Rows


class EncodedRow(NamedTuple):
    """A record with its source and its responses as the model reads them, prompt included."""

    record: Preference
    source: str
    example: Example


def read_preferences(data: DataConfig) -> tuple[list[tuple[str, list[Preference]]], Tally]:
    """Name and rows of each source of `data.train`, comparisons or rankings; bad rows of all sources come at once.

    Rows are comparisons where they have chosen and rejected, else rankings.
    """
    refuse_mixture(data)
    sources: list[tuple[str, list[Preference]]] = []

    def read(source: SourceConfig, left: int | None) -> ParsedRows[Preference]:
        raw = list(read_raw(source.source, str(source.split)))
        names = source.columns or {}
        form = choose_row_format(source.source, raw, "comparisons", names)
        if form.columns != ("chosen", "rejected"):
            form = choose_row_format(source.source, raw, "rankings", names)
        parse = cast("Parse[Preference]", RecordParser(form, data.as_messages))
        parsed = parse_rows(raw, parse, columns=names, max_rows=left)
        sources.append((str(source.name), parsed.rows))
        return parsed

    _, tally = read_sources(data.require_sources("train"), read, data.max_rows, data.on_bad_row)
    print_tally("comparisons", tally)
    return sources, tally


def encode_preferences(
    sources: Sequence[tuple[str, list[Preference]]], model: RewardModel, max_length: int
) -> tuple[list[EncodedRow], Tally]:
    """The rows as the model reads them, an encoder's special tokens included, and counts of dropped and cut rows."""
    encode = encode_responses if model.is_encoder else tokenize_responses
    encoded = []
    tally = Tally()
    for name, records in sources:
        examples, counts = encode(records, model.tokenizer, max_length, ordered=isinstance(records[0], Ranking))
        by_id = {record.row_id: record for record in records}
        for example in examples:
            record = by_id[example.row_id]
            if len(example.documents) < len(replies_of(record)):
                counts.drop(EQUAL_IN_RANKING, record.row_id)
                counts.kept -= 1
            else:
                ranks = {"ranks": [0, 1]}  # a comparison has none of its own
                ranked = replace(example, values={**ranks, **example.values})
                encoded.append(EncodedRow(record, name, ranked))
        tally = tally.merged_with(counts)
    return encoded, tally


def as_encoded(example: Example, is_encoder: bool) -> list[Encoded]:
    """Ids and segments of each document; in an encoder's examples the mask marks the second text."""
    encoded = []
    for ids, mask in zip(example.documents, example.masks, strict=True):
        encoded.append(Encoded(ids, [int(flag) for flag in mask] if is_encoder else [0] * len(ids)))
    return encoded


def score_preferences(rows: Sequence[EncodedRow], model: RewardModel) -> list[ScoredGroup]:
    """The rows with the model's scores; a length is that of the response with end token, of an encoder's text all."""
    texts = [text for row in rows for text in as_encoded(row.example, model.is_encoder)]
    combined = model.combined(model.calibration.apply(score_encoded(model.model, texts)))
    names = [row.record.row_id for row in rows for _ in row.example.documents]
    check_numbers(combined, names.__getitem__, "the score of a response")
    scores = iter(combined.tolist())
    groups = []
    for row in rows:
        group = ScoredGroup(
            source=row.source,
            prompt=prompt_key(row.record),
            scores=[next(scores) for _ in replies_of(row.record)],
            ranks=row.example.values["ranks"],
            lengths=[sum(mask) or len(mask) for mask in row.example.masks],
        )
        groups.append(group)
    return groups


# Figures


def _results(rows: Sequence[EncodedRow], groups: Sequence[ScoredGroup]) -> Figures:
    """The figures of results.json, over all ordered pairs, those of a prompt one cluster; lengths are in characters.

    `chosen_shorter` is the accuracy where the chosen response is the shorter one: 0 for a rule that prefers the longer,
    one half for a coin; null where there is no such pair.
    """
    texts = [[len(text) for text in replies_of(row.record)] for row in rows]
    pairs = pairs_of([group._replace(lengths=lengths) for group, lengths in zip(groups, texts, strict=True)])
    right = outcomes(pairs.margins)
    shorter = pairs.longer < 0

    def clustered(verdicts: np.ndarray, prompts: np.ndarray) -> Figures:
        return asdict(win_rate(verdicts.tolist(), clusters=prompts.tolist()))

    return {
        "accuracy": clustered(right, pairs.prompts),
        "always_longer": clustered(outcomes(pairs.longer), pairs.prompts),
        "chosen_shorter": clustered(right[shorter], pairs.prompts[shorter]) if shorter.any() else None,
        "margin": float(pairs.margins.mean()),
        "score": {"chosen": float(pairs.chosen.mean()), "rejected": float((pairs.chosen - pairs.margins).mean())},
    }


def _figures(config: RewardEvalConfig, groups: Sequence[ScoredGroup], gain: float) -> Figures:
    """Accuracy, reliability and length, of all rows and of each source.

    Reliability is that of scores before normalization by `gain`, as in training.
    """
    names = dict.fromkeys(group.source for group in groups)
    by_source = {name: [group for group in groups if group.source == name] for name in names}
    parts = {"all": groups, **(by_source if len(by_source) > 1 else {})}
    pairs = {name: pairs_of(part) for name, part in parts.items()}
    return {
        "sources": list(by_source),
        "accuracy": {name: accuracy_figures(part) for name, part in parts.items()},
        "calibration": {name: reliability(part.margins / gain, bins=config.bins) for name, part in pairs.items()},
        "length": {name: length_figures(part) for name, part in pairs.items()},
    }


# Best of n


def _read_prompts(config: BestOfNConfig) -> list[Prompt]:
    """The prompts, with policy and judge known to be of the right kind; nothing large is loaded."""
    if Checkpoint(config.policy).architecture != "decoder":
        raise UserError(f"{config.policy}: best_of_n.policy must be a decoder, which samples responses to prompts")
    if config.judge_model is not None:
        find_directory(config.judge_model)
    prompts: list[Prompt] = read_records(config.prompts, "prompts")
    if config.judge == "gold":
        check_hotel_prompts(prompts, "best_of_n.judge=gold", "; take judge=reward_model with judge_model=DIR")
    return prompts


def _sampled_curve(own: BestOfNConfig, weights: WeightsConfig, model: RewardModel, prompts: list[Prompt]) -> Figures:
    """The curve on a policy's samples."""
    n = own.samples
    max_length = own.prompts.max_length
    [samples] = sample_responses(
        own.policy,
        [prompt for prompt in prompts for _ in range(n)],
        [SamplingConfig(own.max_new_tokens, own.temperature, seed=own.seed)],
        max_length=max_length,
        weights=weights,
        chat_template=own.chat_template,
        batch_size=own.batch_size,
        counts_of="best_of_n.prompts",
        way_out="lower best_of_n.max_new_tokens or best_of_n.prompts.max_length",
    )
    responses = [
        (i // n, text, None, end) for i, (text, end) in enumerate(zip(samples.texts, samples.ended, strict=True))
    ]
    scores = score_responses(model, prompts, responses, max_length)
    if own.judge_model is None:
        gold = gold_score([str(prompts[i].prompt) for i, *_ in responses], samples.texts)
    else:
        judge = load_reward_model(own.judge_model, weights.dtype, best_device(), quantize=weights.quantize)
        gold = score_responses(judge, prompts, responses, max_length)
    picked, true = ([values[i : i + n] for i in range(0, len(values), n)] for values in (scores, gold))
    curve = best_of_n_curve(picked, true, powers_of_two(n), seed=own.seed)
    ended_share = sum(samples.ended) / len(responses)
    return {"policy": own.policy, "judge": own.judge_model or "gold", "ended_share": ended_share, "curve": curve}


# Robustness


def sample_texts_evenly(
    rows: Sequence[EncodedRow], count: int, is_encoder: bool
) -> tuple[list[Encoded], list[tuple[int, int]]]:
    """The texts of at most `count` rows, spread evenly over them, and the indices of each ordered pair among them."""
    drawn = {round(position) for position in np.linspace(0, len(rows) - 1, min(count, len(rows)))} if count else set()
    texts = []
    pairs = []
    for index in sorted(drawn):
        example = rows[index].example
        start = len(texts)
        texts += as_encoded(example, is_encoder)
        ranks = example.values["ranks"]
        positions = range(len(example.documents))
        pairs += [(start + a, start + b) for a in positions for b in positions if ranks[a] < ranks[b]]
    return texts, pairs


def scores_in_other_forms(model: RewardModel, texts: Sequence[Encoded]) -> dict[str, Tensor]:
    """Raw scores of the texts by the form they are computed in, [n] each; "batched" is the form of every evaluation."""
    forms = {"batched": score_encoded(model.model, texts), "alone": score_encoded(model.model, texts, 1)}
    forms |= {f"padded {side}": _padded_scores(model, texts, side) for side in ("right", "left")}
    return {name: model.combined(scores) for name, scores in forms.items()}


@torch.no_grad()
def _padded_scores(model: RewardModel, texts: Sequence[Encoded], side: str) -> Tensor:
    """Raw scores of texts in rectangles of `PADDED_ROWS` rows with padding on one side, by each member, [n, k]."""
    device = next(model.model.parameters()).device
    scores = []
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
        scores.append(_padded_logits(model.model, *rectangles).float().cpu())
    return torch.cat(scores)


def _padded_logits(network: nn.Module, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The scores of a padded call, [B, k]."""
    if isinstance(network, AdapterEnsemble):
        return torch.cat([_padded_logits(member, ids, mask, segments) for member in network.members], -1)
    return (network(ids, mask, segments) if isinstance(network, DocumentClassifier) else network(ids, mask)).logits


def _robustness(
    config: RewardEvalConfig,
    scores: dict[str, Tensor],
    texts: Sequence[Encoded],
    pairs: Sequence[tuple[int, int]],
    held_in: str,
) -> Figures:
    """Changes of the scores in other forms, and in other types, for each of which the model is loaded again."""
    notes = {}
    for dtype in [] if config.weights.quantize else config.dtypes:
        if dtype != held_in:
            try:
                model = _load(config, dtype)
                scores[dtype] = model.combined(score_encoded(model.model, texts))
            except UserError as error:  # canaries that this type is too coarse for
                notes[dtype] = str(error)
    base = scores.pop("batched")
    return {
        "texts": len(texts),
        "pairs": len(pairs),
        "held_in": held_in,
        "forms": {name: score_changes(base, other, pairs) for name, other in scores.items()},
        "not_compared": notes,
    }

"""Evaluation of a reward model on preferences: its accuracy, and its card (`alignment evaluate reward`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.text.named_templates import with_chat_template
from alignment.errors import UserError, raise_all
from alignment.evaluation.inputs import check_hotel_prompts, read_records
from alignment.evaluation.responses import sample_responses, score_responses
from alignment.evaluation.reward_card import (
    Figures,
    ScoredGroup,
    accuracy_figures,
    best_of_n_curve,
    calibration_figures,
    ensemble_figures,
    length_figures,
    outcomes,
    pairs_of,
    score_changes,
    strength_figures,
)
from alignment.evaluation.reward_inputs import (
    EncodedRow,
    encode_preferences,
    evenly_drawn_texts,
    read_preferences,
    score_preferences,
    scores_in_other_forms,
)
from alignment.evaluation.winrate import win_rate
from alignment.files import write_json
from alignment.generation import SamplingConfig
from alignment.hotel_world.gold import gold_score
from alignment.loading import architecture_of, best_device, find_directory
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.model import Encoded
from alignment.rewards.selection import powers_of_two
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings


@dataclass(frozen=True)
class BestOfNConfig(Settings):
    """Settings of a best-of-n curve on a policy's samples.

    Attributes:
        policy: directory or Hub name of a decoder, usually the SFT policy.
        prompts: those longer than `prompts.max_length` tokens are truncated on the left.
        judge: gives the true score: gold (of the hotel data set, for its prompts only), or a second reward model that was
            trained on other rows (given as `judge_model`).
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

    Rows may say by how much a response is better, in column `margin` or with scores (ratings) of the responses; the card
    then shows the model's agreement by the strength of the preference.

    Attributes:
        reward_model: directory or Hub name; a decoder, an encoder, an adapter of either, or an ensemble.
        data: the rows, all of which are read; figures are given for each source of `data.train` too.
        output: directory of results.json, card.json and card.html.
        chat_template: a built-in one's name or a Jinja file; None: the tokenizer's own.
        weights: type that the reward model is held and computes in; auto: the checkpoint's.
        bins: of the reliability curve, of equal width.
        robustness_rows: rows, evenly drawn, whose texts are scored alone, in other batches and orders, padded, and in other
            types; 0: leave that out.
        dtypes: types to compare with the one that the model is held in; the model is loaded once more for each.
        best_of_n: sample a policy's responses and let the reward model pick; None: a curve over the K responses of rankings.
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
    """Accuracy of a reward model with its 95 % interval, and that of always preferring the longer response; and its card.

    Ties count half. Writes `results.json`, and the card as `card.json` and `card.html`; the page loads nothing else.

    Raises:
        UserError: bad rows, a checkpoint without a score head, or a process reward model.
    """
    from alignment.evaluation.report.reward_page import write_reward_page  # matplotlib, which --help does not need

    output, (sources, tally) = Path(config.output), read_preferences(config.data)
    prompts = None if config.best_of_n is None else _read_prompts(config.best_of_n)
    model = _load(config, config.weights.dtype)
    rows, counts = encode_preferences(sources, model, config.data.max_length)
    raise_all([] if rows else [f"{config.data.train}: no comparison is left to score"])
    lengths = [(row.record.row_id, len(ids)) for row in rows for ids in row.example.documents]
    check_lengths(model.model, lengths, "lower data.max_length")
    groups = score_preferences(rows, model)
    texts, pairs = evenly_drawn_texts(rows, config.robustness_rows, model.is_encoder)
    card: Figures = {
        "reward_model": config.reward_model,
        "model": _described(model),
        "left_out": [*tally.lines(), *counts.lines()],
        **_figures(config, groups, model.calibration.gain),
        "best_of_n": _ranking_curve(groups) if prompts is None else _sampled_curve(config, model, prompts),
    }
    scores = scores_in_other_forms(model, texts) if texts else {}
    del model  # before it is loaded in other types
    card["robustness"] = _robustness(config, scores, texts, pairs, held_in=card["model"]["dtype"])
    write_json(output / "card.json", card)
    write_reward_page(output / "card.html", card)
    results = {**_results(rows, groups), "left_out": counts.lines(), "card": "card.json", "page": "card.html"}
    write_json(output / "results.json", results)
    return output / "results.json"


def _load(config: RewardEvalConfig, dtype: str) -> RewardModel:
    model = load_reward_model(config.reward_model, dtype, best_device(), quantize=config.weights.quantize)
    if model.loss == "steps":
        raise UserError(
            f"{config.reward_model}: a process reward model scores the steps of a response and none as a whole; "
            "alignment.load_reward_model(DIR).score_steps gives its scores"
        )
    return replace(model, tokenizer=with_chat_template(model.tokenizer, config.chat_template))


def _described(model: RewardModel) -> Figures:
    """The card's entries on the model itself; its type is that of most weights."""
    sizes: Counter[str] = Counter()
    for parameter in model.model.parameters():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return {
        "architecture": "encoder" if model.is_encoder else "decoder",
        "parameters": sizes.total(),
        "dtype": sizes.most_common(1)[0][0],
        "loss": model.loss,
        "normalized": model.calibration.fitted,
    }


def _results(rows: Sequence[EncodedRow], groups: Sequence[ScoredGroup]) -> Figures:
    """The figures of results.json, over all ordered pairs; lengths are in characters."""
    texts = [[len(text) for text in row.texts] for row in rows]
    pairs = pairs_of([group._replace(lengths=lengths) for group, lengths in zip(groups, texts, strict=True)])
    sides = [
        (first, second)
        for group in groups
        for first, one in zip(group.scores, group.ranks, strict=True)
        for second, two in zip(group.scores, group.ranks, strict=True)
        if one < two
    ]
    chosen, rejected = np.array(sides).mean(0)
    return {
        "accuracy": asdict(win_rate(outcomes(pairs.margins).tolist())),
        "always_longer": asdict(win_rate(outcomes(pairs.longer).tolist())),
        "margin": float(pairs.margins.mean()),
        "score": {"chosen": float(chosen), "rejected": float(rejected)},
    }


def _figures(config: RewardEvalConfig, groups: Sequence[ScoredGroup], gain: float) -> Figures:
    """Accuracy, reliability, agreement, length and ensemble, of all rows and of each source.

    Args:
        gain: of the normalized scores; probabilities of preferences come from scores before it, as in training.
    """
    by_source: dict[str, list[ScoredGroup]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group)
    parts = {"all": groups, **(by_source if len(by_source) > 1 else {})}
    pairs = {name: pairs_of(part) for name, part in parts.items()}
    strengths = strength_figures(pairs["all"])
    return {
        "sources": list(by_source),
        "accuracy": {name: accuracy_figures(part) for name, part in parts.items()},
        "calibration": {
            name: calibration_figures(part.margins / gain, part.prompts, bins=config.bins)
            for name, part in pairs.items()
        },
        "length": {name: length_figures(part) for name, part in pairs.items()},
        "ensemble": {name: ensemble_figures(part) for name, part in pairs.items()}
        if groups[0].members is not None
        else _missing("the reward model is a single one; ensemble.members trains several"),
        "agreement": {"by_strength": strengths}
        if strengths
        else _missing("no row says how strong its preference is: columns margin or scores"),
    }


def _missing(why: str) -> Figures:
    """The entry of the card in place of figures that cannot be given."""
    return {"missing": why}


# Best of n


def _read_prompts(config: BestOfNConfig) -> list[Prompt]:
    """The prompts, with policy and judge known to be of the right kind; nothing large is loaded.

    Raises:
        UserError: bad prompts, prompts that the judge cannot judge, a policy that is no decoder, a missing directory.
    """
    if architecture_of(config.policy) != "decoder":
        raise UserError(f"{config.policy}: best_of_n.policy must be a decoder, which samples responses to prompts")
    if config.judge_model is not None:
        find_directory(config.judge_model)
    prompts: list[Prompt] = read_records(config.prompts, "prompts")
    if config.judge == "gold":
        check_hotel_prompts(prompts, "best_of_n.judge=gold", "; take judge=reward_model with judge_model=DIR")
    return prompts


def _sampled_curve(config: RewardEvalConfig, model: RewardModel, prompts: list[Prompt]) -> Figures:
    """The curve on a policy's samples."""
    own, weights = config.best_of_n, config.weights
    assert own is not None
    n, max_length = own.samples, own.prompts.max_length
    [found] = sample_responses(
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
    responses = [(i // n, text, None, end) for i, (text, end) in enumerate(zip(found.texts, found.ended, strict=True))]

    def by_prompt(values: Sequence[float]) -> list[Sequence[float]]:
        return [values[start : start + n] for start in range(0, len(values), n)]

    scores = score_responses(model, prompts, responses, max_length)
    if own.judge_model is None:
        gold = gold_score([str(prompts[i].prompt) for i, *_ in responses], found.texts)
    else:
        judge = load_reward_model(own.judge_model, weights.dtype, best_device(), quantize=weights.quantize)
        gold = score_responses(judge, prompts, responses, max_length)
    curve = best_of_n_curve(by_prompt(scores), by_prompt(gold), powers_of_two(n), seed=own.seed)
    judged = {"policy": own.policy, "judge": own.judge_model or "gold", "gold": "higher is better"}
    return {**judged, "ended_share": sum(found.ended) / len(responses), "curve": curve}


def _ranking_curve(groups: Sequence[ScoredGroup]) -> Figures:
    """The curve on the K responses of rankings, whose gold score is the rank (0 is best)."""
    k_way = [group for group in groups if len(group.ranks) > 2]
    if not k_way:
        return _missing("no policy is named (best_of_n.policy), and no row has more than two responses to pick from")
    sizes = range(1, max(len(group.ranks) for group in k_way) + 1)
    curve = best_of_n_curve([group.scores for group in k_way], [group.ranks for group in k_way], sizes)
    return {"policy": None, "judge": "ranks of the rows", "gold": "rank of the pick, 0 is best", "curve": curve}


# Robustness


def _robustness(
    config: RewardEvalConfig,
    scores: dict[str, torch.Tensor],
    texts: Sequence[Encoded],
    pairs: Sequence[tuple[int, int]],
    *,
    held_in: str,
) -> Figures:
    """Changes of the scores in other forms, and in other types, for each of which the model is loaded again."""
    if not texts:
        return _missing("robustness_rows is 0")
    notes = {}
    for dtype in config.dtypes:
        if config.weights.quantize is not None:
            notes[dtype] = "the weights are quantized"
        elif dtype != held_in:
            try:
                model = _load(config, dtype)
            except UserError as error:  # canaries that this type is too coarse for
                notes[dtype] = str(error)
                continue
            raw = model.members_of_ids([text.ids for text in texts], segments=[text.segments for text in texts])
            scores[dtype] = model.combined(raw)
    base = scores.pop("batched")
    forms = {name: score_changes(base, other, pairs) for name, other in scores.items()}
    return {"texts": len(texts), "pairs": len(pairs), "held_in": held_in, "forms": forms, "not_compared": notes}

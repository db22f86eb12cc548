"""Evaluation of a reward model on preferences: its accuracy, and its card (`alignment evaluate reward`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.text.named_templates import with_chat_template
from alignment.errors import UserError, raise_all
from alignment.evaluation.best_of_n import best_of_n_curve
from alignment.evaluation.reward_card import (
    Figures,
    ScoredGroup,
    accuracy_figures,
    calibration_figures,
    clustered_rate,
    ensemble_figures,
    length_figures,
    outcomes,
    pairs_of,
    strength_figures,
    vote_figures,
)
from alignment.evaluation.reward_inputs import (
    EncodedRow,
    PreferenceRows,
    as_encoded,
    by_annotator,
    encode_preferences,
    read_preferences,
    score_preferences,
    votes_on_pairs,
)
from alignment.evaluation.reward_robustness import evenly_drawn, score_changes, scores_in_other_forms
from alignment.evaluation.reward_sampling import (
    BestOfNConfig,
    check_best_of_n,
    gold_of_samples,
    sample_responses,
    score_samples,
)
from alignment.evaluation.winrate import win_rate
from alignment.files import write_json
from alignment.loading import best_device
from alignment.models.lengths import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.model import Encoded
from alignment.rewards.selection import powers_of_two

SHOWN_ANNOTATORS = 20


@dataclass(frozen=True)
class RewardEvalConfig:
    """Settings of a reward model's evaluation on preferences: comparisons, or rankings of K responses.

    Rows may say more than which response is better, and the card shows the model's agreement with it: `margin`, `scores` or
    ratings (how much better), `votes` (a list with 1 or "chosen", 0 or "rejected", 0.5 or "tie" of each annotator),
    `agreement` (share of annotators for the chosen response), `annotator` (who judged the row).

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
    bins: int = 10
    robustness_rows: int = 64
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = field(default_factory=lambda: ["float32", "bfloat16"])
    best_of_n: BestOfNConfig | None = None

    def __post_init__(self) -> None:
        for name, least in (("bins", 1), ("robustness_rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def run(config: RewardEvalConfig) -> Path:
    """Accuracy of a reward model with its 95 % interval, and that of always preferring the longer response; and its card.

    Ties count half. Writes `results.json`, and the card as `card.json` and `card.html`; the page loads nothing else.

    Raises:
        UserError: bad rows, a checkpoint without a score head, or a process reward model.
    """
    from alignment.evaluation.report.reward_page import write_reward_page  # matplotlib, which --help does not need

    output, rows = Path(config.output), read_preferences(config.data)
    prompts = None if config.best_of_n is None else check_best_of_n(config.best_of_n)
    model = _load(config, config.weights.dtype)
    encoded, counts = encode_preferences(rows, model, config.data.max_length)
    raise_all([] if encoded else [f"{config.data.train}: no comparison is left to score"])
    lengths = [(row.record.row_id, len(ids)) for row in encoded for ids in row.example.documents]
    check_lengths(model.model, lengths, "lower data.max_length")
    groups = score_preferences(encoded, model, rows.annotations)
    texts, pairs = _robustness_texts(config, model, encoded)
    card: dict[str, Any] = {
        "reward_model": config.reward_model,
        "model": _described(model),
        "left_out": [*rows.tally.lines(), *counts.lines()],
        **_figures(config, groups, model.calibration.gain),
        "agreement": _agreement(encoded, groups, rows),
        "best_of_n": _best_of_n(config, model, groups, prompts),
    }
    scores = scores_in_other_forms(model, texts) if texts else {}
    del model  # before it is loaded in other types
    card["robustness"] = _robustness(config, scores, texts, pairs, held_in=card["model"]["dtype"])
    write_json(output / "card.json", card)
    write_reward_page(output / "card.html", card)
    results = {**_results(encoded, groups), "left_out": counts.lines(), "card": "card.json", "page": "card.html"}
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
    """What the card says of the model itself."""
    return {
        "architecture": "encoder" if model.is_encoder else "decoder",
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "dtype": _held_in(model),
        "loss": model.loss,
        "normalized": model.calibration.fitted,
    }


def _held_in(model: RewardModel) -> str:
    """The type of most weights."""
    sizes: Counter[str] = Counter()
    for parameter in model.model.parameters():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _results(rows: Sequence[EncodedRow], groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """The figures of results.json, over all ordered pairs; lengths are in characters."""
    lengths = [replace(g, lengths=[len(text) for text in row.texts]) for row, g in zip(rows, groups, strict=True)]
    pairs = pairs_of(lengths)
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


def _figures(config: RewardEvalConfig, groups: Sequence[ScoredGroup], gain: float) -> dict[str, Any]:
    """Accuracy, reliability, length and ensemble, of all rows and of each source.

    Args:
        gain: of the normalized scores; probabilities of preferences come from scores before it, as in training.
    """
    by_source: dict[str, list[ScoredGroup]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group)
    parts = {"all": groups, **(by_source if len(by_source) > 1 else {})}
    pairs = {name: pairs_of(part) for name, part in parts.items()}
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
    }


def _missing(why: str) -> dict[str, Any]:
    """What stands in the card in place of figures that cannot be given."""
    return {"missing": why}


def _agreement(rows: Sequence[EncodedRow], groups: Sequence[ScoredGroup], read: PreferenceRows) -> dict[str, Any]:
    """Agreement with annotators by the strength of their preference, by their votes, and with each of them."""
    strengths = strength_figures(pairs_of(groups))
    votes = vote_figures(*votes_on_pairs(rows, groups, read.annotations))
    shares = [found.agreement for found in read.annotations.values() if found.agreement is not None]
    people = {
        name: clustered_rate(outcomes((pairs := pairs_of(part)).margins), pairs.prompts)
        for name, part in list(by_annotator(groups, read.annotations).items())[:SHOWN_ANNOTATORS]
    }
    return {
        "by_strength": strengths
        or _missing("no row says how strong its preference is: columns margin, scores or agreement"),
        "votes": votes or _missing("no row has votes of several annotators: column votes, or annotator"),
        "people_for_chosen": float(np.mean(shares)) if shares else _missing("no row has column agreement"),
        "annotators": people or _missing("no row names its annotator: column annotator"),
    }


def _best_of_n(
    config: RewardEvalConfig, model: RewardModel, groups: Sequence[ScoredGroup], prompts: list[Prompt] | None
) -> dict[str, Any]:
    """The curve on a policy's samples, or on the K responses of rankings, whose gold score is the rank (0 is best)."""
    if config.best_of_n is not None and prompts is not None:
        own = config.best_of_n
        samples = sample_responses(own, prompts, config.weights)
        scores = score_samples(model, samples, own.prompts.max_length)
        gold = gold_of_samples(own, samples, config.weights)
        curve = best_of_n_curve(scores, gold, powers_of_two(own.samples), seed=own.seed)
        ended = [one for each in samples.ended for one in each]
        judged = {"policy": own.policy, "judge": own.judge_model or "gold", "gold": "higher is better"}
        return {**judged, "ended_share": sum(ended) / len(ended), "curve": curve}
    k_way = [group for group in groups if len(group.ranks) > 2]
    if not k_way:
        return _missing("no policy is named (best_of_n.policy), and no row has more than two responses to pick from")
    sizes = range(1, max(len(group.ranks) for group in k_way) + 1)
    curve = best_of_n_curve([group.scores for group in k_way], [group.ranks for group in k_way], sizes)
    return {"policy": None, "judge": "ranks of the rows", "gold": "rank of the pick, 0 is best", "curve": curve}


def _robustness_texts(
    config: RewardEvalConfig, model: RewardModel, rows: Sequence[EncodedRow]
) -> tuple[list[Encoded], list[tuple[int, int]]]:
    """The texts of rows evenly drawn, and the indices of each ordered pair among them."""
    texts, pairs = [], []
    for number in evenly_drawn(len(rows), config.robustness_rows):
        example, start = rows[number].example, len(texts)
        texts += as_encoded(example, model.is_encoder)
        ranks = example.values["ranks"]
        positions = range(len(ranks))
        pairs += [(start + a, start + b) for a in positions for b in positions if ranks[a] < ranks[b]]
    return texts, pairs


def _robustness(
    config: RewardEvalConfig,
    scores: dict[str, torch.Tensor],
    texts: Sequence[Encoded],
    pairs: Sequence[tuple[int, int]],
    *,
    held_in: str,
) -> dict[str, Any]:
    """Changes of the scores in other forms, and in other types, for each of which the model is loaded again."""
    if not texts:
        return _missing("robustness_rows is 0")
    base, notes = scores["batched"], {}
    others = {name: other for name, other in scores.items() if name != "batched"}
    for dtype in config.dtypes:
        if config.weights.quantize is not None:
            notes[dtype] = "the weights are quantized"
        elif dtype != held_in:
            try:
                others[dtype] = _scores(_load(config, dtype), texts)
            except UserError as error:  # canaries that this type is too coarse for
                notes[dtype] = str(error)
    forms = {name: score_changes(base, other, pairs) for name, other in others.items()}
    return {"texts": len(texts), "pairs": len(pairs), "held_in": held_in, "forms": forms, "not_compared": notes}


def _scores(model: RewardModel, texts: Sequence[Encoded]) -> torch.Tensor:
    raw = model.members_of_ids([text.ids for text in texts], segments=[text.segments for text in texts])
    return model.combined(raw)

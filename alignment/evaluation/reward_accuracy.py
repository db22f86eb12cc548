"""Accuracy of a reward model: how often it prefers the chosen response (`alignment evaluate reward`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alignment.data.config import DataConfig
from alignment.data.text.named_templates import with_chat_template
from alignment.data.tokenize import tokenize_comparisons
from alignment.errors import UserError, raise_all
from alignment.evaluation.inputs import read_records
from alignment.evaluation.winrate import win_rate
from alignment.files import write_json
from alignment.loading import architecture_of, best_device
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import load_reward_model


@dataclass(frozen=True)
class RewardEvalConfig:
    """Settings of a reward model's accuracy on comparisons.

    Attributes:
        chat_template: a built-in one's name or a Jinja file; None: the tokenizer's own.
        weights: type that the reward model is held and computes in; auto: the checkpoint's.
    """

    reward_model: str
    data: DataConfig
    output: str
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def run(config: RewardEvalConfig) -> Path:
    """Accuracy of a reward model with its 95 % interval, and that of always preferring the longer response.

    Ties count half. Writes `results.json`.

    Raises:
        UserError: bad rows, a checkpoint without a score head, or an encoder.
    """
    if architecture_of(config.reward_model) == "encoder":
        raise UserError(
            f"{config.reward_model}: an encoder reads prompt and response as a pair of texts, and `alignment evaluate "
            "reward` scores decoders; alignment.load_reward_model gives its scores of (prompt, response) pairs"
        )
    rows = read_records(config.data, "comparisons")
    weights = config.weights
    model = load_reward_model(config.reward_model, weights.dtype, best_device(), quantize=weights.quantize)
    tokenizer = with_chat_template(model.tokenizer, config.chat_template)
    pairs, counts = tokenize_comparisons(rows, tokenizer, config.data.max_length)
    kept = {pair.row_id: pair for pair in pairs}
    rows = [row for row in rows if row.row_id in kept]
    raise_all([] if rows else [f"{config.data.train}: no comparison is left to score"])
    chosen = model.score_ids([pair.chosen.ids for pair in pairs])
    rejected = model.score_ids([pair.rejected.ids for pair in pairs])
    results = {
        "accuracy": _accuracy((chosen - rejected).tolist()),
        "always_longer": _accuracy([len(row.chosen) - len(row.rejected) for row in rows]),
        "margin": float((chosen - rejected).mean()),
        "score": {"chosen": float(chosen.mean()), "rejected": float(rejected.mean())},
        "left_out": counts.lines(),
    }
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def _accuracy(margins: Sequence[float]) -> dict[str, Any]:
    """Share of positive margins, zeros counting half, with its interval."""
    return asdict(win_rate([1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins]))

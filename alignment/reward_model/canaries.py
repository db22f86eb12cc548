"""Eight short texts whose scores are saved with a reward model and computed again when it is loaded.

Lost heads, swapped base models and changed tokenizers all give plausible scores; these give others than they gave.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.files import read_json_object, write_json
from alignment.models.quantization import quantization_of
from alignment.reward_model.model import Encoded, RewardModel, score_encoded

CANARIES = "canaries.json"
TEXTS = (
    ("What is the tallest tree?", " The coast redwood, which can grow above 115 meters."),
    ("What is the tallest tree?", " I do not know."),
    ("Write a sentence about the sea.", " The sea was calm, and the boats lay still."),
    ("Write a sentence about the sea.", " sea sea sea sea"),
    ("How many days does a week have?", " Seven."),
    ("How many days does a week have?", " Five, or perhaps nine; nobody has counted them."),
    ("Say hello to a new colleague.", " Hello, and welcome! Shall I show you around?"),
    ("Say hello to a new colleague.", " Go away."),
)
# Largest difference, as a share of the largest score or of 1: by the lowest type of the weights, then or now.
TOLERANCES = {"float32": 1e-3, "half": 0.1, "quantized": 0.5}


@dataclass(frozen=True)
class Canaries:
    """Scores and settings of a saved reward model, beside its weights."""

    scores: Tensor  # raw score of each of the texts by each member, [8, k]
    precision: str  # key of `TOLERANCES` of the run that trained it
    loss: str  # of its training
    texts: tuple[tuple[str, str], ...] = TEXTS  # (prompt, response) of each

    def write(self, directory: Path) -> None:
        rows = [
            {"prompt": prompt, "response": response, "scores": scores}
            for (prompt, response), scores in zip(self.texts, self.scores.tolist(), strict=True)
        ]
        write_json(directory / CANARIES, {"loss": self.loss, "precision": self.precision, "canaries": rows})


def score_canaries(reward_model: RewardModel, texts: tuple[tuple[str, str], ...] = TEXTS) -> Tensor:
    """Raw scores of the texts by each member, [8, k]."""
    return score_encoded(reward_model.model, canary_ids(reward_model, texts))


def canary_ids(reward_model: RewardModel, texts: tuple[tuple[str, str], ...] = TEXTS) -> list[Encoded]:
    """The texts as the model reads them, cut to its positions."""
    room = reward_model.model.spec.max_positions - reward_model.model.virtual_tokens()
    return [Encoded(one.ids[:room], one.segments[:room]) for one in reward_model.encode(texts)]


def read_canaries(directory: Path) -> Canaries | None:
    """The canaries of a saved reward model; None where there is no file."""
    path = directory / CANARIES
    if not path.is_file():
        return None
    found = read_json_object(path)
    try:
        rows: list[Any] = found["canaries"]
        texts = tuple((str(row["prompt"]), str(row["response"])) for row in rows)
        scores = torch.tensor([[float(score) for score in row["scores"]] for row in rows])
        if found["precision"] not in TOLERANCES or scores.dim() != 2:
            raise ValueError(found["precision"])
        return Canaries(scores, found["precision"], str(found["loss"]), texts)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not the scores of {len(TEXTS)} texts ({error!r}); copy the file from the run again, or delete it to "
            "load the model unchecked"
        ) from error


def check_canaries(reward_model: RewardModel, directory: Path, source: str, rounded: bool = False) -> float | None:
    """Score the canaries of a reward model again, where its directory has them; the largest difference.

    Args:
        rounded: the weights were quantized after the model was saved, and are held as floats now.

    Raises:
        UserError: a score differs from that of the saved model, beyond the rounding of types and quantization.
    """
    saved = read_canaries(directory)
    if saved is None:
        return None
    scores = score_canaries(reward_model, saved.texts)
    if scores.shape != saved.scores.shape:
        raise UserError(
            f"{source}: {CANARIES} was written for {saved.scores.shape[1]} score(s) per text, and the model gives "
            f"{scores.shape[1]}; its head is not the one that was trained"
        )
    now = "quantized" if rounded else weights_precision(reward_model.model)
    precision = max(saved.precision, now, key=lambda name: TOLERANCES[name])
    allowed = TOLERANCES[precision] * max(1.0, saved.scores.abs().max().item())
    differences = (scores - saved.scores).abs().amax(1).nan_to_num(nan=torch.inf)
    worst = int(differences.argmax())
    if differences[worst] > allowed:
        raise UserError(
            f"{source}: the reward model scores {saved.texts[worst][1]!r} with {_shown(scores[worst])}, and scored it with "
            f"{_shown(saved.scores[worst])} when it was saved (allowed difference {allowed:.3g}): its head, weights, base "
            f"model or tokenizer are not those that were trained; copy the run's directory again. If the change is wanted, "
            f"delete {directory / CANARIES}"
        )
    return differences[worst].item()


def weights_precision(model: torch.nn.Module) -> str:
    """The key of `TOLERANCES` for a model's weights."""
    if quantization_of(model) is not None:
        return "quantized"
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return "half" if types & {torch.bfloat16, torch.float16} else "float32"


def _shown(scores: Tensor) -> str:
    return ", ".join(f"{score:.4g}" for score in scores.tolist())

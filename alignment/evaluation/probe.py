"""Linear probes: how well a linear layer tells classes of text from a frozen model's states. A stage of recipes, `probe`.

Only the linear layer is fitted; the model is read, never trained. Every model gets the same rows and the same settings.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from alignment.adapters.files import is_adapter
from alignment.data.config import DataConfig
from alignment.data.tasks.classification import encode_texts
from alignment.data.tasks.prepare import LabeledExamples, prepare_labeled
from alignment.errors import UserError, raise_all
from alignment.evaluation.answer_accuracy import accuracy_gain
from alignment.evaluation.inputs import print_tally, refuse_mixture
from alignment.evaluation.winrate import win_rate
from alignment.files import write_json
from alignment.loading import architecture_of, best_device, find_base, find_directory, load_model, load_tokenizer
from alignment.models.families import is_external_type
from alignment.models.language_model import LanguageModel
from alignment.models.model import check_lengths
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged, group_by_length

BATCH_TOKENS = 16_384
Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of linear probes.

    Attributes:
        models: name -> directory or Hub name of a decoder of this library's own families.
        baseline: the name among `models` that the others are compared with.
        data: rows with `text` and `label`: those of `train` fit the linear layer, those of `evaluation` (or
            `evaluation_share`) are judged.
        output: directory of `results.json`.
        pooling: the state of a text: of its last token (last), or the mean over its tokens (mean).
        ridge: weight of the squared norm of the layer beside the mean squared error, on standardized states.
        weights: type that models are held and compute in; auto: each checkpoint's.
    """

    models: dict[str, str]
    baseline: str
    data: DataConfig
    output: str
    pooling: Pooling = "last"
    ridge: float = 0.01
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        if self.baseline not in self.models:
            raise ValueError(f"baseline {self.baseline!r} is not among the models: {', '.join(self.models)}")
        if not 0 < self.ridge < float("inf"):
            raise ValueError(f"ridge must be above 0, got {self.ridge}; 0.01 is usual")
        if not self.data.evaluates:
            raise ValueError("data.evaluation: name the rows that are judged, or set data.evaluation_share")


@dataclass(frozen=True)
class Probe:
    """A linear layer over standardized states.

    Attributes:
        mean, scale: of the states that it was fitted on, [D].
        weight: [D, C].
        bias: share of each class among the rows of the fit, [C].
    """

    mean: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    def classify(self, states: np.ndarray) -> np.ndarray:
        """The class with the highest output for each row; states [N, D] -> [N]."""
        return ((states - self.mean) / self.scale @ self.weight + self.bias).argmax(1)


def fit_probe(states: np.ndarray, classes: np.ndarray, *, count: int, ridge: float) -> Probe:
    """The ridge classifier: least squares from standardized states Z to the indicators Y of the classes.

    weight = argmin ||Z weight - (Y - mean Y)||^2 / N + ridge ||weight||^2 = (Z'Z / N + ridge I)^-1 Z'(Y - mean Y) / N

    Args:
        states: [N, D].
        classes: from 0 to count - 1, [N].
        count: C.
        ridge: > 0; the bias is not penalized.

    Source: probes: Alain and Bengio 2016, arXiv:1610.01644; ridge regression: Hoerl and Kennard 1970, Technometrics 12, 55-67.
    """
    states = states.astype(np.float64)
    mean, deviation = states.mean(0), states.std(0)
    scale = np.where(deviation > 0, deviation, 1.0)
    z, indicators = (states - mean) / scale, np.eye(count)[classes]
    bias = indicators.mean(0)
    covariance = z.T @ z / len(z) + ridge * np.eye(z.shape[1])
    return Probe(mean, scale, np.linalg.solve(covariance, z.T @ (indicators - bias) / len(z)), bias)


@torch.no_grad()
def pooled_states(model: LanguageModel, documents: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
    """One state per document, from the last layer after its norm; token ids of each -> [B, D]."""
    device = next(model.parameters()).device
    found: list[np.ndarray] = [np.empty(0)] * len(documents)
    for group in group_by_length([len(document) for document in documents], BATCH_TOKENS):
        batch = Ragged.build([documents[i] for i in group]).to(device)
        states = model.hidden_states(model.trunk, batch).float()
        for i, own in zip(group, states.split(list(batch.lengths)), strict=True):
            found[i] = (own[-1] if pooling == "last" else own.mean(0)).cpu().numpy()
    return np.stack(found)


def run(config: ProbeConfig) -> Path:
    """Fit and judge a probe on every model; write `results.json` and return its path.

    The results hold, for each model, the share of held-out rows that its probe classifies rightly with Wilson's 95 %
    interval, the difference from the baseline's with the interval for pairs, and the share on the rows of the fit; and
    `majority`, the share of held-out rows that have the most frequent label of the fit.

    Raises:
        UserError: bad rows or labels, a missing model, or one that is no decoder of this library's own families.
    """
    refuse_mixture(config.data)
    for source in config.models.values():
        directory = find_directory(source)
        base = find_base(directory) if is_adapter(directory) else directory
        if is_external_type(read_config(base)) or architecture_of(source) != "decoder":
            raise UserError(f"{source}: a probe reads the states of decoders of this library's own families alone")
    parts = {name: _prepare(config, source) for name, source in config.models.items()}
    _check_same_rows(config, parts)
    right = {name: _judge(config, source, *parts[name]) for name, source in config.models.items()}
    fit, judged = parts[config.baseline]
    classes = np.array([example.label for example in fit.examples])
    majority = np.bincount(classes).argmax()
    held_out_classes = np.array([example.label for example in judged.examples])
    results = {
        "baseline": config.baseline,
        "rows": len(classes),
        "held_out_rows": len(held_out_classes),
        "labels": list(fit.names.values()),
        "majority": float((held_out_classes == majority).mean()),
        "models": {
            name: {
                "accuracy": asdict(win_rate(held_out)),
                "gain": accuracy_gain(held_out, right[config.baseline][1]),
                "fit_accuracy": sum(fitted) / len(fitted),
            }
            for name, (fitted, held_out) in right.items()
        },
    }
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def _prepare(config: ProbeConfig, source: str) -> tuple[LabeledExamples, LabeledExamples]:
    """Rows of the fit and rows to judge, as token ids of one model."""
    tokenizer = load_tokenizer(source)
    fit = prepare_labeled(config.data, "classification", tokenizer, encode_texts)
    judged = prepare_labeled(config.data, "classification", tokenizer, encode_texts, "evaluation", names=fit.names)
    if source == config.models[config.baseline]:
        for part, found in (("train", fit), ("evaluation", judged)):
            print_tally(f"data.{part}", found.counts)
        if twice := judged.counts.trained_on:
            raise UserError(
                f"{len(twice)} held-out texts, the first {twice[0]}, are among the rows of the fit; take them out"
            )
    return fit, judged


def _check_same_rows(config: ProbeConfig, parts: dict[str, tuple[LabeledExamples, LabeledExamples]]) -> None:
    """Refuse models whose tokenizers drop different rows: their accuracies could not be compared."""
    rows = {name: [[each.row_id for each in part.examples] for part in both] for name, both in parts.items()}
    raise_all(
        f"{config.models[name]}: its tokenizer drops other rows than that of {config.baseline}; take those rows out"
        for name, found in rows.items()
        if found != rows[config.baseline]
    )


def _judge(
    config: ProbeConfig, source: str, fit: LabeledExamples, judged: LabeledExamples
) -> tuple[list[float], list[float]]:
    """1.0 for each row that the probe classifies rightly, else 0.0: of the fit, and held out. The model is loaded for this call only."""
    model = load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    states, classes = [], []
    for part in (fit, judged):
        documents = [example.encoded.ids for example in part.examples]
        names = [(example.row_id, len(ids)) for example, ids in zip(part.examples, documents, strict=True)]
        check_lengths(model, names, "lower data.max_length")
        states.append(pooled_states(model, documents, config.pooling))
        classes.append(np.array([example.label for example in part.examples]))
    probe = fit_probe(states[0], classes[0], count=len(fit.names), ridge=config.ridge)
    print(f"probe: {source}", file=sys.stderr)
    fitted, held_out = (
        (probe.classify(each) == known).astype(float).tolist() for each, known in zip(states, classes, strict=True)
    )
    return fitted, held_out

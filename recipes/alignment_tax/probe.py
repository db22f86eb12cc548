"""Linear probes on frozen models' states, and texts of the hotel world for them: two stages of this recipe.

Only the linear layer is fitted; the model is read, never trained. Every model gets the same rows and the same settings.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from alignment.adapters.files import is_adapter
from alignment.data.config import DataConfig
from alignment.data.tasks import LabeledExamples, TaskFormat, prepare_labeled
from alignment.errors import UserError, raise_all
from alignment.evaluation.inputs import print_tally, refuse_mixture
from alignment.evaluation.winrate import accuracy_gain, win_rate
from alignment.files import write_json, write_text
from alignment.hotel_world.datasets import FOLDS, generate_rows
from alignment.hotel_world.grammar import CLAIM, find_claims, fold
from alignment.loading import architecture_of, best_device, find_base, find_directory, load_model, load_tokenizer
from alignment.models.families import is_external_type
from alignment.models.language_model import LanguageModel
from alignment.models.model import check_lengths
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged, group_by_length
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings

FIT_FOLDS = range(60, 63)  # of the folds of held-out pretraining text; the others are of the rows that are judged
BATCH_TOKENS = 16_384
Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class ProbeRowsConfig(Settings):
    """Settings of the probe's rows.

    Attributes:
        output: directory of `train.jsonl` and `heldout.jsonl`.
        seed: of all random choices; the texts are those of held-out pretraining text with this seed.
        rows, heldout: rows of each file.
    """

    output: str
    seed: NonNegativeInt = 0
    rows: PositiveInt = 1500
    heldout: PositiveInt = 1000


def write_rows(config: ProbeRowsConfig) -> Path:
    """Write both files and return their directory; they share no fact sheet with each other or with what is trained on."""
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    sizes = {"train": config.rows, "heldout": config.heldout}
    for row in generate_rows("pretrain_heldout", seed=config.seed, count=sys.maxsize):
        if "\nGuest " in row["text"]:  # a dialogue, which SFT and PPO learn as well
            continue
        facts = tuple(dict(find_claims(row["text"])).items())
        part = "train" if fold(facts, FOLDS) in FIT_FOLDS else "heldout"
        if len(found[part]) < sizes[part]:
            found[part].append(json.dumps(unfinished_text(row["text"])))
        elif all(len(lines) == sizes[name] for name, lines in found.items()):
            break
    for part, lines in found.items():
        write_text(Path(config.output) / f"{part}.jsonl", "\n".join(lines) + "\n")
    return Path(config.output)


def unfinished_text(text: str) -> dict[str, str]:
    """A letter or a guide's entry up to its last sentence about a fact, and as the label the topic of that sentence.

    The facts stand there a second time (in an entry a third time), in another order; the last one is the one that has
    not come again yet, so that the label follows from all that was said, and from no single word.
    """
    last = list(CLAIM.finditer(text))[-1]
    topic, _ = find_claims(text[last.start() :])[0]
    return {"text": text[: last.start()].removesuffix("The ").rstrip(), "label": topic}


@dataclass(frozen=True)
class ProbeConfig(Settings):
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
    ridge: PositiveFloat = 0.01
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (
        Rule("baseline", lambda c: c.baseline not in c.models, "{self.baseline!r} is not among the models"),
        Rule("data", lambda c: not c.data.evaluates, "has no evaluation: name the rows that are judged"),
    )


class Probe(NamedTuple):
    """A linear layer over standardized states."""

    mean: np.ndarray  # of the states that it was fitted on, [D]
    scale: np.ndarray  # their deviation, [D]
    weight: np.ndarray  # [D, C]
    bias: np.ndarray  # share of each class among the rows of the fit, [C]

    def classify(self, states: np.ndarray) -> np.ndarray:
        """The class with the highest output for each row; states [N, D] -> [N]."""
        return ((states - self.mean) / self.scale @ self.weight + self.bias).argmax(1)


def fit_probe(states: np.ndarray, classes: np.ndarray, *, count: int, ridge: float) -> Probe:
    """The ridge classifier: least squares from standardized states Z [N, D] to the indicators Y [N, count] of the classes.

    weight = argmin ||Z weight - (Y - mean Y)||^2 / N + ridge ||weight||^2 = (Z'Z / N + ridge I)^-1 Z'(Y - mean Y) / N

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
    """
    refuse_mixture(config.data)
    for source in config.models.values():
        directory = find_directory(source)
        base = find_base(directory) if is_adapter(directory) else directory
        if is_external_type(read_config(base)) or architecture_of(source) != "decoder":
            raise UserError(f"{source}: a probe reads the states of decoders of this library's own families alone")
    parts = {name: _prepare(config, name) for name in config.models}
    rows = {name: [[each.row_id for each in part.examples] for part in both] for name, both in parts.items()}
    raise_all(
        f"{config.models[name]}: its tokenizer drops other rows than that of {config.baseline}; take those rows out"
        for name, found in rows.items()
        if found != rows[config.baseline]
    )
    right = {name: _judge(config, source, *parts[name]) for name, source in config.models.items()}
    fit, judged = parts[config.baseline]
    classes, held_out_classes = (np.array([example.labels[0] for example in part.examples]) for part in (fit, judged))
    results = {
        "baseline": config.baseline,
        "rows": len(classes),
        "held_out_rows": len(held_out_classes),
        "labels": list(fit.names.values()),
        "majority": float((held_out_classes == np.bincount(classes).argmax()).mean()),
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


def _prepare(config: ProbeConfig, name: str) -> tuple[LabeledExamples, LabeledExamples]:
    """Rows of the fit and rows to judge, as token ids of one model."""
    tokenizer = load_tokenizer(config.models[name])
    form = TaskFormat("classification", max_length=config.data.max_length)
    fit = prepare_labeled(config.data, form, tokenizer)
    judged = prepare_labeled(config.data, form, tokenizer, "evaluation", names=fit.names)
    if name == config.baseline:
        print_tally("data.train", fit.counts)
        print_tally("data.evaluation", judged.counts)
        if twice := judged.counts.trained_on:
            raise UserError(
                f"{len(twice)} held-out texts, the first {twice[0]}, are among the rows of the fit; take them out"
            )
    return fit, judged


def _judge(config: ProbeConfig, source: str, fit: LabeledExamples, judged: LabeledExamples) -> list[list[float]]:
    """1.0 for each row that the probe classifies rightly, else 0.0: of the fit, and held out."""
    model = load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    states, classes = [], []
    for part in (fit, judged):
        documents = [example.documents[0] for example in part.examples]
        names = [(example.row_id, len(ids)) for example, ids in zip(part.examples, documents, strict=True)]
        check_lengths(model, names, "lower data.max_length")
        states.append(pooled_states(model, documents, config.pooling))
        classes.append(np.array([example.labels[0] for example in part.examples]))
    probe = fit_probe(states[0], classes[0], count=len(fit.names), ridge=config.ridge)
    print(f"probe: {source}", file=sys.stderr)
    return [(probe.classify(each) == known).astype(float).tolist() for each, known in zip(states, classes, strict=True)]

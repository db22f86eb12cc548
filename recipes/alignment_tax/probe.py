"""Linear probes on frozen models' states, and texts of the hotel world for them: two stages of this recipe.

Only the linear layer is fitted; the model is read, never trained. Every model gets the same rows and the same settings.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from alignment.analysis.probe import prepare_parts, probe_outcomes, read_probe_rows
from alignment.data.config import DataConfig
from alignment.data.tasks import LabeledExamples
from alignment.errors import raise_all
from alignment.files import write_json, write_text
from alignment.hotel_world.datasets import FOLDS, generate_rows
from alignment.hotel_world.grammar import CLAIM, find_claims, fold
from alignment.loading import best_device, load_model, load_tokenizer
from alignment.models.weights_config import WeightsConfig
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings
from alignment.statistics.winrate import accuracy_gain, win_rate

FIT_FOLDS = range(60, 63)  # of the folds of held-out pretraining text; the others are of the rows that are judged
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
        models: name -> directory or Hub name of a decoder.
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


def run(config: ProbeConfig) -> Path:
    """Fit and judge a probe on every model; write `results.json` and return its path.

    The results hold, for each model, the share of held-out rows that its probe classifies rightly with Wilson's 95 %
    interval, the difference from the baseline's with the interval for pairs, and the share on the rows of the fit; and
    `majority`, the share of held-out rows that have the most frequent label of the fit.
    """
    parts = {
        name: prepare_parts(config.data, load_tokenizer(source), quiet=name != config.baseline)
        for name, source in config.models.items()
    }
    rows = {name: [[each.row_id for each in part.examples] for part in both] for name, both in parts.items()}
    raise_all(
        f"{config.models[name]}: its tokenizer drops other rows than that of {config.baseline}; take those rows out"
        for name, found in rows.items()
        if found != rows[config.baseline]
    )
    right = {name: _judge(config, source, parts[name]) for name, source in config.models.items()}
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


def _judge(config: ProbeConfig, source: str, parts: tuple[LabeledExamples, LabeledExamples]) -> list[list[float]]:
    """1.0 for each row that the probe on the last layer classifies rightly, else 0.0: of the fit, and held out."""
    model = load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    fit, judged = (read_probe_rows(model, part, config.pooling) for part in parts)
    states, classes = (fit.states[-1], judged.states[-1]), (fit.classes, judged.classes)
    outcomes = probe_outcomes(states, classes, count=len(parts[0].names), ridge=config.ridge)
    print(f"probe: {source}", file=sys.stderr)
    return [each.tolist() for each in outcomes]

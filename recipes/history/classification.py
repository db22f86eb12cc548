"""What the systems that classify reviews share: texts, reading them as a language model, fitting on few labels, judging."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from alignment.files import write_json
from alignment.pipeline.stages import load_stage_file
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from alignment.statistics.winrate import win_rate

HERE = Path(__file__).parent
reviews: Any = load_stage_file(HERE / "reviews.py")
descent: Any = load_stage_file(HERE / "descent.py")


@dataclass(frozen=True)
class ClassificationConfig(Settings):
    """Settings of one system on reviews.

    Attributes:
        output: directory of `results.json`.
        width: of all layers; the recipe's widths give the systems the same number of parameters.
        general, unlabeled: general texts and hotel reviews that are read without labels.
        labeled, held_out: reviews with labels, to fit and to judge on.
        general_steps, review_steps: of reading, first the one, then the other.
        steps: of fitting on labels.
        batch_size: texts of a step.
        reading_rate, learning_rate: highest learning rates of reading and of fitting.
        seed: of texts and weights.
    """

    output: str
    width: PositiveInt
    general: PositiveInt = 5000
    unlabeled: PositiveInt = 2000
    labeled: PositiveInt = 200
    held_out: PositiveInt = 500
    general_steps: PositiveInt = 600
    review_steps: PositiveInt = 150
    steps: PositiveInt = 150
    batch_size: PositiveInt = 32
    reading_rate: PositiveFloat = 5e-3
    learning_rate: PositiveFloat = 2e-3
    seed: NonNegativeInt = 0


class Corpus(NamedTuple):
    """Texts as word numbers; each of the labeled parts is (texts [N, T], labels [N])."""

    vocabulary: int
    general: list[Tensor]
    unlabeled: list[Tensor]
    labeled: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


def build_corpus(config: ClassificationConfig) -> Corpus:
    """The texts of one seed, which are the same for all systems."""
    rng = Random(f"{config.seed}/reviews")
    general = reviews.general_texts(config.seed, config.general)
    unlabeled = [reviews.write_review(rng, verdict=0.8).words for _ in range(config.unlabeled)]
    labeled = [reviews.write_review(rng, adjectives=reviews.FAMILIAR) for _ in range(config.labeled)]
    held_out = [reviews.write_review(rng) for _ in range(config.held_out)]
    vocabulary = reviews.Vocabulary([*general, *unlabeled])

    def part(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return pad([torch.tensor(vocabulary.encode(row.words)) for row in rows]), torch.tensor(
            [row.label for row in rows]
        )

    texts = ([torch.tensor(vocabulary.encode(words)) for words in those] for those in (general, unlabeled))
    return Corpus(len(vocabulary), *texts, part(labeled), part(held_out))


def pad(rows: list[Tensor]) -> Tensor:
    """Texts as a rectangle [B, T], zeros on the right."""
    return pad_sequence(rows, batch_first=True)


def read(model: Any, corpus: Corpus, config: ClassificationConfig, **fine_tuning: Any) -> float:
    """Train a language model on general text, then on the unlabeled reviews; the loss on those at the end, nats per word.

    Args:
        model: has `loss(tokens)`.
        fine_tuning: arguments of `descend` for the reviews, in place of the usual ones.
    """
    rng = Random(f"{config.seed}/reading")

    def loss_of(_: int, texts: list[Tensor]) -> Tensor:
        return model.loss(pad(rng.sample(texts, config.batch_size)))

    usual = {"groups": [{"params": [*model.parameters()]}], "learning_rate": config.reading_rate}
    model.train()
    descent.descend(partial(loss_of, texts=corpus.general), steps=config.general_steps, **usual)
    return descent.descend(partial(loss_of, texts=corpus.unlabeled), steps=config.review_steps, **(usual | fine_tuning))


def fit(
    classifier: nn.Module,
    corpus: Corpus,
    config: ClassificationConfig,
    before_step: Callable[[int], None] = lambda _: None,
    **own: Any,
) -> nn.Module:
    """Fit a classifier to the labeled reviews; `own` are arguments of `descend` in place of the usual ones."""
    rng = Random(f"{config.seed}/fitting")
    texts, labels = corpus.labeled

    def loss_of(step: int) -> Tensor:
        before_step(step)
        rows = rng.sample(range(len(labels)), min(config.batch_size, len(labels)))
        return F.cross_entropy(classifier(texts[rows]), labels[rows])

    trained = [each for each in classifier.parameters() if each.requires_grad]
    settings = {"groups": [{"params": trained}], "learning_rate": config.learning_rate, **own}
    classifier.train()
    descent.descend(loss_of, steps=config.steps, **settings)
    return classifier.eval()


def run(config: ClassificationConfig, learn: Callable[[Corpus, ClassificationConfig], Mapping[str, Any]]) -> Path:
    """Let a system learn in its own way, judge it on the held-out reviews, write `results.json` and return its path.

    Args:
        learn: (corpus, config) -> results; those at `variants` are classifiers by name, of which the last one is the system.
    """
    torch.manual_seed(config.seed)
    corpus = build_corpus(config)
    started = time.process_time()
    results = dict(learn(corpus, config))
    results["seconds"] = time.process_time() - started
    variants: dict[str, nn.Module] = results.pop("variants")
    results["variants"] = {name: judge(classifier, corpus) for name, classifier in variants.items()}
    results["parameters"] = descent.parameter_count([*variants.values()][-1])
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


@torch.no_grad()
def judge(classifier: nn.Module, corpus: Corpus) -> dict[str, Any]:
    """Share of the held-out reviews that are classified rightly, with its interval."""
    texts, labels = corpus.held_out
    return asdict(win_rate((classifier(texts).argmax(-1) == labels).float().tolist()))

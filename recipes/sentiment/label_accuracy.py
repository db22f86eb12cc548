"""Accuracy of a reward model's score as a classifier of single labeled responses: a stage of this recipe."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from alignment.data.config import DataConfig
from alignment.errors import raise_all
from alignment.files import write_json
from alignment.judging.inputs import read_records
from alignment.loading import best_device
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import load_reward_model
from alignment.settings import Settings
from alignment.statistics.winrate import win_rate


@dataclass(frozen=True)
class LabelAccuracyConfig(Settings):
    """Settings of the accuracy on labeled responses.

    Attributes:
        reward_model: directory; of several the sum of the scores is taken, each divided by its deviation on `fit`.
        fit: labeled responses that the threshold is fitted on, usually the training rows; comparisons are two of them each.
        data: labeled responses that are judged.
        output: directory of `results.json`.
        weights: type that the reward models are held and compute in; auto: the checkpoint's.
    """

    reward_model: str | list[str]
    fit: DataConfig
    data: DataConfig
    output: str
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def run(config: LabelAccuracyConfig) -> Path:
    """Judge responses desirable whose score is above a threshold; write `results.json` and return its path.

    The results hold the share of right verdicts with its 95 % interval, that on the rows of the fit, the threshold, and
    the share of all (desirable, undesirable) couples whose scores are in order (the area under the ROC curve).
    """
    fit, judged = (read_records(data, "labels") for data in (config.fit, config.data))
    sources = (config.fit.train, fit), (config.data.train, judged)
    raise_all(
        f"{source}: all {len(rows)} responses have the same label, and a threshold needs both"
        for source, rows in sources
        if len({row.desirable for row in rows}) < 2
    )
    models = [config.reward_model] if isinstance(config.reward_model, str) else config.reward_model
    fit_scores, scores = torch.zeros(len(fit)), torch.zeros(len(judged))
    for source in models:
        model = load_reward_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
        ours, theirs = (model.score([(row.prompt, row.response) for row in rows]) for rows in (fit, judged))
        fit_scores, scores = fit_scores + ours / ours.std(), scores + theirs / ours.std()
    fit_labels, labels = (torch.tensor([row.desirable for row in rows]) for rows in (fit, judged))
    threshold = best_threshold(fit_scores, fit_labels)
    results = {
        "accuracy": asdict(win_rate(((scores > threshold) == labels).double().tolist())),
        "fit_accuracy": asdict(win_rate(((fit_scores > threshold) == fit_labels).double().tolist())),
        "threshold": threshold,
        "ordered_couples": ordered_couples(scores, labels),
    }
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def best_threshold(scores: Tensor, labels: Tensor) -> float:
    """The threshold with most right verdicts, `score > threshold` meaning True; scores and both labels [n]."""
    values, order = scores.double().sort()
    right = labels.sum() + torch.cat([torch.zeros(1), (1 - 2 * labels[order].double()).cumsum(0)])
    possible = torch.cat([torch.ones(1), (values[1:] > values[:-1]).double(), torch.ones(1)]).bool()
    cut = int(right.masked_fill(~possible, -1).argmax())  # so many of the lowest scores are judged False
    edges = torch.cat([values[:1] - 1, (values[1:] + values[:-1]) / 2, values[-1:] + 1])
    return float(edges[cut])


def ordered_couples(scores: Tensor, labels: Tensor) -> float:
    """Share of the couples of a True and a False row in which the True one has the higher score; equal ones count half."""
    low = scores[~labels].double().sort().values
    high = scores[labels].double()
    below, up_to = torch.searchsorted(low, high), torch.searchsorted(low, high, right=True)
    return float((below + up_to).double().mean() / (2 * len(low)))

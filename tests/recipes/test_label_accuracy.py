"""Accuracy of scores on single labeled responses: the threshold, the couples in order, a run on a checkpoint."""

import json
from typing import Any

import pytest
import torch

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.pipeline.stages import load_stage_file
from alignment.reward_model import RewardModel
from tests.conftest import write_lines

label_accuracy: Any = load_stage_file(packaged_folder("recipes") / "sentiment/label_accuracy.py")
LabelAccuracyConfig, best_threshold = label_accuracy.LabelAccuracyConfig, label_accuracy.best_threshold

WORTH = {"fine": 2.0, "good": 3.0, "so so": 1.0, "bad": -1.0, "dull": 0.0}


@pytest.fixture
def scores_by_word(monkeypatch):
    """Scores of the words of WORTH; twice as high from a directory named `twice`."""

    class Loaded(RewardModel):
        def score(self, texts, micro_batch_tokens=16_384, ended=None):
            return torch.tensor([self.factor * WORTH[response] for _, response in texts])

    def load(source, *settings, **options):
        model = object.__new__(Loaded)
        object.__setattr__(model, "factor", 2.0 if source == "twice" else 1.0)
        return model

    monkeypatch.setattr(label_accuracy, "load_reward_model", load)


def rows(path, labels):
    lines = [{"prompt": "Review:", "completion": word, "label": label} for word, label in labels]
    write_lines(path, lines)
    return DataConfig(str(path))


def test_the_threshold_lies_in_the_middle_of_the_gap_that_errs_least():
    scores, labels = torch.tensor([0.0, 1.0, 2.0, 4.0, 5.0]), torch.tensor([False, True, False, True, True])
    assert best_threshold(scores, labels) == 0.5  # errs on the score 2; 3.0, which errs on the score 1, is as good
    assert best_threshold(scores[2:], labels[2:]) == 3.0
    assert best_threshold(scores[:2], ~labels[:2]) in (-1.0, 2.0)  # upside down: one verdict for all errs least


@pytest.mark.parametrize("seed", range(40))
def test_threshold_and_couples_agree_with_trying_all(seed):
    torch.manual_seed(seed)
    scores = torch.randint(0, 4, (8,)).float()
    labels = torch.rand(8) > 0.5
    labels[:2] = torch.tensor([True, False])
    right = ((scores > best_threshold(scores, labels)) == labels).sum()
    assert right == max(((scores > cut) == labels).sum() for cut in (-0.5, 0.5, 1.5, 2.5, 3.5))
    lead = scores[labels][:, None] - scores[~labels]
    assert label_accuracy.ordered_couples(scores, labels) == pytest.approx(float((lead.sign() + 1).mean() / 2))


def test_held_out_rows_are_judged_by_the_threshold_of_the_others(tmp_path, scores_by_word):
    fit = rows(tmp_path / "fit.jsonl", [("good", True), ("fine", True), ("dull", False), ("bad", False)])
    data = rows(tmp_path / "data.jsonl", [("so so", False), ("good", True), ("bad", True), ("dull", False)])
    for source in ("once", "twice", ["once", "twice"]):
        path = label_accuracy.run(LabelAccuracyConfig(source, fit, data, str(tmp_path / "out")))
        found = json.loads(path.read_text())
        # The threshold is between dull (0) and fine (2), at 1 times a positive scale: `so so` is on it, so not above.
        assert (found["accuracy"]["wins"], found["accuracy"]["n"]) == (3, 4)
        assert found["fit_accuracy"]["rate"] == 1.0
        assert found["ordered_couples"] == 0.5  # good above both, bad above neither


def test_rows_of_one_label_give_no_threshold(tmp_path, scores_by_word):
    fit = rows(tmp_path / "fit.jsonl", [("good", True), ("fine", True)])
    with pytest.raises(UserError, match=r"fit.jsonl: all 2 responses have the same label"):
        label_accuracy.run(LabelAccuracyConfig("once", fit, fit, str(tmp_path / "out")))

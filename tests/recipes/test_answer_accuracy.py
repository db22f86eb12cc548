"""Accuracy of answers: right and wrong ones counted, gains over a baseline by hand, prompts without an answer refused."""

import json
from typing import Any

import pytest

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import Generation
from alignment.pipeline.stages import load_stage_file
from alignment.statistics.winrate import accuracy_gain, win_rate
from tests.conftest import write_lines

answer_accuracy: Any = load_stage_file(packaged_folder("recipes") / "verifiable/answer_accuracy.py")
AnswerAccuracyConfig, run = answer_accuracy.AnswerAccuracyConfig, answer_accuracy.run


def write_prompts(path, rows):
    write_lines(path, rows)
    return DataConfig(train=str(path))


def test_gain_by_hand():
    # 3 answers that only ours gets right, 1 that only the baseline does, 4 that both or neither do
    gain = accuracy_gain([1, 1, 1, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0])
    assert gain["difference"] == pytest.approx(2 / 8)
    rate = win_rate([1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    assert gain["low"] == pytest.approx(2 * rate.low - 1) and gain["high"] == pytest.approx(2 * rate.high - 1)


def test_models_answer_greedily_and_sampled(checkpoints, tmp_path):
    policy = checkpoints["llama"]
    data = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(6)])
    config = AnswerAccuracyConfig(
        {"SFT": policy, "again": policy}, "SFT", data, str(tmp_path / "out"), max_new_tokens=4
    )
    results = json.loads(run(config).read_text())
    assert results["prompts"] == 6
    for found in results["models"].values():
        for decoding in ("greedy", "sampled"):
            assert found[decoding]["accuracy"]["n"] == 6 and found[decoding]["gain"]["difference"] == 0
    assert results["models"]["SFT"] == results["models"]["again"]
    assert [row["answer"] for row in results["samples"]] == [1, 2, 3, 4, 5, 6]


def test_right_answers_are_counted(checkpoints, tmp_path, monkeypatch):
    found = iter([(["#### 1", "#### 5"], ["#### 1", "it is 2"]), (["#### 0", "#### 0"], ["#### 1", "#### 0"])])

    def sample_responses(source, prompts, samplings, **settings):
        assert [sampling.temperature for sampling in samplings] == [0, 1]
        return [Generation(texts, [[5], [5, 6]], [], [True, False]) for texts in next(found)]

    monkeypatch.setattr(answer_accuracy, "sample_responses", sample_responses)
    data = write_prompts(tmp_path / "p.jsonl", [{"prompt": "0+1=", "answer": "1"}, {"prompt": "1+1=", "answer": "2"}])
    policy = checkpoints["llama"]
    config = AnswerAccuracyConfig({"A": policy, "B": policy}, "B", data, str(tmp_path / "out"))
    models = json.loads(run(config).read_text())["models"]
    assert models["A"]["greedy"]["accuracy"]["rate"] == 0.5 and models["A"]["sampled"]["accuracy"]["rate"] == 1
    assert models["B"]["greedy"]["accuracy"]["rate"] == 0 and models["B"]["sampled"]["accuracy"]["rate"] == 0.5
    assert models["A"]["greedy"]["gain"]["difference"] == 0.5 and models["A"]["sampled"]["gain"]["difference"] == 0.5
    assert models["A"]["greedy"]["ended_share"] == 0.5 and models["A"]["greedy"]["response_tokens"] == 1.5


def test_prompts_without_an_answer_are_refused_all_at_once(checkpoints, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "none"}, {"prompt": "c", "answer": "3"}]
    policy = checkpoints["llama"]
    config = AnswerAccuracyConfig({"A": policy}, "A", write_prompts(tmp_path / "p.jsonl", rows), str(tmp_path / "out"))
    with pytest.raises(UserError) as error:
        run(config)
    assert str(error.value).count("column 'answer'") == 2 and "holds no number" in str(error.value)

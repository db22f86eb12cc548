"""Evaluations from config to results.json, on tiny checkpoints."""

import json

import pytest

from alignment.data.sources import DataConfig
from alignment.errors import UserError
from alignment.evaluation.run import WinRateConfig, run_winrate


@pytest.fixture
def config_of(tmp_path, checkpoints, stage):
    """A comparison on one short and one very long prompt, the latter cut to so many tokens."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Guest:", "hello guest " * 400)))

    def make(max_length: int, **changes) -> WinRateConfig:
        settings = {
            "models": {"one": checkpoints["llama"], "two": checkpoints["gpt2"]},
            "baseline": "one",
            "judge": "reward_model",
            "reward_model": str(stage("reward") / "model"),
            "data": DataConfig(train=str(path), max_length=max_length),
            "output": str(tmp_path / "out"),
            "max_new_tokens": 4,
        }
        return WinRateConfig(**{**settings, **changes})

    return make


def test_prompts_longer_than_the_models_are_cut_for_policies_reference_and_judge(config_of):
    results = json.loads(run_winrate(config_of(64)).read_text())
    assert results["models"]["two"]["win_rate"]["n"] == 2
    assert {"kl", "proxy"} <= results["models"]["two"].keys()


def test_without_room_for_the_response_the_way_out_is_said(config_of):
    with pytest.raises(UserError, match="lower max_new_tokens or shorten the prompts"):
        run_winrate(config_of(1024))

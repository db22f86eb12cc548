"""Recipes that are studies: what is compared differs in the one thing that is studied, and every stage of them runs."""

import json
from pathlib import Path

import pytest

from alignment.algorithms.ppo import PPOConfig
from alignment.pipeline.run import plan, run_recipe

SUMS = [
    "sums.rows.pretrain=200", "sums.rows.pretrain_heldout=8", "sums.rows.demonstrations=64", "sums.rows.prompts=16",
    "sums.rows.prompts_eval=8", "pretrain.model.hidden_size=32", "pretrain.model.intermediate_size=32",
    "pretrain.model.num_hidden_layers=1", "pretrain.model.num_attention_heads=2",
    "pretrain.model.num_key_value_heads=2", "pretrain.training.max_steps=4", "sft.training.max_steps=2",
    "ppo.training.max_steps=3", "ppo.training.batch_size=8", "grpo.training.max_steps=3", "grpo.training.batch_size=2",
]  # fmt: skip


def configs_of(name: str, directory: Path) -> dict:
    return {stage.name: stage.config for stage in plan(name, directory)[1]}


def responses_per_iteration(config: PPOConfig) -> int:
    return config.training.batch_size * config.responses_per_prompt


def read_results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())


# --- verifiable -------------------------------------------------------------------------------------------------------


def test_sums_are_learned_from_the_check_alone_with_as_many_responses(tmp_path):
    configs = configs_of("verifiable", tmp_path)
    grpo, ppo = configs["grpo"], configs["ppo"]
    assert responses_per_iteration(grpo) == responses_per_iteration(ppo) == 128
    assert grpo.training.max_steps == ppo.training.max_steps and grpo.data == ppo.data
    for config in (grpo, ppo):
        assert config.reward_model is None and [spec.answer for spec in config.rewards] == ["gsm8k"]
        assert config.data.train != configs["evaluation"].data.train


@pytest.mark.slow
def test_every_stage_of_the_sums_runs(tmp_path):
    run_recipe("verifiable", tmp_path, SUMS)
    models = read_results(tmp_path / "evaluation")["models"]
    assert models.keys() == {"SFT", "GRPO", "PPO"} and models["SFT"]["sampled"]["accuracy"]["n"] == 8
    series = read_results(tmp_path / "study")["series"]
    assert len(series["PPO"]) == len(series["GRPO"]) == 3
    assert [point["name"] for point in series["accuracy on held-out sums"]] == ["SFT", "GRPO", "PPO"]


@pytest.mark.slow
def test_checked_answers_teach_sums(tmp_path):
    assert run_recipe("verifiable", tmp_path, check=True)

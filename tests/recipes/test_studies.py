"""Recipes that are studies: what is compared differs in the one thing that is studied, and every stage of them runs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from alignment.algorithms.ppo import PPOConfig
from alignment.pipeline.run import plan, run_recipe

PREFERENCES = ("sigmoid", "ipo", "kto", "orpo", "simpo", "hinge", "robust", "cpo", "apo_zero", "nca_pair", "bco")
NAMED = ("sigmoid", "IPO", "KTO", "ORPO", "SimPO")
WORLD = [
    "world.rows.pretrain=60", "world.rows.pretrain_heldout=4", "world.rows.demonstrations=16",
    "world.rows.comparisons=64", "world.rows.comparisons_heldout=8", "world.rows.prompts=16",
    "world.rows.prompts_eval=8", "pretrain.vocabulary=300", "pretrain.model.hidden_size=32",
    "pretrain.model.intermediate_size=32", "pretrain.model.num_hidden_layers=1", "pretrain.training.max_steps=2",
    "pretrain.data.max_length=128", "sft.training.max_steps=1", "evaluation.max_new_tokens=4",
]  # fmt: skip
SUMS = [
    "sums.rows.pretrain=200", "sums.rows.pretrain_heldout=8", "sums.rows.demonstrations=64", "sums.rows.prompts=16",
    "sums.rows.prompts_eval=8", "pretrain.model.hidden_size=32", "pretrain.model.intermediate_size=32",
    "pretrain.model.num_hidden_layers=1", "pretrain.model.num_attention_heads=2",
    "pretrain.model.num_key_value_heads=2", "pretrain.training.max_steps=4", "sft.training.max_steps=2",
    "ppo.training.max_steps=3", "ppo.training.batch_size=8", "grpo.training.max_steps=3", "grpo.training.batch_size=2",
    "right_1.threshold=null", "right_2.threshold=null",  # no answer of so short a training is right
]  # fmt: skip


def configs_of(name: str, directory: Path) -> dict:
    return {stage.name: stage.config for stage in plan(name, directory)[1]}


def differences(one: object, other: object) -> set[str]:
    """Settings of two runs that differ, directories of their own left out."""
    ours, theirs = asdict(one), asdict(other)  # pyright: ignore[reportArgumentType]
    return {key for key in ours if ours[key] != theirs[key]} - {"output"}


def short(stages, steps: int = 1) -> list[str]:
    """Overrides for a few updates of each stage."""
    return [f"{name}.training.{key}" for name in stages for key in (f"max_steps={steps}", "batch_size=4")]


def responses_per_iteration(config: PPOConfig) -> int:
    return config.training.batch_size * config.responses_per_prompt


def read_results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())


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
    policies = ["SFT", "GRPO", "PPO", "expert iteration"]
    assert list(models) == policies and models["SFT"]["sampled"]["accuracy"]["n"] == 8
    series = read_results(tmp_path / "study")["series"]
    assert len(series["PPO"]) == len(series["GRPO"]) == 3
    assert [point["name"] for point in series["accuracy on held-out sums"]] == policies


def test_the_judge_that_stops_has_other_pairs_than_the_proxy(tmp_path):
    configs = configs_of("overoptimization", tmp_path)
    assert configs["ppo"].reward_model == f"{configs['proxy'].output}/model" == configs["best_of_n"].reward_model
    assert configs["proxy"].data.train.endswith("pairs/proxy.jsonl")
    assert configs["judge"].data.train.endswith("pairs/judge.jsonl")
    assert differences(configs["ppo_stopped"], configs["ppo"]) == {"held_out", "training"}
    assert configs["ppo"].held_out.reward_model == f"{configs['judge'].output}/model"
    assert configs["ppo_stopped"].held_out.reward_model == f"{configs['later_judge'].output}/model"
    assert configs["later_judge"].data.train[0] == configs["judge"].data.train
    assert configs["later_judge"].data.train[1].startswith(configs["later_pairs"].output)
    assert configs["later_pairs"].data.train.endswith("pairs/rest.jsonl")
    names = [name for name in configs if name.startswith("dpo_")]
    assert all(configs[name].data.train == configs["proxy"].data.train for name in names)
    assert all(differences(configs[name], configs[names[0]]) <= {"beta"} for name in names)


@pytest.mark.slow
def test_every_stage_of_overoptimization_runs(tmp_path):
    small = short(["proxy", "judge", "later_judge", "dpo_1", "dpo_0_3", "dpo_0_1", "dpo_0_03"])
    small += short(["ppo", "ppo_stopped"], 4)
    for name in ("ppo", "ppo_stopped"):
        small += [f"{name}.max_new_tokens=4", f"{name}.data.evaluation_share=0.3"]
    small += ["best_of_n.best_of_n.samples=4", "best_of_n.best_of_n.max_new_tokens=4", "study.series.PPO.smooth=3"]
    run_recipe("overoptimization", tmp_path, [*WORLD, *small])
    study = read_results(tmp_path / "study")
    assert study["peaks"].keys() == {"PPO", "best of n", "DPO"} and study["laws"].keys() == {"PPO", "best of n"}
    assert [point["kl"] for point in study["series"]["best of n"]] == pytest.approx([0.0, 0.193, 0.636], abs=1e-3)


def test_penalty_and_mix_are_all_that_differs(tmp_path):
    configs = configs_of("alignment_tax", tmp_path)
    base = configs["beta_0_2"]
    betas = [config for name, config in configs.items() if name.startswith("beta_")]
    gammas = [config for name, config in configs.items() if name.startswith("gamma_")]
    assert all(differences(config, base) <= {"kl_coef"} for config in betas)
    mix = {"pretrain", "pretrain_coef", "pretrain_batch_size"}
    assert all(differences(config, base) <= mix and config.kl_coef == base.kl_coef for config in gammas)
    assert configs["probe"].models == configs["benchmarks"].models == configs["evaluation"].models
    assert len({config.kl_coef for config in betas}) == len(betas) >= 3
    assert len({config.pretrain_coef for config in gammas}) == len(gammas) >= 3


@pytest.mark.slow
def test_every_stage_of_the_alignment_tax_runs(tmp_path):
    names = ["beta_0_2", "beta_0_4", "beta_0_8", "gamma_0_05", "gamma_0_1", "gamma_0_2", "gamma_0_5"]
    small = [*short(["reward", *names]), *(f"{name}.max_new_tokens=4" for name in names)]
    run_recipe("alignment_tax", tmp_path, [*WORLD, *small, "probe_rows.rows=200", "probe_rows.heldout=40"])
    probe = read_results(tmp_path / "probe")
    assert len(probe["models"]) == 9 and probe["held_out_rows"] == 40 and len(probe["labels"]) == 10
    tasks = read_results(tmp_path / "benchmarks")["tasks"]
    assert tasks.keys() == {"other_text", "last_word"} and len(tasks["other_text"]["differences"]) == 8
    study = read_results(tmp_path / "study")
    rates = [probe["models"][point["name"]]["accuracy"]["rate"] for point in study["series"]["gamma"]]
    assert [point["probe accuracy"] for point in study["series"]["gamma"]] == rates
    assert [point["name"] for point in study["series"]["gamma"]] == [
        "beta 0.2",
        *(f"gamma {x}" for x in (0.05, 0.1, 0.2, 0.5)),
    ]


def test_methods_have_the_same_budget(tmp_path):
    configs = configs_of("methods", tmp_path)
    online = [config for config in configs.values() if isinstance(config, PPOConfig)]
    assert {responses_per_iteration(config) * config.training.max_steps for config in online} == {1920}
    assert len({config.advantages for config in online}) == len(online) == 6
    assert configs["evaluation"].best_of["best of 16"].reward_model == configs["ppo"].reward_model
    assert configs["dpo"].data.max_rows * 2 == configs["kto"].data.max_rows * 2 == 1920


def test_each_detail_is_switched_off_alone(tmp_path):
    configs = configs_of("details", tmp_path)
    changed = {
        name: differences(config, configs["ppo"])
        for name, config in configs.items()
        if isinstance(config, PPOConfig) and name != "ppo"
    }
    pairs = {"no_clip": {"clip_range", "value_clip_range"}}
    pairs |= {name: {"optim", "value_optim"} for name in ("adam_eps", "no_annealing")}
    assert len(changed) >= 10
    for name, found in changed.items():
        assert found == pairs.get(name, found) and len(found) == len(pairs.get(name, "1")), name
    assert len({tuple(sorted(found)) for found in changed.values()}) >= len(changed) - 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["methods", "details"])
def test_every_method_and_every_detail_runs(name, tmp_path):
    configs = configs_of(name, tmp_path)
    trained = [stage for stage in configs if hasattr(configs[stage], "training") and stage not in ("pretrain", "sft")]
    online = [stage for stage in trained if isinstance(configs[stage], PPOConfig)]
    small = [*short(trained), *(f"{stage}.max_new_tokens=4" for stage in online)]
    if name == "methods":
        small += ["best_of_n.best_of_n.samples=2", "best_of_n.best_of_n.max_new_tokens=4"]
    run_recipe(name, tmp_path, [*WORLD, *small])
    models = read_results(tmp_path / "evaluation")["models"]
    if name == "methods":
        assert models["best of 16"]["win_rate"]["n"] == 8
        assert models["best of 16"]["proxy"] >= max(models[each]["proxy"] for each in ("SFT", "DPO"))
    assert len(models) >= 1 + len(online) and all("gold" in found for found in models.values())
    assert (tmp_path / "report/report.html").is_file()


def test_losses_are_compared_at_equal_budget(tmp_path):
    recipe, stages = plan("preferences", tmp_path)
    configs = {stage.name: stage.config for stage in stages}
    losses = [configs[name] for name in PREFERENCES]
    assert [config.loss for config in losses] == list(PREFERENCES)
    assert {name for name, config in configs.items() if type(config) is type(losses[0])} == set(PREFERENCES)
    equal = {(each.policy, each.data.train, each.training.max_steps, each.training.seed) for each in losses}
    assert len(equal) == 1
    for config in losses:  # a pair is two rows of labels
        assert config.training.batch_size == (64 if config.rows == "labels" else 32)
    expected = {each.metric for each in recipe.expect if each.low is not None and each.low >= 0.5}
    assert {f"models.{name}.win_rate.low" for name in NAMED} <= expected


@pytest.mark.slow
def test_every_loss_of_the_comparison_runs(tmp_path):
    run_recipe("preferences", tmp_path, [*WORLD, *short(PREFERENCES, 2), "world.rows.prompts=1"])
    models = read_results(tmp_path / "evaluation")["models"]
    assert len(models) == 1 + len(PREFERENCES)
    assert all({"kl", "win_rate", "pairs", "gold"} <= result.keys() for name, result in models.items() if name != "SFT")
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert 'id="pairs"' in page and all(name in page for name in NAMED)

"""Packaged configs: every one is valid, and the tiny ones run one after another from nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment import load_model
from alignment.config.load import load_config, packaged_folder, packaged_writer
from alignment.errors import UserError
from alignment.pipeline.stages import find_stage
from alignment.training import learning_rate_at

ROOT = packaged_folder("configs")
NAMES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("*/*.yaml") if path.parent.name != "launch"
)
EVALUATIONS = {  # the others are win rates
    "evaluate/reward_tiny": "reward_eval", "evaluate/judge_tiny": "judge", "evaluate/language_tiny": "language",
    "evaluate/behavior_tiny": "behavior", "evaluate/benchmarks_tiny": "benchmarks",
    "evaluate/ratings_tiny": "ratings", "evaluate/gpt2_zero_shot": "benchmarks",
}  # fmt: skip
TINY = [
    "pretrain/tiny", "sft/tiny", "sft/tiny_mixture", "reward/tiny", "dpo/tiny", "ppo/tiny", "online_dpo/tiny",
    "distill/tiny", "evaluate/tiny", "evaluate/judge_model_tiny",
    *(name for name in NAMES if name.startswith(("pretrain/tiny_", "finetune/tiny", "dpo/tiny_", "ppo/tiny_"))),
    "sft/tiny_text_to_text", *(name for name in EVALUATIONS if name.endswith("_tiny")),
]  # fmt: skip


def verb_of(name: str) -> str:
    stage = name.partition("/")[0]
    return EVALUATIONS.get(name, "winrate") if stage == "evaluate" else stage


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_config_is_valid(name):
    assert load_config(find_stage(verb_of(name))[0], name).output.startswith("runs/")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("evaluate/")])
def test_the_learning_rate_peaks_in_nine_updates_of_few_rows(name):
    config: Any = load_config(find_stage(verb_of(name))[0], name)
    for optim in filter(None, (config.optim, getattr(config, "value_optim", None))):
        assert max(learning_rate_at(update, optim, 9) for update in range(1, 10)) == optim.learning_rate


def test_every_stage_has_a_tiny_config_and_one_for_a_real_model():
    for stage in ("pretrain", "sft", "reward", "ppo", "dpo", "evaluate"):
        variants = [name for name in NAMES if name.startswith(f"{stage}/")]
        assert f"{stage}/tiny" in variants
        assert any("llama" in name for name in variants)


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_are_known_to_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 1


def test_the_readme_is_short():
    lines = (ROOT.parent / "README.md").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines]
    assert sum(map(len, words)) <= 1000
    assert max(map(len, lines)) <= 120
    assert sum(map(len, words[: lines.index(next(line for line in lines if line.startswith("make ")))])) <= 150


def test_configs_of_the_8b_and_its_instructions_agree_on_the_launch_file():
    recipe = (packaged_folder("recipes") / "hh/README.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"launch\(\) \{ accelerate launch --config_file (\S+)", recipe)
    for stage in ("sft", "reward", "dpo", "ppo"):
        head = (ROOT / stage / "llama3.1_8b_80gb.yaml").read_text(encoding="utf-8").partition("output:")[0]
        assert f"--config_file {file} " in head


def test_no_two_configs_write_into_one_directory():
    outputs = [yaml.safe_load((ROOT / f"{name}.yaml").read_text())["output"] for name in NAMES]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.slow
def test_tiny_configs_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in TINY:
        config_class, run = find_stage(verb_of(name))
        assert Path(run(load_config(config_class, name))).exists()
    made = {f"runs/tiny/{path.name}" for path in (tmp_path / "runs/tiny").iterdir()}
    assert made == {yaml.safe_load((ROOT / f"{name}.yaml").read_text())["output"] for name in TINY}


def test_a_missing_model_says_which_config_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert packaged_writer("runs/tiny/reward") == "alignment reward reward/tiny"
    with pytest.raises(
        UserError, match="runs/tiny/sft/model: no such model directory; `alignment sft sft/tiny` writes"
    ):
        load_model("runs/tiny/sft/model")


def test_a_reference_that_stands_for_nothing_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("output: out\nreward_model: ${sft}/model\ndata: {train: '${config}/rows.jsonl'}\n")
    with pytest.raises(UserError) as error:
        load_config(find_stage("reward_eval")[0], str(path))
    assert "${config} is not defined outside a recipe; did you mean 'configs'?" in str(error.value)
    assert "${sft} is not defined outside a recipe" in str(error.value)


def test_data_stands_for_the_folder_of_real_data(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path / "real"))
    path = tmp_path / "mine.yaml"
    path.write_text("output: out\nmodel: m\ndata: {train: '${data}/rows.jsonl'}\n")
    assert load_config(find_stage("language")[0], str(path)).data.train == f"{tmp_path}/real/rows.jsonl"

"""Recipes: every one can be planned; those on real data run, cut short here and whole among the slow tests."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from alignment.config.load import packaged_folder
from alignment.data.rows.read import prompt_key, read_rows
from alignment.errors import UserError
from alignment.pipeline.recipe import read_recipe
from alignment.pipeline.run import plan, run_recipe
from alignment.pipeline.stages import load_stage_file

ROOT = Path(__file__).resolve().parents[2]
opening = load_stage_file(packaged_folder("recipes") / "rows.py").opening

RECIPES = sorted(path.parent.name for path in packaged_folder("recipes").glob("*/recipe.yaml"))
POLICIES = ("hh", "stories")  # real data, policies compared in the end
REAL = (*POLICIES, "polite", "rankings", "sentiment")
SHORT = {  # a few updates of everything
    "hh": [
        "sft.training.max_steps=2", "pretrain.training.max_steps=2", "pretrain.model.hidden_size=32",
        "pretrain.model.intermediate_size=64", "pretrain.model.num_hidden_layers=1", "reward.training.max_steps=2",
        "judge.training.max_steps=2", "reward.data.evaluation=null", "judge.data.evaluation=null",
        "reward_accuracy.data.max_rows=20", "judge_accuracy.data.max_rows=20", "dpo.training.max_steps=2",
        "ppo.training.max_steps=1", "ppo.training.batch_size=8", "ppo.max_new_tokens=8",
        "ppo_without_mix.training.max_steps=1", "ppo_without_mix.training.batch_size=8",
        "ppo_without_mix.max_new_tokens=8", "evaluation.data.max_rows=8", "evaluation.text.max_rows=4",
        "evaluation.max_new_tokens=8",
    ],
    "stories": [
        "sft.training.max_steps=2", "reward.training.max_steps=2", "judge.training.max_steps=2",
        "reward.data.evaluation=null", "judge.data.evaluation=null", "reward_accuracy.data.max_rows=20",
        "judge_accuracy.data.max_rows=20", "ppo.training.max_steps=1", "ppo.training.batch_size=8",
        "ppo_without_mix.training.max_steps=1", "ppo_without_mix.training.batch_size=8", "evaluation.data.max_rows=8",
        "evaluation.text.max_rows=4",
    ],
    "polite": [
        "pretrain.training.max_steps=2", "pretrain.data.max_rows=60", "pretrain.vocabulary=300",
        "pretrain.model.hidden_size=32", "pretrain.model.intermediate_size=32", "sft.training.max_steps=1",
        "sft.data.evaluation=null", "dpo.training.max_steps=2", "dpo.data.max_rows=32", "dpo.data.evaluation=null",
    ],
    "rankings": [
        "pretrain.training.max_steps=2", "pretrain.data.max_rows=60", "pretrain.vocabulary=300",
        "pretrain.model.hidden_size=32", "pretrain.model.intermediate_size=32", "ranking.training.max_steps=1",
        "ranking.data.evaluation=null", "plackett_luce.training.max_steps=1", "plackett_luce.data.evaluation=null",
        "pairs.training.max_steps=1", "pairs.data.evaluation=null", "ranking_accuracy.data.max_rows=8",
        "plackett_luce_accuracy.data.max_rows=8", "pairs_accuracy.data.max_rows=8",
    ],
    "sentiment": [
        "masked.training.max_steps=2", "masked.data.max_rows=20", "masked.vocabulary=300", "causal.training.max_steps=2",
        "causal.data.max_rows=20", "causal.vocabulary=300", "encoder.training.max_steps=2", "decoder.training.max_steps=2",
        "encoder.data.evaluation=null", "decoder.data.evaluation=null", "encoder.data.max_rows=64",
        "decoder.data.max_rows=64", "encoder_accuracy.fit.max_rows=20", "encoder_accuracy.data.max_rows=20",
        "decoder_accuracy.fit.max_rows=20", "decoder_accuracy.data.max_rows=20", "both_accuracy.fit.max_rows=20",
        "both_accuracy.data.max_rows=20",
    ],
}  # fmt: skip
ACCURACIES = {  # stages of the recipes whose result is an accuracy
    "polite": [],
    "rankings": ["ranking_accuracy", "plackett_luce_accuracy", "pairs_accuracy"],
    "sentiment": ["encoder_accuracy", "decoder_accuracy", "both_accuracy"],
}
PREFERENCES = ("sigmoid", "ipo", "kto", "orpo", "simpo", "hinge", "robust", "cpo", "apo_zero", "nca_pair", "bco")
NAMED = ("sigmoid", "IPO", "KTO", "ORPO", "SimPO")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_is_expected_of_its_policies_and_why(name):
    recipe, _, _ = read_recipe(name)
    judged = {"ppo", "evaluation"} & {stage.name for stage in recipe.stages}
    assert recipe.expect and judged <= {expected.stage for expected in recipe.expect}
    assert all(expected.why for expected in recipe.expect)


@pytest.mark.parametrize("name", RECIPES)
def test_a_range_of_rates_that_a_coin_passes_says_so(name):
    """A coin's rate is 0.5 and its interval holds 0.5: `--check` shows nothing where that lies in the range."""
    silent = []
    for expected in read_recipe(name)[0].expect:
        key = expected.metric.split(".")[-1]
        low, high = expected.low or 0.0, 1.0 if expected.high is None else expected.high
        passes = {"low": low < 0.5, "high": high > 0.5}.get(key, low <= 0.5 <= high)
        if (key in ("rate", "low", "high") or key.endswith("accuracy")) and passes:
            silent += [] if re.search(r"\b(coin|chance)\b", expected.why) else [f"{expected.stage}: {expected.metric}"]
    assert silent == []


def test_make_quickstart_checks_the_run_against_its_expectations():
    shown = subprocess.run(["make", "--dry-run", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "alignment run quickstart --check " in shown.stdout


def test_every_recipe_explains_itself():
    for name in RECIPES:
        assert (packaged_folder("recipes") / name / "README.md").is_file(), name


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in REAL])
def test_recipes_without_real_data_can_be_planned(name, tmp_path):
    recipe, stages = plan(name, tmp_path)
    assert recipe.name == name and stages and recipe.expect


@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_recipes_on_real_data_can_be_planned(name, tmp_path):
    recipe, stages = plan(name, tmp_path)
    assert recipe.name == name and stages
    assert all(expected.why for expected in recipe.expect)


@pytest.mark.parametrize("name", REAL)
def test_without_the_data_every_missing_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="is not there; set ALIGNMENT_DATA to the folder of real data"):
        plan(name, tmp_path)


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories", "hh"])
def test_every_stage_runs(name, tmp_path):
    run_recipe(name, tmp_path, SHORT[name])
    results = json.loads((tmp_path / "evaluation/results.json").read_text())
    assert all(0 <= model["win_rate"]["rate"] <= 1 for key, model in results["models"].items() if key != "SFT")
    assert (tmp_path / "report/report.html").is_file()


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["polite", "rankings", "sentiment"])
def test_every_stage_of_preference_learning_runs(name, tmp_path):
    run_recipe(name, tmp_path, SHORT[name])
    for stage in ACCURACIES[name]:
        assert 0 <= json.loads((tmp_path / stage / "results.json").read_text())["accuracy"]["rate"] <= 1
    assert (tmp_path / "report/report.html").is_file()


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "stage", "kind"),
    [("polite", "rows", "comparisons"), ("rankings", "trees", "rankings"), ("sentiment", "sentences", "text")],
)
def test_nothing_held_out_was_trained_on(name, stage, kind, tmp_path):
    run_recipe(name, tmp_path, only=stage)
    parts = [read_rows(str(tmp_path / f"{stage}/{part}.jsonl"), kind)[0] for part in ("train", "heldout")]
    train, held_out = ({opening(row) if kind == "rankings" else prompt_of(row) for row in rows} for rows in parts)
    assert train and held_out and not train & held_out


def prompt_of(row):
    """What tells one row from the others: its prompt, or its text."""
    return row.text if hasattr(row, "text") else prompt_key(row)


@pytest.mark.real_data
def test_held_out_dialogues_begin_like_none_that_was_trained_on(tmp_path):
    run_recipe("hh", tmp_path, only="rows")
    parts = {
        part: read_rows(str(tmp_path / f"rows/{part}.jsonl"), "comparisons")[0]
        for part in ("train", "judge", "heldout")
    }
    counts = {part: len(rows) for part, rows in parts.items()}
    assert sum(counts.values()) == 6819  # of 6,870: 30 ties, 12 with different prompts, 9 without a last answer
    for key in (opening, prompt_key):
        seen = {part: {key(row) for row in rows} for part, rows in parts.items()}
        assert not seen["heldout"] & (seen["train"] | seen["judge"])
        assert not seen["train"] & seen["judge"]


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_whole_recipes_end_in_their_expected_ranges(name, tmp_path):
    assert run_recipe(name, Path(tmp_path), check=True)


# --- losses side by side ----------------------------------------------------------------------------------------------


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
    small = [
        "world.rows.pretrain=60", "world.rows.pretrain_heldout=4", "world.rows.demonstrations=16",
        "world.rows.comparisons=64", "world.rows.comparisons_heldout=8", "world.rows.prompts=1",
        "world.rows.prompts_eval=8", "pretrain.vocabulary=300", "pretrain.model.hidden_size=32",
        "pretrain.model.intermediate_size=32", "pretrain.model.num_hidden_layers=1", "pretrain.training.max_steps=2",
        "pretrain.data.max_length=128", "sft.training.max_steps=1", "evaluation.max_new_tokens=4",
    ]  # fmt: skip
    for name in PREFERENCES:
        small += [f"{name}.training.max_steps=2", f"{name}.training.batch_size=4"]
    run_recipe("preferences", tmp_path, small)
    models = json.loads((tmp_path / "evaluation/results.json").read_text())["models"]
    assert len(models) == 1 + len(PREFERENCES)
    assert all({"kl", "win_rate", "pairs", "gold"} <= result.keys() for name, result in models.items() if name != "SFT")
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert 'id="pairs"' in page and all(name in page for name in NAMED)


@pytest.mark.slow
def test_every_named_loss_is_preferred_to_sft(tmp_path):
    assert run_recipe("preferences", tmp_path, check=True)

"""Recipes: every one can be planned; those on real data run, cut short here and whole among the slow tests."""

import gzip
import json
import re
import socket
import subprocess
from pathlib import Path

import datasets
import pytest

from alignment.config.load import packaged_folder
from alignment.config.yaml_source import strings
from alignment.data.rows.files import hub_source, read_raw
from alignment.data.rows.hub import hub_label, hub_sources
from alignment.data.rows.read import prompt_key, read_rows
from alignment.errors import UserError
from alignment.loading import find_directory
from alignment.pipeline.recipe import read_recipe
from alignment.pipeline.run import plan, run_recipe
from alignment.pipeline.stages import load_stage_file
from tests.conftest import BASES

ROOT = Path(__file__).resolve().parents[2]
opening = load_stage_file(packaged_folder("recipes") / "rows.py").opening

RECIPES = sorted(path.parent.name for path in packaged_folder("recipes").glob("*/recipe.yaml"))
POLICIES = ("hh", "smollm2", "stories")  # real data, policies compared in the end
REAL = (*POLICIES, "polite", "rankings", "sentiment", "text_to_text")
ON_BASES = ("smollm2", "smollm2/short", "polite")
NO_MINILM = pytest.mark.skipif(not (BASES / "minilm").is_dir(), reason="run `make bases BASES=minilm`")
FROM_NOTHING = ("polite/from_nothing", "sentiment/from_nothing")
MARKS = {"real_base": ON_BASES, "real_data": (*REAL, *FROM_NOTHING, "smollm2/short")}


def marked(*names):
    """Recipes as parameters; those on real data or a real base are marked so."""
    parameters = []
    for name in names:
        marks = [getattr(pytest.mark, mark) for mark, those in MARKS.items() if name in those]
        parameters.append(pytest.param(name, marks=[*marks, NO_MINILM] if name == "sentiment" else marks))
    return parameters


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
    "smollm2": [
        "rows.parts={train: 0.02, unused: 0.96, heldout: 0.02}", "others.parts={judge: 0.02, unused: 0.98}",
        "reward.training.max_steps=2", "reward.training.batch_size=2", "judge.training.max_steps=2",
        "judge.training.batch_size=2", "*_accuracy.data.max_rows=8", "sft.training.max_steps=2",
        "sft.training.batch_size=2", "dpo.training.max_steps=2", "dpo.training.batch_size=2",
        "ppo*.training.max_steps=2", "ppo*.training.batch_size=2", "ppo*.minibatches=1", "ppo*.max_new_tokens=8",
        "ppo*.held_out=null", "ppo*.data.evaluation=null", "ppo.pretrain_batch_size=1", "ppo.pretrain.max_rows=2",
        "evaluation.data.max_rows=8", "evaluation.comparisons.max_rows=2", "evaluation.max_new_tokens=8",
        "evaluation.best_of.best of 8.samples=2", "benchmarks.max_rows=2", "mix.max_rows=2",
    ],
    "stories": [
        "sft.training.max_steps=2", "reward.training.max_steps=2", "judge.training.max_steps=2",
        "reward.data.evaluation=null", "judge.data.evaluation=null", "reward_accuracy.data.max_rows=20",
        "judge_accuracy.data.max_rows=20", "ppo.training.max_steps=1", "ppo.training.batch_size=8",
        "ppo_without_mix.training.max_steps=1", "ppo_without_mix.training.batch_size=8", "evaluation.data.max_rows=8",
        "evaluation.text.max_rows=4",
    ],
    "polite/from_nothing": [
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
    "sentiment/from_nothing": [
        "masked.training.max_steps=2", "masked.data.max_rows=20", "masked.vocabulary=2000", "causal.training.max_steps=2",
        "causal.data.max_rows=20", "causal.vocabulary=2000", "encoder.training.max_steps=2", "decoder.training.max_steps=2",
        "encoder.data.evaluation=null", "decoder.data.evaluation=null", "encoder.data.max_rows=64",
        "decoder.data.max_rows=64", "encoder_accuracy.fit.max_rows=20", "encoder_accuracy.data.max_rows=20",
        "decoder_accuracy.fit.max_rows=20", "decoder_accuracy.data.max_rows=20", "both_accuracy.fit.max_rows=20",
        "both_accuracy.data.max_rows=20",
    ],
    "polite": ["dpo.training.max_steps=1", "dpo.training.batch_size=2", "dpo.data.max_rows=8", "dpo.data.evaluation=null"],
    "sentiment": [
        "encoder.training.max_steps=1", "encoder.data.max_rows=32", "encoder.data.evaluation=null",
        "encoder_accuracy.fit.max_rows=8", "encoder_accuracy.data.max_rows=8", "sst2.training.max_steps=1",
        "sst2.data.max_rows=32", "sst2.data.evaluation=null",
    ],
    "text_to_text": [
        "base.training.max_steps=2", "sft.training.max_steps=2", "sft.data.evaluation=null",
        "sft.training.evaluate_every_steps=0",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_is_expected_of_its_policies_and_why(name):
    recipe, _, _ = read_recipe(name)
    judged = {"ppo", "evaluation"} & {stage.name for stage in recipe.stages}
    assert recipe.expect and judged <= {expected.stage for expected in recipe.expect}
    assert all(expected.why for expected in recipe.expect)
    assert (packaged_folder("recipes") / name / "README.md").is_file()


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


@pytest.mark.parametrize("name", RECIPES)
def test_without_data_or_network_a_recipe_ends_in_one_line(name, tmp_path, monkeypatch):
    """Those on generated rows name no set; of the others each set is told with its label and the way to a copy."""

    def refuse(*rest, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path / "nothing"))
    recipe, stages = plan(name, tmp_path)
    assert recipe.name == name and stages
    texts = {text for _, document in read_recipe(name)[2] for text in strings(document.values)}
    sets = {text for text in texts if text.endswith("]") and text.partition("[")[0].partition(":")[0] in hub_sources()}
    assert bool(sets) == (name in REAL) and not any("${data}" in text for text in texts)
    messages = []
    for source in sets:
        with pytest.raises(UserError) as caught:
            next(iter(read_raw(source)))
        messages.append(str(caught.value))
        assert hub_label(*hub_source(source, "")) in messages[-1]
    if sets:
        with pytest.raises(UserError) as caught:
            run_recipe(name, tmp_path / "run")
        messages.append(str(caught.value))
        assert not list((tmp_path / "run").glob("*/model"))
    assert all("\n" not in message and "ALIGNMENT_DATA" in message for message in messages)
    assert not any("{config}" in message for message in messages)


def test_rows_and_tokenizer_of_hh_come_from_the_hub_or_a_copy(tmp_path, monkeypatch):
    """The copies are laid out as the Hub's repositories; without them, and a network, one line names what is missing."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path / "copies"))
    with pytest.raises(UserError) as caught:
        run_recipe("hh", tmp_path / "run", only="rows")
    assert "Anthropic/hh-rlhf:helpful-base[test]" in str(caught.value) and "\n" not in str(caught.value)
    for config in ("helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base"):
        turns = [f"\n\nHuman: {config} {number}?\n\nAssistant: " for number in range(8)]
        lines = [json.dumps({"chosen": f"{turn}yes", "rejected": f"{turn}no"}) + "\n" for turn in turns]
        (tmp_path / "copies/Anthropic/hh-rlhf" / config).mkdir(parents=True)
        (tmp_path / "copies/Anthropic/hh-rlhf" / config / "test.jsonl.gz").write_bytes(
            gzip.compress("".join(lines).encode())
        )
    run_recipe("hh", tmp_path / "run", only="rows")
    counts = json.loads((tmp_path / "run/rows/results.json").read_text())["rows"]
    assert sum(counts.values()) == 32 and min(counts.values()) > 0
    (tmp_path / "copies/openai-community/gpt2").mkdir(parents=True)
    assert find_directory("openai-community/gpt2") == tmp_path / "copies/openai-community/gpt2"


def test_the_base_of_make_bases_is_a_copy_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path))
    monkeypatch.setenv("ALIGNMENT_BASES", str(tmp_path / "bases"))
    (tmp_path / "bases/smollm2").mkdir(parents=True)
    for _ in range(2):
        assert find_directory("HuggingFaceTB/SmolLM2-135M-Instruct") == tmp_path / "bases/smollm2"
    assert capsys.readouterr().err.count(f"read from the copy in {tmp_path / 'bases/smollm2'}") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(*REAL, *FROM_NOTHING))
def test_every_stage_runs(name, tmp_path):
    run_recipe(name, tmp_path, SHORT[name])
    if name in POLICIES:
        models = json.loads((tmp_path / "evaluation/results.json").read_text())["models"]
        assert all(0 <= model["win_rate"]["rate"] <= 1 for key, model in models.items() if key != "SFT")
    for path in tmp_path.glob("*_accuracy/results.json"):
        assert 0 <= json.loads(path.read_text())["accuracy"]["rate"] <= 1
    if "report" in [stage.name for stage in read_recipe(name)[0].stages]:
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
def test_judge_and_policies_of_smollm2_met_no_dialogue_that_is_held_out(tmp_path):
    run_recipe("smollm2", tmp_path, only="rows")
    run_recipe("smollm2", tmp_path, only="others")
    parts = {"rows": ("train", "heldout"), "others": ("judge",)}
    train, held_out, judge = (
        {opening(row) for row in read_rows(str(tmp_path / f"{stage}/{part}.jsonl"), "comparisons")[0]}
        for stage, names in parts.items()
        for part in names
    )
    assert min(map(len, (train, held_out, judge))) > 700
    assert not held_out & (train | judge)


def test_the_short_setting_of_smollm2_is_its_stages_with_bands_of_its_own():
    short, whole = map(read_recipe, ("smollm2/short", "smollm2"))
    runs = {stage.name: (stage.run, stage.config) for stage in whole[0].stages if isinstance(stage.config, str)}
    assert (
        runs.items()
        >= {stage.name: (stage.run, stage.config) for stage in short[0].stages if isinstance(stage.config, str)}.items()
    )
    assert set(short[0].names) < set(whole[0].names) and all(expected.why for expected in short[0].expect)


@pytest.mark.real_data
def test_held_out_dialogues_begin_like_none_that_was_trained_on(tmp_path):
    run_recipe("hh", tmp_path, only="rows")
    names = ("train", "judge", "heldout")
    parts = {name: read_rows(str(tmp_path / f"rows/{name}.jsonl"), "comparisons")[0] for name in names}
    assert (
        sum(map(len, parts.values())) == 6819
    )  # of 6,870: 30 ties, 12 with different prompts, 9 without a last answer
    for key in (opening, prompt_key):
        seen = {part: {key(row) for row in rows} for part, rows in parts.items()}
        assert not seen["heldout"] & (seen["train"] | seen["judge"])
        assert not seen["train"] & seen["judge"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked("preferences", "verifiable", "smollm2/short", *(each for each in REAL if each != "smollm2"), *FROM_NOTHING),
)
def test_whole_recipes_end_in_their_expected_ranges(name, tmp_path):
    assert run_recipe(name, Path(tmp_path), check=True)

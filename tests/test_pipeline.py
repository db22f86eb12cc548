"""Recipes: what runs, what is skipped, what is refused before anything runs. The stages are fakes that leave a file."""

import json
import shutil
import socket
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignment.config.yaml_source import parse_yaml
from alignment.errors import UserError
from alignment.files import write_text
from alignment.pipeline import run as pipeline
from alignment.pipeline import stages
from alignment.pipeline.recipe import repeat_stages
from alignment.pipeline.run import run_recipe
from alignment.pipeline.stages import STAGES
from alignment.settings import PositiveFloat, Settings
from alignment.training.run import lineage
from tests.killing import run_killed

ROOT = Path(__file__).resolve().parent.parent
HOLD = """
import sys, time
from alignment.training.run.directory import lock
with lock(__import__("pathlib").Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
RECIPE = """\
name: demo
seed: 5
stages:
  - name: world
    run: make
    config: {output: "${world}", size: 3, seed: ${seed}}
  - name: sft
    run: train
    config: &train
      policy: ${world}/model
      data: ${recipe}/rows.jsonl
      optim: {rate: 0.1, steps: 2}
  - name: ppo
    run: train
    config:
      <<: *train
      policy: ${sft}/model
    settings:
      optim.rate: 0.5
expect:
  - {stage: ppo, metric: score, low: 1, high: 4, why: the fake scores 2}
"""


@dataclass(frozen=True)
class MakeConfig:
    output: str
    size: int
    seed: int = 0


@dataclass(frozen=True)
class OptimConfig(Settings):
    rate: PositiveFloat
    steps: int


@dataclass(frozen=True)
class TrainConfig:
    policy: str
    output: str
    data: str
    optim: OptimConfig


class Ran(list):
    """Configs of the stages that ran, in order; `fail` names one that breaks after it has written something."""

    fail: str | None = None

    def names(self) -> list[str]:
        names = [Path(config.output).name for config in self]
        self.clear()
        return names


@pytest.fixture
def ran(monkeypatch) -> Ran:
    ran = Ran()

    def run(config: Any) -> None:
        ran.append(config)
        output = Path(config.output)
        (output / "trace").write_text((output / "trace").read_text() + "x" if (output / "trace").exists() else "x")
        if ran.fail == output.name:
            raise RuntimeError("power cut")
        (output / "metrics.jsonl").write_text('{"step": 1, "score": 1.5}\n{"step": 2, "score": 2.0}\n')
        (output / "lineage.json").write_text('{"parents": ["by the stage itself"]}')

    fakes = types.ModuleType("fakes")

    def make(config: MakeConfig) -> None:
        run(config)

    def train(config: TrainConfig) -> None:
        run(config)

    vars(fakes).update(make=make, train=train)
    monkeypatch.setitem(sys.modules, "fakes", fakes)
    monkeypatch.setattr(stages, "STAGES", fake_stages := {"make": "fakes:make", "train": "fakes:train"})
    monkeypatch.setattr(pipeline, "STAGES", fake_stages)
    monkeypatch.setattr(pipeline, "code_hash", lambda: "code")
    return ran


@pytest.fixture
def recipe(tmp_path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "list.yaml").write_text("- a\n")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    return folder


def go(recipe: Path, *overrides: str, **options) -> bool:
    return run_recipe(str(recipe), recipe.parent / "out", list(overrides), **options)


def refusal(recipe: Path, *overrides: str, **options) -> str:
    with pytest.raises(UserError) as error:
        go(recipe, *overrides, **options)
    return str(error.value).replace(str(recipe.parent), "")


def edit(recipe: Path, old: str, new: str) -> None:
    text = (recipe / "recipe.yaml").read_text()
    assert old in text
    (recipe / "recipe.yaml").write_text(text.replace(old, new))


def test_references_merges_and_settings_reach_the_stages(recipe, ran):
    assert go(recipe)
    out = recipe.parent / "out"
    assert list(ran) == [
        MakeConfig(output=str(out / "world"), size=3, seed=5),
        TrainConfig(str(out / "world/model"), str(out / "sft"), str(recipe / "rows.jsonl"), OptimConfig(0.1, 2)),
        TrainConfig(str(out / "sft/model"), str(out / "ppo"), str(recipe / "rows.jsonl"), OptimConfig(0.5, 2)),
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["ppo.optim.rate=0.6"], ["ppo"]),
        (["sft.optim.steps=3"], ["sft", "ppo"]),
        (["seed=6"], ["world", "sft", "ppo"]),
        (["ppo.optim={rate: 0.5, steps: 2}"], []),
    ],
)
def test_a_change_of_settings_reruns_the_stage_and_what_builds_on_it(recipe, ran, overrides, expected):
    go(recipe)
    ran.names()
    go(recipe, *overrides)
    assert ran.names() == expected


def test_a_change_of_an_input_file_or_of_code_reruns_and_a_move_does_not(recipe, ran, monkeypatch):
    go(recipe)
    ran.names()
    (recipe.parent / "out").rename(recipe.parent / "moved")
    run_recipe(str(recipe), recipe.parent / "moved")
    assert ran.names() == []
    (recipe.parent / "moved").rename(recipe.parent / "out")
    (recipe / "rows.jsonl").write_text('{"text": "b"}\n')
    go(recipe)
    assert ran.names() == ["sft", "ppo"]
    monkeypatch.setattr(pipeline, "code_hash", lambda: "other code")
    go(recipe)
    assert ran.names() == ["world", "sft", "ppo"]


def test_a_stage_cut_short_goes_on_with_the_same_settings_only(recipe, ran):
    trace = recipe.parent / "out" / "sft" / "trace"
    ran.fail = "sft"
    for expected in ("x", "xx"):  # the second run finds what the first one left
        with pytest.raises(RuntimeError, match="power cut"):
            go(recipe)
        assert trace.read_text() == expected
    with pytest.raises(RuntimeError, match="power cut"):
        go(recipe, "sft.optim.steps=9")
    assert trace.read_text() == "x"
    assert ran.names() == ["world", "sft", "sft", "sft"]
    ran.fail = None
    go(recipe)
    assert ran.names() == ["sft", "ppo"]


def test_a_recipe_killed_at_any_moment_writes_every_page(recipe, ran, monkeypatch):
    out, after, code = recipe.parent / "out", 0, -1
    monkeypatch.setattr(pipeline, "write_page", lambda directory: write_text(directory / "report.html", "page"))
    while code:
        code = run_killed(lambda: go(recipe), after, ["replace"])
        go(recipe)
        assert all((out / name / "report.html").is_file() for name in ("world", "sft", "ppo")), after
        shutil.rmtree(out)
        after += 1
    assert after > 9


def test_from_and_only(recipe, ran):
    assert "stage world comes first and is not finished" in refusal(recipe, only="sft")
    go(recipe)
    ran.names()
    go(recipe, start="sft")
    assert ran.names() == ["sft", "ppo"]
    go(recipe, only="sft")
    assert ran.names() == ["sft"]
    assert refusal(recipe, only="sfd") == "there is no stage 'sfd'; did you mean 'sft'?"
    assert "exclude each other" in refusal(recipe, only="sft", start="ppo")


def test_a_stage_whose_rows_are_not_there_does_not_start(recipe, ran, monkeypatch):
    lost = lambda config: [(("data", "train"), "rows.jsonl: no such file")] if config.output.endswith("sft") else []  # noqa: E731
    monkeypatch.setattr(pipeline, "missing_data", lost)
    assert refusal(recipe) == "stage sft: data.train: rows.jsonl: no such file"
    assert ran.names() == ["world"]


def test_lineage_and_costs_are_kept(recipe, ran):
    go(recipe)
    out = recipe.parent / "out"
    lineage = json.loads((out / "ppo" / "lineage.json").read_text())
    assert lineage["parents"] == ["by the stage itself"]
    assert (lineage["stage"], lineage["code"]) == ("train", "code")
    assert lineage["pipeline"]["complete"] is True
    assert lineage["pipeline"]["files"]["${recipe}/rows.jsonl"]
    costs = json.loads((out / "stages.json").read_text())
    assert list(costs) == ["world", "sft", "ppo"]
    assert lineage["pipeline"]["parents"] == {"sft": costs["sft"]["hash"]}
    assert all(cost["seconds"] >= 0 and cost["process_peak_megabytes"] > 10 for cost in costs.values())


def test_all_mistakes_are_listed_before_anything_runs(recipe, ran):
    edit(recipe, "rate: 0.1", "rte: 0.1")
    edit(recipe, "size: 3", "size: many")
    assert sorted(refusal(recipe, "ppo.optim.rate=-1").splitlines()) == [
        "stage ppo: /demo/recipe.yaml:12: optim.rte: unknown key; did you mean 'rate'?",
        "stage ppo: override: optim.rate: must be above 0, got -1",
        "stage sft: /demo/recipe.yaml:12: optim.rate: is missing; add it",
        "stage sft: /demo/recipe.yaml:12: optim.rte: unknown key; did you mean 'rate'?",
        "stage world: /demo/recipe.yaml:6: size: must be a whole number, got 'many'",
    ]
    assert list(ran) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("run: make", "run: mak", "stage world: there is no stage 'mak' to run; did you mean 'make'?"),
        ("${sft}/model", "${stf}/model", "stage ppo: ${stf} is no stage before this one; did you mean 'sft'?"),
        ("${world}/model", "${ppo}/model", "stage sft: ${ppo} is no stage before this one"),
        ("name: ppo", "name: sft", "two stages are called sft"),
        ("name: ppo", "name: ../ppo", "name: must be of letters, digits, - and _"),
        ("name: ppo", "name: data", "name: must be of letters, digits, - and _"),
        ('output: "${world}"', "output: elsewhere", "stage world: output: a recipe's stages write into directories"),
        ("stage: ppo, metric", "stage: pppo, metric", "names a stage that is not there: 'pppo'; did you mean 'ppo'?"),
        ("seed: 5", "sed: 5", "recipe.yaml:2: sed: unknown key; did you mean 'seed'?"),
        ("rows.jsonl", "nothing.jsonl", "stage sft: /demo/nothing.jsonl is not there"),
        ("${recipe}/rows.jsonl", "${data}/hh/train.jsonl", "/real/hh/train.jsonl is not there; set ALIGNMENT_DATA"),
        ("    config: &train\n", "    config: &train\n      optimm: 1\n", "optimm: unknown key; did you mean 'optim'?"),
        (
            "    config: &train\n",
            "    config: recipe/../rows.yaml\n    settings: &train\n",
            "there is no such file, and no",
        ),
        (
            "    config: &train\n",
            "    config: list.yaml\n    settings: &train\n",
            "sft: its config must be a section of keys",
        ),
        ("optim.rate: 0.5", "optim.rate: x", "/demo/recipe.yaml:19: optim.rate: must be a number, got 'x'"),
    ],
)
def test_one_mistake_in_a_recipe(recipe, ran, monkeypatch, old, new, message):
    monkeypatch.setenv("ALIGNMENT_DATA", str(recipe.parent / "real"))
    edit(recipe, old, new)
    assert message in refusal(recipe)
    assert list(ran) == []


OWN = """\
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Config:
    output: str
    times: int = 2

def run(config: Config) -> None:
    Path(config.output, "results.json").write_text(f'{{"found": {config.times}}}')
"""


def test_a_stage_of_the_recipe_s_own_is_a_function_in_a_file_beside_it(recipe, ran):
    (recipe / "own.py").write_text(OWN)
    edit(recipe, 'run: make\n    config: {output: "${world}", size: 3, seed: ${seed}}', "run: own.py:run")
    go(recipe)
    assert json.loads((recipe.parent / "out/world/results.json").read_text()) == {"found": 2}
    assert ran.names() == ["sft", "ppo"]
    assert "world: override: times: must be a whole number" in refusal(recipe, "world.times=x")
    (recipe / "own.py").write_text(OWN + "# changed\n")
    go(recipe)
    assert ran.names() == ["sft", "ppo"]  # they depend on its result
    (recipe / "shared.py").write_text("# which own.py may import\n")
    go(recipe)
    assert ran.names() == ["sft", "ppo"]
    edit(recipe, "own.py:run", "own.py:walk")
    assert refusal(recipe) == "stage world: /demo/own.py: has no function 'walk'"
    edit(recipe, "own.py:walk", "none.py:run")
    assert refusal(recipe) == "stage world: run: /demo/none.py is not there"


def test_the_output_of_a_config_file_gives_way_to_the_recipes(recipe, ran):
    (recipe / "make.yaml").write_text("output: runs/elsewhere\nsize: 3\n")
    edit(recipe, 'config: {output: "${world}", size: 3, seed: ${seed}}', "config: make.yaml")
    go(recipe)
    assert ran[0] == MakeConfig(output=str(recipe.parent / "out/world"), size=3)
    assert "write into directories of their own" in refusal(recipe, "world.output=elsewhere")


def test_wrong_overrides_and_recipes(recipe, ran):
    assert refusal(recipe, "pop.rate=1", "ppo.optim") == (
        "override: pop.rate=1: there is no stage 'pop'; did you mean 'ppo'?\n"
        "stage ppo: override: 'optim' is not of the form key=value, such as optim.learning_rate=1e-4"
    )
    assert "override: ppo.optim.rte" not in refusal(recipe, "ppo.optim.rte=1")
    assert "stage ppo: override: optim.rte: unknown key; did you mean 'rate'?" in refusal(recipe, "ppo.optim.rte=1")
    with pytest.raises(UserError, match="there is no such file, and no packaged one of that name"):
        run_recipe("quickstrat", recipe.parent / "out")


def test_real_data_is_read_from_its_folder_and_hashed(recipe, ran, monkeypatch):
    for folder in ("here", "there"):
        (recipe.parent / folder / "hh").mkdir(parents=True)
        (recipe.parent / folder / "hh" / "rows.jsonl").write_text("{}\n")
    edit(recipe, "${recipe}/rows.jsonl", "${data}/hh/rows.jsonl")
    monkeypatch.setenv("ALIGNMENT_DATA", str(recipe.parent / "here"))
    go(recipe)
    assert ran[1].data == str(recipe.parent / "here/hh/rows.jsonl")
    ran.names()
    monkeypatch.setenv("ALIGNMENT_DATA", str(recipe.parent / "there"))
    go(recipe)
    assert ran.names() == []  # the same bytes in another place
    (recipe.parent / "there" / "hh" / "rows.jsonl").write_text("{} \n")
    go(recipe)
    assert ran.names() == ["sft", "ppo"]


def test_a_directory_that_is_not_the_recipe_s_is_left_alone(recipe, ran):
    (recipe.parent / "out" / "sft").mkdir(parents=True)
    (recipe.parent / "out" / "sft" / "thesis.tex").write_text("precious")
    assert "/out/sft: was not written by a recipe; choose another --output" in refusal(recipe)
    assert (recipe.parent / "out" / "sft" / "thesis.tex").read_text() == "precious"
    assert list(ran) == []


@pytest.mark.parametrize(
    ("expected", "good", "shown"),
    [
        ("metric: score, low: 1, high: 4", True, "2 1 .. 4 ok"),
        ("metric: score, low: 3", False, "2 3 .. OUTSIDE"),
        ("metric: score, high: 1.6, over: first", True, "1.5 .. 1.6 ok"),
        ("metric: score, high: 1.6, over: max", False, "2 .. 1.6 OUTSIDE"),
        ("metric: score, low: 1.75, high: 1.75, over: mean", True, "1.75 1.75 .. 1.75 ok"),
        ("metric: absent, low: 0", False, "missing 0 .. OUTSIDE"),
        ("metric: models.PPO mix.win_rate, low: 0.5", True, "0.6 0.5 .. ok"),
    ],
)
def test_expectations_are_checked(recipe, ran, capsys, expected, good, shown):
    edit(recipe, "metric: score, low: 1, high: 4", expected)
    go(recipe)
    results = {"models": {"PPO mix": {"win_rate": 0.6}}}
    (recipe.parent / "out" / "ppo" / "results.json").write_text(json.dumps(results))
    assert go(recipe, check=True) is good
    printed = " ".join(capsys.readouterr().out.split())
    assert shown in printed
    assert ("OUTSIDE" in printed) is not good
    assert "the fake scores 2" in printed


@pytest.mark.parametrize(
    ("over", "good", "shown"),
    [("last", False, "not finite .. 4 OUTSIDE"), ("max", False, "not finite"), ("first", True, "1.5 .. 4 ok")],
)
def test_a_null_where_an_expectation_looks_is_no_earlier_number(recipe, ran, capsys, over, good, shown):
    edit(recipe, "metric: score, low: 1, high: 4", f"metric: score, high: 4, over: {over}")
    go(recipe)
    log = recipe.parent / "out" / "ppo" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 3, "score": null}\n{"step": 4, "loss": 1}\n')
    assert go(recipe, check=True) is good
    assert shown in " ".join(capsys.readouterr().out.split())


def test_a_living_run_keeps_others_out_and_a_dead_one_does_not(recipe, ran):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(recipe.parent / "out")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert f"is in use by another run (process {holder.pid} on {socket.gethostname()}" in refusal(recipe)
    holder.kill()
    holder.wait()
    assert go(recipe)


@pytest.mark.parametrize("verb", sorted(STAGES))
def test_every_verb_has_its_config_and_function(verb):
    config, function = stages.find_stage(verb)
    assert "output" in config.__dataclass_fields__
    assert callable(function)


@pytest.mark.parametrize("name", ["~/models/m", "mymodel"])
def test_a_model_at_home_or_named_by_a_plain_word_is_in_the_hash(recipe, ran, monkeypatch, name):
    monkeypatch.setenv("HOME", str(recipe.parent))
    monkeypatch.chdir(recipe.parent)
    model = Path(name).expanduser()
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    edit(recipe, "${world}/model", name)
    go(recipe)
    assert ran.names() == ["world", "sft", "ppo"]
    go(recipe)
    assert ran.names() == []
    (model / "config.json").write_text('{"changed": true}')
    go(recipe)
    assert ran.names() == ["sft", "ppo"]


def test_another_commit_of_a_hub_model_runs_the_stage_anew(recipe, ran, monkeypatch):
    commits = {"org/name": "a" * 40}
    monkeypatch.setattr(lineage, "hub_commit", commits.get)
    edit(recipe, "${world}/model", "org/name")
    go(recipe)
    assert ran.names() == ["world", "sft", "ppo"]
    path = recipe.parent / "out" / "sft" / "lineage.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parents": dict(commits)}))  # as a run notes it
    go(recipe)
    assert ran.names() == []
    commits["org/name"] = "b" * 40
    go(recipe)
    assert ran.names() == ["sft"]


MATRIX = """\
name: demo
matrix: {size: [4, 8], seed: [0, 1]}
stages:
  - {name: world, run: make, config: {size: 3, seed: "${seed}"}}
  - name: sft_${size}_${seed}
    run: train
    config: &train {policy: "${world}/model", data: "${recipe}/rows.jsonl", optim: {rate: 0.1, steps: "${size}"}}
  - name: ppo_${seed}
    run: train
    config: {<<: *train, policy: "${sft_8_${seed}}/model", optim: {rate: 0.1, steps: "${seed}"}}
"""


@pytest.fixture
def matrix(recipe, monkeypatch) -> Path:
    monkeypatch.setattr(pipeline, "write_page", lambda _: None)  # ten pages take seconds
    (recipe / "recipe.yaml").write_text(MATRIX)
    return recipe


def test_a_stage_is_repeated_for_the_axes_in_its_name(matrix, ran):
    go(matrix, "sft_*_1.optim.rate=0.5", "seed=7")
    out = str(matrix.parent / "out")
    assert ran[0] == MakeConfig(f"{out}/world", 3, 7)  # no axis repeats it: the recipe's seed
    found = [(config.output.removeprefix(out), config.policy.removeprefix(out), config.optim) for config in ran[1:]]
    assert found == [
        ("/sft_4_0", "/world/model", OptimConfig(0.1, 4)), ("/sft_4_1", "/world/model", OptimConfig(0.5, 4)),
        ("/sft_8_0", "/world/model", OptimConfig(0.1, 8)), ("/sft_8_1", "/world/model", OptimConfig(0.5, 8)),
        ("/ppo_0", "/sft_8_0/model", OptimConfig(0.1, 0)), ("/ppo_1", "/sft_8_1/model", OptimConfig(0.1, 1)),
    ]  # fmt: skip
    ran.names()
    go(matrix, "sft_*_1.optim.rate=0.5", "seed=7", "matrix.seed=[1, 2]")  # what is finished stays
    assert ran.names() == ["sft_4_2", "sft_8_2", "ppo_2"]


def test_items_of_lists_are_repeated_in_a_stage_without_the_axis():
    text = """\
matrix: {a: [1, 2], b: [x, y]}
stages:
  - {name: all, config: {each: ["${s_${a}_${b}}/model", "${world}"], alone: "${s_1_x}"}}
  - {name: "one_${b}", config: {each: ["${s_${a}_${b}}", {run: "${b}"}]}}
"""
    every, x, y = repeat_stages(document := parse_yaml(text, "recipe.yaml")).values["stages"]
    pairs = [f"${{s_{a}_{b}}}/model" for a in "12" for b in "xy"]
    assert every["config"] == {"each": [*pairs, "${world}"], "alone": "${s_1_x}"}
    assert (x["name"], x["config"]) == ("one_x", {"each": ["${s_1_x}", "${s_2_x}", {"run": "x"}]})
    assert y["config"]["each"][1] == "${s_2_y}"
    assert repeat_stages(document).location(("stages", 2, "config")) == "recipe.yaml:4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate: 0.1, steps: \"${size}\"", "rate: -1, steps: 2", "stage sft_8_1: /demo/recipe.yaml:7: optim.rate: must be above 0"),
        ("size: [4, 8]", "size: 4", "recipe.yaml:2: matrix.size: must be a list"),
        ("seed: [0, 1]", "seed: []", "matrix: needs a value for each axis"),
        ("size: [4, 8]", "size: [4, 8], world: [1]", "not called like a stage or a folder; got world"),
        ("sft_${size}_", "sft_${sise}_", "must be of letters, digits, - and _"),
        ("sft_8_${seed}}", "sft_9_${seed}}", "stage ppo_1: ${sft_9_1} is no stage before this one"),
        ("name: ppo_${seed}", "name: ppo", "stage ppo: ${sft_8_${seed}}/model needs axes that this stage's name has"),
    ],
)  # fmt: skip
def test_mistakes_in_a_matrix(matrix, ran, old, new, message):
    edit(matrix, old, new)
    assert message in refusal(matrix)
    assert list(ran) == []

"""A run that is stopped and started again ends exactly as one that was not (I12)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec
from alignment.algorithms.runs import open_run
from alignment.data.config import DataConfig, SourceConfig
from alignment.errors import UserError
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import OptimConfig, TrainingConfig
from tests.stopping import assert_goes_on, run_stopped

LORA = LoRASpec(rank=2, dropout=0.1)
JUDGE = "alignment.judging.judges:longer_judge"


@pytest.fixture
def changes(stage, world, checkpoints):
    """What each kind of run is made of beside the defaults: all the state there is."""
    text = DataConfig(train=world["pretrain"], max_length=128)
    everything = {
        "pretrain": text, "pretrain_coef": 0.5, "pretrain_batch_size": 4, "kl_target": 0.1, "kl_horizon": 50.0,
    }  # fmt: skip
    reward_model, lora = {"reward_model": str(stage("reward") / "model")}, {"adapter": LoRASpec(rank=2)}
    rewards = [
        RewardSpec(reward_model["reward_model"], normalize="running", clip=(-1.0, 1.0)),
        RewardSpec(length=LengthSpec(max=4)),
    ]
    short, long = ({"training": TrainingConfig(batch_size=8, **steps)} for steps in ({"max_steps": 4}, {"epochs": 2}))
    return {
        "sft": long,
        "sft LoRA": {**long, "adapter": LORA},
        "reward LoRA": {**long, "adapter": LORA},
        "dpo": long,
        "ppo": {**short, **reward_model, **everything},
        "ppo behind": {**short, **reward_model, "rollouts_behind": 1, "top_p": 0.9},
        "ppo LoRA": {**short, **reward_model, **lora},
        "online_dpo": {**short, "judge": JUDGE, "loss": "bco", "beta": 2.0},
        "online_dpo LoRA": {**short, **reward_model, **lora, "responses_per_prompt": 3},
        "online_dpo rewards": {**short, "rewards": rewards, "loss": "odpo"},
        "distill": {**short, "teacher": checkpoints["llama"], "likeliest": 8},
        "distill LoRA": {**short, **lora, "teacher": checkpoints["llama"], "responses_per_prompt": 2, "top_p": 0.9},
    }


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "sft", "sft LoRA", "reward LoRA", "dpo", "ppo", "ppo behind", "ppo LoRA", "online_dpo", "online_dpo LoRA",
        "online_dpo rewards", "distill", "distill LoRA",
    ],
)  # fmt: skip
def test_stopped_and_resumed_equals_uninterrupted(name, stop, changes, stage, make_stage, tmp_path):
    kind, policy = name.split()[0], str(stage("sft") / "model")
    assert_goes_on(lambda output: make_stage(kind, policy, tmp_path / output, **changes[name]), stop, tmp_path)


def test_other_settings_are_no_resume(stage, make_stage, ran, tmp_path):
    """The learning rate of the second command is not silently ignored."""
    policy = str(stage("sft") / "model")
    training = TrainingConfig(batch_size=8, max_steps=2, save_every_steps=1)
    ran("sft", policy, tmp_path, training=training)
    run, config = make_stage("sft", policy, tmp_path, training=training, adapter=LORA)
    with pytest.raises(UserError, match="adapter"):
        run(config)


def log_one_update(config) -> dict:
    """Start an sft run and log its first update; the data of its lineage."""
    with open_run(config, "sft", [config.policy]) as run:
        for step in run.steps(0, 1):
            run.log(step + 1, {"loss": 1.0})
    return json.loads((Path(config.output) / "lineage.json").read_text())["data"]


@pytest.mark.parametrize("form", ["directory", "glob", "list", "section"])
@pytest.mark.parametrize("part", ["train", "evaluation"])
def test_rows_of_a_directory_or_a_glob_that_have_changed_are_no_resume(
    form, part, make_stage, world, tmp_path, checkpoints
):
    folder = tmp_path / "rows"
    folder.mkdir()
    shutil.copy(world["demonstrations"], folder / "a.jsonl")
    name = str(folder / "*.jsonl" if form == "glob" else folder)
    sources = {"list": [name], "section": [SourceConfig(name)]}.get(form, name)
    data = DataConfig(**{"train": world["demonstrations"], part: sources})
    _, config = make_stage("sft", checkpoints["llama"], tmp_path / "run", data=data)
    assert str(folder / "a.jsonl") in str(log_one_update(config))
    log_one_update(config)
    rows = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(rows.replace("a", "e", 1))
    shutil.copy(world["demonstrations"], folder / "b.jsonl")
    with pytest.raises(UserError, match=rf"(?s)data\.{part}.*a\.jsonl: .* -> .*b\.jsonl: None -> "):
        log_one_update(config)
    (folder / "a.jsonl").write_text(rows)
    (folder / "b.jsonl").unlink()
    log_one_update(config)


def test_a_streamed_directory_is_known_by_the_ends_of_its_files(make_stage, world, tmp_path, checkpoints):
    folder = tmp_path / "rows"
    folder.mkdir()
    shutil.copy(world["demonstrations"], folder / "a.jsonl")
    data = DataConfig(train=str(folder), streaming=True)
    _, config = make_stage(
        "sft", checkpoints["llama"], tmp_path / "run", data=data, training=TrainingConfig(max_steps=2)
    )
    log_one_update(config)
    with (folder / "a.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"a\.jsonl"):
        log_one_update(config)


@pytest.mark.parametrize("key", ["ppo rewards.0.function", "online_dpo rewards.0.function", "online_dpo judge"])
def test_another_function_under_the_same_name_is_no_resume(key, stage, make_stage, tmp_path, monkeypatch):
    kind, key = key.split()
    module = tmp_path / f"own_{kind}_{key[:5]}.py"
    module.write_text(
        "from alignment.judging.judges import longer_judge as judge\n"
        "def score(prompts, responses):\n    return [float(len(text)) for text in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    score = {"rewards": [RewardSpec(function=f"{module.stem}:score")]}
    changes = {"judge": f"{module.stem}:judge"} if key == "judge" else score
    if kind == "ppo":
        changes["value_model"] = "policy"
    run, config = make_stage(kind, str(stage("sft") / "model"), tmp_path / "run", **changes)
    assert run_stopped(run, config, 1) == 143
    module.write_text(module.read_text().replace("float", "-float"))
    with pytest.raises(UserError, match=rf"{key}.*{module.stem}"):
        run(config)


def contents(folder: Path) -> dict[str, tuple[float, bytes]]:
    """Time and bytes of every file that a run has written."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "pretrain", "online_dpo", "ppo", "distill"])
def test_a_finished_run_is_left_as_it_is(kind, make_stage, stage, checkpoints, tmp_path, capsys):
    changes = {"reward_model": str(stage("reward") / "model")} if kind in ("ppo", "online_dpo") else {}
    changes |= {"teacher": checkpoints["llama"]} if kind == "distill" else {}
    run, config = make_stage(kind, str(stage("sft") / "model"), tmp_path, **changes)
    model, before = run(config), contents(tmp_path)
    capsys.readouterr()
    assert run(config) == model and contents(tmp_path) == before
    assert "this run is finished" in capsys.readouterr().err


def test_again_repeats_a_finished_run_from_the_beginning(make_stage, checkpoints, tmp_path, capsys, read_metrics):
    training = {"batch_size": 8, "save_every_steps": 2}
    run, config = make_stage("sft", checkpoints["llama"], tmp_path, training=TrainingConfig(**training))
    weights = load_file(run(config) / "model.safetensors")
    (tmp_path / "checkpoints" / "step-000003" / "state.json").write_text("damaged")  # and not read again
    lines, before = len(read_metrics(tmp_path)), (tmp_path / "model").stat().st_ino
    run, config = make_stage("sft", checkpoints["llama"], tmp_path, training=TrainingConfig(**training, again=True))
    assert_close(load_file(run(config) / "model.safetensors"), weights, rtol=0, atol=0)
    assert (tmp_path / "model").stat().st_ino != before and len(read_metrics(tmp_path)) == lines
    assert "resumed" not in (said := capsys.readouterr().err) and "are lost" not in said
    assert "again:" not in (tmp_path / "config.yaml").read_text()  # else a run of that file would repeat it
    with pytest.raises(UserError, match="adapter"):
        run(replace(config, adapter=LORA))
    assert (tmp_path / "checkpoints" / "step-000003").is_dir(), "what another run has written is not deleted"


def extended(make_stage, policy: str, output: Path, schedule: str, **length):
    """A stage over 24 rows in batches of 8, which are 3 updates an epoch."""
    return make_stage(
        "sft", policy, output, training=TrainingConfig(batch_size=8, save_every_steps=2, **length),
        optim=OptimConfig(learning_rate=3e-3, schedule=schedule),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("short", "long", "stop"),
    [({"epochs": 1}, {"epochs": 2}, 0), ({"epochs": 1}, {"max_steps": 6}, 0), ({"max_steps": 3}, {"max_steps": 6}, 4)],
)
def test_a_finished_run_that_is_made_longer_equals_one_of_that_length(
    short, long, stop, make_stage, checkpoints, tmp_path, read_metrics
):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    run, config = extended(make_stage, checkpoints["llama"], parts, "constant", **short)
    run(config)
    run, config = extended(make_stage, checkpoints["llama"], parts, "constant", **long)
    if stop:
        run_stopped(run, config, stop)
    weights = load_file(run(config) / "model.safetensors")
    assert [line["step"] for line in read_metrics(parts)] == [1, 2, 3, 4, 5, 6]
    run, config = extended(make_stage, checkpoints["llama"], whole, "constant", **long)
    assert_close(weights, load_file(run(config) / "model.safetensors"), rtol=0, atol=0)


def test_a_longer_run_says_that_its_schedule_is_another(make_stage, checkpoints, tmp_path, read_metrics, capsys):
    run, config = extended(make_stage, checkpoints["llama"], tmp_path, "linear", epochs=1)
    run(config)
    run, config = extended(make_stage, checkpoints["llama"], tmp_path, "linear", epochs=2)
    run(config)
    # linear over 3 updates: 1, 2/3, 1/3 of 0.003; over 6, the fourth has 3/6 of it
    rates = [line["learning_rate"] for line in read_metrics(tmp_path)]
    assert rates == pytest.approx([0.003, 0.002, 0.001, 0.0015, 0.001, 0.0005])
    assert "whose schedule depends on the length followed that of the shorter run" in capsys.readouterr().err


def test_what_cannot_be_made_longer_is_refused_and_left_as_it_is(make_stage, checkpoints, tmp_path):
    run, config = extended(make_stage, checkpoints["llama"], tmp_path, "constant", max_steps=3)
    run(config)
    before = contents(tmp_path)
    for length in ({"max_steps": 2}, {"epochs": 0.5}):
        with pytest.raises(UserError, match="other settings"):
            run(extended(make_stage, checkpoints["llama"], tmp_path, "constant", **length)[1])
    with pytest.raises(UserError, match="schedule"):
        run(extended(make_stage, checkpoints["llama"], tmp_path, "linear", max_steps=6)[1])
    assert contents(tmp_path) == before
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint of its end"):
        run(extended(make_stage, checkpoints["llama"], tmp_path, "constant", max_steps=6)[1])


def test_a_run_that_was_stopped_is_not_made_longer(make_stage, checkpoints, tmp_path):
    run, config = extended(make_stage, checkpoints["llama"], tmp_path, "constant", max_steps=3)
    assert run_stopped(run, config, 1) == 143
    with pytest.raises(UserError, match=r"max_steps: 3 -> 6"):
        run(extended(make_stage, checkpoints["llama"], tmp_path, "constant", max_steps=6)[1])

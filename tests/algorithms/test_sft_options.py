"""Options of SFT: each learns, resumes to the bit, and does what its name says."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from alignment.algorithms.sft import SamplesConfig, prompt_of
from alignment.data.batches import Example, collate, collate_whole
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.training import OptimConfig, TrainingConfig
from alignment.training.settings import EarlyStopping
from tests.conftest import read_lines

OPTIONS = {
    "loss_on": {"loss_on": "all"},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "NEFTune": {"neftune_alpha": 5.0},
    "EMA": {"training": {"ema_decay": 0.5}},
    "early stopping": {"training": {"early_stopping": EarlyStopping(patience=2)}},
}


@pytest.fixture
def sft(checkpoints, ran, world, tmp_path, read_metrics):
    """`sft(name, training={...}, **settings)` runs on 16 demonstrations, which are also held out; its directory."""
    data = DataConfig(train=world["demonstrations"], evaluation=world["demonstrations"], max_rows=16)

    def run_one(name, training=(), **settings):
        training = TrainingConfig(**{"batch_size": 8, "max_steps": 9, "evaluate_every_steps": 3, **dict(training)})
        settings = {"optim": OptimConfig(learning_rate=1e-2), "data": data, **settings}
        ran("sft", checkpoints["llama"], tmp_path / name, training=training, **settings)
        return tmp_path / name

    return run_one


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_lowers_the_held_out_loss(option, sft, read_metrics):
    lines = read_metrics(sft("run", **OPTIONS[option]))
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert held_out[-1] < held_out[0] - 0.1
    plain = option not in ("label_smoothing", "z_loss")
    for line in lines:
        assert ("nll" in line) is not plain
        assert plain or line["loss"] > line["nll"] > 0  # both add to the negative log-likelihood
    if not plain:
        assert lines[-1]["held_out_nll"] < lines[2]["held_out_nll"] - 0.1


def test_a_share_of_the_training_rows_is_held_out(sft, world, read_metrics):
    data = DataConfig(train=world["demonstrations"], evaluation_share=0.3, max_rows=24)
    output = sft("run", data=data, training={"keep_best": "held_out_loss"})
    assert len([line for line in read_metrics(output) if "held_out_loss" in line]) == 3
    notes = json.loads((output / "lineage.json").read_text())["notes"]
    told = [note for note in notes if "rows kept" in note]
    kept = [int(note.split(": ")[1].split(" ")[0]) for note in told]
    assert len(kept) == 2 and sum(kept) == 24
    assert any(f"noted {kept[1]}: held out by data.evaluation_share" in note for note in notes)


def test_the_prompt_counts_too_and_the_first_token_never():
    examples = [
        Example.single([1, 5, 6, 7, 2], [False, False, False, True, True], "a", 3),
        Example.single([1, 8, 2], [False, True, True], "b", 4),
    ]
    (part,), (whole,) = collate(examples, 100), collate_whole(examples, 100)
    assert part.tokens[part.target_index].tolist() == [7, 2, 8, 2]
    assert whole.tokens[whole.target_index].tolist() == [5, 6, 7, 2, 8, 2]
    assert (part.weight, whole.weight) == (4.0, 6.0)
    assert whole.sources is not None and whole.sources.tolist() == [3, 4] and whole.row_ids == part.row_ids


def test_a_resumed_run_with_all_options_is_the_same_to_the_bit(sft, read_metrics, tmp_path):
    settings = {
        "neftune_alpha": 5.0, "label_smoothing": 0.1, "samples": SamplesConfig(prompts=1, max_new_tokens=4),
        "training": {"ema_decay": 0.7, "early_stopping": EarlyStopping("held_out_nll", 2), "save_every_steps": 2,
                     "keep_last_checkpoints": 9, "max_steps": 6, "evaluate_every_steps": 2},
    }  # fmt: skip
    whole, parts = sft("whole", **settings), sft("parts", **settings)
    shutil.rmtree(parts / "model")
    for name in ("step-000004", "step-000006"):  # as if it had died in update 4
        shutil.rmtree(parts / "checkpoints" / name)
    sft("parts", **settings)
    ours, theirs = (load_file(path / "model/model.safetensors") for path in (parts, whole))
    assert ours.keys() == theirs.keys() and all(value.equal(theirs[name]) for name, value in ours.items())
    logs = [[{**line, "tokens_per_second": 0} for line in read_metrics(path)] for path in (parts, whole)]
    assert logs[0] == logs[1]
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_samples_of_evaluations_are_reported_and_change_no_number(sft, read_metrics):
    from alignment.reports.page import write_run_report

    without = sft("without", neftune_alpha=5.0)
    with_samples = sft("with", neftune_alpha=5.0, samples=SamplesConfig(prompts=2, max_new_tokens=6))
    losses = [[line["loss"] for line in read_metrics(path)] for path in (without, with_samples)]
    assert losses[0] == losses[1]
    assert not (without / "samples.jsonl").exists()
    lines = read_lines(with_samples / "samples.jsonl")
    assert [line["step"] for line in lines] == [3, 3, 6, 6, 9, 9]
    assert lines[0]["prompt"] == lines[2]["prompt"] != lines[1]["prompt"]
    assert len({line["response"] for line in lines}) > 1
    page = write_run_report(with_samples).read_text()
    assert "update 9" in page


def test_the_prompt_of_a_sample_is_all_before_the_last_response():
    ids = list(range(8))
    turns = [False, False, True, True, False, False, True, True]
    assert prompt_of(Example.single(ids, turns, "")) == [0, 1, 2, 3, 4, 5]
    assert prompt_of(Example.single(ids, [True] * 8, "")) == [0]  # cut at the left: something must come first


def test_a_chat_template_that_no_row_enters_is_refused(checkpoints, make_stage, tmp_path):
    run, config = make_stage("sft", checkpoints["llama"], tmp_path / "run", chat_template="zephyr")
    with pytest.raises(UserError, match="as_messages"):
        run(config)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("sft", "each micro-batch"), ("pretrain", "each micro-batch"), ("reward", "not added"), ("dpo", "not added"),
        ("distill", "not added"),
    ],
)  # fmt: skip
def test_what_becomes_of_the_balance_of_experts_is_noted(stage, said, write_checkpoint, ran, tmp_path, capsys):
    """[A5] It is not additive over micro-batches; and preferences and samples are learned without it."""
    experts = {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.5}
    training = TrainingConfig(batch_size=4, max_steps=1)
    for asked in (True, False):
        policy = write_checkpoint(tmp_path / f"{asked}", "llama", **experts, output_router_logits=asked)
        more = {"teacher": policy} if stage == "distill" else {}
        more |= {"tokenizer": policy} if stage == "pretrain" else {}
        ran(stage, policy, tmp_path / f"run {asked}", training=training, **more)
        notes = capsys.readouterr().err
        assert ("balance_loss: " in notes) == (said in notes) == asked


@pytest.mark.parametrize(("updates", "noted"), [(2, True), (50, True), (51, False)])
@pytest.mark.parametrize("stage", ["sft", "distill"])
def test_a_warmup_that_outlasts_the_run_is_noted_once(stage, updates, noted, checkpoints, make_stage, tmp_path, capsys):
    """The first update has a rate of 0, so that 51 updates are the fewest that reach the peak after 50."""
    policy, training = checkpoints["llama"], TrainingConfig(batch_size=1, max_steps=updates)
    more = {"teacher": policy, "epochs": 1, "minibatches": 1, "max_new_tokens": 1} if stage == "distill" else {}
    optim = OptimConfig(learning_rate=1e-3, warmup_steps=50)
    run, config = make_stage(stage, policy, tmp_path / "run", training=training, optim=optim, **more)
    run(config)
    assert capsys.readouterr().err.count("optim.warmup_steps: 50") == noted

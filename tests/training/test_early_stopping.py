"""The best evaluation: which it is, when a run ends because of it, and that model/ holds its weights."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from alignment.errors import UserError
from alignment.training import Engine, LossSum, Run, Term, TrainingConfig, fit
from alignment.training.result import BestEvaluation
from alignment.training.run.lineage import without_runtime_keys
from alignment.training.settings import EarlyStopping, is_lower_better
from tests.training.toys import ToyStream, collate_by, lines, squared_error, toy_engine, toy_rows, weights

PLATEAU = [3.0, 2.0, 1.0, 1.5, 2.5, 2.0, 0.5, 0.4]  # planted losses of the evaluations, best at the third


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("held_out_loss", True), ("held_out_perplexity/chat", True), ("held_out_nll", True), ("held_out_accuracy", False),
        ("held_out_accuracy/loss", False), ("win_rate", False), ("held_out_score", False), ("held_out_macro_f1", False),
        ("held_out_exact_match", False), ("held_out_chosen_reward", False),
    ],
)  # fmt: skip
def test_the_name_of_a_metric_says_which_direction_is_better(metric, lower):
    assert is_lower_better(metric) is lower


@pytest.mark.parametrize("metric", ["held_out_banana", "", "loss_of_accuracy"])
def test_a_name_that_says_nothing_or_both_is_refused(metric):
    with pytest.raises(ValueError, match="lower or higher"):
        TrainingConfig(keep_best=metric, evaluate_every_steps=1)


def test_the_best_and_the_patience_by_hand():
    best = BestEvaluation("held_out_loss", EarlyStopping(patience=2, min_delta=0.5))
    found = [
        (best.add(step, value), best.waited, best.exhausted) for step, value in enumerate([3.0, 2.7, 2.4, 2.3, 2.6])
    ]
    # 2.7 is the best, but no improvement by more than 0.5 on 3.0; 2.4 is one; 2.3 and 2.6 are none on 2.4
    assert found == [(True, 0, False), (True, 1, False), (True, 0, False), (True, 1, False), (False, 2, True)]
    assert (best.value, best.step) == (2.3, 3)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"keep_best": "held_out_loss"}, "evaluate_every_steps is 0"),
        ({"early_stopping": EarlyStopping()}, "evaluate_every_steps is 0"),
        ({"early_stopping": EarlyStopping(), "keep_best": "held_out_accuracy", "evaluate_every_steps": 1}, "the same"),
        ({"ema_decay": 1.0}, "below 1"),
        ({"ema_decay": 0.0}, "above 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        TrainingConfig(**settings)


@pytest.mark.parametrize("choice", [{}, {"keep_best": "held_out_loss"}, {"early_stopping": {"patience": 3}}])
def test_evaluations_may_change_on_resume_where_they_choose_nothing(choice):
    configs = [{"training": {"evaluate_every_steps": every, "seed": 0, **choice}} for every in (2, 3)]
    one, other = (without_runtime_keys(config) for config in configs)
    assert (one == other) == (not choice) and "seed" in one["training"]


def train(output: Path, *, values=PLATEAU, stop_after: int = 0, kill_after: int = 0, **settings) -> Engine:
    """Eight updates with dropout, evaluated after each with planted losses; `model` holds the weights."""
    training = TrainingConfig(**{"max_steps": 8, "evaluate_every_steps": 1, **settings})
    engine = toy_engine(dropout=0.1, steps=8, training=training)
    config = {"output": str(output), "training": {"trackers": []}}

    def loss_fn(batch) -> LossSum:
        if engine.step + 1 == stop_after and batch.row_ids[0].endswith("-0"):
            os.kill(os.getpid(), signal.SIGTERM)
        return squared_error(engine.model)(batch)

    def evaluate() -> dict[str, float]:
        torch.rand(3)
        if kill_after and engine.step == kill_after + 1:  # nothing of this update is on the disk
            raise KeyboardInterrupt
        return {"held_out_loss": values[engine.step - 1]}

    def save() -> None:
        (output / "model").mkdir(exist_ok=True)
        torch.save(weights(engine), output / "model" / "weights.pt")

    with Run(output, config, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(3), loss_fn, training=training, run=run, evaluate=evaluate, save=save)
    return engine


def written(output: Path) -> dict[str, torch.Tensor]:
    return torch.load(output / "model" / "weights.pt")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def after(step: int) -> dict[str, torch.Tensor]:
    """The weights after so many updates, of a run without any evaluation."""
    engine = toy_engine(dropout=0.1, steps=8)
    for number in range(step):
        engine.update(Term(collate_by(3)(toy_rows(number)), squared_error(engine.model)))
    return weights(engine)


def test_a_run_ends_at_a_plateau_and_its_model_has_the_best_weights(tmp_path, capsys):
    train(tmp_path / "run", early_stopping=EarlyStopping(patience=3), save_every_steps=2)
    logged = lines(tmp_path / "run")
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]  # 0.5 at the 7th is never seen
    assert logged[-1]["best_step"] == 3 and logged[-1]["best_held_out_loss"] == 1.0
    assert equal(written(tmp_path / "run"), after(3))
    assert "model/ holds step 3, the best by held_out_loss (1); the run ended at step 6" in capsys.readouterr().err


def test_the_best_survives_rotation_and_only_one_is_kept_at_the_end(tmp_path):
    train(tmp_path, keep_best="held_out_loss", save_every_steps=1, keep_last_checkpoints=1,
          values=[3.0, 2.0, 1.0, 1.5, 2.5, 2.0, 1.1, 1.2])  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-000008"]
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "best").iterdir()) == ["step-000003"]


@pytest.mark.parametrize("stop_after", [2, 3, 4, 6])
def test_resumed_equals_uninterrupted_with_average_and_stopping(tmp_path, stop_after):
    settings = {"early_stopping": EarlyStopping(patience=3), "ema_decay": 0.5, "save_every_steps": 5}
    whole = train(tmp_path / "whole", **settings)
    with pytest.raises(SystemExit):
        train(tmp_path / "parts", stop_after=stop_after, **settings)
    parts = train(tmp_path / "parts", **settings)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert equal(weights(whole), weights(parts))
    assert equal(written(tmp_path / "whole"), written(tmp_path / "parts"))
    assert "step-000003" in os.listdir(tmp_path / "parts/checkpoints/best")


def test_a_finished_run_again_writes_the_best_weights_again(tmp_path):
    settings = {"early_stopping": EarlyStopping(patience=3), "save_every_steps": 2}
    train(tmp_path, **settings)
    before = written(tmp_path)
    shutil.rmtree(tmp_path / "model")  # killed between the last checkpoint and the model
    train(tmp_path, **settings)
    assert equal(written(tmp_path), before)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


BEST_THIRD = [3.0, 2.0, 1.0, 1.5, 2.5, 2.0, 1.1, 1.2]


def damage_best(output: Path) -> None:
    file = output / "checkpoints/best/step-000003/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def test_damaged_best_weights_are_named_and_the_last_ones_are_written(tmp_path):
    settings = {"keep_best": "held_out_loss", "save_every_steps": 2}
    train(tmp_path, values=BEST_THIRD, **settings)
    shutil.rmtree(tmp_path / "model")
    damage_best(tmp_path)
    for _ in range(2):  # a run that ended with an error is not finished
        with pytest.raises(UserError, match=r"best/step-000003/model\.safetensors does not have .* those of step 8"):
            train(tmp_path, **settings)
        assert equal(written(tmp_path), after(8))


def test_a_run_that_died_goes_on_from_the_best_of_its_checkpoint(tmp_path):
    settings = {"keep_best": "held_out_loss", "save_every_steps": 2}
    falling = [3.0, 2.0, 1.0, 0.9, 0.8, 0.7, 0.75, 0.6]
    with pytest.raises(KeyboardInterrupt):  # after a better evaluation at step 3, which no checkpoint knows
        train(tmp_path, kill_after=3, values=falling, **settings)
    assert sorted(os.listdir(tmp_path / "checkpoints/best")) == ["step-000002", "step-000003"]
    worse = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5]  # as another machine might find
    train(tmp_path, values=worse, **settings)
    assert equal(written(tmp_path), after(2))


def test_damaged_best_weights_are_reported_and_made_up_for(tmp_path, capsys):
    settings = {"keep_best": "held_out_loss", "save_every_steps": 2}
    with pytest.raises(SystemExit):
        train(tmp_path, stop_after=4, values=BEST_THIRD, **settings)
    damage_best(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit):  # stopped again, long before the end
        train(tmp_path, stop_after=5, values=BEST_THIRD, **settings)
    assert "best/step-000003/model.safetensors does not have" in capsys.readouterr().err
    train(tmp_path, values=[*BEST_THIRD[:6], 0.5, 1.2], **settings)
    assert equal(written(tmp_path), after(7))


def test_without_a_finite_evaluation_the_last_weights_are_written(tmp_path):
    with pytest.raises(UserError, match="no evaluation had a finite held_out_loss"):
        train(tmp_path, keep_best="held_out_loss", values=[float("nan")] * 8)
    assert equal(written(tmp_path), after(8))


def test_a_metric_that_no_evaluation_has_is_named_at_the_first(tmp_path):
    with pytest.raises(UserError, match=r"no held_out_accuracy; it has .*held_out_loss"):
        train(tmp_path, keep_best="held_out_accuracy")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_without_evaluations_is_refused_before_an_update(tmp_path, make_stage, checkpoints):
    training = TrainingConfig(keep_best="held_out_loss", evaluate_every_steps=1)
    run, config = make_stage("sft", checkpoints["llama"], tmp_path, training=training)
    with pytest.raises(UserError, match=r"data\.evaluation names no rows"):
        run(config)
    with pytest.raises(ValueError, match="without held-out prompts"):
        make_stage("ppo", checkpoints["llama"], tmp_path, reward_model="x", training=training)

"""What is noted in a run that did what was asked and yet came to nothing: no rate, or a loss that exploded."""

import json

import pytest

from alignment.training import OptimConfig, Run, TrainingConfig, fit
from alignment.training.loop import divergence
from tests.training.toys import ToyStream, collate_by, squared_error, toy_engine


def notes(output, learning_rate=1e-3, steps=9, **optim) -> list[str]:
    """The notes of a toy run."""
    training = TrainingConfig(max_steps=steps)
    engine = toy_engine(learning_rate=learning_rate, training=training, steps=steps, **optim)
    with Run(output, {"training": {"trackers": []}}, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(4), squared_error(engine.model), training=training, run=run)
    return json.loads((output / "lineage.json").read_text()).get("notes", [])


@pytest.mark.parametrize(("warmup", "reached"), [(9, "89%"), (50, "16%")])
def test_a_warmup_that_is_not_over_before_the_run_is_noted(tmp_path, capsys, warmup, reached):
    (note,) = notes(tmp_path, warmup_steps=warmup)
    assert note.startswith(f"the warm-up ({warmup} updates) is as long as the run (9) or longer: ")
    assert f"ends at {reached} of its peak; lower warmup_steps, or give warmup_ratio" in note
    assert note in capsys.readouterr().err


def test_a_stage_notes_it_too_and_ppo_for_policy_and_critic_at_once(make_stage, stage, tmp_path):
    optim = OptimConfig(learning_rate=1e-4, eps=1e-5, warmup_steps=100)
    policy, reward_model = (str(stage(name) / "model") for name in ("sft", "reward"))
    for kind, more in (("dpo", {}), ("ppo", {"reward_model": reward_model})):
        run, config = make_stage(kind, policy, tmp_path / kind, optim=optim, **more)
        run(config)
        found = json.loads((tmp_path / kind / "lineage.json").read_text())["notes"]
        assert len([note for note in found if note.startswith("the warm-up (100 updates)")]) == 1


def test_a_loss_that_stays_finite_and_explodes_is_noted(make_stage, stage, tmp_path, capsys):
    policy = str(stage("sft") / "model")
    for rate, exploded in ((1e-4, False), (1.0, True)):
        output = tmp_path / str(rate)
        settings = {"optim": OptimConfig(learning_rate=rate), "training": TrainingConfig(max_steps=8, batch_size=4)}
        run, config = make_stage("sft", policy, output, **settings)
        assert run(config).is_dir()  # the model is there either way
        found = [note for note in json.loads((output / "lineage.json").read_text()).get("notes", []) if "explo" in note]
        assert bool(found) == exploded
        assert ("the loss has exploded" in capsys.readouterr().err) == exploded
    assert "Lower optim.learning_rate" in found[0]


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [5.0],
        [0.7, 9.0, 9.0, 9.0, 9.0],  # too few to tell
        [5.0 - 0.01 * step for step in range(100)],
        [2.0] * 40,
        [2.0, *[7.0] * 20, *[2.5] * 20],  # came back
        [2.0, 2.0, 2.0, 2.0, 2.0, 9.0],  # one hard batch
        [0.01, 0.4, 0.3, 0.5, 0.2, 0.4],  # small numbers differ by large factors
        [1.0, *[2.9] * 20],  # harmed, and not exploded
    ],
)
def test_a_loss_that_did_not_explode_is_left_in_peace(losses):
    assert divergence(losses) == ""


@pytest.mark.parametrize("losses", [[1.2, *[11.7] * 5], [0.693, *[4.0 + step for step in range(40)]]])
def test_a_loss_that_exploded_is_called_so(losses):
    assert divergence(losses).startswith(f"the loss has exploded: {losses[0]:.4g} before the first update, ")

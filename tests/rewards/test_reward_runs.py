"""PPO on several rewards: two reward models, a function and a rule; what is logged, and that a resumed run is the same run."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.algorithms.ppo import iterate
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.errors import UserError
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import Run, TrainingConfig
from tests.conftest import read_lines


def vowels(prompts, responses, **columns):
    """Share of vowels; does not apply to empty responses."""
    return [sum(c in "aeiou" for c in text) / len(text) if text else None for text in responses]


@pytest.fixture
def several(stage, make_stage, tmp_path):
    """`several(output, rewards, **changes)` -> run function and config of PPO on several rewards."""

    def make(output="ppo", rewards=None, **changes):
        model = str(stage("reward") / "model")
        rewards = (
            []
            if "reward_model" in changes
            else rewards
            or [
                RewardSpec(reward_model=model),
                RewardSpec(reward_model=model, name="again", weight=0.5, normalize="running", clip=(-1.0, 1.0)),
                RewardSpec(function="tests.rewards.test_reward_runs:vowels", weight=2.0),
                RewardSpec(length=LengthSpec(max=4, penalty=0.25), clip=(-1.0, 0.0)),
            ]
        )
        changes = {"value_model": "policy"} | changes
        return make_stage("ppo", str(stage("sft") / "model"), tmp_path / output, rewards=rewards, **changes)

    return make


def state_of(config):
    with Run(config.output, {}, stage="ppo") as directory:
        data = read_data(config, directory)
        return build_state(config, data), data.prompts.rows_at(0)


def test_ppo_learns_from_the_sum_of_its_rewards_and_logs_each(several, tmp_path):
    run, config = several()
    run(config)
    for line in read_lines(tmp_path / "ppo" / "metrics.jsonl"):
        total = line["score/reward_model"] + 0.5 * line["score/again"] + line["score/length"]
        applies = 1 - line["unscored_share/vowels"]
        assert line["score"] == pytest.approx(total + 2 * line["score/vowels"] * applies, abs=1e-5)
        assert line["score/again"] == pytest.approx(line["score/reward_model"])
        assert line["unscored_share/length"] == 0


def test_one_entry_is_the_short_form(several, stage):
    """`rewards` with one reward model gives the rewards, and so the policy, of `reward_model` to the last bit."""
    model = str(stage("reward") / "model")
    found = []
    for output, settings in (("short", {"reward_model": model}), ("list", {"rewards": [RewardSpec(model)]})):
        _, config = several(output, **settings)
        state, prompts = state_of(config)
        metrics, rollout = iterate(state, config, prompts, 0)
        found.append(
            (metrics, rollout.rewards, [p.detach().clone() for p in state.policy.backend.unwrapped.parameters()])
        )
    (metrics, rewards, weights), (others, other_rewards, other_weights) = found
    assert torch.equal(rewards, other_rewards)
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))
    assert metrics == {name: value for name, value in others.items() if "/" not in name}


def test_a_resumed_run_is_the_run_that_was_not_stopped(several, tmp_path, monkeypatch):
    """Statistics of normalized rewards are part of the checkpoint: the same numbers and weights to the last bit."""
    training = TrainingConfig(batch_size=8, max_steps=3)
    run, config = several("whole", training=training)
    whole = run(config)
    run, config = several("parts", training=training)
    log = Run.log

    def log_and_stop(self, step, metrics):
        log(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_stop)
        with pytest.raises(SystemExit):
            run(config)
    parts = run(config)
    assert_close(load_file(parts / "model.safetensors"), load_file(whole / "model.safetensors"), rtol=0, atol=0)
    lines = [
        [
            {name: value for name, value in line.items() if "second" not in name}
            for line in read_lines(directory.parent / "metrics.jsonl")
        ]
        for directory in (whole, parts)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 3


def test_a_checkpoint_of_other_rewards_is_refused(several, stage):
    state, _ = state_of(several("other", rewards=[RewardSpec(str(stage("reward") / "model"), name="new")])[1])
    with pytest.raises(
        UserError, match="holds statistics of reward_model, and the config normalizes new; keep the rewards"
    ):
        state.score.load({"reward_model": {"counts": [1.0], "means": [0.0], "squares": [1.0]}})

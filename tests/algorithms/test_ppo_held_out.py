"""Held-out prompts of a PPO run: what is measured on them, when the run ends, and which weights are its result."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import load_model
from alignment.algorithms.ppo.config import HeldOutConfig
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.rollouts import loop
from alignment.algorithms.rollouts.loop import HeldOutScores, judge_held_out
from alignment.algorithms.rollouts.metrics import kl_columns
from alignment.algorithms.rollouts.state import HeldOut, win_share
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import OptimConfig, Run, TrainingConfig
from alignment.training.settings import EarlyStopping
from tests.ppo_states import exact_kl, move
from tests.stopping import assert_goes_on, timeless

BY_LENGTH = HeldOutConfig(rewards=[RewardSpec(length=LengthSpec(target=3))])


@pytest.fixture
def ppo(stage, make_stage, world, tmp_path):
    """A run of 6 iterations, evaluated after every second, from the SFT policy; 4 held-out prompts."""

    def make(output="run", held_out=BY_LENGTH, training=None, **changes):
        training = training or TrainingConfig(
            batch_size=4, max_steps=6, evaluate_every_steps=2, keep_best="held_out_win_rate"
        )
        settings = {
            "reward_model": str(stage("reward") / "model"), "held_out": held_out, "training": training, "epochs": 1,
            "minibatches": 1, "max_new_tokens": 6,
            "data": DataConfig(train=world["prompts"], evaluation=world["prompts_eval"], max_length=256),
        }  # fmt: skip
        return make_stage("ppo", str(stage("sft") / "model"), tmp_path / output, **(settings | changes))

    return make


def test_scores_win_rate_and_budget_are_worked_by_hand():
    """Scores 1 2 3 4 at the start; then 2 2 1 5: won, tied, lost, won."""
    assert win_share([2.0, 2.0, 1.0, 5.0], [1.0, 2.0, 3.0, 4.0]) == 2.5 / 4
    held_out = HeldOut([], lambda *_: torch.zeros(0), SamplingConfig(), kl_budget=3.0)
    first = held_out.add([1.0, 2.0, 3.0, 4.0], 0.0, 0)
    assert first == {"held_out_score": 2.5, "held_out_win_rate": 0.5, "held_out_kl": 0.0} and not held_out.ended_by
    assert held_out.add([2.0, 2.0, 1.0, 5.0], 3.0, 1)["held_out_win_rate"] == 0.625 and not held_out.ended_by
    held_out.add([2.0, 2.0, 1.0, 5.0], 3.01, 7)
    assert "3.01 nats after iteration 7, above held_out.kl_budget (3)" in held_out.ended_by


def test_responses_have_their_own_seed_and_the_judges_scores(ppo):
    _, config = ppo(held_out=replace(BY_LENGTH, seed=11), temperature=0.8)
    with Run(config.output, {}, stage="ppo") as run:
        data = read_data(config, run)
        state = build_state(config, data)
    with torch.no_grad():
        for parameter in state.policy.backend.unwrapped.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    scores, kl, unscored = judge_held_out(state, config, state.held_out)
    assert (scores, kl, unscored) == judge_held_out(state, config, state.held_out) and unscored == 0
    model, ids = state.policy.backend.unwrapped, [list(prompt.ids) for prompt in data.held_out]
    drawn = decode_responses(model, ids, SamplingConfig(6, 0.8, seed=11), state.stop_ids)
    assert scores == pytest.approx([-0.01 * abs(len(tokens) - 3) for tokens in drawn.token_ids]) and len(scores) == 4
    values = []
    for prompt, tokens in zip(ids, drawn.token_ids, strict=True):
        row = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            found = [
                (net(row[:, :-1]).logits / 0.8)
                .log_softmax(-1)[0, len(prompt) - 1 :]
                .gather(1, row[0, len(prompt) :, None])
                for net in (model, load_model(config.policy))
            ]
        values.append(kl_columns(found[0].T, found[1].T, torch.ones(1, len(tokens), dtype=torch.bool))["kl"].item())
    assert kl == pytest.approx(sum(values) / 4, abs=1e-4) and abs(kl) > 1e-2


def test_held_out_figures_leave_out_what_has_no_score():
    """Means of 4 and 2; of the prompts with both scores 3 beats 1, and 1 loses to 2."""
    held_out = HeldOut([], lambda *_: torch.empty(0), SamplingConfig(4))
    assert held_out.add([1.0, 2.0, math.nan, -9.0], 0.1, 0)["held_out_score"] == -2
    found = held_out.add([3.0, 1.0, 5.0, math.nan], 0.1, 1)
    assert found["held_out_score"] == 3 and found["held_out_win_rate"] == 0.5


def test_the_budget_counts_the_kl_of_the_policy_not_of_its_samples(ppo):
    _, config = ppo(temperature=0.8, top_k=3)
    with Run(config.output, {}, stage="ppo") as run:
        data = read_data(config, run)
        state = build_state(config, data)
    model, ids = state.policy.backend.unwrapped, [list(prompt.ids) for prompt in data.held_out]
    move(model)
    drawn = decode_responses(model, ids, SamplingConfig(6, 0.8, 3), state.stop_ids)
    values = exact_kl(model, load_model(config.policy), ids, drawn.token_ids, 0.8)
    assert judge_held_out(state, config, state.held_out).kl == pytest.approx(sum(values) / 4, rel=1e-3)


def half(prompts, responses, **columns):
    """Applies to every other response."""
    return [1.0 if number % 2 else None for number in range(len(responses))]


def test_responses_without_a_score_are_counted(ppo):
    rewards = [RewardSpec(function="tests.algorithms.test_ppo_held_out:half")]
    _, config = ppo(held_out=HeldOutConfig(rewards=rewards))
    with Run(config.output, {}, stage="ppo") as run:
        state = build_state(config, read_data(config, run))
    found = judge_held_out(state, config, state.held_out)
    assert_close(found.scores, [math.nan, 1.0, math.nan, 1.0], equal_nan=True)
    assert found.unscored == 0.5


def planned(monkeypatch, results):
    """Let the evaluations of a run give these scores and KLs, and keep the weights that each one saw."""
    seen, remaining = [], list(results)

    def judge(state, config, held_out):
        weights = {n: p.detach().clone() for n, p in state.policy.backend.unwrapped.named_parameters()}
        seen.append(weights)
        return HeldOutScores(*remaining.pop(0))

    monkeypatch.setattr(loop, "judge_held_out", judge)
    return seen


def is_model(directory, weights):
    saved = load_model(str(directory)).state_dict()
    return all(torch.equal(saved[name], value) for name, value in weights.items() if name in saved)


def test_the_best_weights_are_the_result(ppo, monkeypatch, read_metrics, tmp_path):
    seen = planned(
        monkeypatch, [([0.0] * 4, 0.0), ([1.0] * 3 + [-1.0], 1.0), ([1.0] * 2 + [-1.0] * 2, 2.0), ([0.0] * 4, 3.0)]
    )
    run, config = ppo()
    model = run(config)
    assert is_model(model, seen[1]) and not is_model(model, seen[3])
    lines = read_metrics(tmp_path / "run")
    rates = {line["step"]: line["held_out_win_rate"] for line in lines if "held_out_win_rate" in line}
    assert rates == {2: 0.75, 4: 0.5, 6: 0.5} and lines[-1]["best_step"] == 2 and len(lines) == 6
    notes = (tmp_path / "run" / "lineage.json").read_text()
    assert "model/ holds step 2, the best by held_out_win_rate (0.75); the run ended at step 6" in notes


def test_the_starting_policy_is_the_result_where_nothing_beats_it(ppo, monkeypatch, stage):
    planned(monkeypatch, [([0.0] * 4, 0.0)] + [([-1.0] * 4, 1.0)] * 3)
    run, config = ppo()
    model = run(config)
    start = load_file(stage("sft") / "model" / "model.safetensors")
    assert_close(load_file(model / "model.safetensors"), start, rtol=0, atol=0)


def test_the_run_ends_at_its_kl_budget_with_the_best_weights_within_it(ppo, monkeypatch, read_metrics, tmp_path):
    seen = planned(monkeypatch, [([0.0] * 4, 0.0), ([1.0] * 3 + [-1.0], 1.0), ([1.0] * 4, 5.0)])
    training = TrainingConfig(
        batch_size=4, max_steps=6, evaluate_every_steps=2, keep_best="held_out_win_rate", save_every_steps=2
    )
    run, config = ppo(held_out=replace(BY_LENGTH, kl_budget=4.0), training=training)
    model = run(config)
    assert is_model(model, seen[1])  # the last one wins more, and lies beyond the budget
    assert len(read_metrics(tmp_path / "run")) == 4
    notes = (tmp_path / "run" / "lineage.json").read_text()
    assert "the run ends after iteration 4: held_out_kl is 5 nats" in notes
    assert (run(config) == model and len(read_metrics(tmp_path / "run")) == 4) or not config.training.save_every_steps


def test_a_start_beyond_the_kl_budget_is_refused(ppo, monkeypatch, read_metrics, tmp_path):
    planned(monkeypatch, [([0.0] * 4, 4.5)])
    run, config = ppo(held_out=replace(BY_LENGTH, kl_budget=4.0))
    with pytest.raises(UserError, match=r"starting policy's held_out_kl is 4\.5 nats, beyond the budget of 4"):
        run(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_metrics(tmp_path / "run")


def test_the_run_ends_when_the_win_rate_no_longer_improves(ppo, monkeypatch, read_metrics, tmp_path):
    seen = planned(monkeypatch, [([0.0] * 4, 0.0), ([1.0] * 4, 1.0), ([1.0] * 3 + [-1.0], 1.0)])
    stopping = EarlyStopping("held_out_win_rate", patience=1)
    training = TrainingConfig(batch_size=4, max_steps=6, evaluate_every_steps=2, early_stopping=stopping)
    run, config = ppo(training=training)
    assert is_model(run(config), seen[1]) and len(read_metrics(tmp_path / "run")) == 4
    assert (
        "held_out_win_rate has not improved by more than 0 in 1 evaluations; its best was 1 after iteration 2"
        in (tmp_path / "run" / "lineage.json").read_text()
    )


def test_a_stopped_run_resumes_with_its_best_and_the_scores_of_the_start(ppo, stage, tmp_path):
    training = TrainingConfig(batch_size=4, max_steps=6, evaluate_every_steps=1, keep_best="held_out_score")
    changes = {"training": training, "optim": OptimConfig(learning_rate=1e-2, eps=1e-5), "rollouts_behind": 1}
    judge = HeldOutConfig(reward_model=str(stage("reward") / "model"))
    assert_goes_on(partial(ppo, held_out=judge, **changes), 3, tmp_path)
    assert len({line["held_out_score"] for line in timeless(tmp_path / "whole")}) > 1

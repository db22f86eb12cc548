"""One iteration of PPO: which settings reach what, which rows and texts each update learns from, metrics by hand."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo import ppo
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.loss_functions import RolloutBatch, rollout_batches, value_loss_fn
from alignment.algorithms.ppo.metrics import explained_variance, sampling_error
from alignment.algorithms.ppo.ppo import iterate
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.algorithms.rollouts.metrics import distinct_share, response_means
from alignment.algorithms.rollouts.rollout import Rollout, group_rollouts, ragged_of
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import load_model
from alignment.models.outputs import ValueOutput
from alignment.ragged import Ragged, group_by_length
from alignment.training import OptimConfig, Run, TrainingConfig


@pytest.fixture
def built(stage, make_stage, tmp_path):
    """`built(**config changes)` -> config, data and state of a run from the SFT policy and the reward model."""

    def build(**changes):
        policy, reward_model = (str(stage(name) / "model") for name in ("sft", "reward"))
        _, config = make_stage("ppo", policy, tmp_path / "run", reward_model=reward_model, **changes)
        with Run(config.output, {}, stage="ppo") as directory:
            data = read_data(config, directory)
            return config, data, build_state(config, data)

    return build


def same(total):
    """A sum over one rank."""
    return total


def test_samples_and_advantages_follow_the_settings(built):
    training = TrainingConfig(batch_size=8, max_steps=3, seed=3)
    config, data, state = built(
        training=training, gamma=0.9, gae_lambda=0.7, kl_coef=0.3, missing_end_penalty=0.4, temperature=0.7,
        max_new_tokens=5, optim=OptimConfig(learning_rate=1e-2), normalize_scores=False,
    )  # fmt: skip
    state.stop_ids = list(range(0, 384, 12))
    draw = partial(
        decode_responses, state.policy.backend.unwrapped, config=SamplingConfig(5, 0.7, seed=3), stop_ids=state.stop_ids
    )
    iterate(state, config, data.prompts.rows_at(0), 0)  # so that policy and reference differ
    prompts = data.prompts.rows_at(2)
    drawn = draw(prompts=[prompt.ids for prompt in prompts], rows=range(16, 24))  # rows are numbered over the whole run
    metrics, rollout = iterate(state, config, prompts, 2)
    assert rollout.responses == drawn.token_ids and rollout.numbers == list(range(16, 24))
    wanted = add_advantages(rollout, config, ScoreNormalizer(enabled=False), 0.3, same)
    for name in ("rewards", "advantages", "returns"):
        assert_close(getattr(rollout, name), getattr(wanted, name))
    assert metrics["response_tokens"] * 8 == sum(map(len, drawn.token_ids)) and rollout.seconds > 0


def test_every_pass_takes_every_row_once_in_an_order_of_its_own(built, monkeypatch):
    """Orders differ by epoch, iteration and seed; each update reads the next texts."""
    orders, texts = {}, []
    for seed in (0, 1):
        training = TrainingConfig(batch_size=8, max_steps=2, seed=seed)
        config, data, state = built(training=training, epochs=3, minibatches=2, max_new_tokens=2)
        state.pretraining = lambda update: texts.append(update) or [Ragged.build([[1, 5, 6]])]
        for step in (0, 1):
            rows = []
            with monkeypatch.context() as patch:
                patch.setattr(
                    ppo, "rollout_batches", lambda r, i, n, rows=rows: rows.append(list(i)) or rollout_batches(r, i, n)
                )
                iterate(state, config, data.prompts.rows_at(step), step)
            assert [len(part) for part in rows] == [4] * 6
            for epoch in range(3):
                orders[seed, step, epoch] = tuple(rows[2 * epoch] + rows[2 * epoch + 1])
    assert all(sorted(order) == list(range(8)) for order in orders.values())
    assert len(set(orders.values())) == len(orders) == 12
    assert texts == 2 * list(range(12))


def test_a_run_goes_through_its_prompts(stage, make_stage, tmp_path, monkeypatch):
    seen, real = [], ppo.iterate
    spy = lambda state, config, prompts, step: (seen.append((step, prompts)), real(state, config, prompts, step))[1]  # noqa: E731
    monkeypatch.setattr(ppo, "iterate", spy)
    training = TrainingConfig(batch_size=8, max_steps=2)
    reward_model = str(stage("reward") / "model")
    run, config = make_stage(
        "ppo", str(stage("sft") / "model"), tmp_path, reward_model=reward_model, training=training, max_new_tokens=2,
        epochs=1, minibatches=1, reference=str(stage("dpo") / "model"),
    )  # fmt: skip
    run(config)
    assert [step for step, _ in seen] == [0, 1]
    ids = {prompt.row_id for _, prompts in seen for prompt in prompts}
    assert len(ids) == 16  # an epoch of 16 prompts, each once
    parents = json.dumps(json.loads((tmp_path / "lineage.json").read_text())["parents"])
    assert all(name in parents for name in (config.policy, reward_model, config.reference))


def test_the_schedule_counts_updates_and_each_network_has_its_optimizer(built, world):
    text = DataConfig(train=world["pretrain"], max_length=128)
    training = TrainingConfig(batch_size=8, max_steps=5, seed=4)
    config, data, state = built(
        training=training, epochs=3, minibatches=2, optim=OptimConfig(learning_rate=1e-3),
        value_optim=OptimConfig(learning_rate=2e-3), pretrain=text, pretrain_coef=0.1, pretrain_batch_size=5,
    )  # fmt: skip
    assert state.policy.total_steps == state.value.total_steps == 5 * 3 * 2
    assert (state.policy.config, state.value.config) == (config.optim, config.value_optim)
    assert not state.policy.model.training and not state.value.model.training  # or the first ratio would not be 1
    assert (data.prompts.seed, data.prompts.batch_size) == (4, 8)
    assert data.texts.batch_size == 5 and data.texts.seed not in (0, 4)  # another order than that of the prompts
    first, second = (tuple(name for batch in state.pretraining(update) for name in batch.row_ids) for update in (0, 1))
    assert len(first) >= 5 and set(first) != set(second)


def test_a_named_reference_is_asked(built, stage):
    reference = str(stage("dpo") / "model")
    _, data, state = built(reference=reference)
    batch = Ragged.build([prompt.ids for prompt in data.prompts.rows_at(0)])
    with torch.no_grad():
        wanted = load_model(reference)(batch=batch).log_probs
        assert_close(state.reference(batch=batch, temperature=1.0).log_probs, wanted, atol=1e-5, rtol=0)
        assert (state.policy.backend.unwrapped(batch=batch).log_probs - wanted).abs().max() > 1e-2


def test_metrics_of_a_rollout_are_worked_by_hand():
    frame = torch.tensor
    rollout = Rollout(
        prompts=[[1], [1], [1], [1]], responses=[[6, 2], [7], [8], [7]], numbers=[0, 1, 2, 3],
        mask=frame([[True, True], [True, False], [True, False], [True, False]]),
        log_probs=frame([[-1.0, -2.0], [-3.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]]),
        sampled_log_probs=frame([[-1.0, -2.1], [-2.7, 0.0], [-1.0, 0.0], [-3.0, 0.0]]),
        reference_log_probs=frame([[-1.2, -1.6], [-4.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]]),
        values=frame([[1.0, 2.0], [0.0, 9.0], [1.0, 9.0], [1.0, 9.0]]),
        scores=frame([3.0, 1.0, -2.0, 4.0]), ended=frame([True, False, True, True]),
        returns=frame([[2.0, 4.0], [0.0, 9.0], [1.0, 9.0], [3.0, 9.0]]),
    )  # fmt: skip
    metrics = response_means(rollout, same)
    # log-ratios 0.2 - 0.4 and 1; k3 exp(-0.2) - 1 + 0.2, exp(0.4) - 1 - 0.4, exp(-1) - 1 + 1
    assert metrics == pytest.approx({
        "score": 1.5, "unscored_share": 0, "kl": (-0.2 + 1.0) / 4, "kl_k3": (0.018731 + 0.091825 + 0.367879) / 4,
        "response_tokens": 5 / 4, "ended_share": 0.75,
    }, abs=1e-5)  # fmt: skip
    # returns 2 4 0 1 3 vary by 10 / 4; what is left of them, 1 2 0 0 2, by 4 / 4
    assert explained_variance(rollout, same) == pytest.approx(0.6)
    assert distinct_share(rollout, lambda value: [value]) == 0.75
    assert distinct_share(rollout, lambda value: [value, [[6, 2], [9]]]) == 4 / 6
    assert sampling_error(rollout, same) == pytest.approx(0.3)  # the sampler was further up
    assert sampling_error(replace(rollout, sampled_log_probs=rollout.log_probs - rollout.mask * 0.2), same) > 0.19


def test_the_value_loss_is_worked_by_hand():
    """Values 2 and 1 are clipped to 0.5 + 0.4, by the value model's own range; the policy's is another."""
    config = PPOConfig(
        "p", reward_model="r", data=DataConfig(train="t"), output="o", clip_range=0.1, value_clip_range=0.4
    )
    batch = RolloutBatch(
        ragged_of([[1, 5]], [[6, 7]], [0]), torch.zeros(2), torch.tensor([0.5, 0.5]), torch.zeros(2),
        torch.tensor([1.5, 1.0]),
    )  # fmt: skip
    value_model = lambda batch, tokens: ValueOutput(values=torch.tensor([9.0, 2.0, 1.0, 9.0])[tokens])  # noqa: E731  2 and 1 stand before the response's tokens
    # (0.9 - 1.5)^2 / 2 = 0.18 beats (2 - 1.5)^2 / 2; (0.9 - 1)^2 / 2 = 0.005 beats (1 - 1)^2 / 2
    assert value_loss_fn(value_model, config)(batch).total.item() == pytest.approx(0.185, abs=1e-6)


def test_responses_to_one_prompt_share_it_in_scoring_and_updates(built):
    """Several responses to a prompt: the same numbers as with the prompt computed for each, in fewer tokens."""
    found = []
    for share in (False, True):
        training = TrainingConfig(batch_size=8, max_steps=2, micro_batch_tokens=300, share_prompts=share)
        config, data, state = built(
            training=training, max_new_tokens=6, optim=OptimConfig(learning_rate=1e-3, eps=1e-4)
        )
        assert state.share_prompts is share
        first, second, third, *_ = data.prompts.rows_at(0)
        metrics, rollout = iterate(state, config, [first, second, first, first, third, second, first, second], 0)
        assert metrics["first_ratio_error"] <= 1e-5
        weights = [parameter.detach().clone() for parameter in state.policy.backend.unwrapped.parameters()]
        batches = rollout_batches(rollout, range(8), 1000)
        tokens = sum(len(batch.ragged.tokens) for batch in batches)
        found.append((metrics, rollout, weights, tokens))
    (plain, apart, expected, more), (shared, together, weights, fewer) = found
    assert fewer == more - 3 * len(apart.prompts[0]) - 2 * len(apart.prompts[1])
    assert apart.responses == together.responses
    for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns"):
        assert_close(getattr(together, name), getattr(apart, name), atol=1e-5, rtol=0)
    for name in ("policy_loss", "value_loss", "kl", "entropy"):
        assert shared[name] == pytest.approx(plain[name], abs=1e-5)
    for one, other in zip(weights, expected, strict=True):
        assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("limit", [12, 20, 40, 1000])
def test_responses_to_one_prompt_stay_together_within_the_limit(limit):
    prompts = [[1] * 8, [2] * 3, [1] * 8, [3] * 5, [1] * 8, [2] * 3]
    responses = [[9] * n for n in (4, 2, 1, 3, 4, 5)]
    groups = group_rollouts(prompts, responses, limit, True)
    assert sorted(row for group in groups for row in group) == list(range(6))
    for group in groups:
        batch = ragged_of([prompts[row] for row in group], [responses[row] for row in group], group, share_prompts=True)
        assert len(batch.tokens) <= limit
    assert len(groups) == {12: 5, 20: 2, 40: 1, 1000: 1}[limit]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    assert group_rollouts(prompts, responses, limit, False) == group_by_length(lengths, limit)
    alone = [[number, *prompt] for number, prompt in enumerate(prompts)]
    assert group_rollouts(alone, responses, limit, True) == group_by_length([n + 1 for n in lengths], limit)

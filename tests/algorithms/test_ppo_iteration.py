"""One iteration of PPO: which settings reach what, which samples, rows and texts each update learns from (H31 to H37)."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.algorithms.ppo import iterate, ppo
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.loss_functions import rollout_batches
from alignment.algorithms.ppo.metrics import sampling_error
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.algorithms.rollouts.metrics import sample_columns
from alignment.algorithms.rollouts.rollout import collect, draw_samples, ragged_of
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig
from tests.ppo_states import exact_kl, move


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
    wanted = add_advantages(rollout, config, ScoreNormalizer(enabled=False), 0.3, lambda total: total)
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


FAST = OptimConfig(learning_rate=1e-3, eps=1e-5)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.5, "temperature": 1.4}, {"min_p": 0.3}]
)
def test_H31_filtered_samples_are_scored_whole_and_weighed(built, settings):
    """The ratio starts at 1 whatever the filter; the sampler's own log-probabilities are those of the cut distribution, so
    that each weight is the mass that the filter kept."""
    config, data, state = built(**settings)
    metrics, rollout = iterate(state, config, data.prompts_of(0), 0)
    assert metrics["first_ratio_error"] <= 1e-5
    if config.samples_differ:
        kept = (rollout.log_probs - rollout.sampled_log_probs).exp()[rollout.mask]
        assert_close(rollout.weights[rollout.mask], kept.clamp(max=2.0), atol=1e-6, rtol=0)
        assert 0 < kept.min() < 0.99 and kept.max() <= 1 + 1e-5
        assert metrics["importance_weight_mean"] == pytest.approx(kept.mean().item(), abs=1e-5)
        assert metrics["sampling_kl"] > 0
    else:
        assert rollout.weights is None and "importance_weight_mean" not in metrics and metrics["sampling_error"] <= 1e-5


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_p": 0.5, "temperature": 1.4}, {"min_p": 0.3}, {"rollouts_behind": 1, "optim": FAST}],
    ids=["top_k", "top_p", "min_p", "behind"],
)
def test_the_kl_of_foreign_samples_is_summed_over_the_vocabulary(built, settings):
    """`kl`, what is written of each sample and the controller's step: of the policy, whatever has drawn its tokens."""
    config, data, state = built(**settings, kl_target=0.02)
    reference = load_model(config.policy)
    if config.rollouts_behind:
        iterate(state, config, data.prompts_of(0), 0)
    else:
        move(state.policy.backend.unwrapped)
    policy, coef = copy.deepcopy(state.policy.backend.unwrapped), state.kl.coef
    metrics, rollout = iterate(state, config, data.prompts_of(1), 1)
    values = exact_kl(policy, reference, rollout.prompts, rollout.responses, config.temperature)
    kl = sum(values) / len(values)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3) and kl > 1e-3
    assert sample_columns(rollout)["kl"] == pytest.approx(values[:2], rel=1e-3)
    assert not {"kl_k2", "kl_k3"} & metrics.keys()  # estimates from tokens that the policy has not drawn
    error = min(max(kl / 0.02 - 1, -0.2), 0.2)
    assert state.kl.coef == pytest.approx(coef * (1 + error * len(values) / config.kl_horizon), rel=1e-6)


def test_the_kl_of_own_samples_is_estimated_from_their_tokens(built):
    config, data, state = built(temperature=0.7)
    move(state.policy.backend.unwrapped)
    metrics, rollout = iterate(state, config, data.prompts_of(0), 0)
    k1 = (rollout.log_probs - rollout.reference_log_probs).sum(1).mean()
    assert rollout.token_kl is None and metrics["kl"] == pytest.approx(k1.item(), abs=1e-6)
    assert {"kl_k2", "kl_k3"} <= metrics.keys()


def test_H32_a_checkpoints_generation_config_does_not_reach_the_rollouts(built, write_checkpoint, tmp_path):
    """64 rollouts of 8 tokens of a nearly uniform model are distinct, with top_k = 1 in its generation_config.json."""
    policy = write_checkpoint(tmp_path / "policy", "llama")
    file = Path(policy) / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {"do_sample": True, "top_k": 1, "top_p": 0.01, "temperature": 0.1}))
    training = TrainingConfig(batch_size=64, max_steps=1)
    config, data, state = built(policy, training=training, max_new_tokens=8)
    same = [data.prompts_of(0)[0]] * 64
    responses = draw_samples(state, config, same, 0).responses.token_ids
    assert len({tuple(tokens) for tokens in responses}) >= 60
    greedy = draw_samples(state, replace(config, top_k=1), same, 0).responses.token_ids
    assert len({tuple(tokens) for tokens in greedy}) == 1  # what the run itself asks for is done


def test_H33_log_probs_do_not_depend_on_batching_and_little_on_precision(built):
    config, data, state = built(max_new_tokens=12)
    found = {}
    for tokens in (1, 10**6):  # one row at a time, and all at once
        changed = replace(config, training=replace(config.training, micro_batch_tokens=tokens))
        found[tokens] = collect(state, changed, data.prompts_of(0), 0)
    one, whole = found[1], found[10**6]
    assert one.responses == whole.responses
    assert_close(one.log_probs, whole.log_probs, atol=2e-6, rtol=0)
    assert sampling_error(whole, lambda total: total) <= 1e-5  # with the cache against without
    model = state.policy.backend.unwrapped
    batch = ragged_of(whole.prompts, whole.responses, whole.numbers)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(batch=batch).log_probs
    assert 0 < (rounded.float() - whole.log_probs[whole.mask]).abs().max() <= 0.05


def ranks_of(built, size, **settings):
    """This iteration's samples on each of `size` ranks, of one prompt again and again."""
    config, data, state = built(name=f"ranks{size}", **settings)
    prompts = [data.prompts_of(0)[0]] * 8
    found = []
    for rank in range(size):
        group = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), largest=lambda count: count)
        view = SimpleNamespace(
            process_group=group, policy=state.policy, rollout_weights="gathered", stop_ids=state.stop_ids, servers=None,
            cuda_graphs=False,
        )  # fmt: skip
        found.append(draw_samples(view, config, prompts, 3))
    return found


@pytest.mark.parametrize("settings", [{}, {"micro_rollout_batch_size": 3, "top_p": 0.8}], ids=["", "few slots"])
def test_H37_ranks_together_draw_the_responses_of_one_rank(built, settings):
    (one,), two = ranks_of(built, 1), ranks_of(built, 2, **settings)
    if not settings:
        merged = dict(
            zip(two[0].numbers + two[1].numbers, two[0].responses.token_ids + two[1].responses.token_ids, strict=True)
        )
        assert merged == dict(zip(one.numbers, one.responses.token_ids, strict=True))
    assert two[0].numbers == [24, 26, 28, 30] and two[1].numbers == [25, 27, 29, 31]
    drawn = [tuple(tokens) for part in two for tokens in part.responses.token_ids]
    assert len(set(drawn)) >= 6  # of 8 responses to one prompt, on two ranks


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_I15_a_seed_reproduces_rollouts_whatever_the_slots(built, slots):
    """Responses of several prompts enter as others end: who shares the cache with whom changes no draw (I15)."""
    settings = {"max_new_tokens": 10, "responses_per_prompt": 1, "top_p": 0.9, "temperature": 1.2}
    config, data, state = built(**settings)
    state.stop_ids = list(range(0, 384, 12))
    prompts = data.prompts_of(0)
    wanted = draw_samples(state, config, prompts, 0).responses
    assert len(set(map(len, wanted.token_ids))) > 1
    again = draw_samples(state, replace(config, micro_rollout_batch_size=slots), prompts, 0).responses
    assert again.token_ids == wanted.token_ids
    for mine, other in zip(again.log_probs, wanted.log_probs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    for changed, step in ((replace(config, training=replace(config.training, seed=1)), 0), (config, 1)):
        assert draw_samples(state, changed, prompts, step).responses.token_ids != wanted.token_ids


def test_an_iteration_behind_learns_from_samples_of_older_weights(built):
    """Decoupled PPO: sampled by older weights, the ratio's denominator, reference and values by those of now, weighed."""
    training = TrainingConfig(batch_size=8, max_steps=3)
    config, data, state = built(rollouts_behind=1, training=training, temperature=0.9)
    model = state.policy.backend.unwrapped
    sampling = replace(config.sampling)

    def sampled(step):
        ids = [list(prompt.ids) for prompt in data.prompts_of(step)]
        return decode_responses(model, ids, sampling, state.stop_ids, rows=range(8 * step, 8 * step + 8)).token_ids

    start = {step: sampled(step) for step in (0, 1)}
    _, first = iterate(state, config, data.prompts_of(0), 0)
    after_one = {step: sampled(step) for step in (1, 2)}
    batch = ragged_of([list(prompt.ids) for prompt in data.prompts_of(1)], start[1], range(8, 16))
    with torch.no_grad():
        now = model(batch=batch, temperature=0.9).log_probs
    metrics, second = iterate(state, config, data.prompts_of(1), 1)
    assert first.responses == start[0]  # nothing is older than the start
    assert second.responses == start[1] != after_one[1]
    assert_close(second.log_probs[second.mask], now, atol=1e-6, rtol=0)
    change = (second.log_probs - second.sampled_log_probs)[second.mask]
    assert change.abs().max() > 1e-3
    assert_close(second.weights[second.mask], change.exp().clamp(max=2.0), atol=1e-6, rtol=0)
    assert metrics["first_ratio_error"] <= 1e-5
    _, third = iterate(state, config, data.prompts_of(2), 2)
    assert third.responses == after_one[2] and state.ahead.waiting is None  # no iteration follows

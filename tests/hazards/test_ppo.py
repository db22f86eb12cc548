"""The hazards of PPO, H28 to H37: what would show if the code had the fault; the worked values of losses are in tests/losses.

That PPO as a whole reaches the known optimum, which a flipped sign does not, is in learning/; resuming in algorithms/test_resume.py.
"""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo import PPOConfig, iterate
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.loss_functions import RolloutBatch, policy_loss_fn, rollout_batches
from alignment.algorithms.ppo.metrics import sampling_error
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.algorithms.rollouts.alarms import Alarms, new_alarms
from alignment.algorithms.rollouts.metrics import kl_columns, sample_columns
from alignment.algorithms.rollouts.rollout import Rollout, collect, draw_samples, ragged_of
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import load_model
from alignment.losses.policy import importance_weights, kl_estimates
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.training import OptimConfig, Run, TrainingConfig
from tests.ppo_states import exact_kl, move

LOG_PROBS = torch.tensor([[-0.9, -2.2, -1.4, -0.3]])
REFERENCE = torch.tensor([[-1.1, -2.0, -1.4, -0.8]])
WHOLE = torch.ones(1, 4, dtype=torch.bool)
FAST = OptimConfig(learning_rate=1e-3, eps=1e-5)
PAD = 1e9  # in slots that hold no token


def config_of(**settings):
    return PPOConfig(policy="p", reward_model="r", data=DataConfig(train="t"), output="o", **settings)


def padded(values, pad=PAD, count=3):
    return torch.cat([values, torch.full((len(values), count), pad, dtype=values.dtype)], dim=1)


PADDED_MASK = torch.cat([WHOLE, ~WHOLE[:, :3]], dim=1)


def rollout_of(mask, **changes):
    """Responses whose policy is the reference and whose values are 0, with score 1 each."""
    rows, zero = len(mask), torch.zeros(mask.shape)
    fields = {
        "prompts": [[1]] * rows, "responses": [[5] * int(row.sum()) for row in mask], "numbers": list(range(rows)),
        "mask": mask, "log_probs": zero, "sampled_log_probs": zero, "reference_log_probs": zero, "values": zero,
        "scores": torch.ones(rows), "ended": torch.ones(rows, dtype=torch.bool),
    }  # fmt: skip
    return Rollout(**(fields | changes))


# --- H28: estimators ------------------------------------------------------------------------------------------------


def test_H28_the_estimates_are_those_of_the_valid_tokens():
    estimates = kl_estimates(LOG_PROBS, REFERENCE)
    assert estimates["k1"].sum().item() == pytest.approx(0.5, abs=1e-6)
    assert_close(estimates["k3"], torch.tensor([[0.018731, 0.021403, 0.0, 0.106531]]), atol=1e-6, rtol=0)
    for pad in (PAD, math.nan):
        columns = kl_columns(padded(LOG_PROBS, pad), padded(REFERENCE, -pad), PADDED_MASK)
        assert columns["kl"].item() == pytest.approx(0.5, abs=1e-6)
        assert columns["kl_k3"].item() == pytest.approx(0.146664, abs=1e-6)
    same = kl_columns(LOG_PROBS, LOG_PROBS, WHOLE)
    assert same["kl"].item() == same["kl_k3"].item() == 0


def test_H28_a_kl_that_stays_negative_gives_an_alarm():
    alarms = Alarms()
    notes = [new_alarms(alarms, step, {"kl": -0.3, "responses": 64.0}) for step in range(1, 7)]
    assert [bool(found) for found in notes] == [False] * 4 + [True, False] and "KL negative" in notes[4][0]


# --- H29: rewards ---------------------------------------------------------------------------------------------------


def test_H29_a_missing_end_costs_by_the_reason_it_ended_not_by_the_end_token(checkpoints):
    """Stop tokens of the run's own end a response as the tokenizer's end token does; only running out of room costs."""
    model = load_language_model(checkpoints["llama"]).eval()
    drawn = decode_responses(model, [[5, 6]] * 40, SamplingConfig(6, seed=2), stop_ids=range(320, 384), rows=range(40))
    ended, lengths = torch.tensor(drawn.ended), [len(tokens) for tokens in drawn.token_ids]
    assert 0 < ended.sum() < 40
    assert all(tokens[-1] >= 320 for tokens, end in zip(drawn.token_ids, drawn.ended, strict=True) if end)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rollout = rollout_of(mask, ended=ended)
    found = add_advantages(
        rollout, config_of(missing_end_penalty=3.0), ScoreNormalizer(enabled=False), 0.0, lambda x: x
    )
    assert_close(found.rewards.sum(1), 1 - 3.0 * (~ended).float())


# --- H31 to H34: the sampler and the update speak of one policy -----------------------------------------------------


@pytest.fixture
def built(stage, make_stage, tmp_path):
    """`built(**config changes)` -> config, prompts of two iterations and state, from the SFT policy or another one."""

    def build(policy=None, name="run", **changes):
        policy = policy or str(stage("sft") / "model")
        _, config = make_stage("ppo", policy, tmp_path / name, reward_model=str(stage("reward") / "model"), **changes)
        with Run(config.output, {}, stage="ppo") as run:
            data = read_data(config, run)
            return config, data.prompts_of, build_state(config, data)

    return build


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.5, "temperature": 1.4}, {"min_p": 0.3}]
)
def test_H31_a_filtered_sample_is_scored_in_the_whole_distribution_and_weighed(built, settings):
    """The ratio starts at 1 whatever the filter; the sampler's own log-probabilities are those of the cut distribution, so
    that each weight is the mass that the filter kept."""
    config, prompts_of, state = built(**settings)
    metrics, rollout = iterate(state, config, prompts_of(0), 0)
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
def test_the_kl_of_samples_that_are_not_the_policy_s_own_is_summed_over_the_vocabulary(built, settings):
    """`kl`, what is written of each sample and the controller's step: of the policy, whatever has drawn its tokens."""
    config, prompts_of, state = built(**settings, kl_target=0.02)
    reference = load_model(config.policy)
    if config.rollouts_behind:
        iterate(state, config, prompts_of(0), 0)
    else:
        move(state.policy.backend.unwrapped)
    policy, coef = copy.deepcopy(state.policy.backend.unwrapped), state.kl.coef
    metrics, rollout = iterate(state, config, prompts_of(1), 1)
    values = exact_kl(policy, reference, rollout.prompts, rollout.responses, config.temperature)
    kl = sum(values) / len(values)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3) and kl > 1e-3
    assert sample_columns(rollout)["kl"] == pytest.approx(values[:2], rel=1e-3)
    assert not {"kl_k2", "kl_k3"} & metrics.keys()  # estimates from tokens that the policy has not drawn
    error = min(max(kl / 0.02 - 1, -0.2), 0.2)
    assert state.kl.coef == pytest.approx(coef * (1 + error * len(values) / config.kl_horizon), rel=1e-6)


def test_the_kl_of_the_policy_s_own_samples_is_the_estimate_from_their_tokens(built):
    config, prompts_of, state = built(temperature=0.7)
    move(state.policy.backend.unwrapped)
    metrics, rollout = iterate(state, config, prompts_of(0), 0)
    k1 = (rollout.log_probs - rollout.reference_log_probs).sum(1).mean()
    assert rollout.token_kl is None and metrics["kl"] == pytest.approx(k1.item(), abs=1e-6)
    assert {"kl_k2", "kl_k3"} <= metrics.keys()


def test_H31_importance_weights_make_the_gradient_of_the_policy_out_of_another_ones_samples():
    """Enumerated over all tokens: sum of q * weight * A * grad log p is sum of p * A * grad log p; without weights it is not."""
    torch.manual_seed(0)
    tiny = {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    model, advantages = build_language_model(tiny).eval(), torch.randn(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        p = model(torch.tensor([[1]])).logits[0, -1].log_softmax(-1)
        q = (p + torch.randn(11)).log_softmax(-1)
    responses, mask = [[token] for token in range(11)], torch.ones(11, 1, dtype=torch.bool)
    weights = importance_weights(p[:, None], q[:, None], mask, cap=math.inf).flatten()

    def gradient(advantages, weights):
        rows = ragged_of([[1]] * 11, responses, list(range(11)))
        zero = torch.zeros(11)
        batch = RolloutBatch(rows, p, zero, advantages, zero, weights=weights)
        loss = policy_loss_fn(model, config_of(), [], kl_coef=0.0)(batch).total
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    wanted = gradient(p.exp() * advantages, None)  # each token as often as the policy itself would draw it
    assert_close(gradient(q.exp() * advantages, weights), wanted, atol=1e-6, rtol=1e-5)
    assert (gradient(q.exp() * advantages, None) - wanted).norm() > 0.3 * wanted.norm()


def test_H32_a_checkpoints_generation_config_does_not_reach_the_rollouts(built, write_checkpoint, tmp_path):
    """64 rollouts of 8 tokens of a nearly uniform model are distinct, with top_k = 1 in its generation_config.json."""
    policy = write_checkpoint(tmp_path / "policy", "llama")
    file = Path(policy) / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {"do_sample": True, "top_k": 1, "top_p": 0.01, "temperature": 0.1}))
    training = TrainingConfig(batch_size=64, max_steps=1)
    config, prompts_of, state = built(policy, training=training, max_new_tokens=8)
    same = [prompts_of(0)[0]] * 64
    responses = draw_samples(state, config, same, 0).responses.token_ids
    assert len({tuple(tokens) for tokens in responses}) >= 60
    greedy = draw_samples(state, replace(config, top_k=1), same, 0).responses.token_ids
    assert len({tuple(tokens) for tokens in greedy}) == 1  # what the run itself asks for is done


def test_H33_log_probs_do_not_depend_on_batching_and_little_on_precision(built):
    config, prompts_of, state = built(max_new_tokens=12)
    found = {}
    for tokens in (1, 10**6):  # one row at a time, and all at once
        changed = replace(config, training=replace(config.training, micro_batch_tokens=tokens))
        found[tokens] = collect(state, changed, prompts_of(0), 0)
    one, whole = found[1], found[10**6]
    assert one.responses == whole.responses
    assert_close(one.log_probs, whole.log_probs, atol=2e-6, rtol=0)
    assert sampling_error(whole, lambda x: x) <= 1e-5  # with the cache against without
    model = state.policy.backend.unwrapped
    batch = ragged_of(whole.prompts, whole.responses, whole.numbers)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(batch=batch).log_probs
    assert 0 < (rounded.float() - whole.log_probs[whole.mask]).abs().max() <= 0.05


def test_H34_the_update_learns_the_ids_that_were_drawn(tokenizer):
    """Two ids that decode to a text which is one id: re-encoding would put another response in their place."""
    pairs = [(first, second) for first in range(20, 200) for second in range(20, 200)]
    drawn = next(
        list(pair) for pair in pairs
        if tokenizer(tokenizer.decode(pair), add_special_tokens=False).input_ids not in (list(pair), [])
    )  # fmt: skip
    again = tokenizer(tokenizer.decode(drawn), add_special_tokens=False).input_ids
    assert again != drawn
    mask = torch.ones(1, 2, dtype=torch.bool)
    config = config_of()
    rollout = rollout_of(mask, responses=[drawn], log_probs=torch.tensor([[-1.0, -2.0]]))
    rollout = add_advantages(rollout, config, ScoreNormalizer(enabled=False), 0.0, lambda x: x)
    (batch,) = rollout_batches(rollout, [0], 100)
    assert batch.ragged.tokens[batch.ragged.target_index].tolist() == drawn and batch.log_probs.tolist() == [-1.0, -2.0]


# --- H37: random streams --------------------------------------------------------------------------------------------


def ranks_of(built, size, **settings):
    """This iteration's samples on each of `size` ranks, of one prompt again and again."""
    config, prompts_of, state = built(name=f"ranks{size}", **settings)
    prompts = [prompts_of(0)[0]] * 8
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
def test_H37_ranks_draw_different_responses_which_together_are_those_of_one_rank(built, settings):
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
def test_I15_a_seed_reproduces_the_rollouts_whatever_the_slots_and_another_seed_does_not(built, slots):
    """Responses of several prompts enter as others end: who shares the cache with whom changes no draw (I15)."""
    settings = {"max_new_tokens": 10, "responses_per_prompt": 1, "top_p": 0.9, "temperature": 1.2}
    config, prompts_of, state = built(**settings)
    state.stop_ids = list(range(0, 384, 12))
    prompts = prompts_of(0)
    wanted = draw_samples(state, config, prompts, 0).responses
    assert len(set(map(len, wanted.token_ids))) > 1
    again = draw_samples(state, replace(config, micro_rollout_batch_size=slots), prompts, 0).responses
    assert again.token_ids == wanted.token_ids
    for mine, other in zip(again.log_probs, wanted.log_probs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    for changed, step in ((replace(config, training=replace(config.training, seed=1)), 0), (config, 1)):
        assert draw_samples(state, changed, prompts, step).responses.token_ids != wanted.token_ids


# --- one iteration behind -------------------------------------------------------------------------------------------


def test_an_iteration_learns_from_the_samples_of_the_weights_before_the_last_updates(built):
    """Decoupled PPO: sampled by older weights, the ratio's denominator, reference and values by those of now, weighed."""
    training = TrainingConfig(batch_size=8, max_steps=3)
    config, prompts_of, state = built(rollouts_behind=1, training=training, temperature=0.9)
    model = state.policy.backend.unwrapped
    sampling = replace(config.sampling)

    def sampled(step):
        ids = [list(prompt.ids) for prompt in prompts_of(step)]
        return decode_responses(model, ids, sampling, state.stop_ids, rows=range(8 * step, 8 * step + 8)).token_ids

    start = {step: sampled(step) for step in (0, 1)}
    _, first = iterate(state, config, prompts_of(0), 0)
    after_one = {step: sampled(step) for step in (1, 2)}
    batch = ragged_of([list(prompt.ids) for prompt in prompts_of(1)], start[1], range(8, 16))
    with torch.no_grad():
        now = model(batch=batch, temperature=0.9).log_probs
    metrics, second = iterate(state, config, prompts_of(1), 1)
    assert first.responses == start[0]  # nothing is older than the start
    assert second.responses == start[1] != after_one[1]
    assert_close(second.log_probs[second.mask], now, atol=1e-6, rtol=0)
    change = (second.log_probs - second.sampled_log_probs)[second.mask]
    assert change.abs().max() > 1e-3
    assert_close(second.weights[second.mask], change.exp().clamp(max=2.0), atol=1e-6, rtol=0)
    assert metrics["first_ratio_error"] <= 1e-5
    _, third = iterate(state, config, prompts_of(2), 2)
    assert third.responses == after_one[2] and state.ahead.waiting is None  # no iteration follows

"""PPO's numbers worked by hand: rollouts, rewards, advantages, losses, weights of samples, statistics, MFU."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.policies import Role
from alignment.algorithms.ppo import ppo as ppo_module
from alignment.algorithms.ppo.advantages import add_advantages, correction_weights
from alignment.algorithms.ppo.loss_functions import (
    RolloutBatch,
    normalized_batches,
    policy_loss_fn,
    rollout_batches,
    value_loss_fn,
)
from alignment.algorithms.ppo.metrics import (
    explained_variance,
    importance_metrics,
    operations_per_token,
    rollout_statistics,
    sampling_error,
    utilization,
)
from alignment.algorithms.ppo.state import PPOState, ScoreNormalizer
from alignment.algorithms.rollouts.metrics import distinct_share, repeated_share, response_means, sample_columns
from alignment.algorithms.rollouts.rollout import Baseline, collect, group_rollouts, ragged_of
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.losses import importance_weights
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.operations import forward_operations
from alignment.models.outputs import LanguageOutput, ValueOutput
from alignment.ragged import group_by_length
from alignment.rewards.combine import PartNormalizer
from alignment.training import TrainingConfig, speed
from tests.examples import prompt_example
from tests.ppo_states import config_of, rollout_of

STOPS = range(0, 384, 6)
SAMPLING = SamplingConfig(8, temperature=0.7, seed=3)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]]
NUMBERS = [28, 29, 30, 31]  # of the rows of iteration 7


@pytest.fixture
def collected(checkpoints):
    """A rollout from models that say simple things of each token, what they were asked, and the sampler."""
    asked = []

    def language(say):
        def answer(batch, temperature):
            asked.append((batch.lengths, batch.row_ids, temperature))
            return SimpleNamespace(log_probs=say(batch).float())

        return answer

    sampler = load_language_model(checkpoints["llama"])
    backend = SimpleNamespace(
        unwrapped=sampler, full_parameters=nullcontext, autocast=nullcontext, collective_forward=False
    )
    state = SimpleNamespace(
        policy=SimpleNamespace(backend=backend, model=language(lambda batch: batch.tokens[batch.target_index])),
        value=SimpleNamespace(
            backend=backend, model=lambda batch, tokens: SimpleNamespace(values=batch.positions[tokens].float())
        ),
        reference=language(lambda batch: 2 * batch.tokens[batch.target_index]),
        score=lambda prompts, responses, ended: torch.tensor(
            [100.0 * len(p.ids) + len(r) + e / 2 for p, r, e in zip(prompts, responses, ended, strict=True)]
        ),
        stop_ids=STOPS,
        rollout_weights="gathered",
        share_prompts=False,
        shared_value=False,
        ahead=None,
        servers=None,
        cuda_graphs=False,
        process_group=SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), sum=lambda total: total),
    )
    state.ask = partial(PPOState.ask, state)
    training = TrainingConfig(batch_size=4, micro_batch_tokens=20, seed=3)
    config = config_of(max_new_tokens=8, temperature=0.7, training=training)
    rollout = collect(state, config, [prompt_example(ids, "", {}, str(ids)) for ids in PROMPTS], 7)
    return rollout, asked, sampler


def test_a_rollout_holds_what_each_model_says_of_each_token(collected):
    """The value is of the state before the token; here it says which place that is."""
    rollout, _, sampler = collected
    drawn = decode_responses(sampler, PROMPTS, SAMPLING, STOPS, rows=NUMBERS)
    assert (rollout.prompts, rollout.responses, rollout.numbers) == (PROMPTS, drawn.token_ids, NUMBERS)
    assert rollout.ended.tolist() == drawn.ended and sum(drawn.ended) > 0
    assert len(set(map(len, drawn.token_ids))) > 1
    for row, (prompt, response) in enumerate(zip(PROMPTS, drawn.token_ids, strict=True)):
        count, tokens = len(response), torch.tensor(response).float()
        assert rollout.mask[row].tolist() == [True] * count + [False] * (rollout.mask.shape[1] - count)
        assert_close(rollout.log_probs[row, :count], tokens)
        assert_close(rollout.reference_log_probs[row, :count], 2 * tokens)
        assert_close(rollout.sampled_log_probs[row, :count], torch.tensor(drawn.log_probs[row]))
        assert rollout.values[row, :count].tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + count))
        assert rollout.scores[row] == 100 * len(prompt) + count + drawn.ended[row] / 2
    for frame in (rollout.log_probs, rollout.reference_log_probs, rollout.sampled_log_probs, rollout.values):
        assert (frame[~rollout.mask] == 0).all()


def test_models_are_asked_at_the_temperature_within_the_limit(collected):
    rollout, asked, _ = collected
    lengths = {f"rollout {n}": len(p) + len(r) for n, p, r in zip(NUMBERS, PROMPTS, rollout.responses, strict=True)}
    assert len(asked) > 2
    for sizes, names, temperature in asked:
        assert temperature == 0.7
        assert sum(sizes) <= 20 and sizes == tuple(lengths[name] for name in names)
    assert sorted(name for _, names, _ in asked for name in names) == sorted(2 * list(lengths))


def two_responses():
    """Two responses, the second one shorter and without its end."""
    frame = torch.tensor
    return rollout_of(
        (2, 1), prompts=[[1, 5], [1]], responses=[[6, 2], [7]], numbers=[30, 31],
        log_probs=frame([[-1.0, -2.0], [-3.0, 0.0]]), sampled_log_probs=frame([[-1.1, -2.0], [-2.7, 0.0]]),
        reference_log_probs=frame([[-1.2, -1.6], [-3.6, 0.0]]), values=frame([[1.0, 2.0], [0.5, 0.0]]),
        scores=frame([3.0, 1.0]), ended=frame([True, False]),
    )  # fmt: skip


SHAPING = {
    "config": config_of(missing_end_penalty=4.0, gamma=0.9, gae_lambda=0.5), "kl_coef": 0.5,
    "normalizer": ScoreNormalizer(scale=2.0, shift=-1.0, fitted=True), "reduce": lambda x: x,
}  # fmt: skip
# scores 2 * 3 - 1 = 5 and 2 * 1 - 1 - 4 = -3; log-ratios 0.2, -0.4 and 0.6
REWARDS = torch.tensor([[-0.1, 5.2], [-3.3, 0.0]])
# errors 5.2 - 2 = 3.2, then -0.1 + 0.9 * 2 - 1 = 0.7; -3.3 - 0.5 = -3.8. Advantages 0.7 + 0.9 * 0.5 * 3.2 = 2.14, 3.2, -3.8
ADVANTAGES = torch.tensor([2.14, 3.2, -3.8])
RETURNS = torch.tensor([[3.14, 5.2], [-3.3, 0.0]])


def test_rewards_advantages_and_returns_are_worked_by_hand():
    rollout = add_advantages(two_responses(), **SHAPING)
    assert_close(rollout.rewards, REWARDS)
    assert_close(rollout.returns, RETURNS)
    whitened = (ADVANTAGES - ADVANTAGES.mean()) / ADVANTAGES.std(correction=0)
    assert_close(rollout.advantages[rollout.mask], whitened, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [1, 100])
def test_batches_hold_what_the_rollout_knows_of_their_rows(limit):
    rollout = replace(add_advantages(two_responses(), **SHAPING), advantages=torch.tensor([[0.1, 0.2], [0.3, 0.0]]))
    batches = rollout_batches(rollout, [1, 0], limit)
    assert [batch.row_ids for batch in batches] == (
        [("rollout 31",), ("rollout 30",)] if limit == 1 else [("rollout 31", "rollout 30")]
    )
    known = {
        "log_probs": [-3.0, -1.0, -2.0],  # as training computes them, not as the sampler did
        "values": [0.5, 1.0, 2.0],
        "advantages": [0.3, 0.1, 0.2],
        "returns": [-3.3, 3.14, 5.2],
    }
    for name, values in known.items():
        assert_close(torch.cat([getattr(batch, name) for batch in batches]), torch.tensor(values))
    targets = torch.cat([batch.ragged.tokens[batch.ragged.target_index] for batch in batches])
    assert targets.tolist() == [7, 6, 2]


def same(total):
    """A sum over one rank."""
    return total


def test_metrics_of_a_rollout_are_worked_by_hand():
    frame = torch.tensor
    rollout = rollout_of(
        (2, 1, 1, 1), responses=[[6, 2], [7], [8], [7]],
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
    config = config_of(clip_range=0.1, value_clip_range=0.4)
    batch = RolloutBatch(
        ragged_of([[1, 5]], [[6, 7]], [0]), torch.zeros(2), torch.tensor([0.5, 0.5]), torch.zeros(2),
        torch.tensor([1.5, 1.0]),
    )  # fmt: skip
    value_model = lambda batch, tokens: ValueOutput(values=torch.tensor([9.0, 2.0, 1.0, 9.0])[tokens])  # noqa: E731  2 and 1 stand before the response's tokens
    # (0.9 - 1.5)^2 / 2 = 0.18 beats (2 - 1.5)^2 / 2; (0.9 - 1)^2 / 2 = 0.005 beats (1 - 1)^2 / 2
    assert value_loss_fn(value_model, config)(batch).total.item() == pytest.approx(0.185, abs=1e-6)


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


def test_policy_metrics_are_worked_by_hand():
    """Ratios 1.5, 1.5, 0.5, 0.5 at advantages 1, -1, 1, -1 and clip range 0.3: costs -1.3, 1.5, -0.5, 0.7."""
    config = config_of(clip_range=0.3)
    change = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    old, advantages = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = RolloutBatch(ragged_of([[1]], [[2, 3, 4, 5]], [0]), old, torch.zeros(4), advantages, torch.zeros(4))
    policy = lambda **_: SimpleNamespace(log_probs=old + change, entropy=torch.tensor([0.1, 0.2, 0.3, 0.4]))  # noqa: E731
    ratio_errors = []
    result = policy_loss_fn(policy, config, ratio_errors)(batch)
    assert result.total.item() == pytest.approx(0.4, abs=1e-6)
    assert {name: value.item() for name, value in result.metrics.items()} == pytest.approx({
        "policy_loss": 0.4,
        "approx_kl": (change**2).sum().item() / 2,
        "clip_fraction": 2,  # the first and the last; the others lie outside the range, but not clipped
        "entropy": 1.0,
    })  # fmt: skip
    assert ratio_errors[0].item() == pytest.approx(0.5)


def test_the_normalizer_makes_mean_0_and_deviation_1():
    """H25: mean -1.25 and deviation 0.8 give scale 1.25 and shift 1.5625; later scores do not move them."""
    scores, add = torch.tensor([-2.05, -0.45]), lambda x: x
    normalizer = ScoreNormalizer()
    assert normalizer.fit(scores, add) is normalizer
    assert (normalizer.scale, normalizer.shift) == pytest.approx((1.25, 1.5625), rel=1e-6)
    shaped = normalizer.scale * scores + normalizer.shift
    assert abs(shaped.mean()) < 1e-6 and shaped.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    normalizer.fit(scores + 5, add)
    assert normalizer.scale == pytest.approx(1.25)


def test_one_response_has_no_deviation_and_is_told_as_that():
    with pytest.raises(UserError, match="that of one response; raise training"):
        ScoreNormalizer().fit(torch.tensor([-2.05]), lambda x: x)
    normalizer = PartNormalizer("first", name="style")
    with pytest.raises(UserError, match=r"style .* that of one response"):
        normalizer.take_in(torch.tensor([0.5]), lambda x: x)


ALONE = SimpleNamespace(sum=lambda x: x, max=lambda x: x, size=1, device=torch.device("cpu"))
PAD = -1e9  # in slots that hold no token, and may not count


def three_responses(**changes):
    """Three responses of 4, 1 and 2 tokens; the second is an end token alone."""
    frame = torch.tensor
    fields = {
        "prompts": [[1], [1, 2], [1]], "responses": [[6, 6, 6, 6], [2], [7, 8]],
        "log_probs": frame([[-1.0, -2.0, -1.0, -1.0], [-3.0, PAD, PAD, PAD], [-1.0, -2.0, PAD, PAD]]),
        "sampled_log_probs": frame([[-1.0, -1.0, -1.5, -1.0], [-3.0, 0, 0, 0], [-3.0, -2.0, 0, 0]]),
        "reference_log_probs": frame([[-1.0, -1.0, -1.0, -1.0], [-1.0, 0, 0, 0], [-1.5, -2.0, 0, 0]]),
        "values": frame([[1.0, 1.0, 1.0, 1.0], [2.0, PAD, PAD, PAD], [0.0, 1.0, PAD, PAD]]),
        "returns": frame([[1.0, 2.0, 3.0, 1.0], [2.0, PAD, PAD, PAD], [1.0, 4.0, PAD, PAD]]),
        "advantages": frame([[9.0] * 4] * 3), "scores": frame([3.0, 1.0, 2.0]), "ended": frame([False, True, True]),
    }  # fmt: skip
    return rollout_of((4, 1, 2), **(fields | changes))


def test_statistics_are_worked_by_hand():
    found = rollout_statistics(three_responses(), ALONE)
    advantages = [0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 3.0]  # returns less values: as estimated, not the whitened 9
    mean = sum(advantages) / 7
    assert found == pytest.approx({
        "kl_k2": (0.5 + 2.0 + 0.125) / 3,  # (1)^2 / 2; (2)^2 / 2; (0.5)^2 / 2
        "score_std": math.sqrt(2 / 3), "response_tokens_min": 1, "response_tokens_max": 4,
        "response_tokens_std": math.sqrt((4 - 7 / 3) ** 2 / 3 + (1 - 7 / 3) ** 2 / 3 + (2 - 7 / 3) ** 2 / 3),
        "empty_share": 1 / 3, "repetition": 0.0,
        "advantage_mean": mean, "advantage_std": math.sqrt(sum((a - mean) ** 2 for a in advantages) / 7),
        "return_mean": 2.0, "return_std": math.sqrt((1 + 0 + 1 + 1 + 0 + 1 + 4) / 7), "value_mean": 1.0,
    })  # fmt: skip


def test_two_ranks_have_the_statistics_of_one():
    rollout = three_responses()
    calls = []
    rollout_statistics(rollout, SimpleNamespace(sum=lambda x: calls.append(x) or x, max=lambda x: x))
    twice = rollout_statistics(rollout, SimpleNamespace(sum=lambda x: 2 * x, max=lambda x: x))
    assert twice == pytest.approx(rollout_statistics(rollout, ALONE)) and len(calls) == 6


def test_repetition_is_the_share_of_n_grams_that_were_there_before():
    """Seven tokens have four 4-grams; of abcabca's two are the same."""
    assert repeated_share([1, 2, 3, 1, 2, 3, 1]) == 1 - 3 / 4
    assert repeated_share([5] * 20) == 1 - 1 / 17
    assert repeated_share([1, 2, 3]) == repeated_share([]) == repeated_share([1, 2, 3, 4]) == 0


def test_importance_weights_are_worked_by_hand():
    """Ratios e^-1, e^0.5 and e^2 beside ones; C = 2 truncates the last; of responses the products e^-0.5, 1, e^2."""
    rollout = three_responses()
    tokens = (rollout.log_probs, rollout.sampled_log_probs, rollout.mask)
    weights = importance_weights(*tokens, cap=2.0)
    wanted = torch.tensor([[1, math.exp(-1), math.exp(0.5), 1], [1, 0, 0, 0], [2, 1, 0, 0]])
    assert_close(weights, wanted.float())
    assert importance_weights(*tokens, cap=math.inf)[2, 0].item() == pytest.approx(math.exp(2))
    sequence = importance_weights(*tokens, cap=2.0, sequence=True)
    assert_close(sequence[0], torch.full((4,), math.exp(-0.5)))
    assert sequence[2].tolist() == [2, 2, 0, 0]


def test_weights_are_there_where_the_sampler_differs_by_construction():
    """And nowhere else: the loss is then the one without weights, bit for bit."""
    for settings in ({}, {"temperature": 0.7}, {"top_p": 0.9, "importance_cap": None}):
        assert correction_weights(three_responses(), config_of(**settings)) is None
    for settings in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"rollouts_behind": 1}):
        assert correction_weights(three_responses(), config_of(**settings)).max() == 2.0


def test_the_mismatch_of_sampler_and_training_is_logged():
    rollout = three_responses()
    differences = [0.0, 1.0, -0.5, 0.0, 0.0, -2.0, 0.0]  # log q - log p
    plain = importance_metrics(rollout, 2.0, ALONE)
    assert plain == pytest.approx({"sampling_kl": sum(differences) / 7})
    rollout = three_responses(
        weights=importance_weights(rollout.log_probs, rollout.sampled_log_probs, rollout.mask, cap=2.0)
    )
    assert importance_metrics(rollout, 2.0, ALONE) == pytest.approx({
        "sampling_kl": sum(differences) / 7, "importance_weight_max": 2.0, "importance_clipped_share": 1 / 7,
        "importance_weight_mean": (1 + math.exp(-1) + math.exp(0.5) + 1 + 1 + 2 + 1) / 7,
    })  # fmt: skip


def test_samples_are_written_with_their_numbers():
    parts = {"length": torch.tensor([0.5, math.nan, 1.0])}
    columns = sample_columns(three_responses(score_parts=parts), count=2)
    assert json.loads(json.dumps(columns)) == {
        "score": [3.0, 1.0], "score/length": [0.5, None], "kl": [-1.0, -2.0], "tokens": [4, 1], "ended": [False, True],
    }  # fmt: skip


CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_mfu_is_counted_operations_over_what_the_device_could_do(monkeypatch):
    """Two documents of 10 tokens; 4 passes of forward and backward are 12 forwards; the value model's head is one row."""
    monkeypatch.setattr("alignment.algorithms.ppo.metrics.peak_tflops", lambda device, precision: 1e-6)  # 10^6 a second
    policy, value = build_language_model(CONFIG), build_scalar_model(CONFIG)
    whole, narrow = operations_per_token(policy, 10), operations_per_token(value, 10)
    assert whole == forward_operations(policy.spec, 10) and whole - narrow == 2 * 16 * 299
    metrics = {"seconds_sampling": 2.0, "seconds_forward": 1.0, "seconds_policy": 4.0, "seconds_value": 3.0}
    roles = [Role("policy", policy), Role("value model", value), Role("reference", None), Role("reward model", value)]
    config = config_of(epochs=4, minibatches=2, training=TrainingConfig(batch_size=2))
    found = utilization(metrics, config, roles, ALONE, documents=[10, 10])
    work = {"sampling": whole, "forward": 2 * whole + narrow, "policy": 12 * whole, "value": 12 * narrow}
    assert found == pytest.approx(
        {f"mfu_{name}": 20 * count / (metrics[f"seconds_{name}"] * 1e6) for name, count in work.items()}
        | {"mfu": 20 * sum(work.values()) / (10 * 1e6)}
    )
    assert utilization(metrics, config, [Role("policy", torch.nn.Linear(1, 1))], ALONE, documents=[10]) == {}


def test_a_phase_clock_adds_up(monkeypatch):
    now = iter([0.0, 1.0, 10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    clock = speed.PhaseClock(torch.device("cpu"))
    for phase in ("policy", "value", "policy"):
        with clock(phase):
            pass
    assert clock.seconds == {"policy": 1.5, "value": 2.5}


def four_responses(**settings):
    """Two responses to each of two prompts, of 2, 1, 1 and 2 tokens, all a log-ratio of 0.5 away from the reference."""
    log_probs = torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, -1.0]])
    return rollout_of(
        (2, 1, 1, 2), prompts=[[1], [1], [2], [2]], responses=[[6, 2], [7], [8], [7, 2]],
        log_probs=log_probs, sampled_log_probs=log_probs, reference_log_probs=1.5 * log_probs, values=None,
        scores=torch.tensor([3.0, 1.0, -2.0, 4.0]), ended=torch.tensor([True, False, True, True]), **settings,
    )  # fmt: skip


def advantages_of(rollout, **settings):
    config = config_of(**{"missing_end_penalty": 0.5, "responses_per_prompt": 2, **settings})
    return add_advantages(rollout, config, ScoreNormalizer(enabled=False), 0.2, lambda total: total)


def test_leave_one_out_has_the_penalty_of_whole_responses():
    """Rewards 3 - 0.2, 1 - 0.5 - 0.1, -2 - 0.1, 4 - 0.2: each less the other one's; all tokens of a response alike."""
    found = advantages_of(four_responses(), advantages="rloo")
    assert_close(found.advantages, torch.tensor([[2.4, 2.4], [-2.4, 0.0], [-5.9, 0.0], [5.9, 5.9]]))
    assert_close(found.returns, torch.tensor([[2.8, 2.9], [0.4, 0.0], [-2.1, 0.0], [3.8, 3.9]]))


def test_grpo_leaves_the_penalty_to_the_loss():
    settings = {"kl_in": "loss", "kl_estimator": "k3"}
    found = advantages_of(four_responses(), advantages="dr_grpo", **settings)
    assert_close(found.advantages, torch.tensor([[1.25, 1.25], [-1.25, 0.0], [-3.0, 0.0], [3.0, 3.0]]))
    scaled = advantages_of(four_responses(), advantages="grpo", **settings)
    assert_close(scaled.advantages.abs()[scaled.mask], torch.full((6,), 2**-0.5), atol=1e-4, rtol=0)


def test_reinforce_plus_plus_whitens_returns_over_the_iteration():
    found = advantages_of(four_responses(), advantages="reinforce++")
    returns = torch.tensor([2.8, 2.9, 0.4, -2.1, 3.8, 3.9])
    wanted = (returns - returns.mean()) / returns.std(correction=0)
    assert_close(found.advantages[found.mask], wanted)
    plain = advantages_of(four_responses(), advantages="reinforce++", whiten_advantages=False)
    assert_close(plain.advantages[plain.mask], returns)


def test_remax_subtracts_the_greedy_response_s_score_with_its_penalty():
    baseline = Baseline(torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([True, True, False, False]))
    found = advantages_of(four_responses(baseline=baseline), advantages="remax")
    assert_close(found.advantages, torch.tensor([[1.8, 1.9], [-0.6, 0.0], [-3.6, 0.0], [2.3, 2.4]]))


def loss_of(config, *, weights=None, kl_coef=0.0):
    """Responses of 1 and 3 tokens: ratios 1.5 | 0.5, 1, 2; advantages 1 | -1, 1, 1."""
    change = torch.tensor([1.5, 0.5, 1.0, 2.0]).log()
    old, advantages = torch.full((4,), -1.0), torch.tensor([1.0, -1.0, 1.0, 1.0])
    batch = RolloutBatch(
        ragged_of([[1], [1]], [[2], [3, 4, 5]], [0, 1]), old, None, advantages, torch.zeros(4), weights,
        reference_log_probs=old,
    )  # fmt: skip
    policy = lambda **_: LanguageOutput(old + change, torch.tensor([0.1, 0.2, 0.3, 0.4]))  # noqa: E731
    return policy_loss_fn(policy, config, [], kl_coef=kl_coef)(batch)


def test_the_three_normalizations_are_worked_by_hand():
    """Costs -1.2 | 0.8, -1, -1.2: their sum, the sum of the responses' means, and the sum."""
    for how, total in {"token_mean": -2.6, "sequence_mean": -1.2 - 1.4 / 3, "constant": -2.6}.items():
        found = loss_of(config_of(loss_normalization=how))
        assert found.total.item() == pytest.approx(total, abs=1e-6)
        clipped = found.metrics.get("clip_fraction", found.means.get("clip_fraction", [None])[0])
        assert clipped.item() == 3  # a count over tokens in every case
        assert ("clip_fraction" in found.means) == (how != "token_mean")


def test_weights_multiply_the_surrogate_and_the_penalty():
    weights = torch.tensor([2.0, 0.5, 1.0, 0.0])
    assert loss_of(config_of(), weights=weights).total.item() == pytest.approx(-2.4 + 0.4 - 1.0, abs=1e-6)
    penalty = loss_of(config_of(kl_in="loss", kl_estimator="k2"), weights=weights, kl_coef=0.1).total.item()
    squares = torch.tensor([1.5, 0.5, 1.0, 2.0]).log() ** 2 / 2
    assert penalty == pytest.approx(-3.0 + 0.1 * (weights * squares).sum().item(), abs=1e-6)


def test_the_entropy_is_taken_off_the_loss():
    assert loss_of(config_of(entropy_coef=0.5)).total.item() == pytest.approx(-2.6 - 0.5, abs=1e-6)


def test_the_sequence_ratio_is_clipped_as_one():
    """The second response's ratio is 1: nothing of it is clipped; the first has one token, and its own ratio."""
    settings = {"ratio": "sequence", "advantages": "rloo", "responses_per_prompt": 2}
    summed = loss_of(config_of(**settings, loss_normalization="token_mean")).total.item()
    assert summed == pytest.approx(-1.2 + 1.0 - 1.0 - 1.0, abs=1e-6)
    assert loss_of(config_of(**settings)).total.item() == pytest.approx(-1.2 + (1.0 - 1.0 - 1.0) / 3, abs=1e-6)


def gradients_of_two_responses(**settings):
    """d loss / d log p of the tokens of two responses, of 5 and 1 tokens, with advantages 1 and -1, at a ratio of 1."""
    config = config_of(responses_per_prompt=2, max_new_tokens=8, **settings)
    log_probs, old = torch.full((6,), -1.0, requires_grad=True), torch.full((6,), -1.0)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    ragged = ragged_of([[1], [1]], [[2, 3, 4, 5, 6], [7]], [0, 1])
    (batch,) = normalized_batches([RolloutBatch(ragged, old, None, advantages, torch.zeros(6))], config)
    policy = lambda **_: LanguageOutput(log_probs, torch.zeros(6))  # noqa: E731
    (policy_loss_fn(policy, config, [])(batch).total / batch.weight).backward()
    return log_probs.grad


@pytest.mark.parametrize(
    ("settings", "long", "short"),
    [
        # GSPO's eq. 5: 1/2 (s_1 A_1 + s_2 A_2), and d s / d log p_t = s / |y|
        ({"ratio": "sequence", "advantages": "grpo"}, -1 / 10, 1 / 2),
        ({"ratio": "sequence", "advantages": "dr_grpo"}, -1 / 10, 1 / 2),
        # divided by the 6 tokens: the response of 5 weighs five times the other one
        ({"ratio": "sequence", "advantages": "grpo", "loss_normalization": "token_mean"}, -1 / 6, 1 / 6),
        # Dr. GRPO: each token by 2 responses of at most 8 tokens
        ({"advantages": "dr_grpo"}, -1 / 16, 1 / 16),
        ({"advantages": "dr_grpo", "loss_normalization": "token_mean"}, -1 / 6, 1 / 6),
        ({"advantages": "grpo"}, -1 / 6, 1 / 6),
    ],
    ids=["gspo", "gspo, dr_grpo", "gspo by tokens", "dr_grpo", "dr_grpo by tokens", "grpo"],
)
def test_a_method_has_its_paper_s_normalization_unless_another_is_set(settings, long, short):
    assert_close(gradients_of_two_responses(**settings), torch.tensor([long] * 5 + [short]))


def test_the_rows_of_a_minibatch_lie_on_the_ranks_of_their_prompts():
    """Three prompts on two ranks, two responses each: rank 0 holds the rows of prompts 0 and 2, rank 1 those of prompt 1."""
    config, filled = config_of(responses_per_prompt=2), {"rewards", "advantages", "returns"}
    held = {0: [0, 1, 4, 5], 1: [2, 3]}  # row numbers of the iteration, in the order in which a rank collects them
    whole = replace(four_responses(), **dict.fromkeys(filled, torch.zeros(4, 2)))
    for rank, numbers in held.items():
        rows = [numbers.index(number) % 4 for number in numbers]
        own = replace(
            whole, numbers=numbers, prompts=[[1]] * len(numbers), responses=[[6]] * len(numbers),
            **{
                name: torch.ones(len(numbers), 1, dtype=torch.bool) if name == "mask" else torch.zeros(len(rows), 1)
                for name in ("mask", "log_probs", "reference_log_probs", *filled)
            },
        )  # fmt: skip
        group = SimpleNamespace(rank=rank, size=2)
        for minibatch in ([5, 0, 3], [1, 2, 4]):
            batches = ppo_module.local_batches(own, minibatch, group, config)
            found = {name for batch in batches for name in batch.row_ids}
            assert found == {f"rollout {number}" for number in minibatch if number in numbers}
    empty = ppo_module.local_batches(own, [0, 5], SimpleNamespace(rank=1, size=2), config)
    assert [batch.weight for batch in empty] == [0.0]  # rank 1 has none of these rows, and joins at weight 0


def test_H31_weights_turn_foreign_samples_into_the_policys_gradient():
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

"""Statistics of rollouts worked by hand, importance weights, MFU from counted operations."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.policies import Role
from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.advantages import correction_weights
from alignment.algorithms.ppo.metrics import importance_metrics, operations_per_token, rollout_statistics, utilization
from alignment.algorithms.rollouts.metrics import repeated_share, sample_columns
from alignment.algorithms.rollouts.rollout import Rollout
from alignment.data.config import DataConfig
from alignment.losses import importance_weights
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.operations import forward_operations
from alignment.training import TrainingConfig, speed

ALONE = SimpleNamespace(sum=lambda x: x, max=lambda x: x, size=1, device=torch.device("cpu"))
PAD = -1e9  # in slots that hold no token, and may not count


def config_of(**settings):
    return PPOConfig(
        policy="policy", reward_model="judge", data=DataConfig(train="prompts"), output="output", **settings
    )


def made(**changes):
    """Three responses of 4, 1 and 2 tokens; the second is an end token alone."""
    frame = torch.tensor
    fields = {
        "prompts": [[1], [1, 2], [1]], "responses": [[6, 6, 6, 6], [2], [7, 8]], "numbers": [0, 1, 2],
        "mask": frame([[True] * 4, [True, False, False, False], [True, True, False, False]]),
        "log_probs": frame([[-1.0, -2.0, -1.0, -1.0], [-3.0, PAD, PAD, PAD], [-1.0, -2.0, PAD, PAD]]),
        "sampled_log_probs": frame([[-1.0, -1.0, -1.5, -1.0], [-3.0, 0, 0, 0], [-3.0, -2.0, 0, 0]]),
        "reference_log_probs": frame([[-1.0, -1.0, -1.0, -1.0], [-1.0, 0, 0, 0], [-1.5, -2.0, 0, 0]]),
        "values": frame([[1.0, 1.0, 1.0, 1.0], [2.0, PAD, PAD, PAD], [0.0, 1.0, PAD, PAD]]),
        "returns": frame([[1.0, 2.0, 3.0, 1.0], [2.0, PAD, PAD, PAD], [1.0, 4.0, PAD, PAD]]),
        "advantages": frame([[9.0] * 4] * 3), "scores": frame([3.0, 1.0, 2.0]), "ended": frame([False, True, True]),
    }  # fmt: skip
    return Rollout(**(fields | changes))


def test_statistics_are_worked_by_hand():
    found = rollout_statistics(made(), ALONE)
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
    rollout = made()
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
    rollout = made()
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
        assert correction_weights(made(), config_of(**settings)) is None
    for settings in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"rollouts_behind": 1}):
        assert correction_weights(made(), config_of(**settings)).max() == 2.0


def test_the_mismatch_of_sampler_and_training_is_logged():
    rollout = made()
    differences = [0.0, 1.0, -0.5, 0.0, 0.0, -2.0, 0.0]  # log q - log p
    plain = importance_metrics(rollout, 2.0, ALONE)
    assert plain == pytest.approx({"sampling_kl": sum(differences) / 7})
    rollout = made(weights=importance_weights(rollout.log_probs, rollout.sampled_log_probs, rollout.mask, cap=2.0))
    assert importance_metrics(rollout, 2.0, ALONE) == pytest.approx({
        "sampling_kl": sum(differences) / 7, "importance_weight_max": 2.0, "importance_clipped_share": 1 / 7,
        "importance_weight_mean": (1 + math.exp(-1) + math.exp(0.5) + 1 + 1 + 2 + 1) / 7,
    })  # fmt: skip


def test_samples_are_written_with_their_numbers():
    parts = {"length": torch.tensor([0.5, math.nan, 1.0])}
    columns = sample_columns(made(score_parts=parts), count=2)
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

"""What a method should come to is known: reference * exp(reward / beta) / Z over all 216 responses of three tokens.

Each method runs through the library's own iteration, advantages, losses and optimizer; sampling alone is from the table's
exact distribution. Injected faults must miss the target.
"""

import pytest
import torch

from alignment.algorithms.ppo import advantages
from alignment.algorithms.rollouts import rollout
from alignment.losses import dpo_loss, shape_rewards
from tests.learning.known_optimum import LENGTH, VOCABULARY, TablePolicy, World, table_sampler, train

CLOSE = 0.03  # total variation
STEPS = {
    0.2: {"iterations": 150, "rate": 0.12},
    0.5: {"iterations": 80, "rate": 0.1},
    1.0: {"iterations": 60, "rate": 0.1},
}
GROUPS = {"responses_per_prompt": 8}
METHODS = {
    "ppo, critic from the reward model": {"value_model": "reward_model"},
    "ppo, critic from the policy": {"value_model": "policy"},
    "ppo, critic on the policy's trunk": {"value_model": "shared"},
    "rloo": {"advantages": "rloo", **GROUPS},
    "dr_grpo": {"advantages": "dr_grpo", **GROUPS},
}
TOKEN_PENALTIES = {"advantages": "dr_grpo", "kl_in": "loss", "kl_estimator": "k2", "responses_per_prompt": 16}


@pytest.fixture
def distance(monkeypatch):
    """`distance(beta, seed, settings, **faults)` -> total variation between what a method comes to and the target."""

    def measure(beta, seed, settings, *, sampler_temperature=None, score_at=None, steps=None, **faults):
        world, sample = World(seed), table_sampler(torch.Generator().manual_seed(seed), sampler_temperature)
        monkeypatch.setattr(rollout, "sample", sample)
        if score_at is not None:
            monkeypatch.setattr(advantages, "shape_rewards", misplaced(score_at))
        temperature = settings.get("temperature", 1.0)
        policy = train(world, beta, {"rows": 128, **STEPS[beta], **settings, **(steps or {})}, faults)
        if settings.get("kl_in") == "loss":
            n = settings["responses_per_prompt"]  # the mean of the group holds the response itself
            return world.distance(policy, world.optimum_of_token_penalties(beta * n / (n - 1)))
        return world.distance(policy, world.optimum(beta, temperature), temperature)

    return measure


def misplaced(position):
    """`shape_rewards` with the score on another token than the last."""

    def shaped(scores, log_probs, reference_log_probs, mask, **settings):
        rewards = shape_rewards(torch.zeros_like(scores), log_probs, reference_log_probs, mask, **settings)
        rewards[:, position] += scores
        return rewards

    return shaped


def dpo_distance(beta: float, seed: int, sign: float = 1.0) -> float:
    """DPO on all pairs of responses, each labeled as often as the Bradley-Terry model says."""
    world = World(seed)
    policy, reference = TablePolicy(world.reference), TablePolicy(world.reference).log_distribution().sum(1).detach()
    first, second = torch.triu_indices(len(reference), len(reference), offset=1)
    wins = torch.sigmoid(sign * (world.reward[first] - world.reward[second]))
    optimizer = torch.optim.LBFGS([policy.logits], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def closure():
        optimizer.zero_grad()
        log_ratios = policy.log_distribution().sum(1) - reference
        chosen = dpo_loss(log_ratios[first], log_ratios[second], beta=beta)
        rejected = dpo_loss(log_ratios[second], log_ratios[first], beta=beta)
        loss = (wins * chosen + (1 - wins) * rejected).mean() * 1e3
        loss.backward()
        return loss

    optimizer.step(closure)
    return world.distance(policy, world.optimum(beta))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_comes_to_the_known_optimum(distance, method):
    assert distance(0.5, 0, METHODS[method]) <= CLOSE


def test_dpo_comes_to_the_known_optimum():
    assert dpo_distance(0.5, seed=0) <= CLOSE
    assert dpo_distance(0.5, seed=0, sign=-1.0) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("beta", STEPS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_comes_to_the_known_optimum_with_every_seed(distance, method, beta):
    found = [distance(beta, seed, METHODS[method]) for seed in range(5)]
    assert max(found) <= CLOSE, found


@pytest.mark.slow
def test_dpo_comes_to_the_known_optimum_with_every_seed():
    found = [dpo_distance(beta, seed) for beta in STEPS for seed in range(5)]
    assert max(found) <= CLOSE, found


def test_a_penalty_of_tokens_in_the_loss_comes_to_its_own_optimum(distance):
    """k2 in the loss makes no token answer for later penalties, so its target is another, and is known as well."""
    world = World(0)
    apart = (world.optimum(0.5) - world.optimum_of_token_penalties(0.5)).abs().sum() / 2
    assert distance(0.5, 0, TOKEN_PENALTIES, steps={"rows": 256}) <= CLOSE < apart * 3


def test_a_temperature_is_that_of_samples_and_updates(distance):
    settings = {**METHODS["rloo"], "temperature": 0.6}
    assert distance(0.5, 0, settings) <= CLOSE
    assert distance(0.5, 0, settings, steps={"iterations": 40}, reads_temperature=False) > 2 * CLOSE


def test_samples_of_another_distribution_are_corrected(distance):
    """A sampler at temperature 3; top_k = 6 of 6 tokens cuts nothing and says that the sampler may differ."""
    settings = {**TOKEN_PENALTIES, "ratio": "sequence", "top_k": VOCABULARY, "importance_cap": 1e4}
    more = {"sampler_temperature": 3.0, "steps": {"rows": 256}}
    assert distance(0.5, 0, settings, **more) <= CLOSE
    assert distance(0.5, 0, {**settings, "importance_cap": None}, **more) > CLOSE


@pytest.mark.parametrize(
    "fault",
    [{"kl_sign": -1.0}, {"reward_sign": -1.0}, {"score_at": LENGTH - 2}, {"score_at": 0}],
    ids=["flipped KL", "flipped reward", "token before the last", "first token"],
)
def test_an_injected_fault_misses_the_optimum(distance, fault):
    assert distance(0.5, 0, METHODS["ppo, critic from the policy"], steps={"iterations": 40}, **fault) > 2 * CLOSE

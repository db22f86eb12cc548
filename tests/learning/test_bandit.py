"""PPO finds the known optimum of a one-token bandit (invariant I8: signs of reward, KL and ascent)."""

import copy
import math
from typing import Any

import pytest
import torch

from alignment.adapters import LoRASpec, PrefixSpec, attach
from alignment.algorithms.policies import Policy
from alignment.algorithms.ppo import FixedKL, PPOConfig, iterate
from alignment.algorithms.ppo.state import PPOState, ScoreNormalizer
from alignment.algorithms.rollouts.state import NextRollout
from alignment.data.config import DataConfig
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.language_model import LanguageModel
from alignment.training import Engine, OptimConfig, TrainingConfig
from tests.examples import prompt_example

VOCABULARY, WANTED = 37, 5
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8, "tie_word_embeddings": False,
}  # fmt: skip


def uniform_model():
    model = build_language_model(CONFIG)
    torch.nn.init.zeros_(model.head.weight)
    return model


def far_from_uniform_model():
    """Eight tokens: a shift of the 16 hidden numbers can give them any logits, so that a prefix can express the optimum."""
    model = build_language_model(CONFIG | {"vocab_size": 8})
    torch.nn.init.orthogonal_(model.head.weight, gain=2.0)
    return model


def probability(model, temperature: float = 1.0) -> float:
    with torch.no_grad():
        return (model.eval()(torch.tensor([[1]])).logits[0, -1] / temperature).softmax(-1)[WANTED].item()


def probability_after_training(
    kl_coef: float,
    sign: float,
    iterations: int = 60,
    seed: int = 0,
    adapter: LoRASpec | PrefixSpec | None = None,
    start: LanguageModel | None = None,
    **settings: Any,
) -> float:
    """The wanted token's probability, at the temperature of the samples; `start` is the policy's start and the reference."""
    torch.manual_seed(seed)
    training = TrainingConfig(batch_size=256, max_steps=iterations, seed=seed)
    config = PPOConfig(
        policy="", reward_model="", data=DataConfig(train="none.jsonl"), output="", max_new_tokens=1, epochs=4, kl_coef=kl_coef,
        missing_end_penalty=0.0, normalize_scores=False, training=training, **settings,
    )  # fmt: skip
    policy = start or uniform_model()
    reference = copy.deepcopy(policy).eval()
    if adapter is not None:
        attach(policy, adapter)
    value_model = build_scalar_model(CONFIG)
    torch.nn.init.zeros_(value_model.head.weight)
    optim = OptimConfig(learning_rate=1e-2, schedule="linear")
    state = PPOState(
        policy=Engine(policy, optim, training, total_steps=4 * iterations),
        value=Engine(value_model, optim, training, total_steps=4 * iterations), reference=torch.no_grad()(reference),
        score=lambda prompts, responses, ended: sign * torch.tensor([float(r[0] == WANTED) for r in responses]),
        stop_ids=[], kl=FixedKL(kl_coef), normalizer=ScoreNormalizer(enabled=False), start=Policy(policy, None),
        ahead=NextRollout(lambda step: prompts if step < iterations else ()) if config.rollouts_behind else None,
    )  # fmt: skip
    prompts = [prompt_example([1], "", {}, str(i)) for i in range(training.batch_size)]
    for step in range(iterations):
        metrics, _ = iterate(state, config, prompts, step)
        assert metrics["first_ratio_error"] <= 1e-5
    return probability(policy, config.temperature)


@pytest.mark.parametrize("seed", [0, 1])
def test_I8_policy_settles_at_the_closed_form_optimum(seed):
    """Proves: sign and size of KL penalty and reward are right (H27, H28, H29); a flipped one runs away."""
    # p is proportional to (1/37) exp(reward / 1): e / (36 + e) = 0.0702
    assert abs(probability_after_training(1.0, 1.0, seed=seed) - math.e / (36 + math.e)) <= 0.01


SLOW = ("cool", "LoRA on the head", "one behind", "top-p in few slots")
VARIANTS = {
    "cool": {"temperature": 0.7}, "top-p in few slots": {"top_p": 0.9, "micro_rollout_batch_size": 50},
    "one behind": {"rollouts_behind": 1}, "LoRA on the head": {"adapter": LoRASpec(rank=8, layers=r"^head$")},
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS])
def test_I8_the_optimum_is_the_same_however_the_samples_come(name):
    """Proves: temperature, filters with their importance weights, samples of the weights before, and adapters leave the
    optimum where it is (H27, H31)."""
    found = probability_after_training(1.0, 1.0, **VARIANTS[name])
    assert abs(found - math.e / (36 + math.e)) <= 0.012


@pytest.mark.slow
def test_I8_a_prefix_reaches_the_optimum():
    """Proves: where a prefix alone is trained, samples, old and new log-probabilities are read behind it (H27, H31)."""
    torch.manual_seed(4)
    start = far_from_uniform_model()
    odds = math.e * probability(start) / (1 - probability(start))
    found = probability_after_training(1.0, 1.0, adapter=PrefixSpec(tokens=4), start=start)
    assert abs(found - odds / (1 + odds)) <= 0.012


def test_I8_policy_takes_all_reward_when_nothing_holds_it_back():
    """Proves: without the penalty the ascent goes all the way (H27)."""
    assert probability_after_training(0.0, 1.0) > 0.95


def test_I8_negated_reward_drives_the_token_below_chance():
    """Proves: it is the reward that is followed (H27)."""
    assert probability_after_training(1.0, -1.0) < 1 / 37

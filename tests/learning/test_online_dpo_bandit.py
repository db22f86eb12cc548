"""Online DPO moves a bandit of one token to the token that is rewarded, and no further than its reference lets it."""

import math

import pytest
import torch

from alignment.algorithms.online_dpo import OnlineDPOConfig, OnlineDPOState, sample_and_update, updates_of
from alignment.algorithms.policies import Policy, Reference
from alignment.data.config import DataConfig
from alignment.models.build import build_language_model
from alignment.training import Engine, OptimConfig, TrainingConfig
from tests.examples import prompt_example
from tests.learning.test_bandit import CONFIG

VOCABULARY, WANTED = 11, 5


def uniform_model():
    model = build_language_model(CONFIG | {"vocab_size": VOCABULARY})
    torch.nn.init.zeros_(model.head.weight)
    return model.eval()


def after_training(sign: float, iterations: int = 40, **settings):
    """Probabilities of the tokens after training, and the metrics of each iteration."""
    torch.manual_seed(0)
    training = TrainingConfig(batch_size=64, max_steps=iterations)
    config = OnlineDPOConfig(
        "", DataConfig(train="none.jsonl"), "", judge="gold", max_new_tokens=1, missing_end_penalty=0.0, training=training,
        **settings,
    )  # fmt: skip
    policy = Engine(
        uniform_model(), OptimConfig(learning_rate=1e-2, schedule="linear"), training, total_steps=iterations
    )
    reference = Reference(policy, uniform_model().requires_grad_(False))
    state = OnlineDPOState(
        policy, reference=reference,
        score=lambda prompts, responses, ended: sign * torch.tensor([float(r[0] == WANTED) for r in responses]),
        updates=updates_of(config, policy, reference, False),
        stop_ids=[],
        start=Policy(policy.model, None),
    )  # fmt: skip
    prompts = [prompt_example([1], "", {}, str(i)) for i in range(training.batch_size)]
    history = [sample_and_update(state, config, prompts, step)[0] for step in range(iterations)]
    with torch.no_grad():
        return policy.model(torch.tensor([[1]])).logits[0, -1].softmax(-1), history


def test_the_policy_moves_to_the_rewarded_token():
    probabilities, history = after_training(1.0)
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert history[0]["score"] == pytest.approx(1 / VOCABULARY, abs=0.08)
    assert probabilities[WANTED] > 0.9 and history[-1]["score"] > 0.9
    # Two draws tie where both or neither are the wanted token: 1 - 2 p (1 - p)
    assert history[0]["score_ties"] == pytest.approx(1 - 2 / 11 * 10 / 11, abs=0.12)


def test_a_negated_reward_drives_the_token_away():
    assert after_training(-1.0)[0][WANTED] < 1 / VOCABULARY / 4


def test_ipo_stops_where_its_reference_holds_it():
    """IPO wants a log-ratio margin of 1 / (2 beta): at beta 1 half a nat, so the rewarded token gains a factor e^0.5."""
    probabilities, _ = after_training(1.0, iterations=60, loss="ipo", beta=1.0)
    others = (1 - float(probabilities[WANTED])) / (VOCABULARY - 1)
    assert math.log(float(probabilities[WANTED]) / others) == pytest.approx(0.5, abs=0.1)


def test_more_responses_leave_fewer_ties():
    share = [after_training(1.0, iterations=1, responses_per_prompt=count)[1][0]["score_ties"] for count in (2, 8)]
    assert share[1] < share[0] - 0.2

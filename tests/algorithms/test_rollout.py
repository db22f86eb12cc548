"""What PPO learns from: what each model is asked about sampled responses, and rewards and advantages worked by hand."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.loss_functions import rollout_batches
from alignment.algorithms.ppo.state import PPOState, ScoreNormalizer
from alignment.algorithms.rollouts.rollout import Rollout, collect
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.training import TrainingConfig
from tests.examples import prompt_example

STOPS = range(0, 384, 6)
SAMPLING = SamplingConfig(8, temperature=0.7, seed=3)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]]
NUMBERS = [28, 29, 30, 31]  # of the rows of iteration 7


def config_of(**settings):
    return PPOConfig(
        "policy", reward_model="reward model", data=DataConfig(train="prompts"), output="output", **settings
    )


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


def test_models_are_asked_at_the_samples_temperature_in_batches_that_keep_to_the_limit(collected):
    rollout, asked, _ = collected
    lengths = {f"rollout {n}": len(p) + len(r) for n, p, r in zip(NUMBERS, PROMPTS, rollout.responses, strict=True)}
    assert len(asked) > 2
    for sizes, names, temperature in asked:
        assert temperature == 0.7
        assert sum(sizes) <= 20 and sizes == tuple(lengths[name] for name in names)
    assert sorted(name for _, names, _ in asked for name in names) == sorted(2 * list(lengths))


def made(**changes):
    """Two responses, the second one shorter and without its end."""
    frame = torch.tensor
    fields = {
        "prompts": [[1, 5], [1]], "responses": [[6, 2], [7]], "numbers": [30, 31],
        "mask": frame([[True, True], [True, False]]),
        "log_probs": frame([[-1.0, -2.0], [-3.0, 0.0]]), "sampled_log_probs": frame([[-1.1, -2.0], [-2.7, 0.0]]),
        "reference_log_probs": frame([[-1.2, -1.6], [-3.6, 0.0]]), "values": frame([[1.0, 2.0], [0.5, 0.0]]),
        "scores": frame([3.0, 1.0]), "ended": frame([True, False]),
    }  # fmt: skip
    return Rollout(**(fields | changes))


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
    rollout = add_advantages(made(), **SHAPING)
    assert_close(rollout.rewards, REWARDS)
    assert_close(rollout.returns, RETURNS)
    whitened = (ADVANTAGES - ADVANTAGES.mean()) / ADVANTAGES.std(correction=0)
    assert_close(rollout.advantages[rollout.mask], whitened, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [1, 100])
def test_batches_hold_what_the_rollout_knows_of_their_rows(limit):
    rollout = replace(add_advantages(made(), **SHAPING), advantages=torch.tensor([[0.1, 0.2], [0.3, 0.0]]))
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

"""PPO's options and its kin as they run: other advantages, KL in the loss, a shared value head, a KL stop, a warm-up."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.ppo import iterate
from alignment.algorithms.ppo import ppo as ppo_module
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.loss_functions import RolloutBatch, normalized_batches, policy_loss_fn
from alignment.algorithms.ppo.ppo import update_policy_and_value
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.algorithms.rollouts.rollout import Baseline, Rollout, ragged_of
from alignment.algorithms.sft import language_loss_fn
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import load_model
from alignment.models.outputs import LanguageOutput
from alignment.training import OptimConfig, TrainingConfig
from tests.ppo_states import state_of

GRPO = {"kl_in": "loss", "kl_estimator": "k3", "loss_normalization": "sequence_mean", "responses_per_prompt": 2}
VARIANTS = {
    "rloo": {"advantages": "rloo", "responses_per_prompt": 2},
    "grpo": {"advantages": "grpo", **GRPO},
    "dr_grpo": {"advantages": "dr_grpo", **GRPO, "loss_normalization": "constant", "clip_range_high": 0.28},
    "reinforce++": {"advantages": "reinforce++"},
    "remax": {"advantages": "remax", "responses_per_prompt": 2},
    "gspo": {"advantages": "grpo", **GRPO, "ratio": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4},
    "shared": {"value_model": "shared", "dual_clip": 3.0, "entropy_coef": 0.01, "whiten_rewards": True},
}
# Adam whose eps dwarfs every gradient divides by a constant: plain gradient descent.
PLAIN_DESCENT = OptimConfig(learning_rate=1e4, betas=(0.0, 0.0), eps=1e6, schedule="constant", max_grad_norm=0)


@pytest.fixture
def ppo(stage, make_stage, tmp_path):
    """`ppo(output, **config changes)` -> its run function and config, from the SFT policy and the reward model."""

    def make(output="ppo", **changes):
        policy, reward_model = (str(stage(name) / "model") for name in ("sft", "reward"))
        return make_stage("ppo", policy, tmp_path / output, reward_model=reward_model, **changes)

    return make


def weights_of(engine):
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.backend.unwrapped.parameters()])


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_of_the_kin_runs_learns_and_goes_on_from_its_checkpoint(ppo, read_metrics, tmp_path, monkeypatch, variant):
    """First ratio 1, its own metrics and no others, a policy that loads; a resumed run ends in the same weights."""
    training = TrainingConfig(batch_size=4, max_steps=2, save_every_steps=1)
    settings = {"max_new_tokens": 5, "epochs": 2, "minibatches": 2, "training": training, **VARIANTS[variant]}
    run, config = ppo("whole", **settings)
    model = run(config)
    lines = read_metrics(tmp_path / "whole")
    assert len(lines) == 2 and all(line["first_ratio_error"] <= 1e-5 for line in lines)
    for line in lines:
        assert ("explained_variance" in line) == ("value_loss" in line) == (variant == "shared")
        assert ("kl_loss" in line) == (config.kl_in == "loss") and "updates" not in line
        assert "value_grad_norm" not in line
    assert not any("value_head" in name for name in load_model(str(model)).state_dict())
    run, config = ppo("cut", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ppo_module, "iterate", lambda *args: iterate(*args) if args[3] == 0 else sys.exit())
        with pytest.raises(SystemExit):
            run(config)
    state_dict = load_model(str(run(config))).state_dict()
    for name, value in load_model(str(model)).state_dict().items():
        assert torch.equal(value, state_dict[name]), name


@pytest.mark.parametrize("variant", ["dr_grpo", "gspo", "shared"])
def test_h12_micro_batches_change_no_update_of_the_kin(ppo, variant):
    def step(name, micro_batch_tokens):
        training = TrainingConfig(batch_size=6, max_steps=1, micro_batch_tokens=micro_batch_tokens)
        _, config = ppo(
            name, training=training, optim=PLAIN_DESCENT, normalize_scores=False, max_new_tokens=5,
            **{**VARIANTS[variant], "clip_range": 0.2, "clip_range_high": 0.3},
        )  # fmt: skip
        state, prompts = state_of(config)
        before = weights_of(state.policy)
        metrics, _ = iterate(state, config, prompts, 0)
        return weights_of(state.policy) - before, metrics

    whole, metrics = step("whole", 10**6)
    single, others = step("single", 1)
    assert whole.norm() > 1e-3 and (whole - single).norm() <= 5e-5 * whole.norm()
    assert others.keys() == metrics.keys()
    for name in (name for name in metrics if not name.startswith("seconds")):
        assert others[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


def test_the_value_head_is_of_the_trunk_and_its_loss_joins_the_policy_s(ppo):
    """step(policy + c * value) = step(policy) + c * step(value) on the trunk; one forward gives both networks' numbers."""

    def step(coef, advantages=True):
        _, config = ppo(
            f"{coef}{advantages}", value_model="shared", value_coef=coef, optim=PLAIN_DESCENT, epochs=1, minibatches=1,
            max_new_tokens=5, normalize_scores=False,
        )  # fmt: skip
        state, prompts = state_of(config)
        head = state.policy.backend.unwrapped.value_head.weight
        assert state.value is None and (head == 0).all()
        torch.nn.init.constant_(head, 0.1)
        _, rollout = iterate(state_of(config)[0], config, prompts, 0)
        if not advantages:
            rollout.advantages.zero_()
        before = weights_of(state.policy)
        metrics = update_policy_and_value(state, config, rollout, 0)
        return weights_of(state.policy) - before, metrics

    small, _ = step(1e-9)
    value, _ = step(1.0, advantages=False)
    both, metrics = step(0.5)
    assert min(small.norm(), value.norm()) > 1e-3
    assert (both - (small + 0.5 * value)).norm() <= 1e-3 * both.norm()
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.5 * metrics["value_loss"], abs=1e-5)


def test_the_updates_stop_where_the_policy_has_moved_too_far(ppo):
    """The first update always stands at approx_kl 0, so the second is the first that can end the passes."""
    found = {}
    for target in (None, 1e-12, 1e3):
        _, config = ppo(f"{target}", target_kl=target, epochs=3, minibatches=2, max_new_tokens=5)
        state, prompts = state_of(config)
        found[target] = iterate(state, config, prompts, 0)[0], state.num_updates, state.policy.step, state.value.step
    assert [count for _, *count in found.values()] == [[6, 6, 6], [2, 2, 2], [6, 6, 6]]
    assert "updates" not in found[None][0] and (found[1e-12][0]["updates"], found[1e3][0]["updates"]) == (2, 6)


def test_the_value_model_warms_up_alone(ppo, read_metrics, tmp_path, stage):
    training = TrainingConfig(batch_size=4, max_steps=3)
    run, config = ppo(
        value_warmup_steps=2, training=training, max_new_tokens=5,
        optim=OptimConfig(learning_rate=1e-2, schedule="linear"),
    )  # fmt: skip
    model = run(config)
    lines = read_metrics(tmp_path / "ppo")
    assert ["policy_loss" in line for line in lines] == [False, False, True] and all(
        "value_loss" in line for line in lines
    )
    assert abs(lines[1]["kl"]) < 1e-4 and lines[2]["first_ratio_error"] <= 1e-5
    # four updates of the policy on a schedule of four: their mean rate is 5/8 of the peak
    assert lines[2]["learning_rate"] == pytest.approx(1e-2 * 0.625, rel=0.3)
    assert model.exists()


def notes_of(output):
    return json.loads((output / "lineage.json").read_text())["notes"]


def test_a_prefix_that_begins_away_from_its_reference_is_noted(ppo, read_metrics, tmp_path):
    """And it is: kl after nothing was learned; adapters that begin with a change of 0 have no such note."""
    settings = {"training": TrainingConfig(batch_size=4, max_steps=1), "max_new_tokens": 5, "kl_target": 0.5}
    run, config = ppo("prefix", adapter=PrefixSpec(tokens=4), **settings)
    run(config)
    (note,) = [note for note in notes_of(tmp_path / "prefix") if "prefix" in note and "reference" in note]
    assert "kl_target" in note
    assert read_metrics(tmp_path / "prefix")[0]["kl_k3"] > 0.01
    run, config = ppo("lora", adapter=LoRASpec(rank=2), **settings)
    run(config)
    assert not [note for note in notes_of(tmp_path / "lora") if "prefix" in note]


def test_the_baseline_is_the_score_of_the_greedy_response(ppo):
    training = TrainingConfig(batch_size=4, max_steps=1)
    _, config = ppo(advantages="remax", responses_per_prompt=3, max_new_tokens=5, training=training)
    state, prompts = state_of(config)
    greedy = decode_responses(
        state.policy.backend.unwrapped, [list(prompt.ids) for prompt in prompts], SamplingConfig(5, 0.0), state.stop_ids
    )
    scores = state.score(prompts, greedy.token_ids, greedy.ended).total
    _, rollout = iterate(state, config, prompts, 0)
    assert_close(rollout.baseline.scores, scores.repeat_interleave(3))
    assert rollout.baseline.ended.tolist() == [end for end in greedy.ended for _ in range(3)]
    assert len(rollout.responses) == 12 and rollout.prompts[0] == rollout.prompts[2] != rollout.prompts[3]
    assert rollout.numbers == list(range(12))


# --- advantages and losses of a rollout worked by hand ---


def config_of(**settings):
    return PPOConfig(policy="p", reward_model="r", data=DataConfig(train="t"), output="o", **settings)


def rollout_of(**settings):
    """Two responses to each of two prompts, of 2, 1, 1 and 2 tokens, all a log-ratio of 0.5 away from the reference."""
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    log_probs = torch.where(mask, -1.0, 0.0)
    return Rollout(
        prompts=[[1], [1], [2], [2]], responses=[[6, 2], [7], [8], [7, 2]], numbers=[0, 1, 2, 3], mask=mask,
        log_probs=log_probs, sampled_log_probs=log_probs, reference_log_probs=log_probs - 0.5 * mask, values=None,
        scores=torch.tensor([3.0, 1.0, -2.0, 4.0]), ended=torch.tensor([True, False, True, True]), **settings,
    )  # fmt: skip


def advantages_of(rollout, **settings):
    config = config_of(**{"missing_end_penalty": 0.5, "responses_per_prompt": 2, **settings})
    return add_advantages(rollout, config, ScoreNormalizer(enabled=False), 0.2, lambda total: total)


def test_leave_one_out_has_the_penalty_of_whole_responses():
    """Rewards 3 - 0.2, 1 - 0.5 - 0.1, -2 - 0.1, 4 - 0.2: each less the other one's; all tokens of a response alike."""
    found = advantages_of(rollout_of(), advantages="rloo")
    assert_close(found.advantages, torch.tensor([[2.4, 2.4], [-2.4, 0.0], [-5.9, 0.0], [5.9, 5.9]]))
    assert_close(found.returns, torch.tensor([[2.8, 2.9], [0.4, 0.0], [-2.1, 0.0], [3.8, 3.9]]))


def test_grpo_leaves_the_penalty_to_the_loss():
    settings = {"kl_in": "loss", "kl_estimator": "k3"}
    found = advantages_of(rollout_of(), advantages="dr_grpo", **settings)
    assert_close(found.advantages, torch.tensor([[1.25, 1.25], [-1.25, 0.0], [-3.0, 0.0], [3.0, 3.0]]))
    scaled = advantages_of(rollout_of(), advantages="grpo", **settings)
    assert_close(scaled.advantages.abs()[scaled.mask], torch.full((6,), 2**-0.5), atol=1e-4, rtol=0)


def test_reinforce_plus_plus_whitens_returns_over_the_iteration():
    found = advantages_of(rollout_of(), advantages="reinforce++")
    returns = torch.tensor([2.8, 2.9, 0.4, -2.1, 3.8, 3.9])
    wanted = (returns - returns.mean()) / returns.std(correction=0)
    assert_close(found.advantages[found.mask], wanted)
    plain = advantages_of(rollout_of(), advantages="reinforce++", whiten_advantages=False)
    assert_close(plain.advantages[plain.mask], returns)


def test_remax_subtracts_the_greedy_response_s_score_with_its_penalty():
    baseline = Baseline(torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([True, True, False, False]))
    found = advantages_of(rollout_of(baseline=baseline), advantages="remax")
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


@pytest.mark.parametrize("advantages", ["gae", "reinforce++", "remax"])
def test_a_ratio_of_whole_responses_refuses_advantages_of_single_tokens(advantages):
    with pytest.raises(ValueError, match=f"ratio sequence.*advantages={re.escape(advantages)} .*grpo"):
        config_of(ratio="sequence", advantages=advantages, responses_per_prompt=2)


# --- the pretraining mix ---


def gradient_of(state, config, rollout):
    """The whole gradient of the policy's first update, before it is clipped."""
    found = []
    step = state.policy.backend.step

    def spy(*arguments, **named):
        parameters = state.policy.backend.unwrapped.parameters()
        found.append(
            torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in parameters])
        )
        return step(*arguments, **named)

    state.policy.backend.step = spy
    metrics = update_policy_and_value(state, config, rollout, 0)
    return found[0].double(), {name: value for name, value in metrics.items() if not name.startswith("seconds")}


@pytest.mark.parametrize("variant", ["gae", "rloo", "gspo", "shared"])
def test_the_mix_adds_gamma_times_the_gradient_of_the_text_and_nothing_at_gamma_0(ppo, world, variant):
    """grad(total) - grad(ppo) = gamma * grad(language) within 1e-5; gamma = 0 is PPO without the mix, bit for bit."""
    text, settings = DataConfig(train=world["pretrain"], max_length=128), VARIANTS.get(variant, {})
    common = {"epochs": 1, "minibatches": 1, "max_new_tokens": 5, **settings}
    _, config = ppo(f"{variant} plain", **common)
    state, prompts = state_of(config)
    _, rollout = iterate(state, config, prompts, 0)

    def gradient(name, gamma):
        more = {} if gamma is None else {"pretrain": text, "pretrain_coef": gamma}
        _, config = ppo(f"{variant} {name}", **common, **more)
        state, _ = state_of(config)
        found, metrics = gradient_of(state, config, rollout)
        return found, metrics, state

    plain, metrics, _ = gradient("none", None)
    zero, zero_metrics, _ = gradient("zero", 0.0)
    assert torch.equal(zero, plain) and zero_metrics == metrics
    total, _, _ = gradient("mix", 0.7)
    _, fresh = ppo(f"{variant} text", **common, pretrain=text, pretrain_coef=0.7)
    fresh_state, _ = state_of(fresh)
    model = fresh_state.policy.backend.unwrapped
    batches = fresh_state.pretraining(0)
    loss_fn = language_loss_fn(model)
    loss = sum(loss_fn(batch).total for batch in batches) / sum(batch.weight for batch in batches)
    loss.backward()
    language = torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])
    assert min(plain.norm(), language.norm()) > 1e-2
    assert ((total - plain) - 0.7 * language.double()).abs().max() <= 1e-5


def test_the_rows_of_a_minibatch_lie_on_the_ranks_of_their_prompts():
    """Three prompts on two ranks, two responses each: rank 0 holds the rows of prompts 0 and 2, rank 1 those of prompt 1."""
    config, filled = config_of(responses_per_prompt=2), {"rewards", "advantages", "returns"}
    held = {0: [0, 1, 4, 5], 1: [2, 3]}  # row numbers of the iteration, in the order in which a rank collects them
    whole = replace(rollout_of(), **dict.fromkeys(filled, torch.zeros(4, 2)))
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

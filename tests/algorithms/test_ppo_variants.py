"""PPO's options and variants as they run: other advantages, a shared value head, a KL stop, a warm-up, the mix of texts."""

import json
import sys

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.ppo import iterate
from alignment.algorithms.ppo import ppo as ppo_module
from alignment.algorithms.ppo.ppo import update_policy_and_value
from alignment.algorithms.sft import language_loss_fn
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig, decode_responses
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
    for name in (name for name in metrics if not name.startswith(("seconds", "mfu"))):
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
def test_the_mix_adds_gamma_times_the_gradient_of_the_text(ppo, world, variant):
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

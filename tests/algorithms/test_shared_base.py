"""PPO and DPO over one base: four networks that hold its weights once, and are what they would be apart."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec, attach, save_adapter
from alignment.algorithms.policies import load_policy, reference_of
from alignment.algorithms.ppo import iterate
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.loading import Checkpoint
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.shared_weights import SharedWeights
from alignment.models.weight_bytes import held_bytes, total_bytes
from alignment.ragged import Ragged
from alignment.reward_model import load_reward_network
from alignment.training import Engine, OptimConfig, TrainingConfig
from tests.adapters.conftest import disturb
from tests.ppo_states import state_of
from tests.stopping import assert_goes_on

IDS = torch.arange(3, 40)[None]
ADAPTERS = {"LoRA": LoRASpec(rank=3, alpha=4.0), "prefix": PrefixSpec(tokens=2)}
KINDS = pytest.mark.parametrize("kind", list(ADAPTERS))
TRAINING = TrainingConfig(batch_size=8, max_steps=3)


@pytest.fixture(scope="module")
def parents(tmp_path_factory, checkpoints, tokenizer):
    """`parents(kind)` -> directories of a policy and a reward model, both adapters of one base."""
    made = {}

    def make(kind):
        if kind not in made:
            folder, base = tmp_path_factory.mktemp(kind), checkpoints["llama"]
            policy = disturb(attach(load_language_model(base), ADAPTERS[kind]), seed=1)
            reward = disturb(attach(load_scalar_model(base, new_head="normal"), ADAPTERS[kind]), seed=2)
            for name, model in (("policy", policy), ("reward", reward)):
                save_adapter(model, folder / name, base=base)
                save_tokenizer(tokenizer, folder / name)
            made[kind] = str(folder / "policy"), str(folder / "reward")
        return made[kind]

    return make


@pytest.fixture
def one_base(parents, make_stage, tmp_path):
    """`one_base("ppo", kind, output, ...)` -> a stage's run and config, its parents and its new adapter of one kind."""

    def make(stage, kind, output="run", **changes):
        policy, reward = parents(kind)
        changes = {"adapter": LoRASpec(rank=2) if kind == "LoRA" else None, "training": TRAINING} | changes
        changes |= {"reward_model": reward} if stage == "ppo" else {}
        return make_stage(stage, policy, tmp_path / output, **changes)

    return make


def networks(state):
    return {role.name: role.model for role in state.roles if role.model is not None}


@KINDS
def test_the_networks_hold_the_base_once(kind, one_base, checkpoints):
    state, _ = state_of(one_base("ppo", kind)[1])
    found = networks(state)
    assert list(found) == ["policy", "value model", "reward model"] + (["reference"] if kind == "prefix" else [])
    base = load_language_model(checkpoints["llama"])
    trunk = {name for name, _ in base.trunk.named_parameters()}
    addresses = {
        role: {
            name.replace(".base_layer", ""): parameter.data_ptr()
            for name, parameter in model.trunk.named_parameters()
            if ".lora_" not in name
        }
        for role, model in found.items()
    }
    assert all(held.keys() == trunk and held == addresses["policy"] for held in addresses.values())
    own = {  # bytes of each network's own: adapters, score heads
        role: 4 * sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name or "prefix." in name)
        + (4 * 32 if role in ("value model", "reward model") else 0)
        + 8 * 2 * (kind == "prefix")  # the prefix's token numbers, a buffer
        for role, model in found.items()
    }
    assert total_bytes(*found.values()) == total_bytes(base) + sum(own.values())
    assert all(total_bytes(model) <= total_bytes(base) + own[role] for role, model in found.items())


@KINDS
@torch.no_grad()
def test_each_network_gives_what_it_gives_alone(kind, one_base, parents, checkpoints):
    policy, reward = parents(kind)
    state, _ = state_of(one_base("ppo", kind, normalize_scores=False)[1])
    batch = Ragged.build([IDS[0].tolist(), list(range(60, 90))])
    start, judge = load_model(policy), load_reward_network(reward)
    log_probs, values = start(batch=batch).log_probs, judge(batch=batch).values
    tight = {"atol": 1e-5, "rtol": 0}
    assert_close(state.policy.model(batch=batch).log_probs, log_probs, **tight)
    assert_close(state.reference(batch=batch).log_probs, log_probs, **tight)
    assert_close(state.value.model(batch=batch).values, values, **tight)
    assert_close(networks(state)["reward model"](batch=batch).values, values, **tight)
    apart = load_model(checkpoints["llama"])
    assert not torch.allclose(apart(batch=batch).log_probs, log_probs, atol=1e-2)  # the adapters do something


@KINDS
def test_iterations_change_what_trains_and_nothing_shared(kind, one_base, checkpoints):
    _, config = one_base("ppo", kind, optim=OptimConfig(learning_rate=1e-2))
    state, prompts = state_of(config)
    batch = Ragged.build([IDS[0].tolist()])

    @torch.no_grad()
    def outputs():
        found = networks(state)
        return (
            state.policy.model(batch=batch).log_probs, state.value.model(batch=batch).values,
            state.reference(batch=batch).log_probs, found["reward model"](batch=batch).values,
        )  # fmt: skip

    before = outputs()
    for step in range(2):
        iterate(state, config, prompts, step)
    policy, value, reference, reward = (not torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))
    assert (policy, value, reference, reward) == (True, True, False, False)
    stored = dict(load_language_model(checkpoints["llama"]).named_parameters())
    for model in networks(state).values():
        for name, parameter in model.trunk.named_parameters():
            if ".lora_" not in name:
                assert torch.equal(parameter, stored["trunk." + name.replace(".base_layer", "")])


@KINDS
@pytest.mark.parametrize("stage", ["ppo", "dpo"])
def test_stopped_and_resumed_equals_uninterrupted(stage, kind, one_base, tmp_path):
    assert_goes_on(partial(one_base, stage, kind), 1, tmp_path)


@KINDS
@pytest.mark.parametrize("stage", ["ppo", "dpo", "sft"])
def test_the_result_is_an_adapter_of_the_original_base_and_opens_in_peft(stage, kind, one_base, checkpoints, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, config = one_base(stage, kind, optim=OptimConfig(learning_rate=1e-2))
    result = run(config)
    named = json.loads((result / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert (result / named).resolve() == Path(checkpoints["llama"]).resolve() and not (result.parent / "base").exists()
    ours = load_model(str(result))(IDS).logits
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoints["llama"]), result).eval()
    assert_close(theirs(IDS).logits, ours, atol=1e-5, rtol=0)
    assert not torch.allclose(load_model(config.policy)(IDS).logits, ours, atol=1e-4)  # it has learned


@KINDS
def test_a_reference_over_the_same_base_shares_its_weights(kind, parents, checkpoints, tmp_path):
    """DPO's reference: the start of a prefix, or any checkpoint that is an adapter of the policy's base."""
    policy_directory, _ = parents(kind)
    tokenizer, batch = load_tokenizer(policy_directory), Ragged.build([IDS[0].tolist()])
    for source in [policy_directory, checkpoints["llama"]]:
        bases = SharedWeights()
        adapter = LoRASpec(rank=2) if kind == "LoRA" else None
        policy = load_policy(Checkpoint(policy_directory), adapter, tokenizer, str(tmp_path), bases=bases)
        engine = Engine(policy.model.eval(), OptimConfig(learning_rate=1e-2), TrainingConfig(), total_steps=2)
        reference = reference_of(policy, source, engine, bases=bases)
        assert reference.model is not None
        shared = held_bytes(reference.model).keys() & held_bytes(engine.backend.unwrapped).keys()
        assert len(shared) == len(list(load_language_model(checkpoints["llama"]).parameters()))
        alone = load_model(source)(batch=batch).log_probs
        assert_close(reference(batch=batch).log_probs, alone, atol=1e-5, rtol=0)


def test_a_frozen_reward_model_shares_with_an_adapted_value_model(stage, make_stage, tmp_path):
    """Here the reward model is no adapter: value model and reward model are one base, policy and reference another."""
    policy, reward = str(stage("sft") / "model"), str(stage("reward") / "model")
    _, config = make_stage("ppo", policy, tmp_path, reward_model=reward, adapter=LoRASpec(rank=2))
    state, _ = state_of(config)
    found = {name: held_bytes(model) for name, model in networks(state).items()}
    assert len(found["value model"].keys() & found["reward model"].keys()) == len(found["reward model"]) - 1  # the head
    assert not found["policy"].keys() & found["reward model"].keys()


def test_where_every_weight_trains_nothing_of_it_is_shared(stage, make_stage, tmp_path):
    policy, reward = str(stage("sft") / "model"), str(stage("reward") / "model")
    _, config = make_stage("ppo", policy, tmp_path, reward_model=reward)
    state, _ = state_of(config)
    found = [held_bytes(model).keys() for model in networks(state).values()]
    assert len(found) == 4 and not any(one & other for i, one in enumerate(found) for other in found[:i])


def test_the_memory_of_each_role_is_noted_before_the_start(one_base, tmp_path):
    run, config = one_base("ppo", "LoRA")
    run(config)
    notes = [
        note for note in json.loads((tmp_path / "run" / "lineage.json").read_text())["notes"] if "memory: " in note
    ]
    roles = [note.removeprefix("memory: ").partition(":")[0] for note in notes[:-1]]
    assert roles == ["policy", "value model", "reward model", "reference"] and notes[-1].startswith("memory: together ")
    assert "shared with value model and reward model" in notes[0] and "of optimizer state" in notes[0]
    assert "nothing of it trains" in notes[2] and "no weights of its own" in notes[3]


def test_a_network_that_trains_the_shared_base_is_refused(one_base, monkeypatch, tmp_path):
    from alignment.algorithms import scoring

    load = scoring.load_frozen_reward_model

    def unfreeze(*rest, **options):
        loaded = load(*rest, **options)
        loaded.model.get_parameter("trunk.norm.weight").requires_grad_(True)
        return loaded

    monkeypatch.setattr(scoring, "load_frozen_reward_model", unfreeze)
    run, config = one_base("ppo", "LoRA")
    with pytest.raises(
        ValueError, match=r"trunk\.norm\.weight would be trained, and policy and value model and reward"
    ):
        run(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()

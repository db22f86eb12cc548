"""Several networks over one set of frozen weights: the same tensors, the same outputs, and nothing of them trains."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec, attach
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.models.shared_weights import SharedWeights, refuse_trained
from alignment.models.weight_bytes import held_bytes, total_bytes
from alignment.models.weights_config import WeightsConfig
from tests.adapters.conftest import disturb

IDS = torch.arange(3, 30)[None]
SPECS = pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=2)], ids=["LoRA", "prefix"])


@pytest.fixture(params=["tied", "untied"])
def directory(request, write_checkpoint, tmp_path):
    """A base model with and without a language head of its own."""
    return write_checkpoint(tmp_path / "base", "llama", tie_word_embeddings=request.param == "tied")


@pytest.fixture
def foreign(tmp_path):
    """A base model of an architecture that runs as transformers' class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "olmo", vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


@torch.no_grad()
def outputs(model):
    found = model.eval()(IDS)
    return found.values if hasattr(found, "values") else found.logits


def test_networks_of_a_directory_hold_the_same_tensors_and_read_them_once(directory, monkeypatch):
    bases, reads = SharedWeights(), []
    monkeypatch.setattr(
        "alignment.models.shared_weights.load_language_model",
        lambda path, **options: reads.append(path) or load_language_model(path, **options),
    )
    one, other, scalar = (
        bases.language_model(directory),
        bases.language_model(directory),
        bases.scalar_model(directory, "zero"),
    )
    assert len(reads) == 1 and one is not other
    assert all(mine is theirs for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))
    assert held_bytes(one) == held_bytes(other)
    assert all(mine is theirs for mine, theirs in zip(one.trunk.parameters(), scalar.trunk.parameters(), strict=True))
    assert total_bytes(one, other, scalar) == total_bytes(one) + 4 * 32  # the score head
    assert (one.head.weight is one.trunk.embed.weight) == (other.head.weight is other.trunk.embed.weight)
    for network in (one, other, scalar):
        assert not any(parameter.requires_grad for parameter in network.trunk.parameters()) and not network.training


@pytest.mark.parametrize("head", ["normal", "zero"])
def test_outputs_and_random_draws_are_those_of_models_loaded_alone(directory, head):
    bases = SharedWeights()
    assert torch.equal(outputs(bases.language_model(directory)), outputs(load_language_model(directory)))
    torch.manual_seed(5)
    shared, after = bases.scalar_model(directory, head), torch.rand(1)
    torch.manual_seed(5)
    alone = load_scalar_model(directory, new_head=head)
    assert torch.equal(shared.head.weight, alone.head.weight) and torch.equal(after, torch.rand(1))
    assert torch.equal(outputs(shared), outputs(alone)) and shared.config == alone.config


def test_a_reward_models_directory_gives_its_head_to_each_network_apart(directory, tmp_path):
    save_model(disturb(load_scalar_model(directory, new_head="normal")), tmp_path / "reward")
    bases, wanted = SharedWeights(), outputs(load_scalar_model(tmp_path / "reward"))
    judge, value = bases.scalar_model(tmp_path / "reward"), bases.scalar_model(tmp_path / "reward", "zero")
    kept = bases.scalar_model(tmp_path / "reward")
    assert (
        torch.equal(outputs(judge), wanted) and torch.equal(outputs(kept), wanted) and outputs(value).abs().max() == 0
    )
    assert judge.trunk.embed.weight is value.trunk.embed.weight is kept.trunk.embed.weight
    with torch.no_grad():
        kept.head.weight += 1
    assert torch.equal(outputs(judge), wanted)


def test_a_foreign_architecture_is_shared_by_policy_and_reward_model(foreign):
    bases = SharedWeights()
    policy, value = bases.language_model(foreign), bases.scalar_model(foreign, "normal")
    own = {id(parameter) for parameter in policy.parameters()}
    assert [name for name, parameter in value.named_parameters() if id(parameter) not in own] == ["inner.score.weight"]
    assert torch.equal(outputs(policy), outputs(load_language_model(foreign)))
    alone = load_scalar_model(foreign, new_head="zero")
    with torch.no_grad():
        alone.head.weight.copy_(value.head.weight)
    assert_close(outputs(value), outputs(alone), atol=1e-6, rtol=0)
    assert value.config == alone.config


@SPECS
def test_training_one_network_changes_no_other_and_no_base_weight(spec, directory):
    bases = SharedWeights()
    trained, other = attach(bases.language_model(directory), spec), attach(bases.language_model(directory), spec)
    value = attach(bases.scalar_model(directory, "normal"), spec)
    for seed, network in enumerate((trained, other, value)):
        disturb(network, seed=seed)
    before = [outputs(network) for network in (other, value)]
    base = {name: parameter.clone() for name, parameter in load_language_model(directory).named_parameters()}
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    first = outputs(trained)
    for _ in range(3):
        trained(IDS).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.allclose(outputs(trained), first, atol=1e-3)
    assert all(torch.equal(a, outputs(b)) for a, b in zip(before, (other, value), strict=True))
    now = bases.language_model(directory)
    assert all(torch.equal(parameter, base[name]) for name, parameter in now.named_parameters())


def test_a_network_that_trains_a_shared_weight_is_refused_by_name(directory):
    bases = SharedWeights()
    policy, reward = attach(bases.language_model(directory), LoRASpec(rank=2)), bases.scalar_model(directory, "zero")
    refuse_trained({"policy": policy, "reward model": reward})
    policy.get_submodule("trunk.blocks.1.attention_norm").weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.1\.attention_norm\.weight .*policy and reward model"):
        refuse_trained({"policy": policy, "reward model": reward})
    refuse_trained({"policy": policy, "reward model": load_scalar_model(directory, new_head="zero")})


def test_a_lower_type_is_shared_too_and_heads_stay_float32(directory):
    bases = SharedWeights(WeightsConfig(dtype="bfloat16"))
    policy, value = bases.language_model(directory), bases.scalar_model(directory, "normal")
    assert policy.trunk.embed.weight is value.trunk.embed.weight
    assert policy.trunk.blocks[0].attention.query.weight.dtype == torch.bfloat16
    assert value.head.weight.dtype == torch.float32 == policy.trunk.norm.weight.dtype
    assert outputs(value).dtype == torch.float32 and outputs(value).abs().max() > 0


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantized_weights_are_shared_with_their_scales(quantize, write_checkpoint, tmp_path):
    directory = write_checkpoint(tmp_path / "wide", "llama", hidden_size=64, intermediate_size=128)
    bases = SharedWeights(WeightsConfig(quantize=quantize))
    policy, other = bases.language_model(directory), bases.language_model(directory)
    value = bases.scalar_model(directory, "normal")
    assert held_bytes(policy) == held_bytes(other)
    assert total_bytes(policy, other, value) == total_bytes(policy) + 4 * 64
    alone = SharedWeights(WeightsConfig(quantize=quantize)).unshared().language_model(directory)
    wanted = outputs(alone)
    attach(policy, LoRASpec(rank=2))
    for network in (policy, other):
        assert torch.equal(outputs(network), wanted)
    disturb(policy)
    assert not torch.allclose(outputs(policy), wanted, atol=1e-2) and torch.equal(outputs(other), wanted)
    assert outputs(value).abs().max() > 0
    assert not torch.allclose(outputs(load_language_model(directory)), wanted, atol=1e-4)  # they are quantized

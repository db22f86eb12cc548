"""LoRA beside our layers: what it computes, switching it off, putting it into the weights."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec, attach, disabled, merge_adapter
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 6.0 / 4), (True, 6.0 / math.sqrt(4))])
def test_a_layer_gives_its_output_plus_the_scaled_update(base, stabilized, scale):
    spec = LoRASpec(rank=4, alpha=6.0, rank_stabilized=stabilized, layers="attention.output")
    layer = attach(load_language_model(base), spec).get_submodule("trunk.blocks.0.attention.output")
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(up)
    x = torch.randn(3, 32)
    assert_close(layer(x), layer.get_base_layer()(x) + scale * x @ down.T @ up.T)


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
def test_only_the_adapter_trains(base, spec):
    model = attach(load_language_model(base), spec)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {
        name for name in dict(model.named_parameters()) if ".lora_" in name or name.startswith("prefix.")
    }
    assert len(trainable) >= 1


def test_a_fresh_lora_changes_nothing(base, ids, logits):
    assert torch.equal(
        logits(attach(load_language_model(base), LoRASpec()), ids), logits(load_language_model(base), ids)
    )


def test_layers_are_chosen_by_the_ends_of_their_names(base):
    model = attach(load_language_model(base), LoRASpec(rank=2, layers=r"1\.attention\.(query|value)"))
    adapted = {name.partition(".lora_A")[0] for name in model.state_dict() if ".lora_A" in name}
    assert adapted == {f"trunk.blocks.1.attention.{name}" for name in ("query", "value")}


def test_layers_that_do_not_exist_are_refused_with_those_that_do(base):
    with pytest.raises(UserError, match=r"q_projection.*names no linear layer.*attention\.query"):
        attach(load_language_model(base), LoRASpec(layers="q_projection"))


def test_dropout_acts_in_training_only(adapted, ids):
    model = adapted(LoRASpec(rank=4, dropout=0.5))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
def test_disabled_gives_the_base_and_puts_everything_back(adapted, base, ids, logits, spec):
    model = adapted(spec)
    with_adapter, without = logits(model, ids), logits(load_language_model(base), ids)
    assert not torch.allclose(with_adapter, without, atol=1e-3)
    with disabled(model):
        assert torch.equal(logits(model, ids), without)
        with disabled(model):
            pass
        assert torch.equal(logits(model, ids), without)  # the inner one did not switch it on
    assert torch.equal(logits(model, ids), with_adapter)


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
def test_disabled_puts_everything_back_after_an_error(adapted, ids, logits, spec):
    model = adapted(spec)
    before = logits(model, ids)
    with pytest.raises(KeyError), disabled(model):
        raise KeyError
    assert torch.equal(logits(model, ids), before)


def test_disabled_leaves_gradients_as_they_were(adapted):
    model = adapted(LoRASpec(rank=2))
    before = [parameter.requires_grad for parameter in model.parameters()]
    with disabled(model):
        assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert [parameter.requires_grad for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    "spec", [LoRASpec(rank=4), LoRASpec(rank=3, rank_stabilized=True, layers="attention.value|down")]
)
def test_merged_equals_unmerged_and_is_a_plain_model(adapted, base, ids, logits, spec):
    # In float64: in float32 rounding alone moves these logits by 1e-6 to 2e-4, for the update outweighs the weights.
    model = adapted(spec).double()
    before = logits(model, ids)
    merged = merge_adapter(model)
    assert_close(logits(merged, ids), before, atol=1e-9, rtol=0)
    assert set(merged.state_dict()) == set(load_language_model(base).state_dict())
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_a_prefix_cannot_be_merged(adapted):
    with pytest.raises(UserError, match="cannot be merged"):
        merge_adapter(adapted(PrefixSpec(tokens=2)))


@pytest.mark.parametrize(
    "settings",
    [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"layers": "("}, {"tokens": 0}],
)
def test_impossible_settings_are_refused(settings):
    kind = PrefixSpec if "tokens" in settings else LoRASpec
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind(**settings)

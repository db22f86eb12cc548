"""LoRA beside our layers: what it computes, which layers it takes, switching it off; and on mixtures of experts."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import IA3Spec, LoRASpec, PrefixSpec, attach, disabled, merge_adapter, save_adapter
from alignment.adapters.lora import keep_as_start
from alignment.errors import UserError
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from tests.adapters.conftest import disturb

BOTH = pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 6.0 / 4), (True, 6.0 / math.sqrt(4))])
def test_a_layer_gives_its_output_plus_the_scaled_update(base, stabilized, scale):
    spec = LoRASpec(rank=4, alpha=6.0, rank_stabilized=stabilized, layers="attention.output")
    layer = attach(load_language_model(base), spec).get_submodule("trunk.blocks.0.attention.output")
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(up)
    x = torch.randn(3, 32)
    assert_close(layer(x), layer.get_base_layer()(x) + scale * x @ down.T @ up.T)


def test_under_autocast_numbers_are_those_of_pefts_casts(base):
    layer = attach(load_language_model(base), LoRASpec(rank=4)).get_submodule("trunk.blocks.0.attention.output")
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    seen, found = [], []
    layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    for _ in range(2):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            layer(x).square().sum().backward()
        found.append((x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.requires_grad)))
        layer.zero_grad()
        layer.__dict__.pop("_cast_input_dtype", None)  # peft's own from here on
    assert seen == [torch.bfloat16, torch.float32]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_layers_are_chosen_by_the_ends_of_their_names(base):
    model = attach(load_language_model(base), LoRASpec(rank=2, layers=r"1\.attention\.(query|value)"))
    adapted = {name.partition(".lora_A")[0] for name in model.state_dict() if ".lora_A" in name}
    assert adapted == {f"trunk.blocks.1.attention.{name}" for name in ("query", "value")}
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())
    with pytest.raises(UserError, match=r"q_projection.*names no linear layer.*attention\.query"):
        attach(load_language_model(base), LoRASpec(layers="q_projection"))


def test_dropout_acts_in_training_only(adapted, ids):
    model = adapted(LoRASpec(rank=4, dropout=0.5))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


@BOTH
def test_disabled_gives_the_base_and_puts_everything_back(adapted, base, ids, logits, spec):
    model = adapted(spec)
    with_adapter, without = logits(model, ids), logits(load_language_model(base), ids)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    assert not torch.allclose(with_adapter, without, atol=1e-3)
    with pytest.raises(KeyError), disabled(model):
        with disabled(model):
            pass
        assert torch.equal(logits(model, ids), without)  # the inner one did not switch it on
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
        raise KeyError
    assert torch.equal(logits(model, ids), with_adapter)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stabilized", [True, False])
def test_a_start_of_the_other_scaling_rule_is_read_as_it_acted(base, plain, ids, logits, tmp_path, stabilized):
    from peft import PeftModel

    first = LoRASpec(rank=4, alpha=8.0, rank_stabilized=not stabilized)
    second = LoRASpec(rank=8, alpha=3.0, rank_stabilized=stabilized, layers=r"attention\.query|down")
    model = keep_as_start(disturb(attach(load_language_model(base), first)))
    model = disturb(attach(model, second)).eval()
    wanted = logits(model, ids)
    save_adapter(model, tmp_path, base=str(base))
    opened = {
        "peft": PeftModel.from_pretrained(plain(), tmp_path),
        "here": load_model(str(tmp_path)),
        "next stage": attach(keep_as_start(load_model(str(tmp_path))), replace(first, layers="attention.key")),
        "merged": merge_adapter(load_model(str(tmp_path))),
    }
    for name, other in opened.items():
        assert_close(logits(other, ids), wanted, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("settings", [{"rank": 0}, {"dropout": 1.0}, {"layers": "("}, {"init": "zeros"}, {"tokens": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        (PrefixSpec if "tokens" in settings else LoRASpec)(**settings)


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), IA3Spec()], ids=["LoRA", "IA3"])
def test_lora_adapts_every_expert_and_not_the_router_and_factors_neither(tmp_path, spec):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    save_model(build_language_model(MIXTRAL), tmp_path / "base")
    torch.manual_seed(1)
    model = disturb(attach(load_language_model(tmp_path / "base"), spec)).eval()
    if isinstance(spec, LoRASpec):
        blocks = {name for name, module in model.trunk.blocks.named_modules() if isinstance(module, torch.nn.Linear)}
        bare = {name for name in blocks if not name.endswith(("base_layer", "lora_A.default", "lora_B.default"))}
        assert bare == {"0.feedforward.router", "1.feedforward.router"}
    else:
        trained = {name.split(".ia3_l")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {f"trunk.blocks.{block}.attention.{part}" for block in (0, 1) for part in ("key", "value")}
    save_adapter(model, tmp_path / "a", base=str(tmp_path / "base"))
    ids = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(4))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "a").eval()
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(load_model(str(tmp_path / "a"))(ids).logits, wanted)
        assert_close(theirs(ids).logits, wanted, atol=1e-4, rtol=0)

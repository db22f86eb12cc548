"""Frozen weights in a lower type: the same numbers as with float32 weights, and no float32 copy that outlives a product."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from alignment import load_model
from alignment.adapters import LoRASpec, attach
from alignment.models import frozen_weights
from alignment.models.frozen_weights import FrozenEmbedding, FrozenLinear, frozen_linear, store_frozen, train_in_float32
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.weight_bytes import describe_weights, total_bytes
from alignment.models.weights_config import WeightsConfig, warn_of_slow_bfloat16
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import TrainingConfig

AUTO = WeightsConfig()
DOCUMENTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]


def batch_of(model):
    ragged = Ragged.build(DOCUMENTS, [[False, *[True] * (len(each) - 1)] for each in DOCUMENTS])
    if hasattr(model, "encoder"):
        return Seq2Seq(ragged, ragged)
    return (
        ragged if model.config["model_type"] != "bert" else replace(ragged, labels=ragged.tokens[ragged.target_index])
    )


def trained(model, spec):
    """The model with a LoRA, drawn from the same seed each time and moved away from zero."""
    torch.manual_seed(0)
    model = train_in_float32(attach(model, spec))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def loss_and_gradients(model, precision):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = -model(batch=batch_of(model)).log_probs.sum()
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bert", "t5", "stablelm"])
def test_a_low_type_changes_no_number(low, family, dtype, precision):
    directory, spec = low(family, dtype), LoRASpec(rank=2)
    plain = trained(load_language_model(directory, torch.float32), spec)
    held = trained(store_frozen(load_language_model(directory, None), AUTO), spec)
    assert {x.dtype for x in held.parameters() if x.dim() > 1 and not x.requires_grad} >= {dtype}
    assert {x.dtype for x in held.parameters() if x.requires_grad or x.dim() < 2} == {torch.float32}
    expected, found = loss_and_gradients(plain, precision), loss_and_gradients(held, precision)
    assert torch.equal(expected[0], found[0])
    assert expected[1].keys() == found[1].keys()
    assert all(torch.equal(expected[1][name], found[1][name]) for name in found[1])


def test_a_scalar_model_holds_its_trunk_low_and_its_head_in_float32(low):
    directory = low("llama")
    torch.manual_seed(1)
    plain = load_scalar_model(directory, torch.float32, new_head="normal")
    torch.manual_seed(1)
    held = store_frozen(load_scalar_model(directory, None, new_head="normal"), AUTO)
    assert held.head.weight.dtype == torch.float32 and held.trunk.embed.weight.dtype == torch.bfloat16
    batch = Ragged.build(DOCUMENTS)
    assert torch.equal(held(batch=batch).values, plain(batch=batch).values)


def test_decoding_is_that_of_float32_weights(low):
    directory = low("gpt2")
    plain, held = (
        load_language_model(directory, torch.float32),
        store_frozen(load_language_model(directory, None), AUTO),
    )
    logits = []
    for model in (plain, held):
        cache = model.new_cache(3, 8)
        first = model.prefill(Ragged.build(DOCUMENTS), cache)
        logits.append(torch.stack([first, model.decode(first.argmax(-1), cache)]))
    assert logits[0].dtype == torch.float32 and torch.equal(*logits)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (24,)])
def test_a_layer_gives_the_numbers_and_gradients_of_its_float32_twin(bias, shape):
    low_weight = torch.randn(40, 24).bfloat16()
    b = torch.randn(40) if bias else None
    outputs = []
    for weight in (low_weight, low_weight.float()):
        x, own = torch.linspace(-1, 1, 24).expand(shape).clone().requires_grad_(), None if b is None else b.clone()
        own = None if own is None else own.requires_grad_()
        y = frozen_linear(x, weight, own)
        y.square().sum().backward()
        outputs.append([y, x.grad, *([own.grad] if own is not None else [])])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_no_float32_copy_of_a_weight_is_kept_for_the_backward_pass():
    layer = FrozenLinear(64, 96, bias=False).requires_grad_(False)
    layer.weight.data = layer.weight.data.bfloat16()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(torch.randn(3, 64, requires_grad=True))
    assert [(tuple(x.shape), x.dtype) for x in kept] == [((96, 64), torch.bfloat16)]
    assert kept[0].data_ptr() == layer.weight.data_ptr()


def test_a_large_matrix_is_cast_in_parts(monkeypatch):
    weight, x = torch.randn(50, 8).bfloat16(), torch.randn(4, 8, requires_grad=True)
    expected = x @ weight.float().T
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    monkeypatch.setattr(frozen_weights, "WHOLE_ELEMENTS", 64)  # 8 rows at a time, 2 in the last part
    y = frozen_linear(x, weight)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_a_type_can_be_asked_for_and_float32_keeps_everything(low):
    held = store_frozen(load_language_model(low("llama", torch.float32), None), WeightsConfig(dtype="bfloat16"))
    assert held.head.weight is held.trunk.embed.weight or held.head.weight.dtype == torch.bfloat16
    assert held.trunk.blocks[0].attention_norm.weight.dtype == torch.float32
    whole = store_frozen(load_language_model(low("llama"), None), WeightsConfig(dtype="float32"))
    assert {x.dtype for x in whole.parameters()} == {torch.float32}
    assert type(whole.trunk.blocks[0].attention.query) is nn.Linear


def test_a_layer_that_trains_is_float32_again():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).bfloat16()
    store_frozen(model, AUTO)
    assert [type(x) for x in model] == [FrozenEmbedding, FrozenLinear]
    model[1].weight.requires_grad_(True)
    train_in_float32(model)
    assert type(model[1]) is nn.Linear and model[1].weight.dtype == torch.float32
    assert type(model[0]) is FrozenEmbedding and model[0](torch.tensor([1])).dtype == torch.float32


def test_a_layer_of_an_unknown_class_keeps_its_tied_weight_in_float32():
    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * self.weight.shape[1] ** 0.5

    model = nn.ModuleDict({"embed": Scaled(8, 4), "head": nn.Linear(4, 8, bias=False), "other": nn.Linear(4, 4)})
    model["head"].weight = model["embed"].weight
    store_frozen(model.bfloat16(), AUTO)
    assert model["head"].weight is model["embed"].weight and model["embed"].weight.dtype == torch.float32
    assert model["other"].weight.dtype == torch.bfloat16 and model["other"].bias.dtype == torch.float32


def test_bytes_are_half_of_float32_and_are_described(low):
    directory, spec = low("llama"), LoRASpec(rank=2)
    whole = load_language_model(directory, torch.float32)
    held = trained(store_frozen(load_language_model(directory, None), AUTO), spec)
    matrices = sum(x.numel() for x in whole.parameters() if x.dim() > 1)
    lora = sum(x.numel() for x in held.parameters() if x.requires_grad)
    assert total_bytes(held) == pytest.approx(2 * matrices + 4 * lora, rel=0.05)
    text = describe_weights(held)
    assert "tensors frozen in bfloat16 (" in text and f"{lora:,} numbers trained in float32" in text


def test_a_cpu_without_bfloat16_instructions_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False, "amx_bf16": False})
    warn_of_slow_bfloat16.cache_clear()
    with pytest.warns(UserWarning, match="no bfloat16 instructions.*precision=auto"):
        warn_of_slow_bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_bfloat16()
    warn_of_slow_bfloat16.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_bfloat16()
    warn_of_slow_bfloat16.cache_clear()


@pytest.mark.parametrize(
    "instructions, precision, dtype",
    [({"avx512_bf16": True}, "bf16", torch.bfloat16), ({"avx2": True, "avx512_bf16": False}, "fp32", torch.float32)],
)
def test_auto_is_bfloat16_where_the_cpu_has_instructions_for_it(monkeypatch, low, instructions, precision, dtype):
    directory = low("llama")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TrainingConfig(precision="auto").precision == precision
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {weight.dtype for weight in load_model(directory, "auto").parameters()} == {dtype}
    assert next(load_model(directory, "bfloat16").parameters()).dtype == torch.bfloat16

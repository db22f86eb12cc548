"""NF4 and int8 through bitsandbytes: what is quantized, what it computes, and the same in transformers and peft."""

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.errors import UserError
from alignment.models import quantization
from alignment.models.frozen_weights import store_frozen
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.quantization import dequantized, is_quantized, quantize_blocks, require_bitsandbytes, round_blocks
from alignment.models.weight_bytes import total_bytes
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged

pytest.importorskip("bitsandbytes")
KINDS = ["nf4", "int8"]
ALIGNED = {  # rows of whole blocks of 64, see `read_weight`
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16},
    "bert": {"hidden_size": 64, "intermediate_size": 128},
}
DOCUMENTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]


def quantized_layers(model):
    return {name: layer for name, layer in model.named_modules() if is_quantized(layer)}


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "bert", "t5", "mixtral", "stablelm"])
def test_the_linear_layers_of_the_blocks_are_quantized_and_nothing_else(low, family, quantize):
    plain = load_language_model(low(family), torch.float32)
    model = store_frozen(load_language_model(low(family), None), WeightsConfig(quantize=quantize))
    found = set(quantized_layers(model))
    inside = {
        name
        for name, layer in plain.named_modules()
        if isinstance(layer, nn.Linear)
        and any(part in name for part in ("blocks.", "layers."))
        and "router" not in name
    }
    assert found == inside and len(found) >= 6
    others = [x for name, x in model.named_parameters() if name.rpartition(".")[0] not in found and x.dim() > 1]
    assert {x.dtype for x in others} <= {torch.bfloat16, torch.float32}
    for name in found:
        matrix, original = dequantized(model.get_submodule(name)), plain.get_submodule(name).weight
        bound = original.abs().max() * (0.16 if quantize == "nf4" else 0.51 / 127 * 1.05)  # half of the widest step
        assert (matrix - original).abs().max() <= bound
        assert (matrix - original).abs().max() > 0


def test_nf4_of_one_block_by_hand():
    # The 16 values of NF4 are fixed, -1 and 1 among them; a block's largest size is its scale, itself held in 8 bits.
    layer = nn.Linear(64, 1, bias=False)
    layer.weight.data = torch.zeros(1, 64)
    layer.weight.data[0, :4] = torch.tensor([-2.0, 2.0, 1.0, 0.16])
    (made,) = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), "nf4")["blocks"]
    # 1 / 2 lies between 0.4407 and 0.5626 (nearer 0.4407 by 0.0593); 0.08 is nearest to 0.0796.
    expected = 2 * torch.tensor([-1.0, 1.0, 0.4407098, 0.0795803])
    torch.testing.assert_close(dequantized(made)[0, :4], expected, rtol=2e-2, atol=1e-3)
    assert dequantized(made)[0, 4:].abs().max() == 0


def test_int8_of_one_row_by_hand():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.27, -0.5, 0.004, 0.006]])
    (made,) = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), "int8")["blocks"]
    torch.testing.assert_close(dequantized(made), torch.tensor([[1.27, -0.5, 0.0, 0.01]]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_is_a_linear_layer_with_the_dequantized_matrix(quantize, precision):
    layer = nn.Linear(64, 96)
    (made,) = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), quantize)["blocks"]
    twin = nn.Linear(64, 96)
    twin.weight.data, twin.bias = dequantized(made), made.bias
    outputs = []
    for each in (made, twin):
        x = torch.linspace(-8, 8, 7 * 64).reshape(7, 64).requires_grad_()  # one above bitsandbytes' threshold of 6
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            y = each.train()(x)
            assert torch.equal(y, each.eval()(x))  # training mode does not matter
            torch.testing.assert_close(y[:2], each(x[:2]), rtol=1e-6, atol=1e-5)  # nor do the other rows
        y.float().square().sum().backward()
        outputs.append((y, x.grad))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            assert torch.equal(each(x), y)
    assert outputs[0][0].dtype == outputs[1][0].dtype
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


class Made(TorchDispatchMode):
    """The largest tensor of each type that is made while the mode is on, in numbers."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return made


@pytest.fixture
def weights_on_a_gpu(monkeypatch):
    """bitsandbytes' parameters quantize nothing when they are moved, as where the weights lie on a GPU already."""
    import bitsandbytes

    monkeypatch.setattr(bitsandbytes.nn.Int8Params, "to", lambda self, *arguments, **options: self)
    monkeypatch.setattr(bitsandbytes.nn.Int8Params, "cuda", lambda self, *arguments, **options: self)


@pytest.mark.usefixtures("weights_on_a_gpu")
def test_int8_is_quantized_where_the_weights_lie():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    original = layer.weight.detach().clone()
    (made,) = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), "int8")["blocks"]
    assert made.weight.dtype == torch.int8 and made.weight.shape == (96, 64) and made.scales.shape == (96,)
    # Half a step of 1/127 of the row's largest size, and the rounding of the weights to half precision before.
    steps = original.abs().amax(1, keepdim=True) / 127
    assert ((dequantized(made) - original).abs() <= 0.51 * steps + 1e-3 * original.abs()).all()
    x = torch.randn(5, 64, requires_grad=True)
    torch.testing.assert_close(made(x), x @ dequantized(made).T + made.bias)
    made(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.usefixtures("weights_on_a_gpu")
def test_a_copied_moved_or_reloaded_model_has_the_same_logits(low, quantize):
    def load():
        return store_frozen(load_language_model(low("llama"), None), WeightsConfig(quantize=quantize))

    model, ids = load(), torch.tensor([DOCUMENTS[0]])
    with torch.no_grad():
        expected = model(ids).logits
        for other in (copy.deepcopy(model), load(), model.to("cpu")):
            assert torch.equal(other(ids).logits, expected)


@pytest.mark.parametrize("rows", [1, 7])
def test_int8_is_read_in_bfloat16_without_a_matrix_in_float32(rows):
    layer = nn.Linear(256, 192)
    (made,) = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), "int8")["blocks"]
    x = torch.randn(rows, 256, dtype=torch.bfloat16, requires_grad=True)
    with Made() as seen:
        made(x).float().sum().backward()
    assert seen.largest[torch.bfloat16] == 256 * 192
    assert seen.largest[torch.float32] <= max(192, rows * 192)
    assert made.read_weight(torch.bfloat16).equal(dequantized(made).bfloat16())


@pytest.mark.parametrize("family", ["llama", "qwen3", "stablelm", "bert"])
def test_nf4_logits_are_those_of_transformers_own_quantized_model(low, family):
    import transformers

    kind = "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["lm_head", "cls"],
    )  # fmt: skip
    directory = low(family, torch.float32, **ALIGNED.get(family, {}))
    theirs = getattr(transformers, kind).from_pretrained(
        directory, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    for module in theirs.modules():  # their path for CPUs with bfloat16 instructions computes in bfloat16
        module.support_avx512bf16_for_cpu = False
    ours = store_frozen(load_language_model(directory, None), WeightsConfig(quantize="nf4"))
    ids = torch.tensor([DOCUMENTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs.eval()(ids).logits, rtol=0, atol=1e-4)


def test_bytes_of_a_layer():
    # NF4: half a byte per number, one scale byte per 64 numbers, a float32 scale of scales per 16384, two code tables.
    layers = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(512, 512, bias=False)])})
    tables = 4 * (16 + 256) + 4  # float32 each: NF4's 16 values, the 256 of the scales, the scales' mean
    assert total_bytes(quantize_blocks(layers, "nf4")) == 512 * 512 // 2 + 512 * 512 // 64 + 4 * 16 + tables
    layers = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(512, 512, bias=False)])})
    assert total_bytes(quantize_blocks(layers, "int8")) == 512 * 512 + 4 * 512


@pytest.mark.parametrize("quantize", KINDS)
def test_rounding_gives_the_quantized_matrices_and_their_errors(low, quantize):
    plain, original = load_language_model(low("llama"), torch.float32), load_language_model(low("llama"), torch.float32)
    errors = round_blocks(plain, quantize)
    model = store_frozen(load_language_model(low("llama"), None), WeightsConfig(quantize=quantize))
    assert errors.keys() == quantized_layers(model).keys()
    for name, (largest, mean) in errors.items():
        weight = plain.get_submodule(name).weight
        assert torch.equal(weight, dequantized(model.get_submodule(name)))
        difference = (weight - original.get_submodule(name).weight).abs()
        assert largest == difference.max() > 0 and mean == pytest.approx(float(difference.mean()))


def test_a_scalar_model_keeps_its_head(low):
    model = store_frozen(load_scalar_model(low("llama"), None, new_head="normal"), WeightsConfig(quantize="nf4"))
    assert type(model.head) is nn.Linear and model.head.weight.dtype == torch.float32
    assert len(quantized_layers(model)) >= 6


def test_quantization_without_bitsandbytes_is_refused(monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    require_bitsandbytes(None)
    with pytest.raises(UserError, match=r"weights.quantize nf4 needs bitsandbytes: pip install -e '.\[quantization\]'"):
        require_bitsandbytes("nf4")


def test_no_message_of_bitsandbytes_comes_with_a_forward(low, caplog):
    model = store_frozen(load_language_model(low("llama"), None), WeightsConfig(quantize="int8"))
    with caplog.at_level(logging.DEBUG):
        model(batch=Ragged.build(DOCUMENTS))
    assert caplog.records == []


def test_nothing_is_fetched_while_bitsandbytes_is_imported(tmp_path):
    """A stand-in of the package `kernels`, of which bitsandbytes would ask for code on a processor with AVX-512 BF16."""
    (tmp_path / "kernels.py").write_text("def get_kernel(*_, **__):\n    raise SystemExit('fetched')\n")
    command = "import alignment, kernels, peft, bitsandbytes, sys; assert sys.modules['kernels'] is kernels"
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "kernels" not in done.stderr, done.stderr

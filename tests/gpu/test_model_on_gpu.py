"""The stack on a GPU: kernels, caches and generated code give the numbers of the CPU in float32."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from alignment.generation import SamplingConfig, cuda_graphs, decode_responses
from alignment.models.build import build_language_model, build_model
from alignment.models.layers import layer_contexts, sdpa
from alignment.models.layers.attention import AttentionFn
from alignment.models.quantization import dequantized, quantize_blocks
from alignment.ragged import Ragged, Seq2Seq
from tests.models.test_shared_prompts import two_forms

SMALL = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "mistral": SMALL | {"num_key_value_heads": 2, "sliding_window": 16},
    "qwen3": SMALL | {"num_key_value_heads": 4, "head_dim": 16},
    "gemma3_text": SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "mixtral": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 128, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 512},
}


def decoder(family: str) -> Any:
    torch.manual_seed(0)
    return build_language_model({"model_type": family, **DECODERS[family]})


def documents(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(128) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", DECODERS)
def test_float32_on_the_gpu_equals_the_cpu(device, family):
    model, batch = decoder(family), Ragged.build(documents([5, 40, 17, 33]))
    expected = model(batch=batch).log_probs
    found = model.to(device)(batch=batch.to(device)).log_probs
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def count_kernel_calls(monkeypatch) -> list[int]:
    """A list that gets one entry for each layer whose attention is the variable-length kernel's."""
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> AttentionFn:
        calls.append(1)
        return sdpa.varlen_attention(*arguments, **options)

    monkeypatch.setattr(layer_contexts, "varlen_attention", counted)
    return calls


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text"])
def test_the_variable_length_kernel_equals_padded_attention(device, family, monkeypatch):
    model = decoder(family).to(device)
    batch = Ragged.build(documents([5, 120, 17, 64, 1])).to(device)
    results = []
    for varlen in (True, False):
        calls = count_kernel_calls(monkeypatch)
        if not varlen:
            monkeypatch.setattr(layer_contexts, "varlen_applies", lambda *_: False)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            total = model(batch=batch).log_probs.sum()
        total.backward()
        assert bool(calls) is varlen
        results.append((total, {name: parameter.grad for name, parameter in model.named_parameters()}))
        monkeypatch.undo()
    (one, gradients), (other, others) = results
    assert float((one - other).abs()) <= 2e-2 * float(other.abs())
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).norm()) <= 5e-2 * float(others[name].norm()) + 1e-4, name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_kernel_with_shared_prompts_equals_itself_without(device, family, monkeypatch):
    model, results = decoder(family).to(device), []
    for batch in two_forms():
        calls = count_kernel_calls(monkeypatch)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            log_probs = model(batch=batch.to(device)).log_probs
        (
            log_probs * torch.arange(len(log_probs), device=device).cos()
        ).sum().backward()  # each of them weighs differently
        assert calls
        results.append((log_probs, {name: parameter.grad for name, parameter in model.named_parameters()}))
        monkeypatch.undo()
    (one, gradients), (other, others) = results
    assert float((one - other).abs().max()) <= 5e-2 and float((one - other).norm()) <= 1e-2 * float(one.norm())
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).norm()) <= 5e-2 * float(gradient.norm()) + 1e-4, name


# The largest error of a weight as a share of the largest one of its row (int8) or of the matrix (nf4): half a step of 1 / 127
# and the rounding to half precision before, and half of the widest step between two of NF4's 16 values.
WEIGHT_ERRORS = {"int8": 0.57 / 127, "nf4": 0.16}


@pytest.mark.parametrize("quantize", WEIGHT_ERRORS)
@pytest.mark.parametrize("rows", [3, 100])  # few: bitsandbytes' own kernel computes with NF4; many: the matrix is read
def test_a_quantized_layer_is_within_its_rounding_of_float32(device, quantize, rows):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 192), torch.randn(rows, 256)
    original, bias = layer.weight.detach().clone(), layer.bias.detach()
    blocks = quantize_blocks(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), quantize).to(device)["blocks"]
    made = blocks.get_submodule("0")
    weight = dequantized(made).cpu()  # pyright: ignore[reportArgumentType]
    largest = original.abs().amax(1, keepdim=True) if quantize == "int8" else original.abs().max()
    assert ((weight - original).abs() <= WEIGHT_ERRORS[quantize] * largest).all() and not weight.equal(original)
    expected = x @ weight.T + bias
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        with torch.no_grad():
            sampling = made(x.to(device, dtype)).float().cpu()
        inputs = x.to(device, dtype, copy=True).requires_grad_()
        training = made(inputs)
        training.float().sum().backward()
        assert float((sampling - expected).norm()) <= error * float(expected.norm())
        assert float((training.detach().float().cpu() - expected).norm()) <= error * float(expected.norm())
        gradient = weight.sum(0).expand(rows, -1)
        assert inputs.grad is not None and float((inputs.grad.float().cpu() - gradient).norm()) <= error * float(
            gradient.norm()
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_decoding_by_cuda_graphs_equals_decoding_step_by_step(device, family, monkeypatch):
    """Greedy responses of rows that end at different times and are filled again, over several widths of the cache."""
    model, captures, capture = decoder(family).to(device, torch.bfloat16).eval(), [], cuda_graphs.capture
    monkeypatch.setattr(cuda_graphs, "capture", lambda step: (captures.append(1), capture(step))[1])
    prompts, sampling = documents([3, 20, 9, 31, 50, 7, 64, 12, 5, 40]), SamplingConfig(120, 0.0)
    plain, graphs = (
        decode_responses(model, prompts, sampling, [127, 3], batch_size=4, cuda_graphs=each) for each in (False, True)
    )
    assert 0 < len(captures) <= 3 * 4  # rows: four, two or fewer, one; widths: 64, 128, 192, 256
    same = []
    for one, other, log_probs, others in zip(
        plain.token_ids, graphs.token_ids, plain.log_probs, graphs.log_probs, strict=True
    ):
        equal = [a == b for a, b in zip(one, other, strict=False)]
        same += equal
        common = equal.index(False) if False in equal else len(equal)  # what follows is another text
        torch.testing.assert_close(torch.tensor(log_probs[:common]), torch.tensor(others[:common]), rtol=0, atol=2e-2)
    assert sum(same) >= 0.95 * len(same)


@pytest.mark.parametrize("family", DECODERS)
def test_a_bfloat16_cache_gives_the_log_probabilities_of_whole_documents(device, family):
    model = decoder(family).to(device)
    prompts = documents([3, 20, 9, 31])
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        sampled = decode_responses(model, prompts, SamplingConfig(32, 1.0), [127])
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, sampled.token_ids, strict=True)]
        found = model(batch=Ragged.build(whole).to(device)).log_probs.float().cpu()
    position = 0
    for prompt, log_probs in zip(prompts, sampled.log_probs, strict=True):
        position += len(prompt) - 1
        own = found[position : position + len(log_probs)]
        position += len(log_probs)
        assert float((own - torch.tensor(log_probs)).abs().mean()) < 2e-2


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_cross_attention_equals_the_cpu(device, family):
    sizes = {
        "t5": {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        "bart": {
            "vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = build_model({"model_type": family, **sizes[family]})
    batch = Seq2Seq(Ragged.build(documents([9, 30, 4])), Ragged.build(documents([7, 3, 12], seed=1)))
    expected = model(batch=batch).log_probs
    found = model.to(device)(batch=batch.to(device)).log_probs
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_compiled_blocks_equal_the_others_in_training_and_sampling(device, family):
    model = decoder(family).to(device)
    compiled = copy.deepcopy(model)
    compiled.compile_blocks()
    for seed, lengths in enumerate(([5, 40, 17], [64, 3, 8, 21], [100, 2])):
        batch = Ragged.build(documents(lengths, seed)).to(device)
        with torch.autocast("cuda", torch.bfloat16):
            one, other = model(batch=batch).log_probs.sum(), compiled(batch=batch).log_probs.sum()
        assert float((one - other).abs()) <= 2e-2 * float(one.abs())
        other.backward()
    greedy = [decode_responses(each, documents([6, 12]), SamplingConfig(16, 0.0), [127]) for each in (model, compiled)]
    same = [
        one == other
        for pair in zip(*(each.token_ids for each in greedy), strict=True)
        for one, other in zip(*pair, strict=False)
    ]
    assert sum(same) >= 0.8 * len(same)  # float32 in another order may tip a near tie, and what follows it

"""A prompt computed once for several responses gives the numbers and gradients of prompts computed apart."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import BottleneckSpec, DoRASpec, IA3Spec, LoRASpec, PrefixSpec, PromptSpec, attach
from alignment.models.build import build_model
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    DynamicScaling,
    LongScaling,
    PlainFeedForwardSpec,
    RMSNormSpec,
    RotarySpec,
    YarnScaling,
)
from alignment.models.layers.layer_contexts import varlen_attentions
from alignment.models.layers.padded_layout import attention_masks, shared_layouts
from alignment.models.layers.rotary import equal_angles
from alignment.models.layers.sdpa import padded_attention
from alignment.models.shared_prompts import prompt_sharing, supports_shared_prompts
from alignment.ragged import Ragged
from tests.models.conftest import DECODERS, PARITY_CASES
from tests.models.test_attention import stand_in

VARIANTS = [(name, variant) for name, case in DECODERS.items() for variant in case["variants"]]
# Tokens of a prompt and of its responses: K = 2 and K = 4, longer than every window here, one token, and no prompt at all.
GROUPS = ((70, (20, 7)), (12, (5, 31, 1, 16)), (0, (9, 14)), (55, (3, 40)), (1, (2, 6)), (12, (4,)))
RELATIVE = 1e-6  # norm of all differences to the norm of all values; twice that for the largest of each; fp32


def build(name: str, variant: str, task: str = "language", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "model_type": PARITY_CASES[name]["model_type"],
        **PARITY_CASES[name]["config"],
        **PARITY_CASES[name]["variants"][variant],
    }
    return roughened(build_model({**config, **changes}, task)).eval()


def roughened(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def two_forms(groups=GROUPS, seed: int = 0) -> tuple[Ragged, Ragged]:
    """The same documents each for itself, and with shared prompts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    documents, masks, together = [], [], []
    for prompt_length, responses in groups:
        prompt = draw(prompt_length)
        together.append(range(len(documents), len(documents) + len(responses)))
        for length in responses:
            documents.append([*prompt, *draw(length)])
            masks.append([False] * prompt_length + [True] * length)
    return Ragged.build(documents, masks), Ragged.build_shared(documents, masks, together)


def outputs(model: Any, batch: Ragged) -> torch.Tensor:
    """Everything that training reads from a model: log-probabilities or values, and the balance of experts."""
    if model.task == "scalar":
        values = model(batch=batch).values
        return torch.cat([values[batch.last], values[batch.before]])
    found = model(batch=batch, temperature=0.9)
    return found.log_probs if found.balance is None else torch.cat([found.log_probs, 1000 * found.balance[None]])


def outputs_and_gradients(model: Any, batch: Ragged) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, and the gradients of a sum that weighs each of them differently."""
    model.zero_grad()
    found = outputs(model, batch)
    (found * torch.arange(len(found)).cos()).sum().backward()
    return found.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_equal_within(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.isfinite().all() and (one - other).norm() <= RELATIVE * other.norm()
    assert (one - other).abs().max() <= 2 * RELATIVE * other.abs().max()


def assert_sharing_changes_nothing(model: Any, groups=GROUPS) -> None:
    plain, shared = two_forms(groups)
    assert shared.shared is not None and len(shared.tokens) < len(plain.tokens)
    expected, expected_gradients = outputs_and_gradients(model, plain)
    found, gradients = outputs_and_gradients(model, shared)
    assert_equal_within(found, expected)
    assert len(gradients) == len(expected_gradients) > 0
    one, other = (torch.cat([gradient.flatten() for gradient in each]) for each in (gradients, expected_gradients))
    assert_equal_within(one, other)


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[", ".join(case) for case in VARIANTS])
def test_log_probs_and_gradients_of_every_decoder(name, variant):
    """[H08] No response reads another one of its prompt."""
    assert_sharing_changes_nothing(build(name, variant))


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "smollm3"])
def test_values_and_gradients_of_every_decoder(name):
    variant = next(iter(PARITY_CASES[name]["variants"]))
    assert_sharing_changes_nothing(build(name, variant, "scalar"))


@pytest.mark.parametrize("responses", [2, 4])
@pytest.mark.parametrize("prompt", [1, 16, 70])
def test_any_number_of_responses(prompt, responses):
    assert_sharing_changes_nothing(build("mistral", "plain"), groups=[(prompt, (5, 9, 30, 1)[:responses])] * 3)


ADAPTERS = {
    "lora": LoRASpec(rank=3, alpha=6.0),
    "dora": DoRASpec(rank=2, alpha=4.0),
    "ia3": IA3Spec(),
    "bottleneck": BottleneckSpec(width=4, placement="houlsby"),
    "prefix": PrefixSpec(tokens=5),
    "prompt": PromptSpec(tokens=5),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("gpt2", "llama", "gemma3_text", "bloom") for kind in ADAPTERS]
    + [("mixtral", kind) for kind in ("lora", "bottleneck", "prefix", "prompt")]
    + [("falcon", kind) for kind in ("prefix", "prompt")],  # its biases depend on the key's own position
)
def test_adapters(name, kind):
    model = build(name, "rw" if name == "falcon" else next(iter(PARITY_CASES[name]["variants"])))
    roughened(attach(model, ADAPTERS[kind]))
    assert_sharing_changes_nothing(model)


@pytest.mark.parametrize("keep", ["nothing", "attention", "products"])
@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_gradient_checkpointing(keep, kind):
    model = build("qwen3", "plain")
    roughened(attach(model, ADAPTERS[kind]))
    model.checkpoint_activations(True, keep)
    assert_sharing_changes_nothing(model)


def test_compiled_blocks(monkeypatch):
    torch._dynamo.reset()
    compiled_call = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compiled_call(self, backend="eager", **options)
    )
    model = build("llama", "plain")
    model.compile_blocks()
    assert_sharing_changes_nothing(model)
    torch._dynamo.reset()


def test_entropies_and_logits_are_those_of_prompts_computed_apart():
    model = build("gpt2", "gelu")
    plain, shared = two_forms()
    with torch.no_grad():
        entropies = [model(batch=batch, entropy=True).entropy for batch in (shared, plain)]
        logits = [model(batch=batch, return_logits=True).logits for batch in (shared, plain)]
    for one, other in (entropies, logits):
        assert_equal_within(one, other)


def test_bfloat16_stays_as_near_to_fp32_as_without_sharing():
    model = build("llama", "grouped queries")
    plain, shared = two_forms()
    with torch.no_grad():
        exact = outputs(model, plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            apart, together = outputs(model, plain), outputs(model, shared)
    assert (together - exact).abs().mean() <= 1.5 * (apart - exact).abs().mean()


def test_responses_share_what_dropout_takes_from_their_prompt():
    # Not the last layer's: it computes the prompt's last token once for each response.
    model = build("gpt2", "gelu", resid_pdrop=0.0, embd_pdrop=0.3, attn_pdrop=0.0).train()
    documents = [[*range(3, 23), 7, 8, 9]] * 2
    masks = [[False] * 20 + [True] * 3] * 2
    batches = Ragged.build_shared(documents, masks, [(0, 1)]), Ragged.build(documents, masks)
    together, apart = (model(batch=batch).log_probs.view(2, 3).T for batch in batches)
    assert together[0, 0] == together[0, 1] and apart[0, 0] != apart[0, 1]  # predicted by the prompt's last token
    assert all(a != b for a, b in together[1:].tolist())  # predicted by tokens of their own


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_kernel_path_equals_the_padded_path(monkeypatch, key_heads, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    _, batch = two_forms()
    assert batch.shared is not None
    spec = AttentionSpec(4, key_heads, 8, 0.3, False, False, window=window)
    queries, keys = shared_layouts(batch, 4)
    masks = attention_masks(queries, keys, window=window, bias=None, device="cpu")
    [varlen] = varlen_attentions([BlockSpec(spec, PlainFeedForwardSpec(1, "relu", False), RMSNormSpec(1e-6))], batch)
    paths = (varlen, padded_attention(spec, queries, keys, masks))
    found = []
    for path in paths:
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randn(len(batch.tokens), h, 8, generator=generator) for h in (4, key_heads, key_heads)]
        parts = [part.requires_grad_() for part in parts]
        query, key, value = parts
        mixed = path(query, key, value, 0.0)
        found.append((mixed, *torch.autograd.grad((mixed * torch.arange(8).cos()).sum(), parts)))
    for kernel, padded in zip(*found, strict=True):
        assert_close(kernel, padded, atol=2e-6, rtol=0)


def test_a_prompt_beyond_the_window_is_not_read():
    """By hand, window 3: a response's second token still reads one token of its prompt of 8, the third one none."""
    _, batch = two_forms([(8, (4, 2))])
    assert batch.shared is not None
    [_, mask] = attention_masks(*shared_layouts(batch, 2), window=3, bias=None, device="cpu")
    assert mask is not None and mask.shape == (1, 1, 4, 12)  # both responses begin at position 8
    read = [row.nonzero().flatten().tolist() for row in mask[0, 0]]
    assert read == [[6, 7, 8], [7, 8, 9], [8, 9, 10], [9, 10, 11]]


def test_who_shares_and_what_the_run_is_told():
    notes: list[str] = []
    decoder, encoder = build("llama", "plain"), build("bert", "plain")
    assert supports_shared_prompts(decoder) and not supports_shared_prompts(encoder)
    assert supports_shared_prompts(build("gemma2", "plain", "scalar"))
    assert not supports_shared_prompts(build("gpt2", "gelu", "sequence"))  # reads whole documents
    assert not supports_shared_prompts(build("t5", next(iter(PARITY_CASES["t5"]["variants"]))))
    assert prompt_sharing([decoder, None, decoder], wanted=True, note=notes.append) is True
    assert prompt_sharing([encoder], wanted=False, note=notes.append) is False and notes == []
    assert prompt_sharing([decoder, encoder], wanted=True, note=notes.append) is False
    assert len(notes) == 1 and "bert is none" in notes[0]


def test_models_that_read_whole_documents_refuse_shared_prompts():
    _, batch = two_forms()
    with pytest.raises(ValueError, match="no prompt is the same"):
        build("bert", "plain")(batch=batch)
    decoder = build("llama", "plain")
    with pytest.raises(ValueError, match="fills a cache"):
        decoder.prefill(batch, decoder.new_cache(len(batch.lengths), 100))


@pytest.mark.parametrize(
    ("scaling", "lengths", "equal"),
    [
        (None, (5, 500), True),
        (YarnScaling(4.0, 16, attention_factor=1.0), (5, 500), True),
        (DynamicScaling(2.0, 16), (5, 16), True),
        (DynamicScaling(2.0, 16), (5, 17), False),
        (DynamicScaling(2.0, 16), (20, 21), False),
        (DynamicScaling(2.0, 16), (20, 20), True),
        (LongScaling((1.0,), (2.0,), original_positions=16, attention_factor=1.0), (5, 16), True),
        (LongScaling((1.0,), (2.0,), original_positions=16, attention_factor=1.0), (16, 17), False),
        (LongScaling((1.0,), (2.0,), original_positions=16, attention_factor=1.0), (20, 500), True),
    ],
)
def test_which_documents_begin_with_equal_angles(scaling, lengths, equal):
    assert equal_angles(RotarySpec(10000.0, 8, scaling), lengths) is equal


@pytest.mark.parametrize(
    ("name", "variant", "original"), [("phi3", "longrope beyond", 128), ("llama", "rope dynamic", 256)]
)
def test_groups_on_both_sides_of_the_original_context_stay_apart(name, variant, original):
    notes: list[str] = []
    model = build(name, variant)
    share = prompt_sharing([model], wanted=True, note=notes.append)
    assert callable(share) and len(notes) == 1 and f"beyond {original} tokens" in notes[0]
    prompt = torch.randint(3, 60, (original - 10,), generator=torch.Generator().manual_seed(1)).tolist()
    answers = [(4, 9), (3, 30), (30, 30), (2, 2)]
    documents = [[*prompt, *range(20, 20 + n)] for pair in answers for n in pair]
    masks = [[False] * len(prompt) + [True] * (len(document) - len(prompt)) for document in documents]
    groups = [(2 * i, 2 * i + 1) for i in range(4)]
    batch = Ragged.build_shared(documents, masks, groups, share=share)
    assert batch.shared is not None and batch.shared.of_documents[2:4] == (None, None)
    assert None not in batch.shared.of_documents[4:] + batch.shared.of_documents[:2]
    with torch.no_grad():
        found, expected = (outputs(model, each) for each in (batch, Ragged.build(documents, masks)))
        wrong = outputs(model, Ragged.build_shared(documents, masks, groups))
    assert_equal_within(found, expected)
    assert (wrong - expected).abs().max() > 1e-3  # what the rule prevents

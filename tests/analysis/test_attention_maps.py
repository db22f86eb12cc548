"""Attention maps are what the model computes with: against transformers, against formulas, and put back into the model."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec, attach
from alignment.analysis import attention_maps, encoder_decoder_attention_maps
from alignment.analysis.attention import recorded
from alignment.models.build import build_model
from alignment.models.external.load import load_external
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.init_weights import InitSpec, initialize
from alignment.models.language_model import LanguageModel
from alignment.models.layers import (
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RotarySpec,
)
from alignment.models.layers.attention import Attention
from alignment.models.transformer import TransformerSpec
from alignment.ragged import Ragged

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from parity_reference import read_cases, write_checkpoint  # noqa: E402

ONE_SIDED = ["gpt2", "llama", "mistral", "gemma2", "bloom", "bert", "deberta-v2", "modernbert", "albert"]
TWO_SIDED = ["t5", "bart"]
LENGTH = 37  # tokens: more than a head is wide, so that unit vectors come in several portions


def one_of(family: str):
    """The family's first case."""
    return next(iter(read_cases(family).values()))


def ids_of(case, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, case.config["vocab_size"], (LENGTH,), generator=generator).tolist()


def eager(reference, **inputs):
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        return reference(**inputs, output_attentions=True)


@pytest.mark.parametrize("family", ["longformer", "big_bird"])
def test_maps_of_long_documents_have_rows_of_one_and_holes(family, tmp_path):
    """Longformer: 16 tokens on either side and the first. BigBird: blocks of 8, of 13, three of them near, and the ends."""
    case = one_of(family)
    write_checkpoint(case, tmp_path, "AutoModelForSequenceClassification")
    ids = (ids_of(case) * 3)[:100]
    for weights in attention_maps(load_pretrained(tmp_path, "sequence"), ids):
        assert_close(weights.sum(-1), torch.ones(4, 100))
        assert (weights[:, 0] > 0).all() and (weights[:, :, 0] > 0).all()
        seen = weights[0, 50].nonzero().squeeze(1).tolist()
        near = range(34, 67) if family == "longformer" else range(40, 64)
        assert seen == ([0, *near] if family == "longformer" else [*range(8), *near, *range(96, 100)])


@pytest.mark.parametrize("family", ONE_SIDED)
def test_maps_are_transformers(family, tmp_path):
    case = one_of(family)
    reference = write_checkpoint(case, tmp_path)
    ids = ids_of(case)
    found = attention_maps(load_pretrained(tmp_path), ids)
    expected = [layer[0] for layer in eager(reference, input_ids=torch.tensor([ids])).attentions]
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", TWO_SIDED)
def test_maps_of_both_sides_and_between_are_transformers(family, tmp_path):
    case = one_of(family)
    reference = write_checkpoint(case, tmp_path)
    source, target = ids_of(case), [reference.config.decoder_start_token_id, *ids_of(case, 1)[:20]]
    found = encoder_decoder_attention_maps(load_pretrained(tmp_path), source, target)
    output = eager(reference, input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]))
    for ours, theirs in zip(
        found, (output.encoder_attentions, output.decoder_attentions, output.cross_attentions), strict=True
    ):
        assert len(ours) == len(theirs) > 1
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other[0], atol=1e-5, rtol=0)
    assert found.cross[0].shape == (case.config.get("num_heads") or case.config["decoder_attention_heads"], 21, LENGTH)


def test_transformers_own_classes_give_theirs(tmp_path):
    case = one_of("gpt2")
    write_checkpoint(case, tmp_path)
    ids = ids_of(case)
    external = load_external(tmp_path)
    before = external.inner.config._attn_implementation
    for ours, theirs in zip(attention_maps(load_pretrained(tmp_path), ids), attention_maps(external, ids), strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert external.inner.config._attn_implementation == before != "eager"


# Parts, one by one, on a small stack of our own

PLAIN = AttentionSpec(heads=4, key_value_heads=4, head_dim=8, scale=8**-0.5, bias=True, output_bias=True)
PARTS = {
    "plain": PLAIN,
    "both sides": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=5),
    "window of both sides": replace(PLAIN, window=5, causal=False),
    "softcap": replace(PLAIN, softcap=0.3),
    "alibi": replace(PLAIN, position_bias=AlibiSpec()),
    "relative bias": replace(PLAIN, position_bias=RelativeBiasSpec(8, 16)),
    "grouped": replace(PLAIN, key_value_heads=2),
    "rotary": replace(PLAIN, rotary=RotarySpec(10_000.0, 8)),
    "grouped window softcap": replace(PLAIN, key_value_heads=1, window=7, softcap=0.5),
}


def stack(attention: AttentionSpec) -> LanguageModel:
    """Two layers with weights large enough for attention to be uneven."""
    block = BlockSpec(attention, PlainFeedForwardSpec(64, "relu", bias=True), LayerNormSpec(1e-5))
    spec = TransformerSpec(61, 32, 64, (block, block), LayerNormSpec(1e-5), InitSpec(0.4, 0.4), tied_head=False)
    torch.manual_seed(0)
    return initialize(LanguageModel(spec.build(), torch.nn.Linear(32, 61, bias=False), {}))


@pytest.fixture(params=sorted(PARTS))
def attention(request) -> AttentionSpec:
    return PARTS[request.param]


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(61, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def test_rows_sum_to_one_and_what_cannot_be_seen_is_exactly_zero(attention, ids):
    apart = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]  # key place minus query place
    seen = apart.abs() < (attention.window or LENGTH)
    seen &= (apart <= 0) | (not attention.causal)
    for weights in attention_maps(stack(attention), ids):
        assert weights.shape == (4, LENGTH, LENGTH)
        assert_close(weights.sum(-1), torch.ones(4, LENGTH), atol=1e-5, rtol=0)
        assert bool((weights[:, ~seen] == 0).all()) and bool((weights[:, seen] > 0).all())


def test_weights_put_back_into_the_model_give_its_hidden_states(attention, ids):
    model = stack(attention)
    batch = Ragged.build([ids])
    maps = iter(attention_maps(model, ids))

    def instead(module, inputs):
        x, context = inputs

        def attend(query, key, value, dropout):
            values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            return torch.einsum("hts,shk->thk", next(maps), values)

        return x, replace(context, attend=attend)

    with torch.no_grad():
        usual = model.trunk(batch)
        for part in model.trunk.modules():
            if isinstance(part, Attention):
                part.register_forward_pre_hook(instead)
        assert_close(model.trunk(batch), usual, atol=1e-5, rtol=1e-5)
    assert next(maps, None) is None


def test_dropout_is_off_and_the_mode_comes_back(ids):
    model = stack(replace(PLAIN, dropout=0.5))
    usual = attention_maps(model, ids)
    model.train()
    for one, other in zip(usual, attention_maps(model, ids), strict=True):
        assert torch.equal(one, other)
    assert model.training


def test_nothing_stays_on_the_model(ids):
    model = stack(PLAIN)
    before = model.trunk(Ragged.build([ids]))
    with recorded(model.trunk) as (maps, _), torch.no_grad():
        recording = model.trunk(Ragged.build([ids]))
    assert torch.equal(recording, before)  # recording does not change what the model computes
    assert all(not part._forward_pre_hooks for part in model.modules())
    model.trunk(Ragged.build([ids]))
    assert len(maps) == 2


@pytest.mark.parametrize("spec", [LoRASpec(rank=4, alpha=16.0), PrefixSpec(tokens=4)], ids=["lora", "prefix"])
def test_adapters_count(spec, ids):
    config = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    model = build_model(config)
    bare = attention_maps(model, ids)
    model = attach(model, spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    adapted = attention_maps(model, ids)
    assert not torch.allclose(bare[0], adapted[0], atol=1e-3)
    total, one = adapted[0].sum(-1), torch.ones(4, LENGTH)
    if isinstance(spec, LoRASpec):
        assert_close(total, one, atol=1e-5, rtol=0)
    else:  # the prefix has the rest
        assert bool(((total > 0) & (total < 1)).all())
    above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    assert bool((adapted[0][:, above] == 0).all())

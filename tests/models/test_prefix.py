"""A prefix stands in front of every document, as peft's prefix tuning has it, in training and in decoding."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.adapters.specs import PrefixSpec
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.ragged import Ragged

P = 5


class Prefix(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec = PrefixSpec(tokens=P)
        attention = spec.blocks[0].attention
        shape = (len(spec.blocks), 2, P, attention.key_value_heads, attention.head_dim)
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)))

    def forward(self):
        return self.weight


@pytest.fixture
def prefixed(model):
    model.prefix = Prefix(model.spec)
    return model


def test_packed_equals_alone_and_differs_from_no_prefix(prefixed, documents, batch):
    with torch.no_grad():
        packed = prefixed(batch=batch).log_probs
        alone = torch.cat([prefixed(batch=Ragged.build([document])).log_probs for document in documents])
        prefixed.prefix_enabled = False
        without = prefixed(batch=batch).log_probs
    assert_close(packed, alone, atol=1e-5, rtol=0)
    assert (packed - without).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_the_whole_prefix(prefixed, documents, batch, checkpointing):
    def gradient(batches):
        prefixed.prefix.weight.grad = None
        for one in batches:
            (-prefixed(batch=one).log_probs.sum()).backward()
        return prefixed.prefix.weight.grad

    apart = gradient([Ragged.build([document]) for document in documents if len(document) > 1])
    prefixed.checkpoint_activations(checkpointing)
    packed = gradient([batch])
    assert (packed != 0).all()
    assert_close(packed, apart, atol=1e-4, rtol=1e-4)


def test_decoding_goes_on_from_the_prefix(prefixed, documents):
    cache = prefixed.new_cache(6, 60)
    prefixed.prefill(Ragged.build([document or [1] for document in documents]), cache)
    logits = prefixed.decode(torch.full((6,), 4), cache)
    with torch.no_grad():
        for row, document in enumerate(documents):
            whole = prefixed(torch.tensor([[*document, 4]])).logits[0, -1]
            assert_close(logits[row], whole, atol=1e-5, rtol=0)
    assert cache.lengths.tolist() == [len(document) + P + 1 for document in documents]


def test_the_prefix_takes_positions(prefixed):
    with pytest.raises(UserError, match="92 tokens after a prefix of 5"):
        prefixed(batch=Ragged.build([[1] * 92]))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prefix_equals_peft(family, tmp_path):
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
    }[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=61, bos_token_id=1, eos_token_id=2, **sizes)
    reference = AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    ours = load_language_model(tmp_path)
    theirs = get_peft_model(reference, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=P)).eval()
    weight = theirs.prompt_encoder["default"].embedding.weight
    attention = ours.spec.blocks[0].attention
    ours.prefix = Prefix(ours.spec)
    with torch.no_grad():
        weight.normal_()
        table = weight.view(P, 2, 2, attention.key_value_heads, attention.head_dim)  # P, layer, key or value
        ours.prefix.weight.copy_(table.permute(1, 2, 0, 3, 4))
        ids = torch.randint(61, (3, 17))
        expected = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert_close(ours(ids).logits, expected, atol=1e-5, rtol=0)

"""Prefix tuning: what it computes, alone and in decoding."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import PrefixSpec, attach
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.ragged import Ragged

BOTH = pytest.mark.parametrize(
    "spec", [PrefixSpec(tokens=3), PrefixSpec(tokens=3, projection_width=8)], ids=["", "projected"]
)


@BOTH
def test_a_prefix_is_what_a_model_sees_before_every_document(adapted, ids, spec):
    """Each document alone equals each in company: the prefix belongs to every one of them."""
    model = adapted(spec)
    documents = [row.tolist() for row in ids]
    with torch.no_grad():
        together = model(batch=Ragged.build([documents[0], documents[1][:5]])).log_probs
        alone = [model(batch=Ragged.build([document])).log_probs for document in (documents[0], documents[1][:5])]
    assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@BOTH
def test_decoding_after_a_prefix_equals_the_whole_forward(adapted, spec):
    model = adapted(spec)
    prompts = [[5, 6, 7, 8], [9]]
    drawn = decode_responses(model, prompts, SamplingConfig(max_new_tokens=20), stop_ids=[])
    for prompt, response, log_probs in zip(prompts, drawn.token_ids, drawn.log_probs, strict=True):
        with torch.no_grad():
            whole = model(batch=Ragged.build([prompt + response])).log_probs[len(prompt) - 1 :]
        assert_close(torch.tensor(log_probs), whole, atol=1e-5, rtol=0)


@BOTH
def test_every_weight_of_the_prefix_gets_a_gradient(base, ids, spec):
    model = attach(load_language_model(base), spec)
    model(batch=Ragged.build([row.tolist() for row in ids])).log_probs.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.prefix.parameters())


def test_the_prefix_takes_up_positions(base):
    """320 positions hold 317 tokens after a prefix of 3."""
    from alignment.errors import UserError

    model = attach(load_language_model(base), PrefixSpec(tokens=3))
    model(torch.zeros(1, 317, dtype=torch.long))
    with pytest.raises(UserError, match="prefix"):
        model(torch.zeros(1, 318, dtype=torch.long))

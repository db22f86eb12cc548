"""The gradient of a prefix, also where blocks are recomputed; logits and decoding are in tests/adapters."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import PrefixSpec, attach
from alignment.ragged import Ragged


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_the_whole_prefix(model, documents, batch, checkpointing):
    torch.manual_seed(2)
    attach(model, PrefixSpec(tokens=5))
    weight = model.prefix.embedding.weight
    torch.nn.init.normal_(weight)

    def gradient(batches):
        weight.grad = None
        for one in batches:
            (-model(batch=one).log_probs.sum()).backward()
        return weight.grad

    apart = gradient([Ragged.build([document]) for document in documents if len(document) > 1])
    model.checkpoint_activations(checkpointing)
    packed = gradient([batch])
    assert (packed != 0).all()
    assert_close(packed, apart, atol=1e-4, rtol=1e-4)

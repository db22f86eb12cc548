"""NEFTune: noise of the paper's size for each document's own length, in training only."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import LoRASpec, PromptSpec, attach
from alignment.models.embedding_noise import add_embedding_noise
from alignment.ragged import Ragged

DOCUMENTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19]]


def recorded(model, embedding):
    """The table's vectors and, in the order of calls, what is handed on."""
    seen = []
    embedding.register_forward_hook(lambda module, args, vectors: seen.append((args[0], vectors.detach().clone())))
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_noise_is_uniform_by_length_and_width(checkpoints, family):
    model = load_model(checkpoints[family]).train()
    add_embedding_noise(model, 5.0)
    seen = recorded(model, model.trunk.embed)
    torch.manual_seed(7)
    model(batch=Ragged.build(DOCUMENTS))
    ((tokens, vectors),) = seen
    width = vectors.shape[1]
    torch.manual_seed(7)
    uniform = torch.empty(len(tokens), width).uniform_(-1, 1)
    scale = torch.cat([torch.full((len(ids), 1), 5.0 / math.sqrt(len(ids) * width)) for ids in DOCUMENTS])
    table = model.trunk.embed.weight.detach()[tokens]
    assert_close(vectors, table + uniform * scale, atol=1e-6, rtol=0)
    # 5 / sqrt(4 * 32) = 0.4419 for the first document
    assert 0.40 < (vectors - table)[:4].abs().max() <= 0.4420


def test_there_is_none_in_evaluation_and_other_calls(checkpoints):
    plain, model = load_model(checkpoints["llama"]).eval(), load_model(checkpoints["llama"]).eval()
    add_embedding_noise(model, 5.0)
    batch = Ragged.build(DOCUMENTS)
    assert torch.equal(model(batch=batch).log_probs, plain(batch=batch).log_probs)
    model.train()
    assert not torch.equal(model(batch=batch).log_probs, plain(batch=batch).log_probs)
    model.eval()
    assert torch.equal(model(batch=batch).log_probs, plain(batch=batch).log_probs)


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PromptSpec(tokens=3)], ids=["LoRA", "prompt"])
def test_an_adapter_gets_noise_on_the_documents_own_tokens(checkpoints, spec):
    model = attach(load_model(checkpoints["llama"]), spec).train()
    add_embedding_noise(model, 5.0)
    seen = recorded(model, model.trunk.embed)
    batch = Ragged.build(DOCUMENTS)
    model(batch=batch).log_probs.sum().backward()
    ((tokens, vectors),) = seen
    noise = (vectors - model.trunk.embed.weight.detach()[tokens]).abs().amax(1)
    virtual, start = 3 if isinstance(spec, PromptSpec) else 0, 0
    for ids in DOCUMENTS:
        own = noise[start + virtual : start + virtual + len(ids)]
        limit = 5.0 / math.sqrt(len(ids) * vectors.shape[1])
        assert 0.5 * limit < own.min() and own.max() <= limit + 1e-6
        start += virtual + len(ids)


@pytest.mark.parametrize("spec", [None, PromptSpec(tokens=3)], ids=["plain", "prompt"])
def test_a_model_of_transformers_gets_noise_by_each_documents_length(checkpoints, tmp_path, spec):
    from alignment.models.external.load import load_external

    model = load_external(checkpoints["gpt2"], "language")
    if spec is not None:
        attach(model, spec)
    model.train()
    documents = [[4] * 4, [9] * 200, [5, 6]]
    add_embedding_noise(model, 5.0)
    embedding = model.inner.get_input_embeddings()
    seen = recorded(model, embedding)
    model(batch=Ragged.build(documents))
    rows = [(ids, vectors) for call in seen for ids, vectors in zip(*call, strict=True)]
    assert len(rows) == len(documents)
    for ids, vectors in rows:
        document = next(d for d in documents if ids[: len(d)].tolist() == d and len(d) <= len(ids) and d[0] == ids[0])
        noise = (vectors - embedding.weight.detach()[ids]).abs()[: len(document)]
        limit = 5.0 / math.sqrt(len(document) * vectors.shape[1])
        assert 0.8 * limit < noise.max() <= limit + 1e-6

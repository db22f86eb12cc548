"""Fresh models: initial weights as published, no dropout unless asked for, linear layers called as modules."""

import math

import pytest
import torch
from torch import nn

from alignment.models.build import build_language_model, build_scalar_model

WIDE = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 128, "n_layer": 8, "n_head": 4, "n_positions": 64}


def test_gpt2_initial_deviations():
    model = build_language_model(WIDE)
    block = model.trunk.blocks[3]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # into the residual stream: 0.02 / sqrt(2 * 8 layers) = 0.005
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert block.feedforward.down.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert model.trunk.positions.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (block.attention.query.bias == 0).all() and (block.attention_norm.weight == 1).all()


def test_llama_initial_deviations_follow_initializer_range():
    model = build_language_model(
        {"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.05}
    )  # fmt: skip
    for layer in (model.trunk.blocks[1].feedforward.down, model.head, model.trunk.embed):
        assert layer.weight.std().item() == pytest.approx(0.05, rel=0.05)


def test_a_fresh_model_has_no_dropout_even_in_training(config, batch):
    model = build_language_model(config).train()
    assert torch.equal(model(batch=batch).log_probs, model(batch=batch).log_probs)


@pytest.mark.parametrize("key", ["attn_pdrop", "resid_pdrop", "embd_pdrop"])
def test_dropout_asked_for_acts_in_training_only(key, batch):
    model = build_language_model({**WIDE, key: 0.3})
    assert torch.equal(model(batch=batch).log_probs, model(batch=batch).log_probs)
    model.train()
    assert not torch.equal(model(batch=batch).log_probs, model(batch=batch).log_probs)


def test_every_linear_layer_is_called_as_a_module(model, batch):
    called = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    model(batch=batch)
    assert called == {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {"trunk.blocks.1.attention.query", "trunk.blocks.0.feedforward.down", "head"} <= called


def test_i9_one_step_changes_every_parameter(config, batch):
    for build, loss_of in (
        (build_language_model, lambda model: -model(batch=batch).log_probs.sum()),
        (build_scalar_model, lambda model: model(batch=batch).values.square().sum()),
    ):
        model = build(config).train()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss_of(model).backward()
        optimizer.step()
        # a key bias shifts all scores of a query alike, so its true gradient is 0
        same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
        assert not {name for name in same if not name.endswith("key.bias")}

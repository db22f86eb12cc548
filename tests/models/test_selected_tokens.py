"""The last layer computes the tokens that are needed and no others: the same numbers and gradients, less work."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from alignment.adapters import LoRASpec, PrefixSpec, PromptSpec, attach
from alignment.models import transformer
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.classifiers import values_before_targets
from alignment.ragged import Ragged
from tests.models.conftest import CONFIGS, DECODERS, roughen


def batch_of(vocabulary: int) -> Ragged:
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (21, 9, 30)]
    masks = [[index >= len(document) // 2 for index in range(len(document))] for document in documents]
    return Ragged.build(documents, masks)


def loss_and_gradients(model, batch):
    model.zero_grad()
    output = model(batch=batch)
    loss = -output.log_probs.sum() + (0 if output.balance is None else output.balance)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("family", DECODERS)
def test_loss_and_gradients_are_those_of_all_tokens(family, monkeypatch):
    case = DECODERS[family]
    model = roughen(build_language_model({"model_type": case["model_type"], **case["config"]})).eval()
    batch = batch_of(model.spec.vocabulary)
    selected = loss_and_gradients(model, batch)
    monkeypatch.setattr(transformer, "selects_tokens", lambda block: False)
    whole = loss_and_gradients(model, batch)
    assert selected.keys() == whole.keys()
    for name, value in whole.items():
        assert_close(selected[name], value, rtol=1e-5, atol=1e-6 * max(1.0, float(value.abs().max())), msg=name)


@pytest.mark.parametrize("spec", [LoRASpec(rank=4), PrefixSpec(tokens=3), PromptSpec(tokens=3)], ids=lambda s: s.kind)
def test_adapters_too(spec, monkeypatch):
    torch.manual_seed(0)
    model = roughen(attach(build_language_model(CONFIGS["llama"]), spec)).eval()
    batch = batch_of(61)
    selected = loss_and_gradients(model, batch)
    monkeypatch.setattr(transformer, "selects_tokens", lambda block: False)
    assert_close(selected, loss_and_gradients(model, batch), rtol=1e-5, atol=3e-5)


def test_values_of_named_tokens_are_those_among_all():
    model = roughen(build_scalar_model(CONFIGS["gpt2"])).eval()
    batch = batch_of(61)
    values = model(batch=batch).values
    assert_close(model(batch=batch, tokens=batch.last).values, values[batch.last], rtol=0, atol=1e-6)


@pytest.mark.parametrize("share", [False, True])
def test_values_before_targets_and_their_gradients_are_those_among_all(share):
    """Three responses, two to one prompt: with the prompt computed once, its last token stands before two targets."""
    documents, prompt = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [4, 1, 2, 2, 2, 9]], [3, 3, 2]
    masks = [[index >= size for index in range(len(ids))] for ids, size in zip(documents, prompt, strict=True)]
    batch = Ragged.build_shared(documents, masks, [(0, 1)], share=share)
    assert (batch.shared is not None) == share
    model, weights = roughen(build_scalar_model(CONFIGS["llama"])).eval(), torch.arange(1.0, 8)
    found = []
    for values in (values_before_targets(model, batch), model(batch=batch).values[batch.before]):
        model.zero_grad()
        (values * weights).sum().backward()
        found.append((values.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert_close(*found, rtol=1e-5, atol=1e-5)


def test_the_work_of_the_other_tokens_is_saved():
    model, batch = build_scalar_model(CONFIGS["llama"]), batch_of(61)

    def operations(call) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    saved = operations(partial(model, batch=batch)) - operations(partial(model, batch=batch, tokens=batch.last))
    others = len(batch.tokens) - len(batch.last)
    assert saved == others * 2 * (32 * 32 + 3 * 32 * 48 + 32)  # output projection, feed-forward, score head

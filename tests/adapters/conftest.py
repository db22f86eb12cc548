"""Adapted models with weights far from their initial zeros, and their twins in transformers and peft."""

from functools import partial

import pytest
import torch

from alignment.adapters import attach
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from tests.adapters import tiny_models

disturb = partial(tiny_models.disturb, seed=1, size=0.2)


@pytest.fixture(params=["gpt2", "llama"])
def family(request):
    return request.param


@pytest.fixture
def base(family, checkpoints):
    """Directory of the frozen weights."""
    return checkpoints[family]


@pytest.fixture
def adapted(base):
    """`adapted(spec, scalar=False)` -> our model with a trained-looking adapter, in eval mode."""

    def make(spec, scalar=False):
        # A fresh adapter and a new head are drawn from torch's own generator, whose state depends on the tests before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = load_scalar_model(base, new_head="normal") if scalar else load_language_model(base)
            return disturb(attach(model, spec)).eval()

    return make


@pytest.fixture
def ids():
    return torch.randint(384, (2, 19), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def plain(base):
    """`plain(scalar=False)` -> the base as transformers opens it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def load(scalar=False):
        if scalar:
            return AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).eval()
        return AutoModelForCausalLM.from_pretrained(base).eval()

    return load


@pytest.fixture
def logits():
    """Logits of any model here."""

    def of(model, ids):
        with torch.no_grad():
            return model.eval()(ids).logits

    return of

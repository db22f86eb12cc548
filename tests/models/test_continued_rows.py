"""Several new tokens behind what cache rows hold: the numbers of a prefill of the whole documents, in every decoder family."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec, PromptSpec, attach
from alignment.models import transformer
from alignment.models.layers.layer_contexts import continue_rows
from alignment.ragged import Ragged
from tests.models.test_shared_prompts import VARIANTS, build

# Tokens that a row holds already and tokens that come: shorter and longer than the windows here, one, and rectangles of
# several widths. Row 1 of the cache is not continued.
HELD = (20, 4, 1, 70, 33, 20)
NEW = (7, 0, 25, 1, 40, 16)
CONTINUED = [0, 2, 3, 4, 5]
CAPACITY = 90


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = [held + new for held, new in zip(HELD, NEW, strict=True)]
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def prefilled(model, whole: list[list[int]]):
    cache = model.new_cache(len(whole), CAPACITY)
    return model.prefill(Ragged.build(whole), cache), cache


@torch.no_grad()
def extended(model, whole: list[list[int]], order: list[int]):
    """The same logits of the documents `order`, and the cache, by `extend`."""
    held = [document[:count] for document, count in zip(whole, HELD, strict=True)]
    _, cache = prefilled(model, held)
    batch = Ragged.build([whole[i][HELD[i] :] for i in order])
    return model.extend(batch, cache, torch.tensor(order)), cache


def assert_continues(model, order=CONTINUED) -> None:
    """Logits, keys and values, and what one more token gives."""
    whole = documents()
    wanted, wanted_cache = prefilled(model, whole)
    found, cache = extended(model, whole, list(order))
    assert_close(found, wanted[list(order)], atol=1e-4, rtol=1e-5)
    assert cache.lengths.tolist() == wanted_cache.lengths.tolist() and cache.longest == wanted_cache.longest
    virtual = int(cache.lengths[1]) - HELD[1]
    for stores in zip(cache.keys + cache.values, wanted_cache.keys + wanted_cache.values, strict=True):
        for row, document in enumerate(whole):
            one, other = (store[row, :, : len(document) + virtual] for store in stores)
            assert_close(one, other, atol=1e-4, rtol=1e-5)
    newest = torch.arange(10, 10 + len(whole))
    assert_close(model.decode(newest, cache), model.decode(newest, wanted_cache), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_continued_row_is_a_whole_prefill(name, variant):
    model = build(name, variant)
    limit = model.longest_extended
    if limit is None or limit >= max(map(len, documents())):
        assert_continues(model)
    else:  # angles depend on the length of the document
        whole = documents()
        with pytest.raises(AssertionError):
            assert_close(extended(model, whole, CONTINUED)[0], prefilled(model, whole)[0][CONTINUED], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("spec", [LoRASpec(rank=4), PrefixSpec(tokens=5), PromptSpec(tokens=3)], ids=lambda s: s.kind)
def test_adapters_act_and_their_virtual_tokens_stay_in_front(name, spec):
    model = build(name, "plain")
    torch.manual_seed(1)
    attach(model, spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    assert_continues(model.eval())


def test_the_order_of_the_rows_and_equal_lengths_change_nothing():
    model = build("llama", "plain")
    assert_continues(model, [4, 0, 5, 3, 2])
    whole = [document[:27] for document in documents() if len(document) >= 27]
    wanted, _ = prefilled(model, whole)
    _, cache = prefilled(model, [document[:20] for document in whole])
    found = model.extend(Ragged.build([document[20:] for document in whole]), cache, torch.arange(len(whole)))
    assert_close(found, wanted, atol=1e-5, rtol=0)


def forgotten_offset(new):
    return new._replace(positions=torch.cat([torch.arange(NEW[row]) for row in CONTINUED]))


def one_behind(new):
    return new._replace(positions=new.positions - 1)


def future_seen(new):
    longer = tuple(tuple(length + 1 for length in lengths) for lengths in new.keys.lengths)
    return new._replace(keys=replace(new.keys, lengths=longer))


def another_row(new):
    return new._replace(rows=tuple(rows.roll(1) for rows in new.rows))


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault) for name in ("llama", "gpt2") for fault in (forgotten_offset, one_behind, future_seen, another_row)]
    + [("bloom", future_seen), ("bloom", another_row)],  # whose positions act by the mask alone
)
def test_a_fault_is_seen(name, fault, monkeypatch):
    monkeypatch.setattr(transformer, "continue_rows", lambda *arguments: fault(continue_rows(*arguments)))
    with pytest.raises(AssertionError):
        assert_continues(build(name, "plain"))


def test_what_cannot_be_continued_is_refused():
    model = build("llama", "plain")
    batch = Ragged.build([[5, 6]])
    cache = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="without a token"):
        model.extend(batch, cache, torch.tensor([0]))
    model.prefill(Ragged.build([[1] * 7]), cache)
    with pytest.raises(ValueError, match="holds 8 tokens per row"):
        model.extend(batch, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="no gradient"):
        model.trunk.extend(batch, cache, torch.tensor([0]))

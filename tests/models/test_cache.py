"""Prefill and decoding equal the whole forward, whatever rows are held, dropped or filled later."""

import pytest
import torch
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.ragged import Ragged

TIGHT = {"atol": 1e-5, "rtol": 0}


@pytest.fixture
def texts():
    """Prompts of different length, each with 8 tokens to come."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(61, (n + 8,), generator=generator).tolist() for n in (11, 3, 20, 1)]


def whole_logits(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("rows", [torch.tensor([2, 3]), torch.tensor([False, False, True, True]), torch.tensor([3, 2])])
def test_kept_rows_go_on_as_if_alone(model, texts, rows):
    cache = model.new_cache(4, 40)
    model.prefill(Ragged.build([text[:-8] for text in texts]), cache)
    model.decode(torch.tensor([text[-8] for text in texts]), cache)
    cache.keep(rows)
    kept = rows.nonzero().squeeze(1).tolist() if rows.dtype == torch.bool else rows.tolist()
    assert cache.rows == 2 and cache.longest == 21
    logits = model.decode(torch.tensor([texts[row][-7] for row in kept]), cache)
    for place, row in enumerate(kept):
        assert_close(logits[place], whole_logits(model, texts[row])[-7], **TIGHT)


def test_keeping_no_row_is_allowed(model, texts):
    cache = model.new_cache(4, 40)
    model.prefill(Ragged.build(texts), cache)
    cache.keep(torch.zeros(4, dtype=torch.bool))
    assert cache.rows == 0 and cache.longest == 0


def test_a_finished_row_can_be_filled_with_another_document(model, texts):
    cache = model.new_cache(2, 40)
    model.prefill(Ragged.build([texts[0][:-8], texts[2][:-8]]), cache)
    first = model.prefill(Ragged.build([texts[1][:-8]]), cache, rows=torch.tensor([1]))
    assert_close(first[0], whole_logits(model, texts[1])[-9], **TIGHT)
    logits = model.decode(torch.tensor([texts[0][-8], texts[1][-8]]), cache)
    for row, text in enumerate(texts[:2]):
        assert_close(logits[row], whole_logits(model, text)[-8], **TIGHT)


def test_capacity_beyond_the_positions_is_refused(model):
    with pytest.raises(UserError, match=r"97 tokens.*96 positions"):
        model.new_cache(1, 97)


def test_a_full_cache_does_not_go_on(model):
    cache = model.new_cache(1, 3)
    model.prefill(Ragged.build([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="full"):
        model.decode(torch.tensor([1]), cache)
    with pytest.raises(ValueError, match="a document needs 4"):
        model.prefill(Ragged.build([[1, 2, 3, 4]]), cache)


def test_a_cache_is_never_filled_with_gradient(model):
    with pytest.raises(ValueError, match="no_grad"):
        model.trunk(Ragged.build([[1, 2]]), cache=model.new_cache(1, 4))


def test_decoding_works_under_bfloat16_autocast(model, texts):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.new_cache(4, 40)
        model.prefill(Ragged.build([text[:-8] for text in texts]), cache)
        logits = model.decode(torch.tensor([text[-8] for text in texts]), cache)
    assert cache.keys[0].dtype == torch.bfloat16 and logits.dtype == torch.float32
    for row, text in enumerate(texts):
        exact = whole_logits(model, text)[-8].log_softmax(-1)
        assert (logits[row].float().log_softmax(-1) - exact).abs().mean() < 0.1

"""The heads: log-probabilities and entropies in chunks, scores at the last real token (H23)."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import entropy, language
from alignment.ragged import Ragged
from tests.examples import padded


def test_log_probs_are_the_log_softmax_at_the_token_before(model, documents):
    batch = Ragged.build(documents, [[i % 3 == 1 for i in range(len(document))] for document in documents])
    with torch.no_grad():
        ours = model(batch=batch, temperature=0.7).log_probs
        expected = []
        for document in documents:
            log_probs = (model(torch.tensor([document])).logits[0] / 0.7).log_softmax(-1)
            expected += [log_probs[i - 1, document[i]] for i in range(len(document)) if i % 3 == 1]
    assert ours.shape == (len(batch.target_index),)
    assert_close(ours, torch.stack(expected), atol=1e-5, rtol=0)


def test_entropy_of_equal_logits_is_log_of_the_vocabulary(model, batch):
    """No distribution has more, so its gradient is 0 there."""
    with torch.no_grad():
        model.trunk.norm.weight.zero_()
        if getattr(model.trunk.norm, "bias", None) is not None:
            model.trunk.norm.bias.zero_()
    output = model(batch=batch, entropy=True)
    assert_close(output.entropy, torch.full_like(output.log_probs, math.log(61)))
    assert_close(output.log_probs.detach(), torch.full_like(output.entropy, -math.log(61)))
    [slope] = torch.autograd.grad(output.entropy.sum(), model.trunk.norm.weight)
    assert slope.abs().max() < 1e-4
    assert model(batch=batch).entropy is None


@pytest.mark.parametrize("kept", [0, 10**9], ids=["computed again", "kept"])
def test_chunks_change_neither_numbers_nor_gradients(kept, model, batch, monkeypatch):
    def run():
        model.zero_grad()
        output = model(batch=batch, temperature=1.3, entropy=True)
        (-output.log_probs.sum()).backward()
        return output, [parameter.grad.clone() for parameter in model.parameters()]

    whole, gradients = run()
    monkeypatch.setattr(language, "CHUNK_ELEMENTS", {"cpu": 61 * 10})  # 127 targets: 13 chunks
    monkeypatch.setattr(language, "KEPT_ELEMENTS", {"cpu": kept})
    cut, cut_gradients = run()
    assert_close(cut.log_probs, whole.log_probs, atol=1e-6, rtol=0)
    assert_close(cut.entropy, whole.entropy, atol=1e-6, rtol=0)
    for a, b in zip(gradients, cut_gradients, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_many_logits_are_not_kept(model, batch, monkeypatch):
    sizes = []
    monkeypatch.setattr(language, "CHUNK_ELEMENTS", {"cpu": 61 * 10})
    monkeypatch.setattr(language, "KEPT_ELEMENTS", {"cpu": 61 * 100})  # 127 targets are more
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        model(batch=batch)
    # 61 * 32 is the head's weight; no saved tensor may be [127, 61] or [10, 61]
    assert 10 * 61 not in sizes and len(batch.target_index) * 61 not in sizes


def test_impossible_tokens_do_not_spoil_the_entropy():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    assert_close(entropy(logits), torch.tensor([math.log(2)]))


def test_h23_score_is_read_at_the_last_real_token(scalar_model, documents):
    # token 9 is the padding and stands inside documents too
    documents = [[*document[:3], 9, *document[3:], 9] for document in documents]
    with torch.no_grad():
        batch = Ragged.build(documents)
        scores = scalar_model(batch=batch).values[batch.last]
        alone = torch.cat([scalar_model(torch.tensor([document])).logits[:, 0] for document in documents])
        for side in ("left", "right"):
            ids, mask = padded(documents, side, extra=3)
            output = scalar_model(ids, mask)
            assert output.logits.shape == (len(documents), 1) and output.values.shape == ids.shape
            assert_close(output.logits[:, 0], scores, atol=1e-6, rtol=1e-6)
            assert (output.values[~mask] == 0).all()
    assert_close(scores, alone, atol=1e-6, rtol=1e-6)


def test_h23_a_value_that_is_the_position_reads_length_minus_one(scalar_model, batch, monkeypatch):
    monkeypatch.setattr(scalar_model, "_scores", lambda batch: batch.positions.float()[:, None])
    ids, mask = torch.ones(2, 6, dtype=torch.long), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    assert scalar_model(ids, mask).logits[:, 0].tolist() == [3, 1]


def test_values_are_fp32_under_autocast(scalar_model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = scalar_model(batch=batch).values
    assert values.dtype == torch.float32 and values.shape == batch.tokens.shape
    # not rounded to bfloat16: the head itself ran in fp32
    assert (values != values.to(torch.bfloat16).float()).any()


def test_a_call_without_input_is_refused(model):
    with pytest.raises(ValueError, match="input_ids or batch"):
        model()

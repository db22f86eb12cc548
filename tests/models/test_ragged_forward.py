"""Documents do not see each other, and a row's numbers do not depend on how it was batched (I5, H08, H18, H33)."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from alignment.data.batches import Example, collate_pairs
from alignment.errors import UserError
from alignment.models.build import build_language_model
from alignment.ragged import Ragged
from tests.examples import padded, sides
from tests.models.conftest import roughen

TIGHT = {"atol": 1e-5, "rtol": 0}


def test_logits_at_padding_are_zero_and_gradients_flow(model, documents):
    ids, mask = padded(documents, "left", 2)
    logits = model(ids, mask).logits
    assert logits.shape == (*ids.shape, 61)
    assert (logits[~mask] == 0).all() and (logits[mask] != 0).any()
    logits.logsumexp(-1)[mask].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_empty_row_is_refused(model):
    with pytest.raises(ValueError, match="row 1"):
        model(torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_h20_too_long_a_document_is_refused_by_name(model):
    batch = Ragged.build([[1, 2], [1] * 97], row_ids=["a:1", "a:2"])
    with pytest.raises(UserError, match=r"97 tokens \(row a:2\).*96 positions"):
        model(batch=batch)
    assert model(batch=Ragged.build([[1] * 96])).log_probs.shape == (95,)


def test_documents_of_very_different_length_use_several_rectangles(config):
    model = build_language_model({**config, **({"n_head": 16} if "n_head" in config else {})})
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(61, (n,), generator=generator).tolist() for n in [96] * 8 + [20] * 30 + [2] * 5]
    with torch.no_grad():
        packed = model(batch=Ragged.build(rows)).log_probs
        alone = torch.cat([model(batch=Ragged.build([row])).log_probs for row in rows])
    assert_close(packed, alone, **TIGHT)


@pytest.mark.parametrize("keep", ["nothing", "attention", "products"])
def test_gradient_checkpointing_changes_no_gradient(model, batch, keep):
    def gradients():
        model.zero_grad()
        (-model(batch=batch).log_probs.sum()).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.checkpoint_activations(True, keep)
    for a, b in zip(plain, gradients(), strict=True):
        assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_what_is_kept_is_not_computed_again(model, batch):
    def products(keep):
        model.checkpoint_activations(True, keep)
        with FlopCounterMode(display=False) as counter:
            (-model(batch=batch).log_probs.sum()).backward()
        return counter.get_total_flops()

    nothing, attention, everything = products("nothing"), products("attention"), products("products")
    model.checkpoint_activations(False)
    with FlopCounterMode(display=False) as counter:
        (-model(batch=batch).log_probs.sum()).backward()
    assert everything == counter.get_total_flops() and everything < attention <= nothing


def test_bfloat16_autocast_stays_near_fp32(model, batch):
    with torch.no_grad():
        exact = model(batch=batch).log_probs
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(batch=batch).log_probs
    assert rounded.dtype == torch.float32
    # bfloat16 keeps 8 bits: logits here are near 5, so a few hundredths per logit
    assert (exact - rounded).abs().mean() < 0.05
    assert (exact - rounded).abs().max() < 0.3


ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY |= {"num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {  # learned positions, rotary ones, biases by relative position, a window
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"max_position_embeddings": 64, **ROTARY},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mistral": {"max_position_embeddings": 64, "sliding_window": 7, **ROTARY},
}


def drawn(length: int, seed: int) -> list[int]:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded_log_probs(model: Any, examples: list[Example], side: str, extra: int = 0) -> torch.Tensor:
    """Log-probabilities of all targets from the logits of a padded rectangle, [M]."""
    ids, mask = padded([each.ids for each in examples], side, extra)
    found = []
    for row, logits in enumerate(model(ids, mask).logits):
        tokens, log_probs = ids[row][mask[row]], logits[mask[row]].log_softmax(-1)
        counts = torch.tensor(examples[row].mask[1:])
        found.append(log_probs[:-1].gather(1, tokens[1:, None])[counts, 0])
    return torch.cat(found)


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("family", MODELS)
def test_h18_padded_packed_and_shared_pairs_have_one_gradient(family):
    """Pairs as a rectangle padded on the left or right, as documents end to end, and with each prompt once."""
    torch.manual_seed(0)
    model = roughen(build_language_model({"model_type": family, "vocab_size": 61, **MODELS[family]})).eval()
    pairs = []
    for number, (prompt_length, chosen, rejected) in enumerate(((20, 9, 3), (4, 12, 15), (11, 1, 6))):
        prompt = drawn(prompt_length, number)
        responses = [drawn(length, 10 * number + side + 5) for side, length in enumerate((chosen, rejected))]
        pairs.append(Example.answered(prompt, responses, str(number)))
    order = sorted(pairs, key=lambda pair: -max(len(pair.documents[0]), len(pair.documents[1])))
    documents = [sides(pair)[0] for pair in order] + [sides(pair)[1] for pair in order]
    [packed], [shared] = (collate_pairs(pairs, 1000, share_prompts=share) for share in (False, True))
    assert len(shared.ragged.tokens) == len(packed.ragged.tokens) - 35
    forms = {
        "packed": lambda: model(batch=packed.ragged).log_probs,
        "shared": lambda: model(batch=shared.ragged).log_probs,
        "padded left": lambda: padded_log_probs(model, documents, "left"),
        "padded right": lambda: padded_log_probs(model, documents, "right", extra=5),
    }
    expected = forms["packed"]()
    expected_gradient = gradient(model, -expected.mean())
    for name in ("shared", "padded left", "padded right"):
        found = forms[name]()
        assert abs(found.mean().item() - expected.mean().item()) <= 1e-6, name
        difference = gradient(model, -found.mean()) - expected_gradient
        assert difference.norm() <= 1e-6 * expected_gradient.norm(), name

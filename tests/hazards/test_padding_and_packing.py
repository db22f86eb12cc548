"""H08 and H18: what stands beside a document, before it or at its padding changes none of its numbers; see also I5."""

from typing import Any

import pytest
import torch

from alignment.data.batches import Example, collate_pairs
from alignment.models.build import build_language_model
from tests.examples import sides

ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY |= {"num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {  # learned positions, rotary ones, biases by relative position, a window
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"max_position_embeddings": 64, **ROTARY},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mistral": {"max_position_embeddings": 64, "sliding_window": 7, **ROTARY},
}


@pytest.fixture(params=sorted(MODELS))
def model(request):
    torch.manual_seed(0)
    model = build_language_model({"model_type": request.param, "vocab_size": 61, **MODELS[request.param]}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model


def example(name: str, length: int, seed: int, prompt: int = 1) -> Example:
    ids = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example.single(ids, [False] * prompt + [True] * (length - prompt), name)


def padded(documents: list[list[int]], side: str, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of a rectangle with `extra` further columns of padding."""
    width = max(map(len, documents)) + extra
    ids, mask = torch.full((len(documents), width), 9), torch.zeros(len(documents), width, dtype=torch.bool)
    for row, document in enumerate(documents):
        columns = slice(width - len(document), width) if side == "left" else slice(len(document))
        ids[row, columns], mask[row, columns] = torch.tensor(document), True
    return ids, mask


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


def test_h08_no_response_reads_another_one_of_the_same_prompt(model):
    """A shared prompt is read by both of its responses; with another chosen response the rejected one stays."""
    prompt, answers = example("a", 30, 0).ids, [example("r", 9, seed).ids for seed in (1, 2, 3)]
    with torch.no_grad():
        found = []
        for chosen in answers[:2]:
            pair = Example.answered(prompt, [chosen, answers[2]], "a")
            [batch] = collate_pairs([pair], 200, share_prompts=True)
            assert len(batch.ragged.tokens) == 30 + 9 + 9
            found.append(model(batch=batch.ragged).log_probs)
    assert (found[0][9:] - found[1][9:]).abs().max() <= 1e-6 < 1e-2 < (found[0][:9] - found[1][:9]).abs().max()


def test_h18_padded_packed_and_shared_forms_have_one_loss_and_one_gradient(model):
    """Pairs as a rectangle padded on the left or right, as documents end to end, and with each prompt once."""
    pairs = []
    for number, (prompt_length, chosen, rejected) in enumerate(((20, 9, 3), (4, 12, 15), (11, 1, 6))):
        prompt = example("p", prompt_length, number).ids
        responses = [example("r", n, 10 * number + side + 5).ids for side, n in enumerate((chosen, rejected))]
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

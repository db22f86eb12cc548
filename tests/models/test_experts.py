"""Mixture of experts against token-by-token loops, and its balance against transformers' Mixtral."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.models.layers import ExpertsSpec, GatedFeedForwardSpec, PlainFeedForwardSpec
from alignment.models.layers.feedforward import Experts, balance_loss
from alignment.ragged import Ragged

WIDTH = 8
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 16,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5,
}  # fmt: skip
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3]]


def experts(kind: type, count: int, chosen: int, normalized: bool) -> Experts:
    torch.manual_seed(0)
    return Experts(ExpertsSpec(kind(6, "silu", True), count, chosen, normalized), WIDTH)


@torch.no_grad()
def token_by_token(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """The formula, one token and one expert at a time."""
    out = []
    for token in x:
        probabilities = (layer.router.weight @ token).softmax(0).tolist()
        ranked = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)
        best = ranked[: layer.spec.experts_per_token]
        total = sum(probabilities[e] for e in best) if layer.spec.normalized else 1.0
        out.append(sum(probabilities[e] / total * layer.experts[e](token[None])[0] for e in best))
    return torch.stack(out)


@pytest.mark.parametrize("kind", [PlainFeedForwardSpec, GatedFeedForwardSpec])
@pytest.mark.parametrize(("count", "chosen", "normalized"), [(4, 2, True), (4, 1, False), (3, 3, True), (1, 1, True)])
def test_experts_are_the_sum_over_the_chosen(kind, count, chosen, normalized):
    layer, x = experts(kind, count, chosen, normalized), torch.randn(50, WIDTH)
    assert_close(layer(x), token_by_token(layer, x))


def test_switch_trains_its_router_through_the_chosen_probability():
    # With one expert per token a normalized weight is 1 whatever the router says; Switch keeps the probability.
    x = torch.randn(20, WIDTH)
    for normalized, moves in ((True, False), (False, True)):
        layer = experts(PlainFeedForwardSpec, 4, 1, normalized)
        layer(x).square().sum().backward()
        assert layer.router.weight.grad is not None
        assert (layer.router.weight.grad.abs().max() > 1e-4) == moves


def test_no_token_is_dropped_where_all_want_the_same_expert():
    layer, x = experts(PlainFeedForwardSpec, 4, 1, True), torch.rand(30, WIDTH)
    with torch.no_grad():
        layer.router.weight.zero_()[2] = 1.0
    assert_close(layer(x), layer.experts[2](x))


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    # Not none: distributed averaging waits for every parameter.
    layer = experts(PlainFeedForwardSpec, 4, 1, True)
    with torch.no_grad():
        layer.router.weight.zero_()[2] = 1.0
    layer(torch.rand(30, WIDTH)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts[0].parameters())


def test_balance_of_even_and_of_collapsed_routing():
    even = 20 * torch.eye(4)  # one token for each of four experts, each nearly certain
    assert_close(balance_loss([even], 1), torch.tensor(1.0))
    collapsed = torch.tensor([[20.0, 0, 0, 0]]).repeat(4, 1)
    assert_close(balance_loss([collapsed], 1), torch.tensor(4.0))


def test_balance_by_hand():
    # Two tokens, two experts. Token 1: p = (3/4, 1/4); token 2: (1/2 - tiny, ...) tipped to expert 0: share (1, 0),
    # mean probability of expert 0 is (0.75 + 0.6) / 2 = 0.675; loss = 2 * 1 * 0.675.
    logits = torch.tensor([[0.75, 0.25], [0.6, 0.4]]).log()
    assert_close(balance_loss([logits], 1), torch.tensor(1.35))


def roughened_mixtral():
    torch.manual_seed(0)
    model = build_model(MIXTRAL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model


def test_balance_of_a_model_is_transformers_loss_and_gradient(tmp_path):
    from transformers import AutoModelForCausalLM

    model = roughened_mixtral()
    save_model(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ROWS])
    aux = reference(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    output = model(batch=Ragged.build(ROWS))
    assert_close(output.balance, 0.5 * aux)
    (0.5 * aux).backward()
    output.balance.backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    for layer, block in enumerate(model.trunk.blocks):
        assert_close(block.feedforward.router.weight.grad, theirs[f"model.layers.{layer}.mlp.gate.weight"])
    assert_close(model.trunk.embed.weight.grad, theirs["model.embed_tokens.weight"])


def test_recomputed_blocks_balance_the_same():
    gradients = []
    for recompute in (False, True):
        model = roughened_mixtral()
        model.checkpoint_activations(recompute)
        output = model(batch=Ragged.build(ROWS))
        (output.balance - output.log_probs.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_close(gradients[0], gradients[1])


def test_balance_is_asked_for_in_training_only():
    batch = Ragged.build(ROWS)
    with torch.no_grad():
        assert roughened_mixtral()(batch=batch).balance is None
    quiet = build_model({**MIXTRAL, "output_router_logits": False})
    assert quiet(batch=batch).balance is None


def test_training_on_the_balance_spreads_tokens():
    torch.manual_seed(0)
    router = nn.Linear(WIDTH, 4, bias=False)
    x = torch.randn(200, WIDTH) + 1.0  # a common direction, so that one expert is liked best by most
    nn.init.normal_(router.weight, std=0.5)
    before = balance_loss([router(x)], 2).item()
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        balance_loss([router(x)], 2).backward()
        optimizer.step()
    after = balance_loss([router(x)], 2).item()
    assert before > 2.3
    assert after < 2.05

"""Attention below quadratic cost: its limits are full attention, documents do not see each other, and models of it learn."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from alignment.config.load import packaged_folder
from alignment.errors import UserError
from alignment.models.init_weights import InitSpec, initialize
from alignment.models.language_model import LanguageModel, MaskedLanguageModel
from alignment.models.layers import BlockSpec, LayerNormSpec, LearnedPositionsSpec, PlainFeedForwardSpec
from alignment.models.layers.attention import AttentionContext
from alignment.models.layers.padded_layout import pad_layout
from alignment.models.transformer import TransformerSpec
from alignment.pipeline.stages import load_stage_file
from alignment.ragged import Ragged

e: Any = load_stage_file(packaged_folder("recipes") / "history/efficient.py")
SPECS = {
    "linformer": e.LinformerSpec(2, 8, projected=4, max_positions=48),
    "performer": e.PerformerSpec(2, 8, features=16),
    "causal performer": e.PerformerSpec(2, 8, features=16, causal=True),
    "nystrom": e.NystromSpec(2, 8, landmarks=4, kernel=5),
    "lsh": e.LSHSpec(2, 8, chunk=4, rounds=2, max_positions=48),
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def no_attention(*_: object) -> Tensor:
    raise AssertionError("this attention computes its own scores")


def heads(length: int, width: int = 8, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values [2, 3, length, width]."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(2, 3, length, width, generator=generator, dtype=torch.float64) for _ in range(3)]


def real(length: int) -> Tensor:
    return torch.ones(2, 1, length, 1, dtype=torch.bool)


def run(layer: nn.Module, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return layer(x, AttentionContext(no_attention, layout=pad_layout(lengths, 2)))


@EACH
def test_documents_do_not_see_their_neighbors_or_padding(spec):
    torch.manual_seed(0)
    lengths = (21, 1, 34, 5, 19)
    layer, x = initialize_layer(spec), torch.randn(sum(lengths), 16)
    alone = torch.cat([run(layer, part, (len(part),)) for part in x.split(lengths)])
    assert_close(run(layer, x, lengths), alone, atol=1e-5, rtol=1e-4)


def initialize_layer(spec) -> nn.Module:
    layer = spec.build(16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


@EACH
def test_all_parameters_get_finite_gradients(spec):
    torch.manual_seed(0)
    layer = initialize_layer(spec)
    run(layer, torch.randn(57, 16), (34, 1, 22)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_linformer_with_identities_is_full_attention():
    q, k, v = heads(12)
    one = torch.eye(12, dtype=torch.float64)
    assert_close(e.linformer_attention(q, k, v, one, one), F.scaled_dot_product_attention(q, k, v))


def test_linformer_by_hand():
    # Both keys are mixed into one, so every query gets the mixed value, whatever the scores.
    q, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[3.0], [5.0]]]])
    mixed = e.linformer_attention(q, v, v, torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, -1.0]]))
    assert mixed.flatten().tolist() == [1.0, 1.0]


def test_linformer_takes_documents_up_to_its_positions():
    layer = e.LinformerSpec(2, 8, projected=4, max_positions=50).build(16)
    x = torch.randn(102, 16)
    together = run(layer, x, (50, 49, 3))  # a rectangle has 64 columns
    assert_close(together[:50], run(layer, x[:50], (50,)), atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="a document of 51 tokens is longer than the 50 positions"):
        run(layer, x, (51, 51))


def test_features_are_orthogonal_and_as_long_as_gaussian_vectors():
    torch.manual_seed(0)
    vectors = e.orthogonal_features(4096 * 8, 8)
    products = vectors.view(-1, 8, 8) @ vectors.view(-1, 8, 8).mT
    assert (products - products.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() < 1e-4
    assert vectors.square().mean().item() == pytest.approx(1, abs=0.01)
    assert vectors.square().sum(1).var().item() == pytest.approx(16, rel=0.05)  # of chi squared with 8 degrees
    assert e.orthogonal_features(11, 8).shape == (11, 8)


def test_the_estimate_of_exp_is_unbiased():
    torch.manual_seed(0)
    q, k = torch.tensor([0.5, -0.3, 0.2, 0.8]), torch.tensor([0.1, 0.7, -0.4, 0.6])
    features = e.orthogonal_features(400_000, 4)
    products = (e.log_features(q, features) + e.log_features(k, features)).exp()
    assert products.mean().item() == pytest.approx((q @ k).exp().item(), rel=0.01)


def test_performer_converges_to_softmax_attention():
    q, k, v = heads(20, scale=0.4)
    full, errors = F.scaled_dot_product_attention(q, k, v), []
    for count in (64, 1024, 16384):
        torch.manual_seed(0)
        estimate = e.performer_attention(q, k, v, e.orthogonal_features(count, 8).double(), real(20), causal=False)
        errors.append(((estimate - full).square().mean() / full.square().mean()).sqrt().item())
    assert errors[2] < 0.02 and errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2  # by sqrt(16) = 4, about


def test_causal_performer_converges_to_causal_attention():
    torch.manual_seed(0)
    q, k, v = heads(150, scale=0.4)
    estimate = e.performer_attention(q, k, v, e.orthogonal_features(8192, 8).double(), real(150), causal=True)
    assert_close(estimate, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=0.03, rtol=0)


@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_causal_products_are_those_of_all_earlier_pairs(length):
    q, k, v = heads(length)
    assert_close(e.causal_products(q, k, v), (q @ k.mT).tril() @ v)


def test_pseudo_inverse_converges():
    weights = (3 * torch.randn(4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).softmax(-1)
    assert_close(e.iterative_pseudo_inverse(weights, 30), torch.linalg.pinv(weights))


def test_nystrom_with_a_landmark_for_every_token_is_full_attention():
    q, k, v = heads(6, scale=2.0)
    mixed = e.nystrom_attention(q, k, v, torch.tensor([6, 6]), landmarks=6, iterations=40)
    assert_close(mixed, F.scaled_dot_product_attention(q, k, v))


def test_nystrom_of_fewer_tokens_than_landmarks_is_full_attention():
    q, k, v = heads(6, scale=2.0)
    v[1, :, 4:] = 0
    mixed = e.nystrom_attention(q, k, v, torch.tensor([6, 4]), landmarks=9, iterations=40)
    assert_close(mixed[0], F.scaled_dot_product_attention(q, k, v)[0])
    q, k, v = (x[1, :, :4] for x in (q, k, v))
    assert_close(mixed[1, :, :4], F.scaled_dot_product_attention(q, k, v))


def test_segments_by_hand():
    weights = e.segment_weights(torch.tensor([6, 5, 2]), columns=6, count=3)[:, 0]
    assert weights[0].tolist() == [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 0.5, 0.5]]
    assert weights[1].tolist() == [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert weights[2].tolist() == [[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]


def test_the_convolution_adds_each_heads_neighbors():
    layer = e.NystromSpec(2, 4, landmarks=2, kernel=3).build(8)
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    value, kernel = layer.value(x).view(7, 2, 4), layer.convolution.weight[:, 0]
    added = torch.stack(
        [sum(kernel[:, j, None] * F.pad(value, (0, 0, 0, 0, 1, 1))[t + j] for j in range(3)) for t in range(7)]
    )
    both = run(layer, x, (7,))
    layer.convolution = None
    assert_close(both - run(layer, x, (7,)), added.flatten(1) @ layer.output.weight.T, atol=1e-5, rtol=1e-4)


def test_nystrom_equals_transformers_layer():
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=16, num_attention_heads=2, num_landmarks=4, segment_means_seq_len=24, conv_kernel_size=5
    )
    theirs = NystromformerSelfAttention(config).eval()
    theirs.init_option = "exact"  # a scale for each matrix, as here
    ours = initialize_layer(SPECS["nystrom"])
    for name in ("query", "key", "value"):
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    theirs.conv.weight.data = ours.convolution.weight.data[..., None]
    x = torch.randn(2, 24, 16)
    expected = ours.output(theirs(x)[0])
    assert_close(run(ours, x.flatten(0, 1), (24, 24)), expected.flatten(0, 1), atol=1e-5, rtol=1e-4)


def dense_lsh(q: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of shared queries and keys on the pairs in `seen` [..., T, T], a token itself only where it is alone."""
    own = torch.eye(q.shape[2], dtype=torch.bool)
    scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(own, e.OWN_SCORE).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("rounds", [1, 3])
def test_lsh_with_one_bucket_is_full_attention_of_shared_queries(rounds):
    q, _, v = heads(12)
    buckets = torch.zeros(2, 3, rounds, 12, dtype=torch.long)
    assert_close(e.lsh_attention(q, v, buckets, chunk=16), dense_lsh(q, v, torch.tensor(True)))


def test_lsh_sees_its_bucket_alone():
    q, _, v = heads(24)
    buckets = torch.randint(6, (2, 3, 1, 24), generator=torch.Generator().manual_seed(1))
    same = buckets[:, :, 0, :, None] == buckets[:, :, 0, None]
    assert_close(e.lsh_attention(q, v, buckets, chunk=24), dense_lsh(q, v, same))


def test_a_token_alone_in_its_bucket_gets_its_own_value():
    q, _, v = heads(8)
    assert_close(e.lsh_attention(q, v, torch.arange(8).expand(2, 3, 1, 8), chunk=2), v)


def test_lsh_sees_its_chunk_and_the_one_before():
    q, _, v = heads(8)
    chunk = torch.arange(8) // 2
    back = chunk[:, None] - chunk
    mixed = e.lsh_attention(q, v, torch.zeros(2, 3, 1, 8, dtype=torch.long), chunk=2)
    assert_close(mixed, dense_lsh(q, v, (back == 0) | (back == 1)))


def test_buckets_by_hand():
    x = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [1.0, 2.0], [0.5, -2.0]])[None, None]
    rotations = torch.eye(2)[None]
    assert e.hash_buckets(x, rotations, torch.tensor([2])).flatten().tolist() == [0, 2, 1, 3]
    assert e.hash_buckets(x, rotations, torch.tensor([1])).flatten().tolist() == [0, 2, 0, 0]
    assert e.hash_buckets(x, rotations, torch.tensor([0])).flatten().tolist() == [0, 0, 0, 0]


def test_two_hashes_have_two_buckets_for_a_chunk_or_more():
    lengths = torch.tensor([1, 4, 5, 8, 16, 400])
    halves = e._halves(lengths, chunk=4).tolist()
    assert halves == [0, 0, 1, 1, 2, 8]  # (2 * halves) ** 2 buckets for 1, 1, 2, 2, 4 and 100 chunks
    assert e.LSHSpec(2, 8, chunk=4, rounds=3, max_positions=400).build(16).rotations.shape == (2, 3, 8, 8)


def test_close_vectors_share_buckets_more_often():
    torch.manual_seed(0)
    x = torch.randn(500, 8)
    pairs = torch.stack([x, x + 0.2 * torch.randn(500, 8), torch.randn(500, 8)], 1)[None]  # [1, 500, 3, 8]
    found = e.hash_buckets(pairs, torch.randn(8, 8, 4), torch.tensor([4]))
    near, far = ((found[..., 0] == found[..., other]).float().mean().item() for other in (1, 2))
    assert near > 0.6 and far < 0.25


@EACH
def test_bfloat16_autocast_keeps_the_arithmetic_in_float32(spec):
    torch.manual_seed(0)
    layer, x = initialize_layer(spec), torch.randn(30, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = run(layer, x, (30,))
    expected = run(layer, x, (30,))
    assert low.dtype == torch.bfloat16
    if not isinstance(spec, e.LSHSpec):  # a rounded query may fall into another bucket
        assert (low - expected).abs().mean() < 0.05 * expected.abs().mean()


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_types_work(spec, dtype):
    torch.manual_seed(0)
    layer, x = initialize_layer(spec), torch.randn(30, 16)
    expected = run(layer, x, (18, 12))
    other = run(layer.to(dtype), x.to(dtype), (18, 12))
    assert other.dtype == dtype and other.isfinite().all()
    if dtype == torch.float64:
        assert_close(other.float(), expected, atol=1e-4, rtol=1e-3)


def model(spec) -> LanguageModel | MaskedLanguageModel:
    torch.manual_seed(0)
    block = BlockSpec(spec, PlainFeedForwardSpec(32, "relu", bias=True), LayerNormSpec(1e-5))
    trunk = TransformerSpec(
        12, 16, 48, (block,) * 2, LayerNormSpec(1e-5), InitSpec(0.1, 0.1), tied_head=True,
        positions=LearnedPositionsSpec(48),
    ).build()  # fmt: skip
    kind = LanguageModel if spec.causal else MaskedLanguageModel
    return initialize(kind(trunk, nn.Linear(16, 12, bias=False), config={}))


LEARNING = SPECS | {"lsh": replace(SPECS["lsh"], chunk=8, rounds=4)}


@pytest.mark.parametrize("spec", LEARNING.values(), ids=LEARNING)
def test_a_model_learns_to_copy_a_far_token(spec):
    """The last token repeats the first; 11 stands there where it is to be predicted."""
    trained = model(spec).train()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(70):
        rows = torch.randint(10, (16, 12), generator=generator)
        labels = rows[:, 0].clone()
        rows[:, -1] = labels if spec.causal else 11
        batch = replace(Ragged.build(rows.tolist(), [[False] * 11 + [True]] * 16), labels=labels)
        loss = -trained(batch=batch).log_probs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.2  # guessing: log 10 = 2.3


def test_causal_performer_sees_no_later_token():
    decoder = model(SPECS["causal performer"])
    rows = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([rows[:, :25], (rows[:, 25:] + 1) % 12], dim=1)
    with torch.no_grad():
        first, second = decoder(rows).logits, decoder(changed).logits
    assert_close(first[:, :25], second[:, :25])
    assert not torch.allclose(first[:, 25:], second[:, 25:])


def test_generation_is_refused():
    decoder = model(SPECS["causal performer"])
    with pytest.raises(UserError, match="keeps no cache of keys and values"):
        decoder.new_cache(1, 8)


def test_weights_drawn_once_are_saved():
    assert "trunk.blocks.0.attention.features" in model(SPECS["performer"]).state_dict()
    assert "trunk.blocks.1.attention.rotations" in model(SPECS["lsh"]).state_dict()

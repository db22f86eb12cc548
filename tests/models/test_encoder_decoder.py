"""Encoder and decoder together: cross-attention, places on both sides, memory kept while decoding, read-outs."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.encoder_decoder import last_positions
from alignment.models.layers import AttentionSpec
from alignment.models.layers.attention import AttentionContext, CrossAttention
from alignment.models.layers.kv_cache import CrossAttentionCache
from alignment.models.layers.padded_layout import pad_layouts, padding_mask
from alignment.models.layers.sdpa import Source, cached_cross_attention, cross_attentions
from alignment.ragged import Ragged, Seq2Seq
from tests.examples import padded
from tests.models.conftest import roughen

T5 = {
    "model_type": "t5", "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4,
    "num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
BART = {
    "model_type": "bart", "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 6,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {"t5": T5, "bart": BART}
SOURCES, TARGETS = (40, 7, 1, 33, 12), (3, 22, 30, 1, 9)


def documents(lengths, seed=1, first=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(first, 61, (length,), generator=generator).tolist() for length in lengths]


def pairs():
    sources, targets = documents(SOURCES), documents(TARGETS, seed=2)
    return sources, [[0, *target[1:]] for target in targets]


def batch_of(sources, targets):
    return Seq2Seq(Ragged.build(sources), Ragged.build(targets))


@pytest.fixture(params=sorted(CONFIGS))
def model(request):
    torch.manual_seed(0)
    return roughen(build_model(CONFIGS[request.param]))


def cross_attention():
    torch.manual_seed(0)
    return CrossAttention(AttentionSpec(3, 3, 5, 0.7, True, True, causal=False), 12, 10)


def test_cross_attention_is_a_softmax_over_the_documents_own_source():
    layer, lengths, targets = cross_attention(), (4, 9, 1), (6, 2, 5)
    states, x = torch.randn(sum(lengths), 10), torch.randn(sum(targets), 12)
    source = Source(states, Ragged.build([[1] * n for n in lengths]))
    [attend] = cross_attentions([layer.spec], source, Ragged.build([[1] * n for n in targets]))
    found = layer(x, AttentionContext(attend=None, cross_attend=attend)).split(targets)  # type: ignore[arg-type]
    for memory, read, mixed in zip(states.split(lengths), x.split(targets), found, strict=True):
        heads = []
        for head in range(3):
            rows = slice(5 * head, 5 * head + 5)
            query, key, value = (
                part(y)[:, rows]
                for part, y in zip((layer.query, layer.key, layer.value), (read, memory, memory), strict=True)
            )
            heads.append((0.7 * query @ key.T).softmax(-1) @ value)
        assert_close(mixed, layer.output(torch.cat(heads, dim=1)))


def test_cross_attention_from_memory_equals_the_whole_one():
    layer, lengths = cross_attention(), (4, 9, 1)
    states, x = torch.randn(sum(lengths), 10), torch.randn(3, 12)
    source = Source(states, Ragged.build([[1] * n for n in lengths]))
    memory = CrossAttentionCache(padding_mask(torch.tensor(lengths), max(lengths)))
    [attend] = cross_attentions([layer.spec], source, Ragged.build([[1]] * 3), memory)
    whole = layer(x, AttentionContext(attend=None, cross_attend=attend))  # type: ignore[arg-type]
    assert memory.keys[0].shape == memory.values[0].shape == (3, 3, 9, 5)
    kept = layer(x, AttentionContext(attend=None, cross_attend=cached_cross_attention(memory, 0, layer.spec)))  # type: ignore[arg-type]
    assert_close(kept, whole)
    memory.select(torch.tensor([2, 0]))
    chosen = layer(x[[2, 0]], AttentionContext(attend=None, cross_attend=cached_cross_attention(memory, 0, layer.spec)))  # type: ignore[arg-type]
    assert_close(chosen, whole[[2, 0]])


def test_a_decoder_without_a_source_says_so(model):
    with pytest.raises(ValueError, match="without an encoder's states"):
        model.decoder(Ragged.build([[0, 5]]))


def test_sources_and_targets_are_packed_in_the_same_order():
    ours, theirs = pad_layouts((300, 2, 5, 120), (1, 400, 5, 3), 8)
    assert len(ours.groups) > 1  # else the order could not differ
    order = {length: row for row, length in enumerate((300, 2, 5, 120))}
    expected = [[(1, 400, 5, 3)[order[length]] for length in group] for group in ours.lengths]
    assert [list(group) for group in theirs.lengths] == expected
    assert all(max(group) <= columns for group, (_, columns) in zip(theirs.lengths, theirs.groups, strict=True))


def test_batches_equal_pairs_alone_and_padded_ones_on_either_side(model):
    sources, targets = pairs()
    alone = [
        model(torch.tensor([s]), decoder_input_ids=torch.tensor([t])).logits[0]
        for s, t in zip(sources, targets, strict=True)
    ]
    for side in ("left", "right"):
        (ids, mask), (target_ids, target_mask) = padded(sources, side), padded(targets, side)
        logits = model(ids, mask, decoder_input_ids=target_ids, decoder_attention_mask=target_mask).logits
        assert_close(logits[target_mask], torch.cat(alone), atol=1e-5, rtol=1e-5)
        assert not logits[~target_mask].any()
    log_probs = [
        logits[:-1].log_softmax(-1)[range(len(t) - 1), t[1:]] for logits, t in zip(alone, targets, strict=True)
    ]
    batch = batch_of(sources, targets)
    output = model(batch=batch, entropy=True)
    assert_close(output.log_probs, torch.cat(log_probs), atol=1e-5, rtol=1e-5)
    assert batch.weight == len(output.log_probs) == sum(TARGETS) - len(TARGETS)
    entropies = [-(row.softmax(-1) * row.log_softmax(-1)).sum(-1) for row in alone]
    assert_close(output.entropy, torch.cat([e[:-1] for e in entropies]), atol=1e-5, rtol=1e-5)
    distributions = model(batch=batch, return_logits=True)
    assert_close(distributions.logits, torch.cat([row[:-1] for row in alone]), atol=1e-5, rtol=1e-5)
    assert_close(model.head(distributions.hidden), distributions.logits)


def test_gradients_do_not_depend_on_how_pairs_are_batched(model):
    sources, targets = pairs()
    model(batch=batch_of(sources, targets)).log_probs.sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for source, target in zip(sources, targets, strict=True):
        if len(target) > 1:
            model(batch=batch_of([source], [target])).log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, together[name], atol=2e-4, rtol=1e-4, msg=name)


def test_checkpointed_activations_give_the_same_gradients(model):
    batch = batch_of(*pairs())
    model(batch=batch).log_probs.sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.checkpoint_activations(keep="products")
    model(batch=batch).log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, plain[name], msg=name)


def test_prefill_and_decoding_equal_the_whole_forward(model):
    sources, targets = documents(SOURCES), [[0, *row] for row in documents((20, 26, 34, 20, 29), seed=2)]
    whole = [
        model(torch.tensor([s]), decoder_input_ids=torch.tensor([t])).logits[0]
        for s, t in zip(sources, targets, strict=True)
    ]
    begins = [len(target) - 15 for target in targets]
    cache = model.new_cache(len(targets), max(map(len, targets)))
    beginnings = [target[:begin] for target, begin in zip(targets, begins, strict=True)]
    logits = model.prefill(batch_of(sources, beginnings), cache)
    rows = list(range(len(targets)))  # which pair each cache row is
    for step in range(15):
        expected = torch.stack([whole[row][begins[row] + step - 1] for row in rows])
        assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        if step == 4:
            cache.keep(torch.tensor([4, 0, 1, 3]))
            rows = [4, 0, 1, 3]
        if step == 7:
            cache.reorder(torch.tensor([3, 1, 1, 0, 0]))
            rows = [rows[i] for i in (3, 1, 1, 0, 0)]
        if step == 10:
            cache.keep(torch.tensor([True, False, True, False, True]))
            rows = [rows[i] for i in (0, 2, 4)]
        logits = model.decode(torch.tensor([targets[row][begins[row] + step] for row in rows]), cache)


def test_memory_is_left_alone_while_beams_of_one_source_change_places(model):
    cache = model.new_cache(2, 8)
    model.prefill(batch_of(documents((5, 9)), [[0], [0]]), cache)
    cache.reorder(torch.tensor([0, 0, 1, 1]))
    keys = cache.memory.keys[0]
    cache.reorder(torch.tensor([1, 1, 3, 2]))
    assert cache.memory.keys[0] is keys
    cache.reorder(torch.tensor([2, 3, 0, 0]))
    assert_close(cache.memory.keys[0], keys[[2, 3, 0, 0]])
    assert cache.memory.owners.tolist() == [1, 1, 0, 0]


def test_dropout_acts_in_training_and_where_t5_has_it():
    model = build_model({**T5, "dropout_rate": 0.5})
    batch = Ragged.build(documents((30,)))
    assert_close(model.encoder(batch), model.encoder(batch))
    torch.manual_seed(0)
    model.train()
    states = model.encoder(batch)
    assert 0.35 < (states == 0).float().mean() < 0.65  # after the last norm as well


def test_last_positions_are_those_of_each_documents_last_end_token():
    batch = Ragged.build([[1, 4, 1, 5], [1], [6, 1]])
    assert last_positions(batch, 1).tolist() == [2, 4, 6]
    with pytest.raises(
        UserError, match=r"2 documents have no end token \(eos_token_id 6\).*rows 0, 1; take a tokenizer"
    ):
        last_positions(batch, 6)
    with pytest.raises(UserError, match="rows a"):
        last_positions(replace(batch, row_ids=("a", "b", "c")), None)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("task", ["sequence", "span"])
def test_read_outs_are_the_same_alone_batched_and_padded(name, task):
    torch.manual_seed(0)
    config = {**CONFIGS[name], "eos_token_id": 1}
    model = build_model({**config, "num_labels": 3} if task == "sequence" else config, task)
    rows = [[*row, 1] for row in documents((9, 1, 30))]
    batched = model(batch=Ragged.build(rows)).logits
    alone = torch.cat([model(batch=Ragged.build([row])).logits for row in rows])
    assert batched.shape == ((3, 3) if task == "sequence" else (43, 2))
    assert_close(batched, alone, atol=1e-5, rtol=1e-5)
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        scores = model(ids, mask).logits
        assert_close(scores if task == "sequence" else scores[mask], batched, atol=1e-5, rtol=1e-5)


def test_bfloat16_runs_and_stays_near(model):
    batch = batch_of(*pairs())
    exact = model(batch=batch).log_probs
    rounded = model.to(torch.bfloat16)(batch=batch).log_probs
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.1
    cache = model.new_cache(2, 4)
    assert model.prefill(batch_of(documents((5, 9)), [[0], [0, 4]]), cache).isfinite().all()
    assert model.decode(torch.tensor([4, 5]), cache).isfinite().all()


def test_targets_longer_than_the_positions_are_refused():
    model = build_model(BART)
    with pytest.raises(UserError, match=r"65 tokens \(row b\) does not fit the model's 64 positions"):
        model(batch=Seq2Seq(Ragged.build([[5], [6]]), Ragged.build([[2, 4], [2] * 65], row_ids=("a", "b"))))
    with pytest.raises(UserError, match=r"65 tokens.*do not fit the model's 64 positions"):
        model.new_cache(1, 65)
    assert build_model(T5).new_cache(1, 100).capacity == 100  # buckets end nowhere

"""A prefix that a decoder reads in both directions: its mask, its two limits, transformers' logits, and decoding behind it."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import PromptSpec, attach
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.layers.padded_layout import attention_masks, layout_of, pad_layout
from alignment.ragged import Ragged
from tests.models.conftest import CONFIGS, LENGTHS, written_by_transformers

PREFIXES = (12, 7, 1, 0, 40, 3)  # of documents as long as LENGTHS


@pytest.fixture(params=sorted(CONFIGS))
def both(request, tmp_path):
    """A model of ours and transformers' with the same random weights."""
    config = {key: value for key, value in CONFIGS[request.param].items() if key != "model_type"}
    theirs = written_by_transformers(tmp_path, request.param, config, attn_implementation="eager")
    return load_language_model(tmp_path), theirs


def with_prefixes(batch, prefixes):
    return replace(batch, prefix_lengths=torch.tensor(prefixes))


def test_the_mask_is_made_by_hand():
    """Documents of 4 and 3 tokens, prefixes of 2 and 0; the second row's last slot is padding, which sees only itself."""
    layout = layout_of([4, 3], [([0, 1], 4)], "cpu")
    [mask] = attention_masks(
        layout, layout, window=None, bias=None, device="cpu",
        in_prefix=torch.tensor([True, True, False, False, False, False, False]),
    )  # fmt: skip
    expected = [
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]
    assert mask[:, 0, :, :3].int().tolist() == [[row[:3] for row in rows] for rows in expected]
    assert mask[0, 0, :, 3].int().tolist() == [0, 0, 0, 1]
    assert mask[1, 0, :, 3].int().tolist() == [0, 0, 0, 1]  # a real token never sees padding


def test_both_limits_are_causal_and_bidirectional_attention():
    layout = pad_layout([5, 5], heads=2)
    for inside, causal in ((False, True), (True, False)):
        tokens = torch.full((10,), inside)
        [mask] = attention_masks(layout, layout, window=None, bias=None, device="cpu", in_prefix=tokens)
        expected = torch.ones(5, 5, dtype=torch.bool)
        assert torch.equal(mask.expand(2, 1, 5, 5)[:, 0], (expected.tril() if causal else expected).expand(2, 5, 5))


def test_logits_are_those_of_transformers_under_the_same_mask(both, documents):
    ours, theirs = both
    batch = with_prefixes(Ragged.build(documents), PREFIXES)
    with torch.no_grad():
        states = ours.head(ours.hidden_states(ours.trunk, batch)).split(list(batch.lengths))
        for document, prefix, logits in zip(documents, PREFIXES, states, strict=True):
            seen = torch.ones(len(document), len(document), dtype=torch.bool).tril()
            seen[:, :prefix] = True
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            expected = theirs(input_ids=torch.tensor([document]), attention_mask=mask[None, None]).logits[0]
            assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_prefix_of_nothing_changes_nothing(both, documents):
    model, batch = both[0], Ragged.build(documents)
    with torch.no_grad():
        causal, none = model(batch=batch).log_probs, model(batch=with_prefixes(batch, [0] * 6)).log_probs
        whole = model(batch=with_prefixes(batch, LENGTHS)).log_probs
    assert_close(none, causal, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, causal, atol=1e-2)


def test_decoding_behind_a_prefix_reads_it_as_training_does(both, documents):
    """A prompt is read in both directions, what is generated behind it is not: the cache gives the packed logits."""
    model, document, prompt = both[0], documents[0], 30
    whole = with_prefixes(Ragged.build([document]), [prompt])
    with torch.no_grad():
        expected = model.head(model.hidden_states(model.trunk, whole))[prompt - 1 :]
        cache = model.new_cache(1, len(document))
        found = [model.prefill(with_prefixes(Ragged.build([document[:prompt]]), [prompt]), cache)]
        found += [model.decode(torch.tensor([token]), cache) for token in document[prompt:]]
    assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)


def test_generated_tokens_are_the_likeliest_behind_a_prefix(both, documents):
    model, prompts = both[0].eval(), documents[:2]
    config = SamplingConfig(temperature=0, max_new_tokens=4)
    causal = decode_responses(model, prompts, config, []).token_ids
    model.prefix_mask = True
    found = decode_responses(model, prompts, config, []).token_ids
    assert found != causal
    for prompt, response in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in response:
            batch = with_prefixes(Ragged.build([text]), [len(prompt)])
            assert int(model.head(model.hidden_states(model.trunk, batch))[-1].argmax()) == token
            text.append(token)


def test_a_soft_prompt_before_a_prefix_is_part_of_it(both, documents):
    model, document = both[0], documents[1]
    torch.manual_seed(0)
    attach(model, PromptSpec(tokens=3))
    batch = with_prefixes(Ragged.build([document]), [4])
    changed = with_prefixes(Ragged.build([[*document[:3], 5, *document[4:]]]), [4])
    with torch.no_grad():
        one, other = (model.read(model.trunk, each).states for each in (batch, changed))
    assert (one[:3] - other[:3]).abs().max() > 1e-3  # its first token sees the end of the prefix


def test_gradients_do_not_depend_on_neighbors(both, documents):
    model, weight = both[0], both[0].trunk.blocks[0].attention.value.weight
    batches = [[with_prefixes(Ragged.build(documents), PREFIXES)]]
    pairs = zip(documents, PREFIXES, strict=True)
    batches.append([with_prefixes(Ragged.build([d]), [p]) for d, p in pairs if len(d) > 1])
    found = []
    for each in batches:
        model.zero_grad()
        for batch in each:
            (-model(batch=batch).log_probs.sum()).backward()
        found.append(weight.grad.clone())
    assert_close(found[0], found[1], atol=1e-3, rtol=1e-4)


def test_shared_prompts_and_windows_take_no_prefix(both):
    model = both[0]
    shared = Ragged.build_shared([[1, 2, 3], [1, 2, 4]], [[False, False, True]] * 2, [[0, 1]])
    with pytest.raises(ValueError, match="no prompt is the same"):
        model(batch=with_prefixes(shared, [2, 2]))
    windowed = build_language_model({**CONFIGS["llama"], "model_type": "mistral", "sliding_window": 4})
    with pytest.raises(UserError, match="within a window"):
        windowed(batch=with_prefixes(Ragged.build([[1, 2, 3]]), [2]))

"""Families without a table of ours run as transformers' classes, and behave as our own models do."""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.adapters import PrefixSpec, attach
from alignment.errors import UserError
from alignment.generation import BeamConfig, SamplingConfig, beam_search, decode_responses
from alignment.models.external.load import load_external, save_external
from alignment.models.external.rectangles import RereadCache, SharedCache, groups_with_little_padding
from alignment.ragged import Ragged, Seq2Seq
from tests.examples import padded
from tests.models.conftest import written_by_transformers as written

SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
OLD = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}
DECODERS = {
    "gpt_neo": {
        "vocab_size": 101, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
    },
    "stablelm": {**GATED, "partial_rotary_factor": 0.5},
    "cohere": {**GATED, "logit_scale": 0.3},
    "granite": {**GATED, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "gptj": OLD,
    "codegen": OLD,
    "starcoder2": {**GATED, "sliding_window": 8},
    "mpt": {"vocab_size": 101, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "mamba": {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip
NO_SHARED_CACHE = ("mpt", "mamba")  # one cannot be told positions, the other has no attention
PEGASUS = {
    "vocab_size": 101, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
    "decoder_start_token_id": 0,
}  # fmt: skip
MPNET = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 130}
FNET = {key: value for key, value in MPNET.items() if key != "num_attention_heads"}  # it has no mask for padding either
DOCUMENTS = [[5, 9, 44, 3, 8, 61, 99, 7, 31, 15, 16, 23, 42], [88], [17, 3, 90, 21], [6, 6, 7]]


@pytest.fixture(params=DECODERS)
def decoder(request, tmp_path):
    """Ours, theirs."""
    theirs = written(tmp_path, request.param, DECODERS[request.param])
    return load_external(tmp_path), theirs


@torch.no_grad()
def test_logits_are_those_of_each_document_alone_wherever_padding_lies(decoder):
    ours, theirs = decoder
    assert ours.source == "transformers" and not ours.training and ours.spec.vocabulary == 101
    alone = [theirs(input_ids=torch.tensor([document])).logits[0] for document in DOCUMENTS]
    for side in ("left", "right"):
        ids, mask = padded(DOCUMENTS, side, filler=77)
        logits = ours(ids, mask).logits
        assert_close(logits[mask.bool()], torch.cat(alone), atol=2e-5, rtol=1e-5)
        assert logits[~mask.bool()].abs().sum() == 0


@torch.no_grad()
def test_ragged_log_probs_equal_those_of_padded_logits(decoder):
    ours, _ = decoder
    batch = Ragged.build(DOCUMENTS)
    ids, mask = padded(DOCUMENTS)
    real = mask[:, 1:].bool()
    for temperature in (1.0, 0.7):
        log_softmax = (ours(ids, mask).logits[:, :-1] / temperature).log_softmax(-1)
        out = ours(batch=batch, temperature=temperature, entropy=True)
        expected = log_softmax.gather(-1, ids[:, 1:, None]).squeeze(-1)[real]
        assert_close(out.log_probs, expected, atol=2e-5, rtol=1e-5)
        assert_close(out.entropy, -(log_softmax.exp() * log_softmax).sum(-1)[real], atol=2e-5, rtol=1e-5)
    logits = ours(batch=batch, return_logits=True).logits
    assert_close(logits, ours(ids, mask).logits[:, :-1][real], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_decoding_equals_the_whole_forward_with_rows_kept_and_reordered(decoder):
    ours, theirs = decoder
    kind = RereadCache if theirs.config.model_type in NO_SHARED_CACHE else SharedCache
    cache = ours.new_cache(4, 20)
    assert type(cache) is kind and cache.rows == 4
    rows = [list(document) for document in DOCUMENTS]
    logits = ours.prefill(Ragged.build(rows), cache)
    moves = {2: ("reorder", [3, 0, 0, 2]), 4: ("keep", [True, False, True, True]), 5: ("keep", [2, 0])}
    for step in range(7):
        expected = [theirs(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]
        assert_close(logits, torch.stack(expected), atol=5e-5, rtol=1e-5)
        assert cache.lengths.tolist() == [len(row) for row in rows]
        if step in moves:
            name, which = moves[step]
            getattr(cache, name)(torch.tensor(which))
            kept = [i for i, flag in enumerate(which) if flag] if isinstance(which[0], bool) else which
            rows = [list(rows[i]) for i in kept]
        tokens = torch.tensor([(11 * step + 5 * i) % 101 for i in range(len(rows))])
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        logits = ours.decode(tokens, cache)


def test_generation_equals_transformers(decoder):
    ours, theirs = decoder
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    greedy = decode_responses(ours, DOCUMENTS, SamplingConfig(10, temperature=0.0), [2]).token_ids
    best = beam_search(ours, DOCUMENTS, BeamConfig(3, max_new_tokens=10), [2]).token_ids
    for row, document in enumerate(DOCUMENTS):
        ids, mask = torch.tensor([document]), torch.ones(1, len(document), dtype=torch.long)
        for found, beams in ((greedy, 1), (best, 3)):
            if beams > 1 and theirs.config.model_type == "mamba":
                continue  # its states cannot be reordered over there
            whole = theirs.generate(input_ids=ids, attention_mask=mask, num_beams=beams, **options)[0].tolist()
            assert found[row] == whole[len(document) :], beams


def test_a_rows_result_and_gradient_do_not_depend_on_its_neighbors(decoder):
    ours, _ = decoder
    whole = ours(batch=Ragged.build(DOCUMENTS)).log_probs
    whole.sum().backward()
    gradients = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    ours.zero_grad()
    alone = torch.cat([ours(batch=Ragged.build([row])).log_probs for row in DOCUMENTS if len(row) > 1])
    assert_close(alone, whole, atol=2e-5, rtol=1e-5)
    alone.sum().backward()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        if name in gradients:
            assert (parameter.grad - gradients[name]).abs().max() <= 2e-5 * largest, name


def test_recomputed_activations_give_the_same_gradient(decoder):
    ours, theirs = decoder
    batch = Ragged.build(DOCUMENTS)
    if not theirs.supports_gradient_checkpointing:
        with pytest.raises(UserError, match="does not support it"):
            ours.checkpoint_activations()
        return
    for training in (True, False):  # DPO and PPO train in eval mode
        gradients, calls = [], []
        for enabled in (False, True):
            ours.checkpoint_activations(enabled)
            ours.train(training).zero_grad()
            torch.manual_seed(3)
            with counted_calls(ours) as count:
                ours(batch=batch).log_probs.sum().backward()
            calls.append(len(count))
            gradients.append({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
        for name, gradient in gradients[0].items():
            assert_close(gradients[1][name], gradient)
        assert calls[0] > 0 and calls[1] == 2 * calls[0], f"every layer is computed twice, training={training}"
        with torch.no_grad(), counted_calls(ours) as count:
            ours(batch=batch)
        assert len(count) == calls[0]


@contextmanager
def counted_calls(ours):
    """Calls of the first part inside each of transformers' layers, a norm commonly."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    count, hooks = [], []
    for layer in ours.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            inside = next(layer.children())
            hooks.append(inside.register_forward_hook(lambda *_: count.append(1)))
    yield count
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", ["stablelm", "cohere", "granite", "gptj"])
def test_the_head_reads_the_columns_with_targets_only(family, tmp_path):
    written(tmp_path, family, DECODERS[family])
    ours, rows = load_external(tmp_path), []
    head = ours.inner.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[:2].numel()))
    masks = [[False] * (len(row) - 2) + [True] * 2 for row in DOCUMENTS[:1] + DOCUMENTS[2:]]
    batch = Ragged.build(DOCUMENTS[:1] + DOCUMENTS[2:], masks)
    wanted = ours(batch=Ragged.build(DOCUMENTS[:1] + DOCUMENTS[2:])).log_probs
    assert rows == [3 * 12]  # the last column of the longest predicts nothing
    last_two = torch.tensor([10, 11, 13, 14, 15, 16])
    assert_close(ours(batch=batch).log_probs, wanted[last_two])
    assert rows[1:] == [3 * 5]  # columns 10 and 11 of the longest row, 1 and 2, 0 and 1


@torch.no_grad()
def test_what_is_saved_opens_in_transformers_bit_for_bit(decoder, tmp_path):
    from transformers import AutoModelForCausalLM

    ours, theirs = decoder
    state = {name: tensor.clone() for name, tensor in ours.state_dict().items()}  # as gathered from other ranks
    ours.config["pad_token_id"] = 9
    for number, given in enumerate((None, state)):
        directory = tmp_path / f"saved{number}"
        save_external(ours, directory, tensors=None if given is None else given.items())
        ids = torch.tensor(DOCUMENTS[:1])
        assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, theirs(ids).logits)
        assert json.loads((directory / "config.json").read_text())["pad_token_id"] == 9
        assert torch.equal(load_external(directory)(ids).logits, ours(ids).logits)
        assert {path.name for path in directory.iterdir()} <= {
            "config.json", "generation_config.json", "model.safetensors"
        }  # fmt: skip
    with pytest.raises(ValueError, match="surplus"):
        save_external(ours, tmp_path / "no", tensors={**state, "surplus": torch.zeros(1)}.items())


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt_neo", "stablelm", "gptj"])
def test_a_scalar_model_has_one_value_per_token(family, tmp_path):
    theirs = written(tmp_path, family, DECODERS[family], "AutoModelForSequenceClassification", num_labels=1)
    ours = load_external(tmp_path, "scalar")
    values = ours(batch=Ragged.build(DOCUMENTS)).values
    assert values.shape == (21,) and values.dtype == torch.float32
    ends = torch.tensor([len(document) for document in DOCUMENTS]).cumsum(0) - 1
    alone = [theirs(input_ids=torch.tensor([document])).logits[0] for document in DOCUMENTS]
    assert_close(values[ends], torch.cat(alone), atol=2e-5, rtol=1e-5)
    for side in ("left", "right"):
        ids, mask = padded(DOCUMENTS, side)
        out = ours(ids, mask)
        assert_close(out.logits[:, 0], values[ends], atol=2e-5, rtol=1e-5)
        assert_close(out.values[mask.bool()], values, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_a_language_model_starts_models_with_new_heads(tmp_path):
    theirs = written(tmp_path, "stablelm", DECODERS["stablelm"])
    with pytest.raises(UserError, match=r"tensor score\.weight is missing"):
        load_external(tmp_path, "scalar")
    torch.manual_seed(0)
    scalar = load_external(tmp_path, "scalar", new_head=True)
    assert scalar.head is scalar.inner.score and 0.01 < scalar.head.weight.std().item() < 0.03  # drawn with 0.02
    classifier = load_external(tmp_path, "sequence", new_head=True, config={"num_labels": 5})
    assert classifier(batch=Ragged.build(DOCUMENTS)).logits.shape == (4, 5)
    assert torch.equal(scalar.inner.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    save_external(scalar, tmp_path / "saved")
    again = load_external(tmp_path / "saved", "scalar")
    assert torch.equal(again(batch=Ragged.build(DOCUMENTS)).values, scalar(batch=Ragged.build(DOCUMENTS)).values)
    other = load_external(tmp_path / "saved", "scalar", new_head=True)
    assert not torch.equal(other.head.weight, scalar.head.weight)


@torch.no_grad()
def test_an_encoder(tmp_path):
    theirs = written(tmp_path, "mpnet", MPNET, "AutoModelForMaskedLM", pad_token_id=1)
    ours = load_external(tmp_path)
    alone = torch.cat([theirs(input_ids=torch.tensor([document])).logits[0] for document in DOCUMENTS])
    for side in ("left", "right"):
        ids, mask = padded(DOCUMENTS, side)
        assert_close(ours(ids, mask).logits[mask.bool()], alone, atol=2e-5, rtol=1e-5)
    masks = [[i % 3 == 0 for i in range(len(document))] for document in DOCUMENTS]
    places = torch.tensor([flag for mask in masks for flag in mask]).nonzero().squeeze(1)
    labels = (7 * places) % 101
    built = Ragged.build(DOCUMENTS)
    batch = Ragged(built.tokens, built.positions, built.starts, built.lengths, places, places, 1.0, labels=labels)
    expected = alone.log_softmax(-1)[places, labels]
    assert_close(ours(batch=batch).log_probs, expected, atol=2e-5, rtol=1e-5)
    assert_close(ours(batch=batch, return_logits=True).logits, alone[places], atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("task", ["sequence", "tokens", "span"])
@pytest.mark.parametrize(("family", "config"), [("mpnet", MPNET), ("fnet", FNET), ("gpt_neo", DECODERS["gpt_neo"])])
def test_classifiers(task, family, config, tmp_path):
    door = {"sequence": "SequenceClassification", "tokens": "TokenClassification", "span": "QuestionAnswering"}[task]
    labels = 2 if task == "span" else 3
    theirs = written(tmp_path, family, config, f"AutoModelFor{door}", pad_token_id=1, num_labels=labels)
    ours = load_external(tmp_path, task)
    outs = [theirs(input_ids=torch.tensor([document])) for document in DOCUMENTS]
    if task == "span":
        expected = torch.cat([torch.stack([out.start_logits[0], out.end_logits[0]], -1) for out in outs])
    else:
        expected = torch.cat([out.logits if task == "sequence" else out.logits[0] for out in outs])
    assert_close(ours(batch=Ragged.build(DOCUMENTS)).logits, expected, atol=2e-5, rtol=1e-5)
    ids, mask = padded(DOCUMENTS, "left")
    scores = ours(ids, mask).logits
    assert_close(scores if task == "sequence" else scores[mask.bool()], expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_an_encoder_decoder(tmp_path):
    theirs = written(tmp_path, "pegasus", PEGASUS, "AutoModelForSeq2SeqLM", eos_token_id=2)
    ours = load_external(tmp_path)
    targets = [[0, 9, 8, 7, 6], [0, 5], [0], [0, 44, 43]]
    alone = [
        theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
        for source, target in zip(DOCUMENTS, targets, strict=True)
    ]
    for side in ("left", "right"):
        (ids, mask), (target_ids, target_mask) = padded(DOCUMENTS, side), padded(targets, side)
        logits = ours(ids, mask, decoder_input_ids=target_ids, decoder_attention_mask=target_mask).logits
        assert_close(logits[target_mask.bool()], torch.cat(alone), atol=2e-5, rtol=1e-5)
    batch = Seq2Seq(Ragged.build(DOCUMENTS), Ragged.build(targets))
    log_softmax = torch.cat([logits[:-1] for logits in alone]).log_softmax(-1)
    labels = torch.tensor([token for target in targets for token in target[1:]])
    expected = log_softmax.gather(-1, labels[:, None]).squeeze(-1)
    assert_close(ours(batch=batch).log_probs, expected, atol=2e-5, rtol=1e-5)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 2, "forced_eos_token_id": None}
    greedy = decode_responses(ours, DOCUMENTS, SamplingConfig(8, temperature=0.0), [2], start_token=0).token_ids
    found = beam_search(ours, DOCUMENTS, BeamConfig(4, max_new_tokens=8), [2], start_token=0).token_ids
    for row, source in enumerate(DOCUMENTS):
        ids = torch.tensor([source])
        assert greedy[row] == theirs.generate(input_ids=ids, num_beams=1, **options)[0].tolist()[1:]
        assert found[row] == theirs.generate(input_ids=ids, num_beams=4, **options)[0].tolist()[1:]


def test_damage_is_refused_by_name(tmp_path):
    written(tmp_path, "stablelm", DECODERS["stablelm"])
    weights, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(weights)
    victim = "model.layers.1.mlp.up_proj.weight"
    rest = {name: tensor for name, tensor in tensors.items() if name != victim}
    for damaged, problem in (
        (rest, f"tensor {victim} is missing"),
        ({**tensors, "model.surplus": torch.zeros(1)}, r"unexpected tensor model\.surplus"),
        ({**rest, victim: torch.zeros(3, 32)}, rf"{victim} has shape \(3, 32\), the config asks for \(48, 32\)"),
    ):
        save_file(damaged, weights, metadata={"format": "pt"})
        with pytest.raises(UserError, match=problem):
            load_external(tmp_path)
    save_file(tensors, weights, metadata={"format": "pt"})
    for changed, problem in (
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map asks to run Python code"),
        ({"model_type": "nobody"}, "neither in our tables nor in transformers'"),
        ({"model_type": "clip"}, "no language model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(UserError, match=problem):
            load_external(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match=r"weights only as pickle \(pytorch_model.bin\)"):
        load_external(tmp_path)


def test_other_refusals(tmp_path):
    written(tmp_path, "codegen", OLD)
    with pytest.raises(UserError, match="no ModelForSequenceClassification for 'codegen'"):
        load_external(tmp_path, "scalar", new_head=True)
    with pytest.raises(UserError, match="no head for 'next_sentence'"):
        load_external(tmp_path, "next_sentence")
    model = load_external(tmp_path)
    with pytest.raises(UserError, match="129 tokens"):
        model.new_cache(1, 129)
    written(tmp_path / "e", "mpnet", MPNET, "AutoModelForSequenceClassification", num_labels=1)
    with pytest.raises(UserError, match="gives no number per token"):
        load_external(tmp_path / "e", "scalar")
    written(tmp_path / "m", "mpnet", MPNET, "AutoModelForMaskedLM")
    with pytest.raises(UserError, match="needs layers that keep keys and values, and MPNetForMaskedLM"):
        attach(load_external(tmp_path / "m"), PrefixSpec())


def test_documents_of_like_length_share_a_padded():
    assert groups_with_little_padding([3, 3000, 5, 2900]) == [[1, 3], [2, 0]]  # 3 * 3000 - 5905 cells would be padding
    assert groups_with_little_padding([7, 7, 6]) == [[0, 1, 2]]

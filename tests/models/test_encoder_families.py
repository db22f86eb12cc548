"""Encoders: published files as they are, heads in and out of transformers. And what their configs mean."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.models.layers import NoNormSpec
from alignment.ragged import Ragged

from .tiny import SHAPE, TINY, written_by_transformers

CLASSES = {
    "language": "AutoModelForMaskedLM",
    "next_sentence": "AutoModelForPreTraining",
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}


def written(model_type: str, task: str, directory, **changes: Any) -> Any:
    return written_by_transformers({"model_type": model_type, **TINY[model_type], **changes}, directory, CLASSES[task])


def scores_of(output: Any) -> torch.Tensor:
    """What transformers' classes call by several names, [B, ...]."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits


@pytest.fixture
def ids() -> torch.Tensor:
    ids = torch.randint(5, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    ids[:, [7, 8, 23]] = 4  # separators of a question and its context
    return ids


@pytest.mark.parametrize("task", ["sequence", "tokens", "span"])
@pytest.mark.parametrize("model_type", sorted(TINY))
@torch.no_grad()
def test_a_pretrained_encoder_gets_a_new_head_that_transformers_opens(model_type, task, ids, tmp_path):
    import transformers

    written(model_type, "language", tmp_path / "pretrained")
    changes = {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}}  # of no use to a span
    model = load_pretrained(tmp_path / "pretrained", task, new_head=True, config=changes)
    assert model.head.output.weight.std() > 0
    save_model(model, tmp_path / "ours")
    again = getattr(transformers, CLASSES[task]).from_pretrained(tmp_path / "ours").eval()
    assert_close(scores_of(again(ids)), model(ids).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="is missing"):
        load_pretrained(tmp_path / "pretrained", task)


@pytest.mark.parametrize("model_type", ["bert", "albert", "big_bird"])
@torch.no_grad()
def test_both_pretraining_heads_are_kept_and_one_may_be_left_aside(model_type, ids, tmp_path):
    reference = written(model_type, "next_sentence", tmp_path)
    segments = torch.zeros_like(ids)
    segments[:, 12:] = 1
    theirs = reference(ids, token_type_ids=segments)
    both = load_pretrained(tmp_path, "next_sentence")(ids, None, segments)
    alone = load_pretrained(tmp_path, "language")(ids, None, segments)
    follows = theirs.sop_logits if model_type == "albert" else theirs.seq_relationship_logits
    assert_close(both.logits, theirs.prediction_logits, atol=1e-5, rtol=1e-5)
    assert_close(both.next_sentence_logits, follows, atol=1e-5, rtol=1e-5)
    assert_close(alone.logits, both.logits)
    assert alone.next_sentence_logits is None


@torch.no_grad()
def test_the_pooler_of_a_pretrained_encoder_stays_under_a_new_head(tmp_path):
    written("bert", "next_sentence", tmp_path)
    pooler = load_file(tmp_path / "model.safetensors")["bert.pooler.dense.weight"]
    model = load_pretrained(tmp_path, "sequence", new_head=True)
    assert torch.equal(model.head.transform.dense.weight, pooler)


@torch.no_grad()
def test_names_of_the_first_files_are_understood(ids, tmp_path):
    """LayerNorm's gamma and beta, buffers of places, the tied decoder and its bias written out once more."""
    written("bert", "next_sentence", tmp_path)
    expected = load_pretrained(tmp_path, "language")(ids).logits
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        "bert.embeddings.position_ids": torch.arange(64)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_pretrained(tmp_path, "language")(ids).logits, expected)
    load_pretrained(tmp_path, "tokens", new_head=True)


def test_a_copy_of_the_bias_that_differs_is_refused(tmp_path):
    written("bert", "language", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"cls\.predictions\.decoder\.bias differs"):
        load_pretrained(tmp_path, "language")


@torch.no_grad()
def test_an_encoder_saved_without_a_head_is_a_start_for_one(ids, tmp_path):
    written("bert", "next_sentence", tmp_path)
    with_head = load_pretrained(tmp_path, "tokens", new_head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("bert."): x for name, x in tensors.items() if name.startswith("bert.")}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_pretrained(tmp_path, "sequence", new_head=True)
    assert torch.equal(model.trunk(Ragged.build(ids.tolist())), with_head.trunk(Ragged.build(ids.tolist())))
    assert torch.equal(model.head.transform.dense.bias, tensors["bert.pooler.dense.bias"])


@torch.no_grad()
def test_what_debertas_files_carry_and_no_model_reads_is_left_out(ids, tmp_path):
    written("deberta-v2", "sequence", tmp_path)
    expected = load_pretrained(tmp_path, "sequence")(ids).logits
    tensors = load_file(tmp_path / "model.safetensors")
    surplus = {"deberta.embeddings.position_embeddings.weight": (64, 32), "mask_predictions.dense.weight": (32, 32)}
    tensors |= {name: torch.zeros(shape) for name, shape in surplus.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_pretrained(tmp_path, "sequence")(ids).logits, expected)


def test_absolute_places_that_the_config_asks_for_are_never_left_out(tmp_path):
    written("deberta-v2", "sequence", tmp_path, position_biased_input=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["deberta.embeddings.position_embeddings.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"position_embeddings\.weight is missing"):
        load_pretrained(tmp_path, "sequence")


def test_debertas_documents_may_be_longer_than_any_it_was_trained_on():
    document = Ragged.build([list(range(5, 61)) * 3])  # 168 tokens, max_position_embeddings is 64
    assert build_model({"model_type": "deberta-v2", **TINY["deberta-v2"]})(batch=document).log_probs.isfinite().all()
    absolute = build_model({"model_type": "deberta-v2", **TINY["deberta-v2"], "position_biased_input": True})
    with pytest.raises(UserError, match="does not fit the model's 64 positions"):
        absolute(batch=document)


def test_new_encoders_have_no_dropout_and_loaded_ones_their_own(tmp_path):
    assert build_model({"model_type": "bert", **SHAPE}).spec.blocks[0].dropout == 0
    written("bert", "language", tmp_path)
    spec = load_pretrained(tmp_path, "language").spec
    assert (spec.embedding_dropout, spec.blocks[0].dropout, spec.blocks[0].attention.dropout) == (0.1, 0.1, 0.1)


@torch.no_grad()
def test_an_untied_decoder_keeps_its_own_weight_and_bias(ids, tmp_path):
    import transformers

    reference = written("bert", "language", tmp_path / "theirs", tie_word_embeddings=False)
    model = load_pretrained(tmp_path / "theirs", "language")
    assert torch.equal(model.head.bias, reference.cls.predictions.decoder.bias)
    save_model(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is False
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(ids).logits, reference(ids).logits)


def spec_of(model_type: str, **changes: Any) -> Any:
    config = {"model_type": model_type, **TINY[model_type], **changes}
    return family_of(config).spec_from_config(config)


def test_alberts_layers_share_the_blocks_of_their_group():
    spec = spec_of("albert", num_hidden_layers=6, num_hidden_groups=2)
    assert (len(spec.blocks), spec.order) == (2, (0, 0, 0, 1, 1, 1))


def test_modernberts_local_layers_see_half_their_width_on_either_side():
    spec = spec_of("modernbert", num_hidden_layers=4)
    assert [block.attention.window for block in spec.blocks] == [None, 5, 5, None]  # |i - j| <= 4
    assert [block.attention.rotary.theta for block in spec.blocks] == [160_000, 10_000, 10_000, 160_000]
    assert [block.attention_norm for block in spec.blocks] == [NoNormSpec(), None, None, None]


def test_modernberts_thetas_are_read_in_both_spellings():
    new = {"full_attention": {"rope_theta": 9.0, "rope_type": "default"}, "sliding_attention": {"rope_theta": 7.0}}
    assert spec_of("modernbert", rope_parameters=new) == spec_of(
        "modernbert", global_rope_theta=9.0, local_rope_theta=7.0
    )

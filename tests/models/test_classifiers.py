"""Models that read: what is pooled, both call forms, padding on either side, dropout, new heads."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.classifiers import SequenceClassifier, pooled
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.huggingface.checkpoint import load_pretrained, load_scalar_model, save_model
from alignment.ragged import Ragged
from tests.examples import padded
from tests.models.conftest import roughen

BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
}  # fmt: skip
ROWS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]


def test_pooling_takes_the_first_the_last_or_the_mean():
    hidden = torch.arange(18.0).reshape(9, 2)  # documents are rows 0-4, 5 and 6-8
    batch = Ragged.build(ROWS)
    assert_close(pooled(hidden, batch, "first"), torch.tensor([[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]]))
    assert_close(pooled(hidden, batch, "last"), torch.tensor([[8.0, 9.0], [10.0, 11.0], [16.0, 17.0]]))
    assert_close(pooled(hidden, batch, "mean"), torch.tensor([[4.0, 5.0], [10.0, 11.0], [14.0, 15.0]]))


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["first token", "last token"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_classes_of_a_document_do_not_depend_on_the_call_or_on_padding(config, side):
    model = roughen(build_model({**config, "num_labels": 3}, "sequence"))
    scores = model(batch=Ragged.build(ROWS)).logits
    assert scores.shape == (3, 3)
    assert_close(model(*padded(ROWS, side)).logits, scores)
    alone = torch.cat([model(torch.tensor([row])).logits for row in ROWS])
    assert_close(scores, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("task", "columns"), [("tokens", 3), ("span", 2)])
@torch.no_grad()
def test_scores_of_tokens_lie_at_their_places_with_zeros_at_padding(task, columns):
    model = roughen(build_model({**BERT, "num_labels": 3}, task))
    scores = model(batch=Ragged.build(ROWS)).logits
    ids, mask = padded(ROWS, "left")
    rectangle = model(ids, mask).logits
    assert rectangle.shape == (3, 5, columns)
    assert_close(rectangle[mask.bool()], scores)
    assert not rectangle[~mask.bool()].any()


@torch.no_grad()
def test_the_second_sentence_of_a_pair_is_told_apart_by_its_segment():
    model = roughen(build_model(BERT, "sequence"))
    ids, segments = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1]])
    assert not torch.allclose(model(ids, None, segments).logits, model(ids).logits)
    assert_close(model(ids, None, torch.zeros_like(ids)).logits, model(ids).logits)


def test_a_classification_head_drops_in_training_only():
    head = ClassificationHeadSpec(4, bias=False, input_dropout=0.5).build(4)
    nn.init.eye_(head.output.weight)
    x = torch.ones(200, 4)
    assert_close(head.eval()(x), x)
    found = head.train()(x)  # kept values are doubled
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (found == 0).float().mean() < 0.6


def test_an_encoder_with_one_class_scores_texts_and_no_tokens(tmp_path):
    model = roughen(build_model(BERT, "scalar"))
    assert isinstance(model, SequenceClassifier)
    assert model(batch=Ragged.build(ROWS)).logits.shape == (3, 1)
    save_model(model, tmp_path)
    again = load_pretrained(tmp_path, "scalar")
    assert_close(again(batch=Ragged.build(ROWS)).logits, model(batch=Ragged.build(ROWS)).logits)
    with pytest.raises(UserError, match="number at every token"):
        load_scalar_model(tmp_path)


def test_a_classifier_of_several_classes_is_no_scalar_model(tmp_path):
    save_model(build_model({**BERT, "num_labels": 3}, "sequence"), tmp_path)
    with pytest.raises(UserError, match="names 3 labels"):
        load_pretrained(tmp_path, "scalar")


def test_a_task_the_family_has_not_is_refused():
    with pytest.raises(UserError, match="no head for 'next_sentence'"):
        build_model(GPT2, "next_sentence")

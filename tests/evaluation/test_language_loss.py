"""Held-out language-model loss, and log-probabilities of the two responses of held-out pairs."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import Sequence

from alignment import load_model, load_tokenizer
from alignment.data.batches import Example
from alignment.data.rows.records import Text
from alignment.errors import UserError
from alignment.evaluation import language_loss
from alignment.evaluation.language_loss import compare_pairs, loss_on_rows, pair_log_probs
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged


class Certain(torch.nn.Module):
    """Gives every target the probability 2 ** -(its token id)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.modes = []

    def forward(self, batch: Ragged) -> SimpleNamespace:
        self.modes.append(self.training)
        return SimpleNamespace(log_probs=-math.log(2) * batch.tokens[batch.target_index].float() + self.weight)


DOCUMENTS = [[0, 1, 1], [0, 4], [0, 2, 2, 2]]  # bits of the targets: 1 1, 4, 2 2 2; in all 12 over 6 tokens


@pytest.mark.parametrize("cut", [[DOCUMENTS], [DOCUMENTS[:1], DOCUMENTS[1:]], [[document] for document in DOCUMENTS]])
def test_every_token_counts_the_same_however_batches_are_cut(cut):
    result = language_loss(Certain(), [Ragged.build(documents) for documents in cut], text_bytes=24)
    assert result.tokens == 6
    assert result.loss == pytest.approx(2 * math.log(2))
    assert result.perplexity == pytest.approx(4.0)
    assert result.bits_per_byte == pytest.approx(12 / 24)


def test_model_is_in_evaluation_mode_meanwhile_and_gets_its_mode_back():
    model = Certain().train()
    result = language_loss(model, [Ragged.build(DOCUMENTS)])
    assert model.modes == [False] and model.training
    assert result.bits_per_byte is None


def test_a_loss_that_is_not_finite_is_no_figure(checkpoints):
    model = Certain()
    model.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        language_loss(model, [Ragged.build(DOCUMENTS)])
    broken = load_model(checkpoints["llama"])
    broken.trunk.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match=r"pair 7: .*not finite"):
        pair_log_probs(broken, [Example(([5, 6], [5, 7]), ([False, True], [False, True]), "pair 7")])


def test_text_without_anything_to_predict_is_refused():
    with pytest.raises(UserError, match="at least two tokens"):
        language_loss(Certain(), [Ragged.build([[3]])])


@pytest.mark.parametrize("bos", [True, False])
def test_bits_are_per_byte_of_what_is_predicted_and_cut_texts_are_counted(checkpoints, monkeypatch, capsys, bos):
    """Without BOS nothing predicts a text's first token, so that its bytes do not count either."""
    module, source = sys.modules[language_loss.__module__], checkpoints["llama"]
    tokenizer = load_tokenizer(source)
    if not bos:
        tokenizer.backend_tokenizer.post_processor = Sequence([])
    monkeypatch.setattr(module, "load_tokenizer", lambda source: tokenizer)
    texts = ["Hotel Oak: the bar serves tea.", "Grüße, " * 40]
    rows = [Text(text, str(number)) for number, text in enumerate(texts)]
    found = loss_on_rows(source, rows, 64, WeightsConfig())
    firsts = [tokenizer(text, add_special_tokens=False).tokens()[0] for text in texts]
    size = sum(len(text.encode()) for text in texts) - (0 if bos else sum(map(len, firsts)))
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / size / math.log(2))
    assert "cut 1: text longer than max_length: cut into successive pieces (1)" in capsys.readouterr().err


@torch.no_grad()
def test_a_response_counts_as_the_sum_over_its_tokens(checkpoints, monkeypatch):
    model = load_model(checkpoints["llama"])
    sides = [([5, 6], [7, 8, 9], [4]), ([3], [2], [9, 8, 7, 6, 5, 4]), ([1, 2], [3], [5])]
    pairs = [Example.answered(prompt, responses, "pair") for prompt, *responses in sides]
    module = sys.modules[pair_log_probs.__module__]
    monkeypatch.setattr(module, "TOKENS_PER_FORWARD", 9)  # several batches, out of the pairs' order
    found = pair_log_probs(model, pairs)
    for row, each in enumerate(pairs):
        for column, (ids, mask) in enumerate(zip(each.documents, each.masks, strict=True)):
            logits = model(torch.tensor([ids])).logits[0]
            own = [float(logits[i - 1].log_softmax(-1)[ids[i]]) for i, flag in enumerate(mask) if flag]
            assert float(found[row, column]) == pytest.approx(sum(own), abs=1e-5)
    with pytest.raises(UserError, match="comparisons: no pair is left"):
        pair_log_probs(model, [])


def test_changes_margin_and_accuracy_of_three_pairs_worked_by_hand():
    reference = torch.tensor([[-10.0, -10.0], [-20.0, -12.0], [-5.0, -7.0]])
    policy = torch.tensor([[-9.0, -13.0], [-23.0, -14.0], [-6.0, -8.0]])
    # changes of the chosen: 1, -3, -1; of the rejected: -3, -2, -1; margins: 4, -1, 0
    found = compare_pairs(policy, reference)
    assert found == pytest.approx({
        "chosen_log_prob": -38 / 3, "rejected_log_prob": -35 / 3, "chosen_log_prob_change": -1,
        "rejected_log_prob_change": -2, "margin": 1, "accuracy": 0.5,  # one right, one wrong, one tie
    })  # fmt: skip

"""Held-out language-model loss."""

import math
from types import SimpleNamespace

import pytest
import torch

from alignment.errors import UserError
from alignment.evaluation import language_loss
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


def test_text_without_anything_to_predict_is_refused():
    with pytest.raises(UserError, match="at least two tokens"):
        language_loss(Certain(), [Ragged.build([[3]])])

"""Log-probabilities of held-out pairs: sums over responses, in the pairs' order, compared between two models."""

import pytest
import torch

from alignment.data.examples import Example
from alignment.errors import UserError
from alignment.evaluation import pair_log_probs as module
from alignment.evaluation.pair_log_probs import compare_pairs, pair_log_probs
from alignment.loading import load_model
from tests.examples import pair_example, sides


def pair(prompt: list[int], chosen: list[int], rejected: list[int], name: str) -> Example:
    sides = [
        Example.single(prompt + ids, [False] * len(prompt) + [True] * len(ids), name) for ids in (chosen, rejected)
    ]
    return pair_example(*sides, None, name)


@torch.no_grad()
def test_a_response_counts_as_the_sum_over_its_tokens_whatever_it_is_batched_with(checkpoints, monkeypatch):
    model = load_model(checkpoints["llama"])
    pairs = [pair([5, 6], [7, 8, 9], [4], "a"), pair([3], [2], [9, 8, 7, 6, 5, 4], "b"), pair([1, 2], [3], [5], "c")]
    monkeypatch.setattr(module, "TOKENS_PER_FORWARD", 9)  # several batches, out of the pairs' order
    found = pair_log_probs(model, pairs)
    for row, each in enumerate(pairs):
        for column, side in enumerate((sides(each)[0], sides(each)[1])):
            logits = model(torch.tensor([side.ids])).logits[0]
            own = [float(logits[i - 1].log_softmax(-1)[side.ids[i]]) for i, flag in enumerate(side.mask) if flag]
            assert float(found[row, column]) == pytest.approx(sum(own), abs=1e-5)
    with pytest.raises(UserError, match="comparisons: no pair is left"):
        pair_log_probs(model, [])


def test_changes_margin_and_accuracy_of_three_pairs_worked_by_hand():
    reference = torch.tensor([[-10.0, -10.0], [-20.0, -12.0], [-5.0, -7.0]])
    policy = torch.tensor([[-9.0, -13.0], [-23.0, -14.0], [-6.0, -8.0]])
    # changes of the chosen: 1, -3, -1; of the rejected: -3, -2, -1; margins: 4, -1, 0
    found = compare_pairs(policy, reference)
    assert (found.chosen_log_prob_change, found.rejected_log_prob_change, found.margin) == (-1, -2, 1)
    assert found.accuracy == pytest.approx(0.5)  # one right, one wrong, one tie
    assert found.chosen_log_prob == pytest.approx(-38 / 3) and found.rejected_log_prob == pytest.approx(-35 / 3)

"""How likely a model finds the two responses of held-out comparisons, and how that changed since a reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.data.examples import Example
from alignment.errors import UserError
from alignment.models.protocols import GenerativeModel
from alignment.ragged import Ragged, group_by_length

TOKENS_PER_FORWARD = 16_384


@dataclass(frozen=True)
class PairLogProbs:
    """Means over held-out comparisons; they compare policies whatever losses they were trained with.

    Attributes:
        chosen_log_prob: of the whole chosen response, nats.
        rejected_log_prob: of the whole rejected response, nats.
        chosen_log_prob_change: the policy's minus the reference's, nats; below 0 the chosen responses were displaced.
        rejected_log_prob_change: likewise of the rejected response.
        margin: change of the chosen minus change of the rejected response, nats.
        accuracy: share of pairs with a margin above 0, half of those with 0.
    """

    chosen_log_prob: float
    rejected_log_prob: float
    chosen_log_prob_change: float
    rejected_log_prob_change: float
    margin: float
    accuracy: float


@torch.no_grad()
def pair_log_probs(model: GenerativeModel, pairs: Sequence[Example]) -> Tensor:
    """Log-probabilities of chosen and rejected responses, the sum over a response's tokens, nats, [n, 2] float64 on the CPU.

    Args:
        model: in evaluation mode; called as `model(batch=ragged)`, whose `.log_probs` [M] are those of the targets.
        pairs: n comparisons in the model's tokens.

    Raises:
        UserError: there is no pair.
    """
    if not pairs:
        raise UserError("comparisons: no pair is left to measure")
    device = next(model.parameters()).device
    found = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for column in (0, 1):
        for group in group_by_length([len(pair.documents[column]) for pair in pairs], TOKENS_PER_FORWARD):
            batch = Ragged.build([pairs[i].documents[column] for i in group], [pairs[i].masks[column] for i in group])
            log_probs = model(batch=batch.to(device)).log_probs.double().cpu()
            found[:, column].index_add_(0, torch.tensor(group)[batch.target_rows], log_probs)
    return found


def compare_pairs(policy: Tensor, reference: Tensor) -> PairLogProbs:
    """The means of two models' log-probabilities on the same pairs.

    Args:
        policy, reference: as from `pair_log_probs`, [n, 2].
    """
    change = policy - reference
    margin = change[:, 0] - change[:, 1]
    right = (margin > 0).double() + (margin == 0).double() / 2
    return PairLogProbs(
        chosen_log_prob=float(policy[:, 0].mean()),
        rejected_log_prob=float(policy[:, 1].mean()),
        chosen_log_prob_change=float(change[:, 0].mean()),
        rejected_log_prob_change=float(change[:, 1].mean()),
        margin=float(margin.mean()),
        accuracy=float(right.mean()),
    )

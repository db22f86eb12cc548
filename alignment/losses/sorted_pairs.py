"""Losses that compare two distributions of rewards over a batch, smallest with smallest and largest with largest (AOT).

Both take the same four log-probabilities as `dpo_loss` and give the unreduced cost, [B]; beta is > 0, and eps, the
parameter `label_smoothing`, in [0, 0.5). The cost of one row depends on the order of the whole batch. For batches computed
in parts, `values_of_all` hands in what the parts' rows are sorted among, without gradient, and `positions` which of them these
rows are; the result is then that of the batch in one piece.
"""

import torch
from torch import Tensor

from alignment.losses.preference import smoothed_loss


def aot_paired_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    values_of_all: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cost of a policy whose margins do not dominate the reference's, quantile by quantile, [B].

    m     = policy_chosen - policy_rejected,  m_ref = reference_chosen - reference_rejected
    lead  = beta * (k-th smallest m - k-th smallest m_ref)
    cost  = (1 - eps) * softplus(-lead) + eps * softplus(lead)

    Args:
        values_of_all: m and m_ref of the whole batch, without gradient, [n] each; None: these pairs are the batch.
        positions: of these pairs in the whole batch, [B]; given with `values_of_all`.

    Returns:
        Each cost at the place of the pair whose m is the k-th smallest.

    Source: Melnyk et al. 2024, arXiv:2406.05882 ("AOT paired").
    """
    policy, reference = policy_chosen - policy_rejected, reference_chosen - reference_rejected
    all_policy, all_reference = values_of_all or (policy.detach(), reference)
    others, shares = partners(_positions_of(policy, values_of_all, positions), all_policy, all_reference)
    return (shares * smoothed_loss(beta * (policy - others), beta, label_smoothing)).sum(0)


def aot_unpaired_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    values_of_all: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cost of chosen responses' log-ratios that do not dominate the rejected ones', quantile by quantile, [B].

    That two responses share a row says nothing here.

    lead = beta * (k-th smallest log-ratio of chosen - k-th smallest log-ratio of rejected)
    cost = (1 - eps) * softplus(-lead) + eps * softplus(lead)

    Args:
        values_of_all: log-ratios of the chosen and of the rejected responses of the whole batch, without gradient, [n]
            each; None: these pairs are the batch.
        positions: of these pairs in the whole batch, [B]; given with `values_of_all`.

    Returns:
        Each cost at the place of the chosen response of the k-th smallest log-ratio. The rejected response's
        gradient is that of the sum over the batch.

    Source: Melnyk et al. 2024, arXiv:2406.05882 ("AOT unpaired").
    """
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    all_chosen, all_rejected = values_of_all or (chosen.detach(), rejected.detach())
    positions = _positions_of(chosen, values_of_all, positions)
    others, shares = partners(positions, all_chosen, all_rejected)
    of_chosen = (shares * smoothed_loss(beta * (chosen - others), beta, label_smoothing)).sum(0)
    others, shares = partners(positions, all_rejected, all_chosen)
    of_rejected = (shares * smoothed_loss(beta * (others - rejected), beta, label_smoothing)).sum(0)
    return of_chosen + of_rejected - of_rejected.detach()  # the same sum twice, for the other side's gradient


def partners(positions: Tensor, among: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For some values of `among`, each the k-th smallest of them, the k-th smallest of `others`; without gradient.

    Values that are equal, of which T is the largest number, have the others of all their ranks, in equal shares.

    Args:
        positions: of the values in `among`, [B]. Values that are computed again differ in their last bits, and would not be
            found by what they are.
        among: all values of their kind, [n].
        others: [n].

    Returns:
        The others and their shares, which add up to 1, [T, B] each.
    """
    ordered, theirs, values = among.detach().sort().values, others.detach().sort().values, among.detach()[positions]
    first = torch.searchsorted(ordered, values).clamp(max=len(theirs) - 1)
    number = (torch.searchsorted(ordered, values, right=True) - first).clamp(min=1)
    step = torch.arange(int(number.max()), device=values.device)[:, None]
    return theirs[(first + step).clamp(max=len(theirs) - 1)], (step < number) / number


def _positions_of(values: Tensor, values_of_all: tuple[Tensor, Tensor] | None, positions: Tensor | None) -> Tensor:
    if (values_of_all is None) != (positions is None):
        raise ValueError("values_of_all and positions go together: they say which of all pairs these are")
    return torch.arange(len(values), device=values.device) if positions is None else positions

"""The training loop that all systems of this recipe share, and learning rates over the steps."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Schedule = Callable[[float], float]  # share of the steps that are done, in [0, 1) -> share of the highest learning rate


def warm_then_linear(done: float, warm: float = 0.1) -> float:
    """Linear warm-up for a tenth of the steps, then linear to 0."""
    return min(done / warm, (1 - done) / (1 - warm)) if done > 0 else 0.01


def descend(
    loss_of: Callable[[int], Tensor],
    groups: Iterable[dict],
    steps: int,
    *,
    learning_rate: float,
    schedule: Schedule = warm_then_linear,
) -> float:
    """Take `steps` steps of Adam down `loss_of(step)` and return the mean loss of the last tenth.

    Args:
        groups: parameter groups as of torch.optim; those without an `lr` have `learning_rate`.
    """
    optimizer = torch.optim.Adam(groups, lr=learning_rate, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step / steps))
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    last = losses[-math.ceil(steps / 10) :]
    return sum(last) / len(last)


def parameter_count(model: nn.Module) -> int:
    """Numbers that are trained, shared ones once."""
    return sum(each.numel() for each in model.parameters())

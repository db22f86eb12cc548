"""Bytes of an optimizer's state for a network, from its shapes."""

from torch import nn

from alignment.training import OptimConfig
from alignment.training.optimizers import hidden_matrices, optimizer_bytes


def state_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Bytes of the state after every trained weight was updated once, without sharding."""
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters() if x.requires_grad}
    hidden = hidden_matrices(model) if config.name == "muon" else {}
    return optimizer_bytes(shapes, config, hidden=hidden)

"""Weights and optimizer state as safetensors, keyed by parameter name. No pickle.

Frozen parameters are left out: a run that trains an adapter loads its base model from the original checkpoint.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.training.optimizers import restore_state, saved_state

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def kept_names(model: nn.Module) -> list[str]:
    """Names of the tensors that training changes: trainable parameters (a tied one once) and saved buffers."""
    saved = set(model.state_dict())
    parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return parameters + [name for name, _ in model.named_buffers() if name in saved]


def save_weights(model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
    """Write the tensors of a full state dict that training changes.

    Raises:
        FloatingPointError: a tensor has a value that is not finite; such weights are never saved.
    """
    kept = {name: state[name].contiguous() for name in kept_names(model)}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FloatingPointError(f"{name} holds values that are not finite; the checkpoint is not written")
    save_file(kept, directory / WEIGHTS)


def read_weights(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """The tensors written by `save_weights`, checked against the model's names and shapes.

    Raises:
        UserError: file, tensors or shapes do not fit; all problems are listed.
    """
    return read_state_tensors(directory / WEIGHTS, kept_names(model))


def load_weights(model: nn.Module, directory: Path) -> None:
    """Load the tensors written by `save_weights` into the model.

    Raises:
        UserError: file, tensors or shapes do not fit; all problems are listed.
    """
    state = read_weights(model, directory)
    expected = model.state_dict()
    raise_all(
        f"{directory / WEIGHTS}: {name} has shape {list(tensor.shape)}, the model has {list(expected[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != expected[name].shape
    )
    with torch.no_grad():
        for name, tensor in state.items():
            expected[name].copy_(tensor)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state with keys such as `name/exp_avg`; a parameter that was never updated has no entry."""
    return {
        f"{name}/{key}": value.cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, value in saved_state(optimizer, parameter).items()
    }


def save_optimizer(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write what `optimizer_tensors` returned."""
    save_file(tensors, directory / OPTIMIZER)


def read_optimizer(model: nn.Module, directory: Path) -> dict[str, dict[str, Tensor]]:
    """The state of each trainable parameter by its name.

    Raises:
        UserError: the file is missing, or names parameters that are not trainable in this model.
    """
    path = directory / OPTIMIZER
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_state_tensors(path).items():
        name, entry = key.rsplit("/", 1)
        state.setdefault(name, {})[entry] = tensor
    raise_all(f"{path}: {name} is not a trainable parameter of this model" for name in sorted(set(state) - trainable))
    return state


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Load the state written by `save_optimizer` by name: the order of parameters does not matter.

    Raises:
        UserError: the file is missing or does not fit.
    """
    state = read_optimizer(model, directory)
    for name, parameter in model.named_parameters():
        if name in state:
            restore_state(optimizer, parameter, state[name], lambda tensor, to=parameter.device: tensor.to(to))


def read_state_tensors(path: Path, expected: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, which must be exactly the expected ones if those are given.

    Raises:
        UserError: the file is missing, or tensors are missing or unexpected; all of them are named.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is missing, so the run cannot resume from this checkpoint; delete the checkpoint to start from the beginning"
        )
    tensors = load_file(path)
    if expected is not None:
        problems = [f"{path}: {name} is missing" for name in expected if name not in tensors]
        names = set(expected)
        raise_all(problems + [f"{path}: {name} is no tensor of the model" for name in tensors if name not in names])
    return tensors

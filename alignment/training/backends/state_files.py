"""A model's weights and its optimizer's state as safetensors, keyed by parameter name. No pickle; no rotation here.

Frozen parameters are left out: a run that trains an adapter rebuilds its base model from where it came.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def kept_names(model: nn.Module) -> list[str]:
    """Names of what training changes: trainable parameters (a shared one once) and saved buffers."""
    saved = set(model.state_dict())
    parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return parameters + [name for name, _ in model.named_buffers() if name in saved]


def save_weights(model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
    """Write the trained part of a full state dict.

    Raises:
        FloatingPointError: a tensor holds a value that is not finite; such weights are never saved.
    """
    kept = {name: state[name].contiguous() for name in kept_names(model)}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FloatingPointError(f"{name} holds values that are not finite; the checkpoint is not written")
    save_file(kept, directory / WEIGHTS)


def read_weights(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """The tensors written by `save_weights`, checked against the model's names and shapes.

    Raises:
        UserError: file, tensor or shape does not fit, all at once.
    """
    return read_tensors(directory / WEIGHTS, dict.fromkeys(kept_names(model)))


def load_weights(model: nn.Module, directory: Path) -> None:
    """Put the tensors written by `save_weights` into the model.

    Raises:
        UserError: file, tensor or shape does not fit.
    """
    state = read_weights(model, directory)
    here = model.state_dict()
    raise_all(
        f"{directory / WEIGHTS}: {name} has shape {list(tensor.shape)}, the model wants {list(here[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != here[name].shape
    )
    with torch.no_grad():
        for name, tensor in state.items():
            here[name].copy_(tensor)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as `name/exp_avg` and so on; a parameter that was never updated has no entry."""
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_optimizer(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write what `optimizer_tensors` gave."""
    save_file(tensors, directory / OPTIMIZER)


def read_optimizer(model: nn.Module, directory: Path) -> dict[str, dict[str, Tensor]]:
    """State by parameter name, of parameters that the model trains.

    Raises:
        UserError: the file is missing or speaks of parameters that the model does not train.
    """
    path = directory / OPTIMIZER
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(path).items():
        name, entry = key.rsplit("/", 1)
        state.setdefault(name, {})[entry] = tensor
    raise_all(f"{path}: {name} is not a trainable parameter of this model" for name in sorted(set(state) - trainable))
    return state


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Put back the state written by `save_optimizer`, by name: the order of parameters does not matter.

    Raises:
        UserError: the file is missing or does not fit.
    """
    state = read_optimizer(model, directory)
    for name, parameter in model.named_parameters():
        if name in state:
            optimizer.state[parameter] = {
                key: tensor.to(parameter.device, torch.float32) for key, tensor in state[name].items()
            }


def read_tensors(path: Path, wanted: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """A safetensors file; with `wanted`, exactly these names.

    Raises:
        UserError: missing file, or missing and surplus tensors, all at once.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is missing, so the run cannot go on from this checkpoint; delete the checkpoint to start afresh"
        )
    tensors = load_file(path)
    if wanted is not None:
        problems = [f"{path}: {name} is missing" for name in wanted if name not in tensors]
        raise_all(problems + [f"{path}: {name} is not wanted by the model" for name in tensors if name not in wanted])
    return tensors

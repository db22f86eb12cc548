"""Parameters that have not been read: each knows which part of which file's tensor it is.

A model is built of them where every process is to read its own slices only. Such a parameter has its shape and type, takes
no memory, and holds nothing but NaN: it is one number, expanded. A new adapter is therefore attached as to any model, and a
write to it is an error. Reading is left to whoever shards the model, who finds `parameter.stored`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.huggingface.weight_map import HFLocation, cut
from alignment.models.safetensors_files import StoredTensor

COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # types that a model can compute in


class StoredParameter(NamedTuple):
    """The place of one of our parameters in a file.

    Attributes:
        tensor: the file's tensor.
        location: the part of it that is our parameter.
        dtype: type that the parameter has in the model.
    """

    tensor: StoredTensor
    location: HFLocation
    dtype: torch.dtype

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of the parameter, in the file's type; to be copied from and not written to."""
        return cut(self.tensor.read(), self.location, start, stop)

    def read(self, device: str | torch.device = "cpu") -> Tensor:
        """The whole parameter."""
        part = self.rows()
        return torch.empty(part.shape, dtype=self.dtype, device=device).copy_(part)


def stored_parameter(tensor: StoredTensor, location: HFLocation, dtype: torch.dtype | None) -> StoredParameter:
    """The place of a parameter; `dtype` None keeps the file's type.

    Raises:
        UserError: the file's type is to be kept and is none that a model can compute in.
    """
    if dtype is None and tensor.dtype not in COMPUTED:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{tensor.path}: tensor {tensor.name} is {kind}, which no model computes in; name another type")
    return StoredParameter(tensor, location, dtype or tensor.dtype)


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape that takes no memory; all of it is NaN, and it cannot be written to."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype).expand(shape)


def source_of(parameter: nn.Parameter) -> StoredParameter | None:
    """Where an unread parameter's data lies; None for any other parameter."""
    return getattr(parameter, "stored", None)


def read_parameters(model: nn.Module) -> nn.Module:
    """Read what is unread of a model, in place, and return the model."""
    for parameter in model.parameters():
        stored = source_of(parameter)
        if stored is not None:
            parameter.data = stored.read().to(parameter.dtype)
            del parameter.stored  # type: ignore[attr-defined]
    return model

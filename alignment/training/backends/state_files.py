"""Weights and optimizer state as safetensors, keyed by parameter name. No pickle.

    model.safetensors       the tensors that training changes, of one process or of replicas
    model-shards/           of a sharded model: a file per rank, written and read by torch's distributed checkpoint
    optimizer.safetensors   the optimizer's state; of a sharded model in optimizer-shards/
Any number of processes can read what any other number wrote. Frozen parameters are left out: a run that trains an
adapter loads its base model from the original checkpoint.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# kinds of files
WEIGHTS = "model"
OPTIMIZER = "optimizer"


class Stored(NamedTuple):
    """Shape and type of a tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor; its class takes time to import."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; a tensor that is not sharded itself."""
    return cast("DTensor", tensor).to_local() if is_sharded(tensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """First row, and the one after the last, of what this rank holds of a tensor; all of them unless it is sharded."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, rows
    mesh = cast("DTensor", tensor).device_mesh
    for dimension, placement in enumerate(cast("DTensor", tensor).placements):
        if placement.is_shard():
            size = mesh.size(dimension)
            rank = mesh.get_local_rank(dimension)
            chunk = -(-rows // size)
            return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)
    return 0, rows


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: trainable parameters (a tied one once) and saved buffers."""
    state = model.state_dict()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: state[name] for name in [*names, *(name for name, _ in model.named_buffers() if name in state)]}


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors of which this rank holds a value that is not finite."""
    return [name for name, x in tensors.items() if x.is_floating_point() and not local_tensor(x).isfinite().all()]


def write(kind: str, tensors: Mapping[str, Tensor], directory: Path, *, rank: int) -> None:
    """Write tensors as the files of one kind; a collective operation where some of them are sharded."""
    if not any(is_sharded(tensor) for tensor in tensors.values()):
        if rank == 0:
            write_file(tensors, directory / f"{kind}.safetensors")
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(directory / f"{kind}-shards"), save_distributed=True)
    with _plain_errors():
        save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)


def write_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write whole tensors as one file."""
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path, metadata=metadata)


def saved_tensors(kind: str, directory: Path) -> dict[str, Stored]:
    """Shapes and types of the tensors of one kind, by name."""
    whole = directory / f"{kind}.safetensors"
    shards = directory / f"{kind}-shards"
    if not whole.is_file() and not shards.is_dir():
        raise UserError(
            f"{whole} is missing, so the run cannot resume from this checkpoint; resume with the launch configuration "
            "that saved it, or delete the checkpoint to start from the beginning"
        )
    try:
        if whole.is_file():
            with safe_open(whole, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {name: Stored(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        metadata: Mapping[str, Any] = _reader(shards).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{whole if whole.is_file() else shards}: not a readable checkpoint ({error})") from error
    problems = []
    for name, entry in metadata.items():
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            problems.append(f"{shards}: parts of {name} are missing; put the file of every rank back")
    raise_all(problems)
    return {name: Stored(entry.size, entry.properties.dtype) for name, entry in metadata.items()}


def read_into(kind: str, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill tensors, or this rank's shards of them, from the files of one kind; a collective operation."""
    stored = saved_tensors(kind, directory)
    problems = [f"{directory}: {name} is missing" for name in tensors if name not in stored]
    problems += [f"{directory}: {name} is no tensor of the model" for name in stored if name not in tensors]
    problems += [
        f"{directory}: {name} has shape {list(stored[name].shape)}, the model has {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    raise_all(problems)
    whole = directory / f"{kind}.safetensors"
    if whole.is_file():
        with safe_open(whole, framework="pt") as file, torch.no_grad():
            for name, tensor in tensors.items():
                start, stop = local_rows(tensor)
                rows = file.get_slice(name)[start:stop] if tensor.ndim else file.get_tensor(name)
                local_tensor(tensor).copy_(rows)
    elif tensors:
        from torch.distributed.checkpoint.state_dict_loader import load

        with _plain_errors():
            load(
                {name: x.detach() for name, x in tensors.items()}, storage_reader=_reader(directory / f"{kind}-shards")
            )


def _reader(directory: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(directory))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Let an error of some rank's files be raised itself, where torch wraps all of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error

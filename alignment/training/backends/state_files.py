"""Weights and optimizer state as safetensors, keyed by parameter name. No pickle.

    model.safetensors            the tensors that training changes, of one process or of replicas
    model-rank-00003.safetensors those rows of them that rank 3 holds, where the model is sharded
    optimizer.safetensors        the optimizer's state; of rank 3 likewise
A file with rows of tensors says in its header, under `rows`, which ones: {name: [first row, rows of the whole tensor]}. Any
number of processes can read what any other number wrote. Frozen parameters are left out: a run that trains an adapter loads
its base model from the original checkpoint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.files import sync
from alignment.training.optimizers import saved_state

WEIGHTS, OPTIMIZER = "model", "optimizer"  # kinds of files


class Rows(NamedTuple):
    """Some rows of a tensor, from its first axis.

    Attributes:
        values: the rows.
        start: index of the first.
        whole: rows of the whole tensor.
    """

    values: Tensor
    start: int
    whole: int


class Part(NamedTuple):
    """A tensor in a file that holds rows of a tensor: the file, the first row and the one after the last."""

    path: Path
    start: int
    stop: int


def kept_names(model: nn.Module) -> list[str]:
    """Names of the tensors that training changes: trainable parameters (a tied one once) and saved buffers."""
    saved = set(model.state_dict())
    parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return parameters + [name for name, _ in model.named_buffers() if name in saved]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state with keys such as `name/exp_avg`; a parameter that was never updated has no entry."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, value in saved_state(optimizer, parameter).items()
    }


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a value that is not finite."""
    return [name for name, x in tensors.items() if x.is_floating_point() and not torch.isfinite(x).all()]


def refuse_not_finite(names: Sequence[str]) -> None:
    """Refuse to save tensors with values that are not finite.

    Raises:
        FloatingPointError: there are such names.
    """
    if names:
        raise FloatingPointError(f"{names[0]} holds values that are not finite; the checkpoint is not written")


def write_whole(kind: str, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write whole tensors as the file of one process."""
    save_file(_on_cpu(tensors), directory / f"{kind}.safetensors")


def whole_trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters of a model whose weights are whole, by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def fill_whole(kind: str, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill whole tensors from the files of one kind.

    Raises:
        UserError: a file or tensor is missing or does not fit.
    """
    files = StateFiles(kind, directory)
    files.check({name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        tensor.copy_(files.rows(name))


def write_rows(kind: str, rows: Mapping[str, Rows], rank: int, directory: Path) -> None:
    """Write the rows that one rank holds; whole tensors among them have start 0 and all their rows."""
    ranges = {name: [part.start, part.whole] for name, part in rows.items() if part.values.numel()}
    tensors = {name: rows[name].values for name in ranges}
    path = directory / f"{kind}-rank-{rank:05d}.safetensors"
    save_file(_on_cpu(tensors), path, metadata={"rows": json.dumps(ranges)})
    sync(path)  # rank 0, which syncs all files, may run on another machine


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


class StateFiles:
    """The tensors of one kind in a checkpoint, whichever number of processes wrote them.

    Attributes:
        directory: the checkpoint's.
        shapes: the shape of each whole tensor, by name.
    """

    def __init__(self, kind: str, directory: Path):
        """Read the headers.

        Raises:
            UserError: there is no file, one cannot be read, or rows of a tensor are missing.
        """
        self.directory = directory
        whole = directory / f"{kind}.safetensors"
        files = [whole] if whole.is_file() else sorted(directory.glob(f"{kind}-rank-*.safetensors"))
        if not files:
            raise UserError(
                f"{whole} is missing, so the run cannot resume from this checkpoint; delete the checkpoint to start from the "
                "beginning"
            )
        self.shapes: dict[str, torch.Size] = {}
        self._parts: dict[str, list[Part]] = {}
        for path in files:
            self._read_header(path)
        raise_all(self._gaps())

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, all of them by default, in the type they were saved in."""
        shape = self.shapes[name]
        stop = (shape[0] if shape else 1) if stop is None else stop
        pieces = [
            _read(part.path, name)[max(start - part.start, 0) : stop - part.start] if shape else _read(part.path, name)
            for part in self._parts[name]
            if max(start, part.start) < min(stop, part.stop) or not shape
        ]
        if not pieces:
            return _read(self._parts[name][0].path, name)[:0].clone()
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def check(self, expected: Mapping[str, torch.Size]) -> None:
        """Check that the files hold exactly these tensors, in these shapes.

        Raises:
            UserError: all problems.
        """
        where, shapes = self.directory, self.shapes
        problems = [f"{where}: {name} is missing" for name in expected if name not in shapes]
        problems += [f"{where}: {name} is no tensor of the model" for name in shapes if name not in expected]
        problems += [
            f"{where}: {name} has shape {list(shapes[name])}, the model has {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ]
        raise_all(problems)

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                ranges = json.loads((file.metadata() or {}).get("rows", "{}"))
                for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                    shape = file.get_tensor(name).shape
                    rows = shape[0] if shape else 1
                    start, whole = ranges.get(name, (0, rows))
                    self.shapes[name] = torch.Size([whole, *shape[1:]]) if shape else shape
                    self._parts.setdefault(name, []).append(Part(path, start, start + rows))
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: not a readable checkpoint file ({error})") from error

    def _gaps(self) -> Iterator[str]:
        """A sentence for each tensor whose rows are not all there, each once."""
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part.start)
            shape = self.shapes[name]
            ends = [part.stop for part in parts]
            if [part.start for part in parts] != [0, *ends[:-1]] or ends[-1] != (shape[0] if shape else 1):
                yield f"{self.directory}: rows of {name} are missing, or there twice; put the file of every rank back"


def optimizer_names(files: StateFiles, model: nn.Module) -> dict[str, list[str]]:
    """The entries of the saved state of each trainable parameter, by the parameter's name.

    Raises:
        UserError: the files name parameters that are not trainable in this model.
    """
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    entries: dict[str, list[str]] = {}
    for key in files.shapes:
        name, entry = key.rsplit("/", 1)
        entries.setdefault(name, []).append(entry)
    raise_all(
        f"{files.directory}: {name} is not a trainable parameter of this model"
        for name in sorted(entries.keys() - trainable)
    )
    return entries


def _read(path: Path, name: str) -> Tensor:
    """A tensor mapped from its file."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)

"""Checkpoints under DeepSpeed's ZeRO in the files of state_files.py: float32 weights and optimizer state by name.

ZeRO keeps flat vectors of many parameters, cut into equal parts by rank. Here they become whole tensors again, one at a
time, each on the rank that writes it, so that a rank holds its share of the tensors in memory. They are read back element
by element: the number of ranks, the stage of ZeRO and the backend may have changed in between. The state of 8-bit
optimizers is saved as ZeRO's vectors, for the same number of ranks: its blocks of 256 elements may span two parameters.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.training.backends import state_files
from alignment.training.backends.state_files import OPTIMIZER, WEIGHTS, Rows, StateFiles
from alignment.training.backends.zero_loading import elements
from alignment.training.distributed import ProcessGroup
from alignment.training.optimizers import restore_state, saved_state

STEP = "step"  # the entry of the optimizer's state that is one number for all elements
VECTORS = "vectors"  # first part of the names of a state that is saved as ZeRO's vectors: vectors/RANK/NUMBER/ENTRY


class Fragment(NamedTuple):
    """The elements of one parameter whose float32 weights and optimizer state lie on this rank.

    Attributes:
        master: vector of the float32 weights of several parameters; its key in the optimizer's state.
        position: of the first element in `master`.
        first: index of that element in the flattened parameter.
        size: number of elements.
    """

    master: Tensor
    position: int
    first: int
    size: int

    def of(self, vector: Tensor) -> Tensor:
        """The elements in a vector that is laid out like `master`."""
        return vector.detach().narrow(0, self.position, self.size)


class ZeroState:
    """Float32 weights and optimizer state of the trainable parameters of a DeepSpeed engine.

    Attributes:
        trainable: the parameters by name.
        fragments: what lies on this rank of each; None where nothing does.
    """

    def __init__(self, model: nn.Module, zero: object, process_group: ProcessGroup):
        """Find the fragments.

        Args:
            model: as it was given to DeepSpeed.
            zero: the engine's optimizer, of any stage of ZeRO.
            process_group: the engine's.
        """
        self.model, self.process_group = model, process_group
        self.zero: Any = zero
        self.trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        find = self._fragment_of_vector if hasattr(zero, "grad_position") else self._fragment_of_group
        self.fragments = {name: find(parameter) for name, parameter in self.trainable.items()}

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state, each tensor by one rank; a collective operation.

        Raises:
            FloatingPointError: a weight is not finite.
        """
        rank, group = self.process_group.rank, self.process_group
        weights = dict(self._whole(None)) | (self._buffers() if group.is_main else {})
        bad = group.gather_objects(state_files.not_finite(weights))
        state_files.refuse_not_finite([name for names in bad for name in names])
        state_files.write_rows(WEIGHTS, _as_rows(weights), rank, directory)
        del weights
        state_files.write_rows(OPTIMIZER, _as_rows(self._optimizer_tensors()), rank, directory)

    def load(self, directory: Path) -> None:
        """Read this rank's elements of what `save`, or another backend, wrote.

        Raises:
            UserError: files or tensors are missing or do not fit.
        """
        weights, optimizer = StateFiles(WEIGHTS, directory), StateFiles(OPTIMIZER, directory)
        buffers = self._buffers()
        shapes = {name: shape_of(parameter) for name, parameter in self.trainable.items()}
        weights.check(shapes | {name: buffer.shape for name, buffer in buffers.items()})
        for name, buffer in buffers.items():
            buffer.copy_(weights.rows(name))
        with torch.no_grad():
            for name in self.trainable:
                self._load_weights(weights, name)
        persistent = getattr(self.zero, "persistent_parameters", [])
        if persistent:  # stage 3 keeps small parameters whole: they are gathered again
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
        if any(key.startswith(f"{VECTORS}/") for key in optimizer.shapes):
            return self._load_vectors(optimizer)
        state_files.optimizer_names(optimizer, self.model)
        self._load_optimizer(optimizer, shapes)

    def _fragment_of_vector(self, parameter: nn.Parameter) -> Fragment | None:
        """Stage 3: every parameter is cut into equal parts by rank, the last ones padded."""
        vector, position, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        first = size * self.process_group.rank
        count = min(size, prod(shape_of(parameter)) - first)
        return Fragment(self.zero.fp32_partitioned_groups_flat[vector], position, first, count) if count > 0 else None

    def _fragment_of_group(self, parameter: nn.Parameter) -> Fragment | None:
        """Stages 1 and 2: the vector of a group of parameters is cut, wherever that falls."""
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        master = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        return Fragment(master, here.start, there.start, here.numel)

    def _buffers(self) -> dict[str, Tensor]:
        """The saved buffers, which are whole on every rank."""
        kept = set(state_files.kept_names(self.model))
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    def _masters(self) -> list[Any]:
        """The vectors with elements on this rank, in the order of the parameters."""
        found = {id(fragment.master): fragment.master for fragment in self.fragments.values() if fragment is not None}
        return list(found.values())

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """What this rank writes of the optimizer's state; empty before the first update. A collective operation."""
        rank, optimizer = self.process_group.rank, self.zero.optimizer
        vectors = {
            f"{VECTORS}/{rank}/{number}/{entry}": value
            for number, master in enumerate(self._masters())
            for entry, value in saved_state(optimizer, master).items()
        }
        if any(self.process_group.gather_objects(self._in_blocks())):
            return vectors
        state = {f"{name}/{entry}": x for entry in self._entries() for name, x in self._whole(entry)}
        steps = self._steps()
        return state | ({f"{name}/{STEP}": x for name, x in steps.items()} if self.process_group.is_main else {})

    def _in_blocks(self) -> bool:
        """Whether some of the state belongs to blocks of elements, as the scales of 8-bit moments do."""
        return any("absmax1" in state for state in self.zero.optimizer.state.values())

    def _whole(self, entry: str | None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on the CPU of the ranks that write them: of the float32 weights, or of an optimizer's entry."""
        loads = [0] * self.process_group.size
        for name, parameter in self.trainable.items():
            shape = shape_of(parameter)
            writer = loads.index(min(loads))  # the rank with the fewest elements so far
            loads[writer] += prod(shape)
            whole = torch.zeros(prod(shape), device=self.process_group.device)
            fragment = self.fragments[name]
            if fragment is not None:
                vector = fragment.master if entry is None else self.zero.optimizer.state[fragment.master][entry]
                whole.narrow(0, fragment.first, fragment.size).copy_(fragment.of(vector))
            dist.reduce(whole.view(torch.int32), dst=writer)  # integers: bits added to zeros stay what they are
            if writer == self.process_group.rank:
                yield name, whole.view(shape).cpu()

    def _entries(self) -> list[str]:
        """Entries of the optimizer's state with one number for each element, the same on every rank; none at first."""
        local = {
            key
            for master, state in self.zero.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == master.shape
        }
        return sorted(set().union(*self.process_group.gather_objects(local)))

    def _steps(self) -> dict[str, Tensor]:
        """The number of updates of each parameter, as torch's AdamW keeps it; empty where the optimizer has none."""
        states = self.zero.optimizer.state
        local = [
            0.0 if fragment is None else float(states.get(fragment.master, {}).get(STEP, 0.0))
            for fragment in self.fragments.values()
        ]
        steps = self.process_group.max(torch.tensor(local)).cpu()
        return {name: step for name, step in zip(self.fragments, steps, strict=True) if step > 0}

    def _load_weights(self, weights: StateFiles, name: str) -> None:
        parameter, fragment = self.trainable[name], self.fragments[name]
        part: Tensor | None = getattr(parameter, "ds_tensor", None)
        if part is None:  # stages 1 and 2 compute with whole weights
            parameter.copy_(weights.rows(name))
        if fragment is None:
            return
        values = self._elements(weights, name, fragment)
        fragment.of(fragment.master).copy_(values)
        if part is not None:
            part.narrow(0, 0, fragment.size).copy_(values)

    def _load_optimizer(self, files: StateFiles, shapes: dict[str, torch.Size]) -> None:
        """Fill the vectors of the optimizer's state; an update that a parameter missed counts for its whole vector."""
        optimizer = self.zero.optimizer
        counts_in_python = type(optimizer).__module__.startswith("deepspeed")  # its CPU Adam
        for key in files.shapes:
            name, entry = key.rsplit("/", 1)
            fragment = self.fragments[name]
            if fragment is None:
                continue
            state = optimizer.state[fragment.master]
            if entry == STEP:
                step = max(float(files.rows(key)), float(state.get(STEP, 0.0)))
                state[STEP] = int(step) if counts_in_python else torch.tensor(step)
            elif files.shapes[key] == shapes[name]:
                vector = state.setdefault(entry, torch.zeros_like(fragment.master).detach())
                fragment.of(vector).copy_(self._elements(files, key, fragment))
            else:
                raise UserError(
                    f"{files.directory}: {key} has not one number for each weight, and DeepSpeed cannot divide it among "
                    "ranks; resume with the launch configuration that saved it"
                )

    def _elements(self, files: StateFiles, key: str, fragment: Fragment) -> Tensor:
        """The elements of a fragment from a tensor of the files."""
        shape, last = files.shapes[key], fragment.first + fragment.size
        return elements(lambda start, stop: files.rows(key, start, stop), shape, fragment.first, last)

    def _load_vectors(self, files: StateFiles) -> None:
        """Put back vectors that the same number of ranks saved."""
        masters, group = self._masters(), self.process_group
        by_master: list[dict[str, Tensor]] = [{} for _ in masters]
        ranks = set()
        for key in files.shapes:
            _, rank, number, entry = key.split("/")
            ranks.add(int(rank))
            if int(rank) == group.rank and int(number) < len(masters):
                by_master[int(number)][entry] = files.rows(key)
        if len(ranks) != group.size:
            raise UserError(
                f"{files.directory}: the state of an 8-bit optimizer was saved by {len(ranks)} processes under DeepSpeed, and "
                f"now there are {group.size}: its blocks cannot be divided otherwise; resume with {len(ranks)}"
            )
        for master, tensors in zip(masters, by_master, strict=True):
            restore_state(self.zero.optimizer, master, tensors, lambda tensor, to=master.device: tensor.to(to))


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; stage 3 leaves an empty tensor and the shape in `ds_shape`."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _as_rows(tensors: dict[str, Tensor]) -> dict[str, Rows]:
    """Whole tensors as all of their rows."""
    return {name: Rows(x, 0, x.shape[0] if x.ndim else 1) for name, x in tensors.items()}

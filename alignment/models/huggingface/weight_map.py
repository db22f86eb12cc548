"""How our parameters lie in a Hugging Face file: names from a family's table, fused matrices, turned ones."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.models.families.family import Family, Name


class HFLocation(NamedTuple):
    """Where a parameter of ours lives in a Hugging Face file.

    Attributes:
        name: of the tensor there.
        part: which of the tensors it is cut into this parameter is.
        rows: rows of each of these, along its output axis.
        transposed: the matrix is stored [in, out].
        groups: rows come in so many groups, each with its share of every part.
    """

    name: str
    part: int = 0
    rows: tuple[int, ...] = (1,)
    transposed: bool = False
    groups: int = 1


def pattern_of(name: str) -> str:
    """The name with {} for every number."""
    return ".".join("{}" if piece.isdigit() else piece for piece in name.split("."))


def map_weights(
    shapes: Mapping[str, torch.Size], table: Iterable[Name], family: Family, spec: Any
) -> dict[str, HFLocation]:
    """The place of each of our parameters that the table knows.

    Args:
        shapes: of every parameter of the architecture, by our name.
        table: (Hugging Face name, our name or names).
    """
    by_ours = {}
    for hf, ours in table:
        parts = (ours,) if isinstance(ours, str) else ours
        for part, name in enumerate(parts):
            by_ours[name] = (hf, part, parts)
    places = {}
    for name in shapes:
        if pattern_of(name) not in by_ours:
            raise ValueError(f"the weight table of {family.name} has no name for {name}")
        hf, part, parts = by_ours[pattern_of(name)]
        numbers = [piece for piece in name.split(".") if piece.isdigit()]
        rows = tuple(shapes[other.format(*numbers)][0] for other in parts)
        groups = next((count(spec) for end, count in family.interleaved.items() if hf.endswith(end)), 1)
        places[name] = HFLocation(hf.format(*numbers), part, rows, hf.endswith(family.transposed), groups)
    return places


def to_hf(state: dict[str, Tensor], places: dict[str, HFLocation]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names: slices joined, matrices turned where the family stores them so."""
    slices: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        slices.setdefault(places[name].name, {})[places[name].part] = tensor.detach()
    shared = {place.name: place for place in places.values()}
    joined = {name: _join([parts[i] for i in range(len(parts))], shared[name].groups) for name, parts in slices.items()}
    return {name: (tensor.T if shared[name].transposed else tensor).contiguous() for name, tensor in joined.items()}


def from_hf(tensors: dict[str, Tensor], places: dict[str, HFLocation]) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names; the inverse of `to_hf`."""
    state = {}
    for name, place in places.items():
        tensor = tensors[place.name].T if place.transposed else tensors[place.name]
        state[name] = _cut(tensor, place).clone(memory_format=torch.contiguous_format)
    return state


def _join(parts: list[Tensor], groups: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _cut(tensor: Tensor, place: HFLocation) -> Tensor:
    if len(place.rows) == 1:
        return tensor
    pieces = tensor.unflatten(0, (place.groups, -1)).split([rows // place.groups for rows in place.rows], dim=1)
    return pieces[place.part].flatten(0, 1)

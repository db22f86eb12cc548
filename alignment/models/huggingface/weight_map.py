"""The place of each of our parameters in a Hugging Face file: tensor names, fused and transposed matrices; and a file's
tensors brought to the present names of one model class: older names, other heads, tensors saved twice.

Where each process reads its own slices only, a model is built of parameters that have not been read. Such a parameter
has its shape and type, takes no memory, and holds nothing but NaN: it is one number, expanded. A new adapter is
attached to it as to any model, and a write to it is an error. Whoever shards the model reads `parameter.stored`, a
`StoredParameter`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.family import Family, Name, tensor_names
from alignment.models.layers import AttentionSpec
from alignment.models.safetensors_files import StoredTensor
from alignment.models.transformer import TransformerSpec

STACKS = ("trunk", "encoder", "decoder")
Tensors = dict[str, StoredTensor]
COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # types that a model can compute in


class HFLocation(NamedTuple):
    """The tensor of a Hugging Face file, or the part of it, that is one of our parameters."""

    name: str  # the tensor's name in the file
    part: int = 0  # index of this parameter among those that the tensor is cut into
    rows: tuple[int, ...] = (1,)  # rows of each of them along the output axis
    transposed: bool = False  # the file stores the matrix as [in, out]
    groups: int = 1  # number of groups of rows, each with some rows of every part


def pattern_of(name: str) -> str:
    """A tensor's name with {} for every number."""
    return ".".join("{}" if piece.isdigit() else piece for piece in name.split("."))


def map_weights(
    shapes: Mapping[str, torch.Size], table: Iterable[Name], family: Family, spec: TransformerSpec | EncoderDecoderSpec
) -> dict[str, HFLocation]:
    """The location in a file of each of our parameters, whose `shapes` are given by our names.

    A later line of the table replaces an earlier one of the same name of ours. The family says which matrices are
    transposed, and which are fused in groups: one for each of `spec`'s key heads.
    """
    attention = spec.blocks[0].attention if isinstance(spec, TransformerSpec) else None
    key_heads = attention.key_value_heads if isinstance(attention, AttentionSpec) else 1
    by_ours = {}
    for hf, ours in tensor_names(table):
        parts = (ours,) if isinstance(ours, str) else ours
        by_ours |= {name: (hf, part, parts) for part, name in enumerate(parts)}
    locations = {}
    for name in shapes:
        if pattern_of(name) not in by_ours:
            raise ValueError(f"the weight table of {family.name} has no name for {name}")
        hf, part, parts = by_ours[pattern_of(name)]
        numbers = [piece for piece in name.split(".") if piece.isdigit()]
        rows = tuple(shapes[other.format(*numbers)][0] for other in parts)
        locations[name] = HFLocation(
            hf.format(*numbers),
            part,
            rows,
            transposed=hf.endswith(family.transposed),
            groups=key_heads if hf.endswith(family.interleaved) else 1,
        )
    return locations


def to_hf(state: Mapping[str, Tensor], locations: Mapping[str, HFLocation]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names, parts fused and matrices transposed as the family stores them."""
    return dict(stream_to_hf(state.items(), locations))


def stream_to_hf(
    tensors: Iterable[tuple[str, Tensor]], locations: Mapping[str, HFLocation]
) -> Iterator[tuple[str, Tensor]]:
    """As `to_hf`, each tensor of the file as soon as all its parts are there."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if name not in locations:  # the second name of a shared parameter
            continue
        location = locations[name]
        parts = waiting.setdefault(location.name, {})
        parts[location.part] = tensor.detach()
        if len(parts) == len(location.rows):
            del waiting[location.name]
            whole = fuse_rows([parts[i] for i in range(len(parts))], location.groups)
            yield location.name, (whole.T if location.transposed else whole).contiguous()


def cut(tensor: Tensor, location: HFLocation, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows `start` to `stop` of our parameter, from the whole tensor of the file; a view where that is possible."""
    tensor = tensor.T if location.transposed else tensor
    if len(location.rows) == 1:
        return tensor[start:stop] if tensor.ndim else tensor
    stop = location.rows[location.part] if stop is None else stop
    heights = [rows // location.groups for rows in location.rows]
    height = max(1, heights[location.part])  # rows of this part in each group
    first = start // height
    last = -(-stop // height)
    pieces = tensor.unflatten(0, (location.groups, -1))[first:last].split(heights, dim=1)
    return pieces[location.part].flatten(0, 1)[start - first * height : stop - first * height]


def fuse_rows(parts: list[Tensor], groups: int) -> Tensor:
    """Matrices on top of each other, or with `groups` above 1 some rows of each in turn."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def cut_rows(tensor: Tensor, rows: Sequence[int], groups: int) -> list[Tensor]:
    """The matrices of `rows` rows each that `fuse_rows` put together."""
    location = HFLocation("", 0, tuple(rows), groups=groups)
    return [cut(tensor, location._replace(part=part)) for part in range(len(rows))]


class StoredParameter(NamedTuple):
    """The place of one of our parameters: the file's tensor, the part of it, and the parameter's type in the model."""

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
    """The place of a parameter; `dtype` None keeps the file's type, UserError where no model can compute in it."""
    if dtype is None and tensor.dtype not in COMPUTED:
        raise UserError(
            f"{tensor.path}: tensor {tensor.name} is {str(tensor.dtype).removeprefix('torch.')}, which no model "
            "computes in; name another type"
        )
    return StoredParameter(tensor, location, dtype or tensor.dtype)


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape that takes no memory; all of it is NaN, and it cannot be written to."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype).expand(shape)


def read_parameters(model: nn.Module) -> nn.Module:
    """Read what is unread of a model, in place, and return the model."""
    for parameter in model.parameters():
        stored: StoredParameter | None = getattr(parameter, "stored", None)
        if stored is not None:
            parameter.data = stored.read().to(parameter.dtype)
            del parameter.stored  # type: ignore[attr-defined]
    return model


# Tensors of a file under the present names


def present_names(tensors: Tensors, family: Family, task: str, needed: set[str]) -> Tensors:
    """A file's tensors under the names that a file of `task` has today, without those that the family ignores.

    The file may be of any class of the family. `needed` names are kept also where the family ignores them.
    """
    wanted = family.prefix(task)
    prefixes = {family.prefix(other) for other in family.tasks} - {""}
    used = next((prefix for prefix in sorted(prefixes) if any(name.startswith(prefix) for name in tensors)), "")
    # The tables of the heads are searched too: part of a head may be in the trunk, as BERT's pooler is.
    heads = (line for other in family.tasks.values() for line in other.names)
    lines = (*tensor_names((*family.names, *heads)), *family.tied_copies)
    trunk = {pattern_of(hf) for hf, _ in lines if hf.startswith(family.trunk_prefix)}
    ignored = (*family.ignored_tensors, *family.tasks[task].unused)
    present_tensors = {}
    for name, tensor in tensors.items():
        name = next(
            (name.removesuffix(old) + new for old, new in family.legacy_names.items() if name.endswith(old)), name
        )
        short = name.removeprefix(used)
        if used != wanted and pattern_of(family.trunk_prefix + short) in trunk:
            name = wanted + short
        if name in needed or not _matches(name, ignored):
            present_tensors[name] = tensor
    return present_tensors


def without_heads(tensors: Tensors, family: Family, task: str, locations: Mapping[str, HFLocation]) -> Tensors:
    """A file's tensors without any head, for a model of `task` with a new one; what the new head starts from stays."""
    needed = {location.name for location in locations.values()}
    kept = {location.name for name, location in locations.items() if in_trunk(name)}
    kept |= set(family.tasks[task].kept_by_new_head)
    heads = {pattern_of(hf) for other in family.tasks.values() for hf, _ in tensor_names(other.names)}
    heads |= {pattern_of(copy) for copy, original in family.tied_copies if original not in needed}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in kept or not (pattern_of(name) in heads or _matches(name, family.ignored_tensors))
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def drop_tied_copy(tensors: Tensors, name: str, original: str, directory: Path) -> None:
    """Remove `name`, a copy of the shared `original`, or rename it where that is missing; UserError if they differ."""
    copy = tensors.pop(name, None)
    kept = tensors.get(original)
    if copy is not None and kept is None:
        tensors[original] = copy
    elif copy is not None and kept is not None and not torch.equal(copy.read(), kept.read()):
        raise UserError(
            f"{directory}: config.json says tie_word_embeddings (or the family shares the tensor), but {name} differs "
            f"from {original}; one of the two is wrong"
        )


def in_trunk(name: str) -> bool:
    """True where a parameter, by our name, belongs to the trunk and not to a head."""
    return name.split(".")[0] in STACKS

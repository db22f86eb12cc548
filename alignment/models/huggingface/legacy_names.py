"""Tensors of a file brought to the present names of one model class: older names, other heads, tensors saved twice."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from alignment.errors import UserError
from alignment.models.families.family import Family
from alignment.models.huggingface.weight_map import HFLocation, pattern_of
from alignment.models.safetensors_files import StoredTensor

STACKS = ("trunk", "encoder", "decoder")


def rename_legacy_keys(
    tensors: dict[str, StoredTensor], family: Family, task: str, needed: set[str]
) -> dict[str, StoredTensor]:
    """A file's tensors under their present names, without those that the family ignores.

    Args:
        tensors: by name in the file.
        family: has the legacy names.
        task: whose trunk prefix the names get.
        needed: names of tensors that the model needs; they are kept also where the family ignores them.
    """
    present = {_present_name(name, family): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in _with_trunk_prefix(present, family, task).items()
        if name in needed or not any(re.fullmatch(pattern, name) for pattern in family.ignored_tensors)
    }


def _present_name(name: str, family: Family) -> str:
    for legacy, present in family.legacy_names.items():
        if name.endswith(legacy):
            return name.removesuffix(legacy) + present
    return name


def _with_trunk_prefix(tensors: dict[str, StoredTensor], family: Family, task: str) -> dict[str, StoredTensor]:
    """The trunk's tensors with the name prefix of `task`, whichever class the file was saved from."""
    wanted, prefixes = family.prefix(task), {family.prefix(other) for other in family.tasks} - {""}
    used = next((prefix for prefix in sorted(prefixes) if any(name.startswith(prefix) for name in tensors)), "")
    if used == wanted:
        return tensors
    # The tables of the heads are searched too: part of a head may be in the trunk, as BERT's pooler is.
    lines = (*family.names, *family.tied_copies, *(line for other in family.tasks.values() for line in other.names))
    trunk = {pattern_of(hf) for hf, _ in lines if hf.startswith(family.trunk_prefix)}
    without_prefix = {name: name.removeprefix(used) for name in tensors}
    return {
        wanted + without_prefix[name]
        if pattern_of(family.trunk_prefix + without_prefix[name]) in trunk
        else name: tensor
        for name, tensor in tensors.items()
    }


def drop_other_heads(
    tensors: dict[str, StoredTensor], family: Family, task: str, locations: Mapping[str, HFLocation]
) -> dict[str, StoredTensor]:
    """A file's tensors without the heads of other tasks that may lie beside the head of `task`."""
    needed = {location.name for location in locations.values()}
    return _without(tensors, needed, set(), family.tasks[task].other_heads)


def drop_all_heads(
    tensors: dict[str, StoredTensor], family: Family, task: str, locations: Mapping[str, HFLocation]
) -> dict[str, StoredTensor]:
    """A file's tensors without any head, for a model of `task` with a new one; what the new head starts from stays."""
    needed = {location.name for location in locations.values()}
    heads = {pattern_of(hf) for other in family.tasks.values() for hf, _ in other.names}
    heads |= {pattern_of(copy) for copy, original in family.tied_copies if original not in needed}
    others = tuple(pattern for other in family.tasks.values() for pattern in other.other_heads)
    trunk = {location.name for name, location in locations.items() if in_trunk(name)}
    return _without(tensors, trunk | set(family.tasks[task].kept_by_new_head), heads, others)


def _without(
    tensors: dict[str, StoredTensor], needed: set[str], heads: set[str], patterns: tuple[str, ...]
) -> dict[str, StoredTensor]:
    """The tensors that are needed, and those that neither `heads` (name patterns) nor `patterns` (regular) name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in needed
        or (pattern_of(name) not in heads and not any(re.fullmatch(pattern, name) for pattern in patterns))
    }


def drop_tied_copy(tensors: dict[str, StoredTensor], name: str, original: str, directory: Path) -> None:
    """Remove `name` from `tensors`, a copy of the shared tensor `original`, or rename it where `original` is missing.

    Raises:
        UserError: both are there and differ.
    """
    copy, kept = tensors.pop(name, None), tensors.get(original)
    if copy is None:
        return
    if kept is None:
        tensors[original] = copy
    elif not torch.equal(copy.read(), kept.read()):
        raise UserError(
            f"{directory}: config.json says tie_word_embeddings (or the family shares the tensor), but {name} differs "
            f"from {original}; one of the two is wrong"
        )


def in_trunk(name: str) -> bool:
    """Whether a parameter, by our name, belongs to the trunk and not to a head."""
    return name.split(".")[0] in STACKS

"""Tensors of a file brought to the present names of one model class: older names, other heads, tensors saved twice."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from alignment.errors import UserError
from alignment.models.families.family import Family, tensor_names
from alignment.models.huggingface.weight_map import HFLocation, pattern_of
from alignment.models.safetensors_files import StoredTensor

STACKS = ("trunk", "encoder", "decoder")
Tensors = dict[str, StoredTensor]


def present_names(tensors: Tensors, family: Family, task: str, needed: set[str]) -> Tensors:
    """A file's tensors under the names that a file of `task` has today, without those that the family ignores.

    Args:
        tensors: by name in the file, which may be of any class of the family.
        needed: names that the model needs; they are kept also where the family ignores them.
    """
    wanted, prefixes = family.prefix(task), {family.prefix(other) for other in family.tasks} - {""}
    used = next((prefix for prefix in sorted(prefixes) if any(name.startswith(prefix) for name in tensors)), "")
    # The tables of the heads are searched too: part of a head may be in the trunk, as BERT's pooler is.
    heads = (line for other in family.tasks.values() for line in other.names)
    lines = (*tensor_names((*family.names, *heads)), *family.tied_copies)
    trunk = {pattern_of(hf) for hf, _ in lines if hf.startswith(family.trunk_prefix)}
    ignored, found = (*family.ignored_tensors, *family.tasks[task].unused), {}
    for name, tensor in tensors.items():
        name = next(
            (name.removesuffix(old) + new for old, new in family.legacy_names.items() if name.endswith(old)), name
        )
        short = name.removeprefix(used)
        if used != wanted and pattern_of(family.trunk_prefix + short) in trunk:
            name = wanted + short
        if name in needed or not _matches(name, ignored):
            found[name] = tensor
    return found


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
    """Remove `name` from `tensors`, a copy of the shared tensor `original`, or rename it where `original` is missing.

    Raises:
        UserError: both are there and differ.
    """
    copy, kept = tensors.pop(name, None), tensors.get(original)
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

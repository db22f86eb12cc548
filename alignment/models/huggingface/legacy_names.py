"""What a file holds, under the names that its family has today: older names, other heads, tensors held twice."""

import re
from pathlib import Path

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.models.families.family import Family
from alignment.models.huggingface.weight_map import HFLocation, pattern_of


def rename_legacy_keys(tensors: dict[str, Tensor], family: Family, task: str, needed: set[str]) -> dict[str, Tensor]:
    """The file's weights, named as today with the head of `task`; what is ignored and not needed is left out."""
    tensors = _named_as_in_head({_of_today(name, family): x for name, x in tensors.items()}, family, task)
    return {
        name: x
        for name, x in tensors.items()
        if name in needed or not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    }


def _of_today(name: str, family: Family) -> str:
    for old, new in family.older.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _named_as_in_head(tensors: dict[str, Tensor], family: Family, task: str) -> dict[str, Tensor]:
    """The trunk's names with the prefix of `task`, whatever head the file has or has not."""
    wanted, prefixes = family.prefix(task), {family.prefix(other) for other in family.tasks} - {""}
    used = next((prefix for prefix in sorted(prefixes) if any(name.startswith(prefix) for name in tensors)), "")
    if used == wanted:
        return tensors
    # Some heads keep a part of theirs in the trunk: BERT's pooler.
    lines = (*family.names, *family.copies, *(line for other in family.tasks.values() for line in other.names))
    trunk = {pattern_of(hf) for hf, _ in lines if hf.startswith(family.trunk_prefix)}
    bare = {name: name.removeprefix(used) for name in tensors}
    return {
        wanted + bare[name] if pattern_of(family.trunk_prefix + bare[name]) in trunk else name: x
        for name, x in tensors.items()
    }


def drop_other_heads(
    tensors: dict[str, Tensor], family: Family, task: str, new_head: bool, places: dict[str, HFLocation]
) -> dict[str, Tensor]:
    """Without the heads that are not asked for: known ones of other tasks, or all where a new one is drawn."""
    needed = {place.name for place in places.values()}
    if new_head:
        heads = {pattern_of(hf) for other in family.tasks.values() for hf, _ in other.names}
        heads |= {pattern_of(copy) for copy, original in family.copies if original not in needed}
        beside = [pattern for other in family.tasks.values() for pattern in other.beside]
        needed = {*family.tasks[task].kept, *(place.name for name, place in places.items() if in_trunk(name))}
    else:
        heads, beside = set(), list(family.tasks[task].beside)
    return {
        name: x
        for name, x in tensors.items()
        if name in needed
        or (pattern_of(name) not in heads and not any(re.fullmatch(pattern, name) for pattern in beside))
    }


def drop_tied_copy(tensors: dict[str, Tensor], name: str, original: str, directory: Path) -> None:
    """A file may hold a shared tensor twice; both must then be the same."""
    copy, kept = tensors.pop(name, None), tensors.get(original)
    if copy is None:
        return
    if kept is None:
        tensors[original] = copy
    elif not torch.equal(copy, kept):
        raise UserError(
            f"{directory}: config.json says tie_word_embeddings (or the family shares the tensor), but {name} differs "
            f"from {original}; one of the two is wrong"
        )


def in_trunk(name: str) -> bool:
    return name.split(".")[0] in ("trunk", "encoder", "decoder")

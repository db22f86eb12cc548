"""Weights written as Hugging Face's safetensors files while they come in: one file, or shards with an index."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment.files import write_atomic, write_json
from alignment.models.safetensors_files import INDEX, WEIGHTS

SHARD = re.compile(r"model-\d{5}(-of-\d{5})?\.safetensors")


def write_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> torch.dtype:
    """Write named tensors as they come; at most one shard of them is held at a time.

    Up to `max_shard_bytes` they are model.safetensors; beyond, model-00001-of-00003.safetensors and so on with an index, as
    transformers writes them: a tensor that no longer fits begins the next shard, one that is larger has its own. Weight
    files of an earlier save are removed at the end.

    Returns:
        The type that most of the numbers have.
    """
    shard: dict[str, Tensor] = {}
    shard_bytes, total_bytes = 0, 0
    written: list[list[str]] = []
    numbers: Counter[torch.dtype] = Counter()
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + size > max_shard_bytes:
            _write_shard(shard, directory / _shard_name(len(written) + 1))
            written.append(list(shard))
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes, total_bytes = shard_bytes + size, total_bytes + size
        numbers[tensor.dtype] += tensor.numel()
    if written:
        _write_shard(shard, directory / _shard_name(len(written) + 1))
        written.append(list(shard))
        _write_index(written, directory, {"total_parameters": sum(numbers.values()), "total_size": total_bytes})
    else:
        _write_shard(shard, directory / WEIGHTS)
    _remove_others(directory, len(written))
    return numbers.most_common(1)[0][0]


def _write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))


def _write_index(shards: list[list[str]], directory: Path, metadata: dict[str, int]) -> None:
    """Give the shards their final names, which tell how many there are, and write the index."""
    weight_map = {}
    for number, names in enumerate(shards, 1):
        final = _shard_name(number, len(shards))
        os.replace(directory / _shard_name(number), directory / final)
        weight_map |= dict.fromkeys(names, final)
    write_json(directory / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _shard_name(number: int, count: int | None = None) -> str:
    return f"model-{number:05d}.safetensors" if count is None else f"model-{number:05d}-of-{count:05d}.safetensors"


def _remove_others(directory: Path, count: int) -> None:
    """Remove the weight files of an earlier save that are no part of this one, which has `count` shards or one file."""
    kept = {_shard_name(number, count) for number in range(1, count + 1)} | ({INDEX} if count else {WEIGHTS})
    for path in directory.iterdir():
        if path.name not in kept and (path.name in (WEIGHTS, INDEX) or SHARD.fullmatch(path.name)):
            path.unlink()

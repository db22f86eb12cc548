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

    Up to `max_shard_bytes` they are model.safetensors; beyond, model-00001-of-00003.safetensors and so on with an
    index, as transformers writes them: a tensor that no longer fits begins the next shard, one that is larger has its
    own. Weight files of an earlier save are removed at the end.

    Returns:
        The type that most of the numbers have.
    """
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []  # names in each that is written
    shard_bytes, total_bytes, numbers = 0, 0, Counter[torch.dtype]()

    def write_shard() -> None:
        path = directory / f"model-{len(shards) + 1:05d}.safetensors"
        write_atomic(path, lambda temporary: save_file(shard, temporary, metadata={"format": "pt"}))
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + size > max_shard_bytes:
            write_shard()
            shard_bytes = 0
        shard[name] = tensor
        shard_bytes, total_bytes = shard_bytes + size, total_bytes + size
        numbers[tensor.dtype] += tensor.numel()
    write_shard()
    _finish(shards, directory, {"total_parameters": sum(numbers.values()), "total_size": total_bytes})
    return numbers.most_common(1)[0][0]


def _finish(shards: list[list[str]], directory: Path, metadata: dict[str, int]) -> None:
    """Give the shards their final names, write the index of more than one, and remove files of an earlier save."""
    count, weight_map = len(shards), {}
    for number, names in enumerate(shards, 1):
        final = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        os.replace(directory / f"model-{number:05d}.safetensors", directory / final)
        weight_map |= dict.fromkeys(names, final)
    if count > 1:
        write_json(directory / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    kept = {*weight_map.values(), INDEX} if count > 1 else {WEIGHTS}
    for path in directory.iterdir():
        if path.name not in kept and (path.name in (WEIGHTS, INDEX) or SHARD.fullmatch(path.name)):
            path.unlink()

"""What lies in a model directory, read with suspicion: config.json and safetensors, whole or in shards."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.errors import UserError, raise_all

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a local directory.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise UserError(f"{directory}: no {CONFIG}; a model directory holds {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: must hold one JSON object, got {type(config).__name__}")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards its index names.

    Raises:
        UserError: no safetensors file, a pickle instead, or an index that does not match its shards.
    """
    if (directory / WEIGHTS).is_file():
        return _read_file(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{directory}: weights only as pickle ({', '.join(pickles)}), which can run code when opened and is "
                f"refused; save the model again with safetensors"
            )
        raise UserError(f"{directory}: no {WEIGHTS} and no {INDEX}")
    return _read_shards(directory)


def _read_shards(directory: Path) -> dict[str, Tensor]:
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()), key=str)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no readable 'weight_map' ({error!r})") from error
    raise_all(
        f"{path}: shard {shard!r} must be the plain name of a .safetensors file in the same directory"
        for shard in shards
        if Path(str(shard)).name != shard or not str(shard).endswith(".safetensors")
    )
    raise_all(f"{path}: shard {shard} is missing" for shard in shards if not (directory / shard).is_file())
    found = {shard: _read_file(directory / shard) for shard in shards}
    placed = {name: shard for shard, tensors in found.items() for name in tensors}
    raise_all(
        f"{path}: tensor {name} is listed in {weight_map.get(name)} and found in {placed.get(name)}"
        for name in sorted(weight_map.keys() | placed.keys())
        if weight_map.get(name) != placed.get(name)
    )
    return {name: tensor for tensors in found.values() for name, tensor in tensors.items()}


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file object is no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error

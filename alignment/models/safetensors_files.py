"""What lies in a model directory, read with suspicion: config.json and safetensors, whole or in shards."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
COUNTS = re.compile(r"(?:.*_)?(?:layers?|experts?|groups?)")  # config keys: how often a part is built
SIZES = re.compile(r"(?:.*_)?(?:size|dim|embd|inner|heads?|model|ff|kv|buckets|rank)")  # how large
MOST_SHARED_LAYERS = 1024  # a network whose layers share weights may have more layers than tensors


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a local directory.

    Raises:
        UserError: there is none, it is no JSON object, or files of the directory lie elsewhere.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise UserError(f"{directory}: no {CONFIG}; a model directory holds {CONFIG} and {WEIGHTS}")
    check_directory(Path(directory))
    return read_json_object(path)


def read_state_dict(directory: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards its index names.

    Raises:
        UserError: no safetensors file, a pickle instead, or an index that does not match its shards.
    """
    return {
        name: tensor for file in weight_files(directory) for name, tensor in read_safetensors(directory / file).items()
    }


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that `read_state_dict` would give, from the files' headers alone."""
    return {name: shape for shapes in _shapes_by_file(directory).values() for name, shape in shapes.items()}


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that hold a directory's weights, each of them in the directory itself.

    Raises:
        UserError: as `read_state_dict`.
    """
    return list(_shapes_by_file(directory))


def check_sizes(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a config whose sizes the weights cannot have, before a part is built or memory taken for it.

    Every layer has a tensor of its own, unless layers share theirs, and no width exceeds the largest tensor. What
    passes may still be wrong, and is then found tensor by tensor.

    Raises:
        UserError: naming each such key.
    """
    count = max(len(shapes), MOST_SHARED_LAYERS)
    largest = max([2**16, *(prod(shape) for shape in shapes.values())])
    raise_all(
        f"{directory}/{CONFIG}: {key} = {value:.6g} is more than the weights can have, which are {len(shapes)} tensors, "
        f"the largest of {largest} numbers"
        for key, value in _numbers(config)
        if (COUNTS.fullmatch(key) and value > count) or (SIZES.fullmatch(key) and value > largest)
    )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a config with the nearest key above it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _shapes_by_file(directory: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    check_directory(directory)
    if (directory / WEIGHTS).is_file():
        return {WEIGHTS: _file_shapes(directory / WEIGHTS)}
    if not (directory / INDEX).is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{directory}: weights only as pickle ({', '.join(pickles)}), which can run code when opened and is "
                f"refused; save the model again with safetensors"
            )
        raise UserError(f"{directory}: no {WEIGHTS} and no {INDEX}")
    path = directory / INDEX
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: no readable 'weight_map'; it must map each tensor to its file")
    shards = sorted(set(map(str, weight_map.values())))
    raise_all(
        f"{path}: shard {shard!r} must be the plain name of a .safetensors file in the same directory"
        for shard in shards
        if Path(shard).name != shard or not shard.endswith(".safetensors")
    )
    raise_all(f"{path}: shard {shard} is missing" for shard in shards if not (directory / shard).is_file())
    found = {shard: _file_shapes(directory / shard) for shard in shards}
    placed = {name: shard for shard, shapes in found.items() for name in shapes}
    raise_all(
        f"{path}: tensor {name} is listed in {weight_map.get(name)} and found in {placed.get(name)}"
        for name in sorted(weight_map.keys() | placed.keys())
        if weight_map.get(name) != placed.get(name)
    )
    return found


def _file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, OverflowError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file.

    Raises:
        UserError: it is no safetensors file, or a damaged one.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file object is no mapping
    except (SafetensorError, OSError, OverflowError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error

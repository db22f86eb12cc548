"""The files of a model directory: config.json, generation_config.json, and safetensors in one file or in shards.

What is read is checked; weights are written while they come in.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, without_foreign_code, write_atomic, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"  # stop tokens and defaults for other programs; our sampling ignores it
SHARD = re.compile(r"model-\d{5}(-of-\d{5})?\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
COUNTS = re.compile(r"(?:.*_)?(?:layers?|experts?|groups?)")  # config keys that count modules
SIZES = re.compile(r"(?:.*_)?(?:size|dim|embd|inner|heads?|model|ff|kv|buckets|rank)")  # config keys that are widths
QUANTIZED_NAME = re.compile(r"(?:[-_.](?:unsloth|bnb|[48]bit|int[48]|awq|gptq|fp8|mxfp4|dynamic))+$", re.IGNORECASE)
MAX_SHARED_LAYERS = 1024  # layers that share weights may be more than there are tensors

HFConfig = dict[str, Any]  # the content of a config.json, or its values with the defaults filled in


def read_config(directory: Path) -> HFConfig:
    """The content of a directory's config.json, without an `auto_map`.

    Raises:
        UserError: there is none, the directory links to files elsewhere, the weights are quantized, or need code of
            their own.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise UserError(f"{directory}: no {CONFIG}; a model directory holds {CONFIG} and {WEIGHTS}")
    check_directory(Path(directory))
    config = without_foreign_code(read_json_object(path), path)
    refuse_quantized(config, path)
    return config


def refuse_quantized(config: HFConfig, path: Path) -> None:
    """Refuse weights that are stored quantized, and name the model that they were made from where it is known."""
    settings = config.get("quantization_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    original = QUANTIZED_NAME.sub("", str(config.get("_name_or_path") or "")) or "that they were made from"
    raise UserError(
        f"{path}: quantization_config: the weights are quantized ({method or settings}), and such files are not read; "
        f"take the 16-bit model {original} and set weights.quantize=nf4"
    )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, known from the file's header and not yet read."""

    path: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The tensor on the CPU, mapped from the file: its pages are read when they are used. Do not write to it."""
        with _opened(self.path) as file:
            return file.get_tensor(self.name)


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each of a directory's tensors, from the files' headers alone."""
    return {name: tuple(tensor.shape) for name, tensor in stored_tensors(directory).items()}


def check_sizes(directory: Path, config: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a config with sizes that its weights cannot have, before memory is allocated for a model of these sizes.

    There cannot be more layers than tensors (unless layers share weights), nor a width above the size of the largest
    tensor. A config that passes may still be wrong; loading then finds it tensor by tensor.
    """
    count = max(len(shapes), MAX_SHARED_LAYERS)
    largest = max([2**16, *(prod(shape) for shape in shapes.values())])
    raise_all(
        f"{directory}/{CONFIG}: {key} = {value:.6g} is more than the weights can have, which are {len(shapes)} "
        f"tensors, the largest of {largest} numbers"
        for key, value in _numbers(config)
        if (COUNTS.fullmatch(key) and value > count) or (SIZES.fullmatch(key) and value > largest)
    )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a config with its key, that of the innermost mapping around it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Tensors of model.safetensors, or of the shards in its index, by Hugging Face's names; only headers are read."""
    check_directory(directory)
    if (directory / WEIGHTS).is_file():
        return _file_tensors(directory / WEIGHTS)
    path = directory / INDEX
    if not path.is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{directory}: weights only as pickle ({', '.join(pickles)}), which can run code when opened and is "
                f"refused; save the model again with safetensors"
            )
        raise UserError(f"{directory}: no {WEIGHTS} and no {INDEX}")
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
    tensors = {name: tensor for shard in shards for name, tensor in _file_tensors(directory / shard).items()}
    file_of = {name: tensor.path.name for name, tensor in tensors.items()}
    raise_all(
        f"{path}: tensor {name} is listed in {weight_map.get(name)} and found in {file_of.get(name)}"
        for name in sorted(weight_map.keys() | file_of.keys())
        if weight_map.get(name) != file_of.get(name)
    )
    return tensors


def _file_tensors(path: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(path, name, tensor.shape, tensor.dtype)
        for name, tensor in read_safetensors(path).items()  # mapped, not read
    }


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file object is no mapping


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, OverflowError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def max_dtype(directory: Path) -> torch.dtype:
    """The type in which all tensors of a directory can be held without loss: float32, bfloat16 or float16."""
    types = {tensor.dtype for tensor in stored_tensors(directory).values()}
    (low,) = types if len(types) == 1 else (torch.float32,)
    return low if low in (torch.bfloat16, torch.float16) else torch.float32


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
    shard_bytes = 0
    total_bytes = 0
    numbers = Counter[torch.dtype]()

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
        shard_bytes = shard_bytes + size
        total_bytes = total_bytes + size
        numbers[tensor.dtype] += tensor.numel()
    write_shard()
    _finish(shards, directory, {"total_parameters": sum(numbers.values()), "total_size": total_bytes})
    return numbers.most_common(1)[0][0]


def _finish(shards: list[list[str]], directory: Path, metadata: dict[str, int]) -> None:
    """Give the shards their final names, write the index of more than one, and remove files of an earlier save."""
    count = len(shards)
    weight_map = {}
    for shard_number, names in enumerate(shards, 1):
        final = WEIGHTS if count == 1 else f"model-{shard_number:05d}-of-{count:05d}.safetensors"
        os.replace(directory / f"model-{shard_number:05d}.safetensors", directory / final)
        weight_map |= dict.fromkeys(names, final)
    if count > 1:
        write_json(directory / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    kept = {*weight_map.values(), INDEX} if count > 1 else {WEIGHTS}
    for path in directory.iterdir():
        if path.name not in kept and (path.name in (WEIGHTS, INDEX) or SHARD.fullmatch(path.name)):
            path.unlink()


# generation_config.json


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """The content of a directory's generation_config.json; None if there is no such file."""
    path = Path(directory) / GENERATION_CONFIG
    try:
        return read_json_object(path) if path.is_file() else None
    except UserError as error:
        raise UserError(f"{error}; mend it or delete it") from error


def write_generation_config(config: HFConfig | None, directory: Path) -> None:
    """Write a model's generation config, if it has one."""
    if config is not None:
        write_json(Path(directory) / GENERATION_CONFIG, config)

"""Checkpoints by their config.json alone: the architecture, the weights' type, the adapters on top.

Nothing is downloaded and no weights are read. A directory that is not there yet is traced to the packaged config that
writes it, and a base of the Hub to the files in configs/bases.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from alignment.adapters.attach import read_spec
from alignment.adapters.files import is_adapter, read_base
from alignment.adapters.specs import AdapterSpec, LoRASpec
from alignment.config.load import build, packaged_folder, packaged_writer
from alignment.config.yaml_source import SourcedYaml, fill, read_yaml
from alignment.errors import UserError, suggest
from alignment.loading import load_tokenizer
from alignment.models.families import FAMILIES, family_of, is_external_type
from alignment.models.safetensors_files import CONFIG, HFConfig, read_config

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Start:
    """A checkpoint as far as its memory goes.

    Attributes:
        config: config.json of the base model.
        dtype: type of the base's weights in its files.
        base: identity of the base model; checkpoints with the same one can share its weights.
        adapters: settings of the adapters that the checkpoint has on the base, in order; empty for a whole model.
        shapes_from: where the config was found, for the reader of the plan.
    """

    config: HFConfig
    dtype: torch.dtype
    base: str
    adapters: tuple[AdapterSpec, ...] = ()
    shapes_from: str = ""


def find_start(source: str, directory: Path | None = None) -> Start:
    """The checkpoint behind a directory or a Hub name.

    Args:
        source: as a stage's config has it.
        directory: folder with further configs, one of which may write `source`; None: the packaged ones only.

    Raises:
        UserError: nothing is known about the name; the message says what would help.
    """
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return _local_start(path, directory)
    writer = _config_that_writes(path, directory)
    if writer is not None:
        return _start_of_run(source, writer, directory)
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        command = packaged_writer(str(path.parent)) if path.name == "model" else None
        advice = f"`{command}` writes it" if command else "give a directory with config.json, or a Hub name"
        raise UserError(f"{source}: no such model directory, and no config writes it; {advice}")
    return _hub_start(source)


def _local_start(path: Path, directory: Path | None) -> Start:
    if is_adapter(path):
        below = find_start(read_base(path), directory)
        return replace(below, adapters=on_top(below.adapters, read_spec(path)))
    config = read_config(path)
    return Start(config, _stored_dtype(path, config), str(path.resolve()), shapes_from=str(path / CONFIG))


def _stored_dtype(path: Path, config: HFConfig) -> torch.dtype:
    """The type of most weights in the files of a directory; that of its config.json where there are no files."""
    from safetensors import safe_open

    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    sizes: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors"))[:1]:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                part = tensors.get_slice(name)
                sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + torch.Size(part.get_shape()).numel()
    known = {names[name]: size for name, size in sizes.items() if name in names}
    return max(known, key=known.__getitem__) if known else config_dtype(config)


def config_dtype(config: HFConfig) -> torch.dtype:
    """The type that a config.json names; float32 where it names none."""
    return FLOATS.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)


def is_encoder(config: HFConfig) -> bool:
    """True for one of our encoders, which have a score for a text and none per token."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.architecture == "encoder" and not is_external_type(config)


def _hub_start(name: str) -> Start:
    """A base of the Hub: from the user's cache, or from the packaged facts."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, CONFIG)
    if isinstance(cached, str):
        config = read_config(Path(cached).parent)
        return Start(config, config_dtype(config), name, shapes_from=cached)
    bases = packaged_bases()
    if name not in bases:
        raise UserError(
            f"{name}: its config.json is neither in the Hub's cache nor packaged ({suggest(name, bases)}); download it "
            f"(`hf download {name} config.json`), or give a directory that holds it"
        )
    file, config = bases[name]
    return Start(config, config_dtype(config), name, shapes_from=f"configs/bases/{file}")


@cache
def packaged_bases() -> dict[str, tuple[str, HFConfig]]:
    """Hub name -> file name and config.json, for the bases whose facts are packaged."""
    found = {}
    for path in sorted((packaged_folder("configs") / "bases").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found |= dict.fromkeys(content["hub_ids"], (path.name, content["config"]))
    return found


# Directories that a run has yet to write


def _config_that_writes(path: Path, directory: Path | None) -> Path | None:
    """The config file whose run writes `path`, which ends in `model`: one beside the user's, else a packaged one."""
    if path.name != "model":
        return None
    near = [] if directory is None else sorted(directory.glob("*.yaml"))
    for file in [*near, *sorted(packaged_folder("configs").glob("*/*.yaml"))]:
        if file.parent.name in ("evaluate", "launch"):
            continue
        values = read_yaml(file).values
        if isinstance(values, dict) and "data" in values and values.get("output") == str(path.parent):
            return file
    return None


@dataclass(frozen=True)
class _Section:
    adapter: AdapterSpec


def _start_of_run(source: str, file: Path, directory: Path | None) -> Start:
    """The checkpoint that the run of a config file will write: its own start, trained whole or with its adapter on top."""
    values: dict[str, Any] = fill(read_yaml(file).values, {"configs": str(packaged_folder("configs")), "data": ""})
    if values.get("policy") is None:
        config = fresh_config(values)
        return Start(config, torch.float32, source, shapes_from=str(file))
    below = find_start(values["policy"], directory)
    if values.get("adapter") is None:
        return replace(below, base=source, adapters=(), dtype=torch.float32)  # all weights were trained
    section = SourcedYaml({"adapter": values["adapter"]}, {(): str(file)})
    return replace(below, adapters=on_top(below.adapters, build(_Section, section).adapter))


def on_top(adapters: tuple[AdapterSpec, ...], new: AdapterSpec) -> tuple[AdapterSpec, ...]:
    """The adapters of a checkpoint that trains a new one on these: two LoRAs are saved as one of the sum of their ranks."""
    if adapters and isinstance(adapters[-1], LoRASpec) and isinstance(new, LoRASpec):
        return (*adapters[:-1], replace(new, rank=adapters[-1].rank + new.rank))
    return (*adapters, new)


def fresh_config(values: Mapping[str, object]) -> HFConfig:
    """config.json of a model that is trained from nothing; its vocabulary is the tokenizer's, as far as that is known.

    Raises:
        UserError: the size of the vocabulary is not known before the tokenizer is trained.
    """
    model = dict(cast(HFConfig, values["model"]))
    if "vocab_size" not in model:
        sizes = {"bytes": 259, "characters": 512}  # bytes and special tokens; a guess for characters
        size = values.get("vocabulary") or sizes.get(str(values.get("tokenizer_kind")))
        if size is None:
            size = len(load_tokenizer(str(values.get("tokenizer"))))
        model["vocab_size"] = size
    return {**family_of(model).new_model_config, **model}

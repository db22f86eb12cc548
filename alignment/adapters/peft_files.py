"""Adapter directories in peft's format, read and written. Layer names and fused matrices follow the family's weight table.

Where a file holds one matrix for several of our layers (GPT-2's c_attn holds query, key and value), their n updates of
rank r are written as one block-diagonal update of rank n * r on the whole matrix, an ordinary LoRA for peft.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.adapters.attach import Loaded, require_native
from alignment.adapters.lora import attach_lora, lora_layers, matching_layers
from alignment.adapters.prefix import PrefixAdapter, attach_prefix, peft_config, prefix_dimensions
from alignment.adapters.specs import AdapterSpec, LoRASpec, PrefixSpec
from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, write_atomic, write_json
from alignment.models.classifiers import ScalarModel
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.native_model import NativeModel
from alignment.models.safetensors_files import read_safetensors

Spec = TypeVar("Spec", LoRASpec, PrefixSpec)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SPEC = "alignment_adapter.json"  # our own settings, in files that we write
STACKS = ("trunk", "encoder", "decoder")
FULL_NAMES = re.compile(r"[\w|]*(?:\\\.[\w|]+)*")  # layer names as `_lora_spec` writes them, and no other pattern

# Options of LoRA files from other programs that are supported; any other option must have peft's default.
SUPPORTED_OPTIONS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "modules_to_save", "fan_in_fan_out",
}  # fmt: skip
UNCHANGED_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # other `init_lora_weights` change the base too


@dataclass(frozen=True)
class TargetModule:
    """A linear layer of a peft file.

    Attributes:
        file_name: its name there.
        layers: names of our layers that make it up, in order.
    """

    file_name: str
    layers: tuple[str, ...]


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and not a model."""
    return (Path(directory) / CONFIG).is_file()


def is_scalar_adapter(directory: Path) -> bool:
    """Whether an adapter is that of a reward model, which must contain a score head."""
    return _read_config(directory).get("task_type") == "SEQ_CLS"


def read_base(directory: Path) -> str:
    """An adapter's base model: a local directory, relative to the adapter's own where it exists there, or a Hub name."""
    base = _read_config(directory).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(
            f"{directory}/{CONFIG}: base_model_name_or_path is empty; write the base model's directory there"
        )
    local = Path(directory, base)
    return str(local.resolve()) if local.is_dir() else base


def read_revision(directory: Path) -> str | None:
    """The base model's commit on the Hub; None for the newest or for a local directory."""
    return _read_config(directory).get("revision")


def read_spec(directory: Path) -> AdapterSpec:
    """The settings of a directory's adapter.

    Raises:
        UserError: the kind or an option of the adapter is not supported.
    """
    config = _read_config(directory)
    kind = config.get("peft_type")
    where = f"{directory}/{CONFIG}"
    if kind == "PREFIX_TUNING":
        return _build_spec(PrefixSpec, {"tokens": config.get("num_virtual_tokens")}, where)
    if kind != "LORA":
        raise UserError(f"{where}: peft_type {kind!r} is not one of LORA, PREFIX_TUNING")
    path = Path(directory) / SPEC
    if path.is_file():
        spec = _build_spec(LoRASpec, read_json_object(path), str(path))
        if not FULL_NAMES.fullmatch(spec.layers):
            raise UserError(f"{path}: layers must name each layer in full, joined by |; write the adapter again")
        return spec
    raise_all(f"{where}: {problem}" for problem in _unsupported_options(config))
    found = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    return _build_spec(LoRASpec, {**found, "rank_stabilized": bool(config.get("use_rslora"))}, where)


def _build_spec(kind: type[Spec], values: dict[str, object], where: str) -> Spec:
    """A spec from JSON values, checked as a run's config is."""
    from alignment.config.load import build
    from alignment.config.yaml_source import SourcedYaml

    try:
        return build(kind, SourcedYaml(values, {(): where}))
    except UserError as error:
        raise UserError(f"{error}; write the adapter again") from error


def adapter_state(model: NativeModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's weights by our names, with the score head of a scalar model.

    Args:
        model: a model with its adapter attached.
        state: the full state dict where the model is sharded; None: the model's own.
    """
    whole: dict[str, Tensor] = model.state_dict() if state is None else state
    kept = {name: value for name, value in whole.items() if ".lora_" in name or name.startswith("prefix.")}
    if isinstance(model, ScalarModel):
        kept["head.weight"] = whole["head.weight"]
    return kept


def save_adapter(
    model: NativeModel,
    directory: Path,
    *,
    base: str | None,
    revision: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write an adapter so that `peft.PeftModel.from_pretrained(base model, directory)` gives the same model.

    Args:
        model: a model with its adapter attached.
        directory: directory to write.
        base: directory or Hub name of the frozen weights. A directory is written relative to the adapter's, so that
            both can be moved together.
        revision: commit of a base model on the Hub.
        state: the full state dict where the model is sharded; None: the model's own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = adapter_state(model, state)
    if base is not None and Path(base).is_dir():
        base = Path(os.path.relpath(Path(base).resolve(), directory.resolve())).as_posix()
    task = {"task_type": _task_type(model), "base_model_name_or_path": base, "revision": revision}
    if model.prefix is not None:
        tensors, config = _prefix_file(model, state, task)
    else:
        tensors, config = _lora_file(model, state, task)
        write_json(directory / SPEC, asdict(_lora_spec(model)))
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config.inference_mode = True
    config.save_pretrained(str(directory))


def load_adapter(model: Loaded, directory: Path, *, with_head: bool = True) -> Loaded:
    """Attach the adapter of a directory to its base model and return the model.

    Args:
        model: the base model. A policy's adapter also fits a scalar model, which then keeps its score head.
        directory: an adapter in peft's format.
        with_head: load the score head of a reward model's adapter; False keeps that of `model`.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or the model runs through transformers' class.
    """
    directory = Path(directory)
    if not (directory / WEIGHTS).is_file():
        raise UserError(f"{directory}: no {WEIGHTS}; only safetensors adapters are read")
    native, spec, tensors = require_native(model), read_spec(directory), read_safetensors(directory / WEIGHTS)
    if isinstance(spec, PrefixSpec):
        _check_size(directory, native, spec, tensors)
        attach_prefix(native, spec)
        wanted = {"prefix.encoder.embedding.weight": tensors.pop("prompt_embeddings", None)}
    else:
        written_by_us = (directory / SPEC).is_file()
        modules = {module.file_name: module for module in _target_modules(native)}
        if not written_by_us:
            spec = _with_layers_of_file(spec, tensors, modules)
        _check_size(directory, native, spec, tensors)
        attach_lora(native, spec)
        wanted = _lora_tensors(native, tensors, modules, block_diagonal=written_by_us)
    if isinstance(native, ScalarModel):
        native.head.requires_grad_(True)
        if is_scalar_adapter(directory):
            score = next((name for name in tensors if name.endswith("score.weight")), "")
            head = tensors.pop(score, None)
            wanted |= {"head.weight": head} if with_head else {}
    _load_strictly(native, wanted, tensors, directory)
    return model


def _check_size(directory: Path, model: NativeModel, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> None:
    """Refuse settings that need far more parameters than the file has, before allocating them."""
    if isinstance(spec, PrefixSpec):
        asked = spec.tokens * 2 * prod(prefix_dimensions(model))
    else:
        sizes = [_layer_sizes(model, name) for name in matching_layers(model, spec)]
        asked = spec.rank * sum(width + height for width, height in sizes)
    held = sum(tensor.numel() for tensor in tensors.values())
    if asked > 4 * held:  # a fused matrix has one lora_A in the file where we have three
        raise UserError(
            f"{directory}: its settings (rank, virtual tokens, layers) ask for {asked} numbers, and {WEIGHTS} holds "
            f"{held}; write the adapter again"
        )


def _load_strictly(
    model: NativeModel, wanted: dict[str, Tensor | None], unexpected: dict[str, Tensor], directory: Path
) -> None:
    """Copy tensors into the model; any missing, unexpected or misshapen tensor is an error."""
    parameters = dict(model.named_parameters())
    problems = [
        f"{directory}/{WEIGHTS}: tensor for {name} is missing" for name, value in wanted.items() if value is None
    ]
    problems += [f"{directory}/{WEIGHTS}: tensor {name} belongs nowhere in this model" for name in unexpected]
    problems += [
        f"{directory}/{WEIGHTS}: {name} has shape {list(value.shape)}, the model wants {list(parameters[name].shape)}"
        for name, value in wanted.items()
        if value is not None and value.shape != parameters[name].shape
    ]
    raise_all(problems)
    with torch.no_grad():
        for name, value in wanted.items():
            assert value is not None
            parameters[name].copy_(value)


def _prefix_file(model: NativeModel, state: dict[str, Tensor], task: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Tensors and config of a prefix in peft's format."""
    own = {name.removeprefix("prefix."): value for name, value in state.items() if name.startswith("prefix.")}
    # Computed by a copy: the model's own prefix may be sharded, and every rank would have to join its forward.
    assert isinstance(model.prefix, PrefixAdapter)
    prefix = PrefixAdapter(model.prefix.spec, *prefix_dimensions(model))
    prefix.load_state_dict(own)
    tensors = {"prompt_embeddings": prefix.prompt_embeddings()}  # any projection applied
    if isinstance(model, ScalarModel):
        tensors["base_model.score.weight"] = state["head.weight"]
    stored = PrefixSpec(tokens=model.prefix.spec.tokens)  # the projection is needed in training only
    return tensors, peft_config(stored, *prefix_dimensions(model), **task)


def _lora_file(model: NativeModel, state: dict[str, Tensor], task: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Tensors and config of a LoRA in peft's format."""
    from peft import LoraConfig

    spec, layers, tensors = _lora_spec(model), lora_layers(model), {}
    targets: dict[str, int] = {}  # name in the file -> rank
    for module in _target_modules(model):
        if not any(name in layers for name in module.layers):
            continue
        down, up = [], []
        for name in module.layers:
            height, adapted = _layer_sizes(model, name)[1], name in layers
            down += [state[f"{name}.lora_A.default.weight"]] if adapted else []
            up.append(state[f"{name}.lora_B.default.weight"] if adapted else torch.zeros(height, 0))
        whole = f"base_model.model.{module.file_name}"
        tensors[f"{whole}.lora_A.weight"] = torch.cat([part.cpu() for part in down])
        tensors[f"{whole}.lora_B.weight"] = torch.block_diag(*(part.cpu() for part in up))
        targets[module.file_name] = len(tensors[f"{whole}.lora_A.weight"])
    if isinstance(model, ScalarModel):
        tensors["base_model.model.score.weight"] = state["head.weight"]
    scale = spec.alpha / (sqrt(spec.rank) if spec.rank_stabilized else spec.rank)
    other_ranks = {name: rank for name, rank in targets.items() if rank != spec.rank}
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        target_modules=sorted(targets),
        rank_pattern=other_ranks,
        alpha_pattern={
            name: scale * (sqrt(rank) if spec.rank_stabilized else rank) for name, rank in other_ranks.items()
        },
        fan_in_fan_out=bool(family_of(model.config).transposed),
        modules_to_save=["score"] if isinstance(model, ScalarModel) else None,
        **task,
    )
    return tensors, config


def _lora_tensors(
    model: NativeModel, tensors: dict[str, Tensor], modules: dict[str, TargetModule], *, block_diagonal: bool
) -> dict[str, Tensor | None]:
    """The LoRA tensors of a file by our names; they are removed from `tensors`.

    Args:
        block_diagonal: fused updates consist of one block per layer; otherwise their layers share one lora_A.
    """
    layers, wanted = lora_layers(model), {}
    for file_name, module in modules.items():
        adapted = [name for name in module.layers if name in layers]
        if not adapted:
            continue
        down = tensors.pop(f"base_model.model.{file_name}.lora_A.weight", None)
        up = tensors.pop(f"base_model.model.{file_name}.lora_B.weight", None)
        heights = [_layer_sizes(model, name)[1] for name in module.layers]
        if up is not None and len(up) != sum(heights):
            raise UserError(f"{WEIGHTS}: {file_name}.lora_B has {len(up)} rows, the model wants {sum(heights)}")
        rows = [None] * len(heights) if up is None else up.split(heights)
        for name, part in zip(module.layers, rows, strict=True):
            if name not in layers:
                continue
            rank, index = layers[name].r["default"], adapted.index(name)
            block = slice(index * rank, (index + 1) * rank) if block_diagonal else slice(None)
            wanted[f"{name}.lora_A.default.weight"] = None if down is None else down[block]
            wanted[f"{name}.lora_B.default.weight"] = None if part is None else part[:, block]
    return wanted


def _with_layers_of_file(spec: LoRASpec, tensors: dict[str, Tensor], modules: dict[str, TargetModule]) -> LoRASpec:
    """The spec with exactly the layers of a file that another program wrote."""
    suffix = ".lora_A.weight"
    held = [name.removeprefix("base_model.model.").removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    ours = [name for module in held if module in modules for name in modules[module].layers]
    return LoRASpec(
        rank=spec.rank, alpha=spec.alpha, rank_stabilized=spec.rank_stabilized,
        layers="|".join(sorted({name.replace(".", r"\.") for name in ours})) or "(?!)",
    )  # fmt: skip


def _layer_sizes(model: nn.Module, name: str) -> tuple[int, int]:
    """Columns and rows of a linear layer's matrix, with or without LoRA."""
    from peft.tuners.lora import LoraLayer

    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear | LoraLayer)
    return layer.in_features, layer.out_features


def _target_modules(model: NativeModel) -> list[TargetModule]:
    """Every linear layer of the model's blocks as the family's weight table names it."""
    layers: dict[str, list[str]] = {}
    for ours, location in hf_locations(model).items():
        stack, _, inside = ours.partition(".")
        if stack in STACKS and inside.startswith("blocks.") and ours.endswith(".weight") and "norm" not in ours:
            layers.setdefault(location.name.removesuffix(".weight"), []).append(ours.removesuffix(".weight"))
    return [TargetModule(name, tuple(ours)) for name, ours in layers.items()]


def _lora_spec(model: NativeModel) -> LoRASpec:
    """The settings of a model's LoRA, with the full name of every layer."""
    layers = lora_layers(model)
    first = next(iter(layers.values()))
    dropout = getattr(first.lora_dropout["default"], "p", 0.0)
    return LoRASpec(
        rank=first.r["default"],
        alpha=first.lora_alpha["default"],
        dropout=dropout,
        layers="|".join(sorted(name.replace(".", r"\.") for name in layers)),
        rank_stabilized=bool(first.use_rslora["default"]),
    )


def _task_type(model: NativeModel) -> str:
    """peft's `task_type` of a model."""
    if isinstance(model, Seq2SeqModel):
        return "SEQ_2_SEQ_LM"
    return "SEQ_CLS" if isinstance(model, ScalarModel) else "CAUSAL_LM"


def _read_config(directory: Path) -> dict[str, Any]:
    check_directory(Path(directory))
    config = read_json_object(Path(directory) / CONFIG)
    if "auto_map" in config:
        raise UserError(f"{directory}/{CONFIG}: 'auto_map' asks to run code from the checkpoint, which is refused")
    return config


def _unsupported_options(config: dict[str, object]) -> list[str]:
    """One message per option of an adapter_config.json that would change the result and is not supported."""
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    problems = []
    for key, value in config.items():
        if key in SUPPORTED_OPTIONS or not value or value == defaults.get(key):
            continue
        if key not in defaults:
            close = difflib.get_close_matches(key, defaults, 1)
            problems.append(f"{key} is no option that we know" + (f"; is it {close[0]}?" if close else ""))
        elif key != "init_lora_weights":
            problems.append(f"{key} = {value!r} is not supported, only {defaults[key]!r}")
        elif value not in UNCHANGED_BASE:
            problems.append(
                f"{key} = {value!r} belongs to changed base weights; convert it to plain LoRA with peft first"
            )
    return problems

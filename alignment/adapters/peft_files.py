"""Adapter directories in peft's own format, both ways. Names and fused matrices follow the family's weight table.

A file may hold one matrix where we have three (GPT-2's c_attn). Three updates of rank r on its parts are one update of
rank 3r on the whole, block by block, which is how they are written; peft sees an ordinary LoRA of that rank.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment.adapters.lora import attach_lora, layers_of, lora_layers
from alignment.adapters.options import refused_options
from alignment.adapters.prefix import Prefix, attach_prefix, dimensions, peft_config
from alignment.adapters.specs import AdapterSpec, LoRASpec, PrefixSpec
from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, write_atomic, write_json
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import hf_names
from alignment.models.safetensors_files import read_safetensors

WEIGHTS, CONFIG, OURS = "adapter_model.safetensors", "adapter_config.json", "alignment_adapter.json"
STACKS = ("trunk", "encoder", "decoder")
SPELLED_OUT = re.compile(r"[\w|]*(?:\\\.[\w|]+)*")  # names of layers as `_spec_of` writes them, and no other pattern


@dataclass(frozen=True)
class HFLocation:
    """A linear layer as its file names it, and which of ours make it up, in order."""

    file_name: str
    ours: tuple[str, ...]


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter rather than a model."""
    return (Path(directory) / CONFIG).is_file()


def is_scalar_adapter(directory: Path) -> bool:
    """Whether an adapter belongs to a reward model and so must hold a score head."""
    return _read_config(directory).get("task_type") == "SEQ_CLS"


def read_base(directory: Path) -> str:
    """The checkpoint an adapter sits on: a local directory, looked for from the adapter's own, or a Hub name."""
    base = _read_config(directory).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(
            f"{directory}/{CONFIG}: base_model_name_or_path is empty; write the base model's directory there"
        )
    beside = Path(directory, base)
    return str(beside.resolve()) if beside.is_dir() else base


def read_revision(directory: Path) -> str | None:
    """The commit of a base model on the Hub; None: the newest, or a local base."""
    return _read_config(directory).get("revision")


def read_spec(directory: Path) -> AdapterSpec:
    """What kind of adapter a directory holds.

    Raises:
        UserError: a kind or an option that we do not have.
    """
    config = _read_config(directory)
    kind = config.get("peft_type")
    where = f"{directory}/{CONFIG}"
    if kind == "PREFIX_TUNING":
        return _checked(PrefixSpec, {"tokens": config.get("num_virtual_tokens")}, where)
    if kind != "LORA":
        raise UserError(f"{where}: peft_type {kind!r} is not one of LORA, PREFIX_TUNING")
    own = Path(directory) / OURS
    if own.is_file():
        spec = _checked(LoRASpec, read_json_object(own), str(own))
        if not SPELLED_OUT.fullmatch(spec.layers):
            raise UserError(f"{own}: layers must name each layer in full, joined by |; write the adapter again")
        return spec
    raise_all(f"{where}: {problem}" for problem in refused_options(config))
    found = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    return _checked(LoRASpec, {**found, "rank_stabilized": bool(config.get("use_rslora"))}, where)


def _checked(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """A specification whose values have been looked at as a run's config is."""
    try:
        return build(kind, SourcedYaml(values, {(): where}))
    except UserError as error:
        raise UserError(f"{error}; write the adapter again") from error


def adapter_state(model: Any, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's own weights by our names, the score head of a scalar model among them.

    Args:
        model: with its adapter attached.
        state: the whole state where the live one is sharded.
    """
    whole: dict[str, Tensor] = model.state_dict() if state is None else state
    kept = {name: value for name, value in whole.items() if ".lora_" in name or name.startswith("prefix.")}
    if _is_scalar(model):
        kept["head.weight"] = whole["head.weight"]
    return kept


def save_adapter(
    model: Any,
    directory: Path,
    *,
    base: str | None,
    revision: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write an adapter so that `peft.PeftModel.from_pretrained(base model, directory)` gives the same model.

    Args:
        base: directory or Hub name of the frozen weights. The config names a directory as seen from the adapter's, so
            that both can be moved together.
        revision: commit of a base on the Hub.
        state: as in `adapter_state`.
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
        write_json(directory / OURS, asdict(_spec_of(model)))
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config.inference_mode = True
    config.save_pretrained(str(directory))


def load_adapter(model: Any, directory: Path, *, with_head: bool = True) -> Any:
    """Attach the adapter of a directory to its base model and return it.

    Args:
        model: the base model; of a policy's adapter it may be a scalar model, whose score head then stays.
        with_head: take the score head of a reward model's adapter; False keeps the one that `model` has.

    Raises:
        UserError: the weights are missing, unknown or of another shape.
    """
    directory = Path(directory)
    if not (directory / WEIGHTS).is_file():
        raise UserError(f"{directory}: no {WEIGHTS}; only safetensors adapters are read")
    spec, tensors = read_spec(directory), read_safetensors(directory / WEIGHTS)
    if isinstance(spec, PrefixSpec):
        _check_size(directory, model, spec, tensors)
        attach_prefix(model, spec)
        wanted = {"prefix.encoder.embedding.weight": tensors.pop("prompt_embeddings", None)}
    else:
        own = (directory / OURS).is_file()
        places = {place.file_name: place for place in _places(model)}
        if not own:
            spec = _layers_in_file(spec, tensors, places)
        _check_size(directory, model, spec, tensors)
        attach_lora(model, spec)
        wanted = _lora_tensors(model, tensors, places, blocks=own)
    if _is_scalar(model):
        model.head.requires_grad_(True)
        if is_scalar_adapter(directory):
            score = next((name for name in tensors if name.endswith("score.weight")), "")
            head = tensors.pop(score, None)
            wanted |= {"head.weight": head} if with_head else {}
    _fill(model, wanted, tensors, directory)
    return model


def _check_size(directory: Path, model: Any, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> None:
    """Refuse settings that ask for far more numbers than the file holds, before memory is taken for them."""
    if isinstance(spec, PrefixSpec):
        asked = spec.tokens * 2 * prod(dimensions(model))
    else:
        layers = [model.get_submodule(name) for name in layers_of(model, spec)]
        asked = spec.rank * sum(layer.in_features + layer.out_features for layer in layers)
    held = sum(tensor.numel() for tensor in tensors.values())
    if asked > 4 * held:  # of a fused matrix the file holds one lora_A where we have three
        raise UserError(
            f"{directory}: its settings (rank, virtual tokens, layers) ask for {asked} numbers, and {WEIGHTS} holds "
            f"{held}; write the adapter again"
        )


def _fill(model: Any, wanted: dict[str, Tensor | None], left: dict[str, Tensor], directory: Path) -> None:
    """Copy tensors into the model, strictly."""
    parameters = dict(model.named_parameters())
    problems = [
        f"{directory}/{WEIGHTS}: tensor for {name} is missing" for name, value in wanted.items() if value is None
    ]
    problems += [f"{directory}/{WEIGHTS}: tensor {name} belongs nowhere in this model" for name in left]
    problems += [
        f"{directory}/{WEIGHTS}: {name} has shape {list(value.shape)}, the model wants {list(parameters[name].shape)}"
        for name, value in wanted.items()
        if value is not None and value.shape != parameters[name].shape
    ]
    raise_all(problems)
    with torch.no_grad():
        for name, value in wanted.items():
            parameters[name].copy_(value)


def _prefix_file(model: Any, state: dict[str, Tensor], task: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    own = {name.removeprefix("prefix."): value for name, value in state.items() if name.startswith("prefix.")}
    # A copy of its own: the live one may be sharded, and all ranks would have to take part in its call.
    prefix = Prefix(model.prefix.spec, *dimensions(model))
    prefix.load_state_dict(own)
    tensors = {"prompt_embeddings": prefix.flat()}  # any projection applied
    if _is_scalar(model):
        tensors["base_model.score.weight"] = state["head.weight"]
    stored = PrefixSpec(tokens=model.prefix.spec.tokens)  # the projection is only a way to train it
    return tensors, peft_config(stored, *dimensions(model), **task)


def _lora_file(model: Any, state: dict[str, Tensor], task: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    from peft import LoraConfig

    spec, layers, tensors = _spec_of(model), lora_layers(model), {}
    targets: dict[str, int] = {}  # file name -> rank there
    for place in _places(model):
        if not any(name in layers for name in place.ours):
            continue
        down, up = [], []
        for name in place.ours:
            width = layers[name].out_features if name in layers else model.get_submodule(name).out_features
            adapted = name in layers
            down += [state[f"{name}.lora_A.default.weight"]] if adapted else []
            up.append(state[f"{name}.lora_B.default.weight"] if adapted else torch.zeros(width, 0))
        whole = f"base_model.model.{place.file_name}"
        tensors[f"{whole}.lora_A.weight"] = torch.cat([part.cpu() for part in down])
        tensors[f"{whole}.lora_B.weight"] = torch.block_diag(*(part.cpu() for part in up))
        targets[place.file_name] = len(tensors[f"{whole}.lora_A.weight"])
    if _is_scalar(model):
        tensors["base_model.model.score.weight"] = state["head.weight"]
    scale = spec.alpha / (sqrt(spec.rank) if spec.rank_stabilized else spec.rank)
    odd = {name: rank for name, rank in targets.items() if rank != spec.rank}
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        target_modules=sorted(targets),
        rank_pattern=odd,
        alpha_pattern={name: scale * (sqrt(rank) if spec.rank_stabilized else rank) for name, rank in odd.items()},
        fan_in_fan_out=bool(family_of(model.config).transposed),
        modules_to_save=["score"] if _is_scalar(model) else None,
        **task,
    )
    return tensors, config


def _lora_tensors(
    model: Any, tensors: dict[str, Tensor], places: dict[str, HFLocation], *, blocks: bool
) -> dict[str, Tensor | None]:
    """The file's tensors by our names; taken out of `tensors`.

    Args:
        blocks: the file's fused updates are ours, block by block; otherwise their parts share one lora_A.
    """
    layers, wanted = lora_layers(model), {}
    for file_name, place in places.items():
        adapted = [name for name in place.ours if name in layers]
        if not adapted:
            continue
        down = tensors.pop(f"base_model.model.{file_name}.lora_A.weight", None)
        up = tensors.pop(f"base_model.model.{file_name}.lora_B.weight", None)
        heights = [model.get_submodule(name).out_features for name in place.ours]
        if up is not None and len(up) != sum(heights):
            raise UserError(f"{WEIGHTS}: {file_name}.lora_B has {len(up)} rows, the model wants {sum(heights)}")
        rows = [None] * len(heights) if up is None else up.split(heights)
        for name, part in zip(place.ours, rows, strict=True):
            if name not in layers:
                continue
            rank, index = layers[name].r["default"], adapted.index(name)
            block = slice(index * rank, (index + 1) * rank) if blocks else slice(None)
            wanted[f"{name}.lora_A.default.weight"] = None if down is None else down[block]
            wanted[f"{name}.lora_B.default.weight"] = None if part is None else part[:, block]
    return wanted


def _layers_in_file(spec: LoRASpec, tensors: dict[str, Tensor], places: dict[str, HFLocation]) -> LoRASpec:
    """The spec with exactly the layers that someone else's file holds."""
    suffix = ".lora_A.weight"
    held = [name.removeprefix("base_model.model.").removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    ours = [name for place in held if place in places for name in places[place].ours]
    return LoRASpec(
        rank=spec.rank, alpha=spec.alpha, rank_stabilized=spec.rank_stabilized,
        layers="|".join(sorted({name.replace(".", r"\.") for name in ours})) or "(?!)",
    )  # fmt: skip


def _places(model: Any) -> list[HFLocation]:
    """Every linear layer of the trunk, or of encoder and decoder, from the family's weight table."""
    parts: dict[str, list[str]] = {}
    for ours, place in hf_names(model).items():
        stack, _, inside = ours.partition(".")
        if stack in STACKS and inside.startswith("blocks.") and ours.endswith(".weight") and "norm" not in ours:
            parts.setdefault(place.name.removesuffix(".weight"), []).append(ours.removesuffix(".weight"))
    return [HFLocation(name, tuple(ours)) for name, ours in parts.items()]


def _spec_of(model: Any) -> LoRASpec:
    """The spec of the LoRA a model carries, its layers spelled out."""
    layers = lora_layers(model)
    some = next(iter(layers.values()))
    dropout = getattr(some.lora_dropout["default"], "p", 0.0)
    return LoRASpec(
        rank=some.r["default"],
        alpha=some.lora_alpha["default"],
        dropout=dropout,
        layers="|".join(sorted(name.replace(".", r"\.") for name in layers)),
        rank_stabilized=bool(some.use_rslora["default"]),
    )


def _task_type(model: Any) -> str:
    """peft's name for the kind of model."""
    if hasattr(model, "decoder"):
        return "SEQ_2_SEQ_LM"
    return "SEQ_CLS" if _is_scalar(model) else "CAUSAL_LM"


def _is_scalar(model: Any) -> bool:
    return model.head.out_features == 1 and model.spec.vocabulary != 1  # a sharded weight may have another shape


def _read_config(directory: Path) -> dict[str, Any]:
    check_directory(Path(directory))
    config = read_json_object(Path(directory) / CONFIG)
    if "auto_map" in config:
        raise UserError(f"{directory}/{CONFIG}: 'auto_map' asks to run code from the checkpoint, which is refused")
    return config

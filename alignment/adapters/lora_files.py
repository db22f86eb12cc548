"""LoRA and DoRA in peft's file format. Layer names and fused matrices follow the family's weight table.

Where a file holds one matrix for several of our layers (GPT-2's c_attn holds query, key and value), their n updates of
rank r are written as one block-diagonal update of rank n * r on the whole matrix, an ordinary LoRA for peft; DoRA's
magnitudes, one per row, are written one after another.
"""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment.adapters.extras import (
    extras_from_file,
    extras_to_file,
    modules_of_config,
    rows_of_config,
    tokens_trained,
    wrappers,
)
from alignment.adapters.files import CONFIG, SPEC, WEIGHTS, build_spec, check_size, read_own_settings
from alignment.adapters.layer_names import (
    BEFORE,
    FileLayer,
    escaped,
    file_layers,
    layer_sizes,
    linear_layers,
    matching_layers,
)
from alignment.adapters.lora import DEFAULT, LowRankUpdate, attach_lora, by_layer, lora_layers, lora_updates, spec_scale
from alignment.adapters.specs import DoRASpec, LoRASpec, LowRankSpec
from alignment.errors import UserError, raise_all
from alignment.files import read_json_object
from alignment.models.huggingface.weight_map import cut_rows, fuse_rows
from alignment.patterns import search_names

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

FULL_NAMES = re.compile(r"[\w|]*(?:\\\.[\w|]+)*")  # layer names as `lora_spec` writes them, and no other pattern

# Options of LoRA files from other programs that are supported; any other option must have peft's default.
SUPPORTED_OPTIONS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "modules_to_save", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
    "trainable_token_indices",
}  # fmt: skip
UNCHANGED_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # other `init_lora_weights` change the base too


def is_lora_file(config: Mapping[str, object]) -> bool:
    """Whether an adapter_config.json is that of a LoRA."""
    return config.get("peft_type") == "LORA" and not config.get("use_dora")


def is_dora_file(config: Mapping[str, object]) -> bool:
    """Whether an adapter_config.json is that of a DoRA, which for peft is an option of LoRA."""
    return config.get("peft_type") == "LORA" and bool(config.get("use_dora"))


def read_lora_spec(config: Mapping[str, object], directory: Path) -> LoRASpec | DoRASpec:
    """The settings of a LoRA or DoRA in peft's format; in a file that another program wrote, without its layers.

    Raises:
        UserError: naming every option that would change the result and is not supported.
    """
    path, kind = Path(directory) / SPEC, DoRASpec if config.get("use_dora") else LoRASpec
    if (settings := read_own_settings(directory)) is not None:
        spec = build_spec(kind, settings, str(path))
        if not isinstance(spec.layers, str) or not FULL_NAMES.fullmatch(spec.layers):
            raise UserError(f"{path}: layers must name each layer in full, joined by |; write the adapter again")
        return spec
    where = f"{directory}/{CONFIG}"
    raise_all(f"{where}: {problem}" for problem in _unsupported_options(config))
    found = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    patterns = {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    return build_spec(
        kind,
        {
            **found,
            **patterns,
            "rank_stabilized": bool(config.get("use_rslora")),
            "token_rows": rows_of_config(config, where),
        },
        where,
    )


def lora_to_file(model: nn.Module, state: dict[str, Tensor]) -> "tuple[dict[str, Tensor], LoraConfig]":
    """Tensors and config of a LoRA or DoRA in peft's format; see `AdapterKind.to_file`."""
    from peft import LoraConfig

    updates, linear, extras = lora_updates(model, state), linear_layers(model), extras_to_file(model, state)
    tensors = extras.tensors
    spec, layers = lora_spec(model, updates), [each for each in file_layers(model) if updates.keys() & set(each.layers)]
    ranks, alphas = {}, {}
    for layer in layers:
        parts = [updates.get(name) for name in layer.layers]
        fused = _fused(parts, [layer_sizes(linear[name])[1] for name in layer.layers], layer.groups)
        tensors[f"{BEFORE}{layer.file_name}.lora_A.weight"] = fused.down
        tensors[f"{BEFORE}{layer.file_name}.lora_B.weight"] = fused.up
        if fused.magnitude is not None:
            tensors[f"{BEFORE}{layer.file_name}.lora_magnitude_vector"] = fused.magnitude
        rank = len(fused.down)
        if rank != spec.rank:
            ranks[layer.file_name] = rank
        if rank != spec.rank or fused.scale != spec_scale(spec, rank):
            alphas[layer.file_name] = fused.scale * (rank**0.5 if spec.rank_stabilized else rank)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        use_dora=isinstance(spec, DoRASpec),
        target_modules=sorted(layer.file_name for layer in layers),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        fan_in_fan_out=any(layer.transposed for layer in layers),
        modules_to_save=extras.modules_to_save,
        trainable_token_indices=extras.token_rows,
    )
    return tensors, config


def lora_settings(model: nn.Module, state: dict[str, Tensor]) -> dict[str, object]:
    """The settings that peft's config does not hold as we read them."""
    return asdict(lora_spec(model, lora_updates(model, state)))


def lora_spec(model: nn.Module, updates: Mapping[str, LowRankUpdate]) -> LoRASpec | DoRASpec:
    """The settings of a model's LoRA, with the full name of every layer; of several LoRAs as one where there are more."""
    layers = lora_layers(model)
    ranks, alphas = {}, {}
    for name, layer in layers.items():
        first = DEFAULT if DEFAULT in layer.lora_A else next(iter(layer.lora_A))
        ranks[name], grown = len(updates[name].down), len(updates[name].down) / layer.r[first]
        alphas[name] = layer.lora_alpha[first] * (grown**0.5 if layer.use_rslora[first] else grown)
    rank, alpha = Counter(zip(ranks.values(), alphas.values(), strict=True)).most_common(1)[0][0]
    one = next((layer for layer in layers.values() if DEFAULT in layer.lora_A), next(iter(layers.values())))
    first = DEFAULT if DEFAULT in one.lora_A else next(iter(one.lora_A))
    return (DoRASpec if one.use_dora[first] else LoRASpec)(
        rank=rank,
        alpha=alpha,
        dropout=getattr(one.lora_dropout[first], "p", 0.0),
        layers="|".join(sorted(escaped(name) for name in layers)),
        rank_stabilized=bool(one.use_rslora[first]),
        rank_pattern={escaped(name): each for name, each in ranks.items() if each != rank},
        alpha_pattern={escaped(name): each for name, each in alphas.items() if each != alpha},
        token_rows=tokens_trained(model),
        modules_to_save=tuple(sorted(wrappers(model))),
    )


def lora_from_file(
    model: nn.Module, spec: LowRankSpec, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor | None]:
    """Attach a LoRA or DoRA and take its tensors out of the file's; see `AdapterKind.from_file`."""
    written_by_us, in_file = (Path(directory) / SPEC).is_file(), file_layers(model)
    if not written_by_us:
        modules = modules_of_config(read_json_object(Path(directory) / CONFIG), tensors)
        spec = _with_layers_of_file(replace(spec, modules_to_save=tuple(modules)), tensors, in_file, directory)
    wanted, linear = matching_layers(model, spec.layers), linear_layers(model)
    ranks = by_layer(model, wanted, spec, "rank_pattern")
    check_size(
        directory, sum(int(ranks.get(name, spec.rank)) * sum(layer_sizes(linear[name])) for name in wanted), tensors
    )
    attach_lora(model, spec)
    adapted, found = lora_layers(model), {}
    for layer in in_file:
        if adapted.keys() & set(layer.layers):
            found |= _from_fused(layer, adapted, tensors, layer_sizes_of=linear, block_diagonal=written_by_us)
    return found | extras_from_file(model, tensors)


def _fused(parts: list[LowRankUpdate | None], heights: list[int], groups: int) -> LowRankUpdate:
    """The updates of several layers as one of the matrix that they are fused into; None: a layer without an update."""
    there = [part for part in parts if part is not None]
    scale = there[0].scale
    ups = [torch.zeros(h, 0) if part is None else part.up for part, h in zip(parts, heights, strict=True)]
    factors = [1.0 if part is None else part.scale / scale for part in parts]
    ups = [up if factor == 1.0 else up * factor for up, factor in zip(ups, factors, strict=True)]
    blocks = list(torch.block_diag(*ups).split(heights))
    magnitudes = [part.magnitude for part in there if part.magnitude is not None]
    return LowRankUpdate(
        torch.cat([part.down for part in there]),
        fuse_rows(blocks, groups),
        scale,
        fuse_rows(magnitudes, groups) if magnitudes else None,
    )


def _from_fused(
    layer: FileLayer,
    adapted: "Mapping[str, LoraLayer]",
    tensors: dict[str, Tensor],
    *,
    layer_sizes_of: Mapping[str, nn.Module],
    block_diagonal: bool,
) -> dict[str, Tensor | None]:
    """The tensors of one layer of a file by our names; they are removed from `tensors`.

    Args:
        block_diagonal: the update of a fused matrix consists of one block per layer; else its layers share one lora_A.
    """
    here = f"{BEFORE}{layer.file_name}."
    down, up = tensors.pop(f"{here}lora_A.weight", None), tensors.pop(f"{here}lora_B.weight", None)
    magnitude = tensors.pop(f"{here}lora_magnitude_vector", None)
    if magnitude is None:
        magnitude = tensors.pop(f"{here}lora_magnitude_vector.weight", None)
    heights = [layer_sizes(layer_sizes_of[name])[1] for name in layer.layers]
    for leaf, tensor in (("lora_B", up), ("lora_magnitude_vector", magnitude)):
        if tensor is not None and len(tensor) != sum(heights):
            raise UserError(
                f"{WEIGHTS}: {layer.file_name}.{leaf} has {len(tensor)} rows, the model wants {sum(heights)}"
            )
    none = [None] * len(heights)
    ups = none if up is None else cut_rows(up, heights, layer.groups)
    lengths = none if magnitude is None else cut_rows(magnitude, heights, layer.groups)
    found: dict[str, Tensor | None] = {}
    before, scale = 0, 0.0  # columns of lora_B that belong to earlier layers
    for name, rows, length in zip(layer.layers, ups, lengths, strict=True):
        if name not in adapted:
            continue
        rank = adapted[name].r[DEFAULT]
        block = slice(before, before + rank) if block_diagonal else slice(None)
        before += rank
        found[f"{name}.lora_A.{DEFAULT}.weight"] = None if down is None else down[block]
        scale = scale or adapted[name].scaling[DEFAULT]  # of the file: that of the first layer
        factor = scale / adapted[name].scaling[DEFAULT] if block_diagonal else 1.0
        own = None if rows is None else rows[:, block]
        found[f"{name}.lora_B.{DEFAULT}.weight"] = own if own is None or factor == 1.0 else own * factor
        if adapted[name].use_dora[DEFAULT]:
            found[f"{name}.lora_magnitude_vector.{DEFAULT}.weight"] = length
    return found


def _with_layers_of_file(
    spec: LowRankSpec, tensors: Mapping[str, Tensor], in_file: list[FileLayer], directory: Path
) -> LowRankSpec:
    """The spec with exactly the layers, ranks and scales of a file that another program wrote.

    Raises:
        UserError: the file has no update of a linear layer of this model.
    """
    ranks, alphas = {}, {}
    for layer in in_file:
        down = tensors.get(f"{BEFORE}{layer.file_name}.lora_A.weight")
        if down is None:
            continue
        key = next(
            (
                key
                for key in spec.alpha_pattern
                if search_names(rf"^(.*\.)?({key})$", [layer.file_name], f"{directory}: alpha_pattern {key!r}")
            ),
            None,
        )
        ranks |= dict.fromkeys(layer.layers, len(down))
        alphas |= dict.fromkeys(layer.layers, spec.alpha if key is None else spec.alpha_pattern[key])
    if not ranks:
        raise UserError(f"{directory}/{WEIGHTS}: updates none of the linear layers of its base model")
    return replace(
        spec,
        layers="|".join(sorted(map(escaped, ranks))),
        rank_pattern={escaped(name): rank for name, rank in ranks.items() if rank != spec.rank},
        alpha_pattern={escaped(name): alpha for name, alpha in alphas.items() if alpha != spec.alpha},
    )


def _unsupported_options(config: Mapping[str, object]) -> list[str]:
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

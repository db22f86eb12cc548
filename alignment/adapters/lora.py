"""LoRA and DoRA: peft's layers injected into our modules, several LoRAs of one layer as one, and their files.

A layer may have up to three low-rank updates, all of which add up: `default` is trained; `start` is the frozen one of
the adapter that the run started from; `initial` is frozen and minus what `default` started as (PiSSA), so that the base
weights stay as they are. A file holds them as one LoRA of the sum of their ranks over the original base, an ordinary
one for peft.

Where a file holds one matrix for several of our layers (GPT-2's c_attn holds query, key and value), their n updates of
rank r are written as one block-diagonal update of rank n * r on the whole matrix; DoRA's magnitudes, one per row, are
written one after another.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from alignment.adapters.extras import (
    DEFAULT,
    Change,
    InjectedKind,
    State,
    attach_extras,
    extras_from_file,
    extras_to_file,
    modules_of_file,
    token_rows,
    wrappers,
)
from alignment.adapters.files import CONFIG, SPEC, WEIGHTS, check_size
from alignment.adapters.layer_names import (
    BEFORE,
    FileLayer,
    escaped,
    file_layers,
    matching,
    matching_layers,
    names_in_file,
)
from alignment.adapters.specs import AdapterSpec, DoRASpec, LoRASpec, LowRankSpec
from alignment.errors import UserError
from alignment.models.huggingface.weight_map import cut_rows, fuse_rows
from alignment.settings import search_names

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

START = "start"
INITIAL = "initial"
UNCHANGED_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # other `init_lora_weights` change the base too
Model = TypeVar("Model", bound=nn.Module)


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """The linear layers with a LoRA update by name; empty without LoRA."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@dataclass(frozen=True)
class LowRankUpdate:
    """A linear layer's change of weight: scale * up @ down; with magnitude, DoRA's length of each row of the sum."""

    down: Tensor  # A, [rank, inputs]
    up: Tensor  # B, [outputs, rank]
    scale: float  # factor on B A
    magnitude: Tensor | None = None  # m, [outputs], or None

    def applied(self, weight: Tensor) -> Tensor:
        """The layer's weight with the update, [outputs, inputs]."""
        changed = weight + self.scale * self.up @ self.down
        if self.magnitude is None:
            return changed
        return changed * (self.magnitude / torch.linalg.norm(changed, dim=1))[:, None]


# Attaching


def attach_lora(model: nn.Module, spec: LowRankSpec, name: str = DEFAULT) -> None:
    """Freeze the model and add a low-rank update to each linear layer that `spec.layers` matches.

    In peft's layers the one named `default` is trained, `start` is loaded and frozen, below the new one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    wanted = matching_layers(model, spec.layers)
    ranks = by_layer(model, wanted, spec.rank_pattern, "rank_pattern")
    alphas = by_layer(model, wanted, spec.alpha_pattern, "alpha_pattern")
    if isinstance(spec, DoRASpec):
        _check_dora(model, set(wanted))
    model.requires_grad_(False)
    if hasattr(model, "peft_config"):
        del model.peft_config  # of the LoRA below; the two are known by name in the layers
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),  # any number works
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        use_dora=isinstance(spec, DoRASpec),
        target_modules=wanted,
        rank_pattern=cast(Any, {re.escape(layer): rank for layer, rank in ranks.items()}),
        alpha_pattern=cast(Any, {re.escape(layer): alpha for layer, alpha in alphas.items()}),
    )
    inject_adapter_in_model(config, model, name)
    if spec.init == "pissa":
        config.lora_dropout = 0.0
        inject_adapter_in_model(config, model, INITIAL)
        for layer in lora_layers(model).values():
            if name in layer.lora_A:
                _start_at_principal_vectors(layer, name)
    if isinstance(spec, LoRASpec):
        for layer in lora_layers(model).values():
            layer._cast_input_dtype = _cast_unless_autocast  # pyright: ignore[reportAttributeAccessIssue]
    activate_loras(model)
    attach_extras(model, spec.modules_to_save, spec.token_rows)


def _cast_unless_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the type of a LoRA's weights; under autocast as it is, for peft's two copies would give the same product."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def by_layer(model: nn.Module, wanted: list[str], pattern: Mapping[str, float], key: str) -> dict[str, float]:
    """The values of `rank_pattern` or `alpha_pattern` by our full names of the layers; an earlier line wins."""
    names = {name: in_file for name, in_file in names_in_file(model).items() if name in wanted} if pattern else {}
    values: dict[str, float] = {}
    for text, value in reversed(list(pattern.items())):
        layers = matching((text,), names, key)
        if not layers:
            raise UserError(
                f"adapter.{key} {text!r} names none of the layers that have an update: {', '.join(wanted[:8])}"
            )
        values |= dict.fromkeys(layers, value)
    return values


def _check_dora(model: nn.Module, wanted: set[str]) -> None:
    """Refuse DoRA on a LoRA, and on some of the layers that a file holds as one, whose rows all have a length there."""
    if lora_layers(model):
        raise UserError("adapter: dora cannot lie on another adapter, whose sum would be no DoRA; merge that one first")
    for layer in file_layers(model):
        without = [name for name in layer.layers if name not in wanted]
        if without and len(without) < len(layer.layers):
            raise UserError(
                f"adapter: a file holds {', '.join(layer.layers)} as one matrix, {layer.file_name}, and dora on it "
                f"changes every row; let `layers` match {', '.join(without)} too, or use lora"
            )


def activate_loras(model: nn.Module) -> None:
    """Let every LoRA of a layer act; `default` alone is trained."""
    for layer in lora_layers(model).values():
        # peft's own switch also changes requires_grad, which sharded optimizers must not see later.
        layer._active_adapter = [name for name in (START, DEFAULT, INITIAL) if name in layer.lora_A]
        for name, parameter in cast(nn.Module, layer).named_parameters():
            if LoRAKind.weights in f".{name}":
                parameter.requires_grad_(f".{DEFAULT}." in f".{name}")


@torch.no_grad()
def _start_at_principal_vectors(layer: "LoraLayer", name: str) -> None:
    """Start an update at the principal part of the layer's weight, and the frozen one at minus that.

    With W = U S V^T: scale * B A is the part of the largest singular values, B = U sqrt(S / scale) and
    A = sqrt(S / scale) V^T. The base weight stays, unlike in the paper, and `initial` takes the part off again.

    Source: Meng et al. 2024, arXiv:2404.02948, equations 2 to 4.
    """
    from peft.utils.integrations import dequantize_module_weight

    base = layer.get_base_layer()
    rank = layer.r[name]
    scale = layer.scaling[name]
    weight = dequantize_module_weight(base).float()
    if tuple(weight.shape) != (layer.out_features, layer.in_features) or getattr(layer, "fan_in_fan_out", False):
        weight = weight.T  # transformers' Conv1D
    if START in layer.lora_A:
        weight = weight + layer.scaling[START] * _matrix(layer.lora_B, START) @ _matrix(layer.lora_A, START)
    left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    root = (sizes[:rank] / scale).sqrt()
    for adapter, sign in ((name, 1.0), (INITIAL, -1.0)):
        _matrix(layer.lora_A, adapter).copy_(root[:, None] * right[:rank])
        _matrix(layer.lora_B, adapter).copy_(sign * left[:, :rank] * root)


def _matrix(layers: nn.ModuleDict, name: str) -> Tensor:
    return cast(nn.Linear, layers[name]).weight


# A LoRA that a run starts from, kept frozen under the new one: no merged copy of the base weights is needed


def can_stack(start: AdapterSpec, new: AdapterSpec) -> bool:
    """True where a new adapter can lie on a start with one: both are LoRAs, without further parts that train."""
    return all(isinstance(spec, LoRASpec) and not spec.token_rows and not spec.modules_to_save for spec in (start, new))


@torch.no_grad()
def keep_as_start(model: Model) -> Model:
    """Freeze the model's LoRA and make room for a new one on it; return the model.

    Switching adapters off leaves the frozen one on.
    """
    spec = spec_of(model, lora_updates(model, model.state_dict()))
    del model.peft_config  # peft would warn of several adapters; they are known by name in the layers
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten: the new adapter's must not depend on it
        attach_lora(model, replace(spec, dropout=0.0), START)
    for layer in lora_layers(model).values():
        for matrices in (layer.lora_A, layer.lora_B):
            _matrix(matrices, START).copy_(_matrix(matrices, DEFAULT))
        layer.delete_adapter(DEFAULT)
    del model.peft_config
    activate_loras(model)
    return model


# Several LoRAs as one


def lora_updates(model: nn.Module, state: State) -> dict[str, LowRankUpdate]:
    """The update of every layer by our names, all LoRAs of a layer as one of the sum of their ranks."""
    return {name: _update(name, layer, state) for name, layer in lora_layers(model).items()}


def _update(name: str, layer: "LoraLayer", state: State) -> LowRankUpdate:
    names = [adapter for adapter in (DEFAULT, START, INITIAL) if adapter in layer.lora_A]
    downs = [state[f"{name}.lora_A.{adapter}.weight"].cpu() for adapter in names]
    ups = [state[f"{name}.lora_B.{adapter}.weight"].cpu() for adapter in names]
    scale = layer.scaling[names[0]]
    if len(names) == 1:
        magnitude = state.get(f"{name}.lora_magnitude_vector.{names[0]}.weight")
        return LowRankUpdate(downs[0], ups[0], scale, None if magnitude is None else magnitude.cpu())
    ups = [up * (layer.scaling[adapter] / scale) for adapter, up in zip(names, ups, strict=True)]
    return LowRankUpdate(torch.cat(downs), torch.cat(ups, dim=1), scale)


def spec_of(model: nn.Module, updates: Mapping[str, LowRankUpdate]) -> LoRASpec | DoRASpec:
    """The settings of a model's LoRA, or of several LoRAs as one, with the full name of every layer."""
    layers = lora_layers(model)
    first = DEFAULT if any(DEFAULT in layer.lora_A for layer in layers.values()) else START
    one = next(layer for layer in layers.values() if first in layer.lora_A)
    rows = token_rows(model)
    stabilized = one.use_rslora[first]
    ranks = {}
    alphas = {}
    for name, layer in layers.items():
        adapter = first if first in layer.lora_A else next(iter(layer.lora_A))
        rank = len(updates[name].down)
        if layer.use_rslora[adapter] == stabilized:
            grown = rank / layer.r[adapter]
            alpha = layer.lora_alpha[adapter] * (grown**0.5 if stabilized else grown)
        else:  # the start's alone, by the other rule
            alpha = updates[name].scale * (sqrt(rank) if stabilized else rank)
        ranks[name] = rank
        alphas[name] = alpha
    rank, alpha = Counter(zip(ranks.values(), alphas.values(), strict=True)).most_common(1)[0][0]
    return (DoRASpec if one.use_dora[first] else LoRASpec)(
        rank=rank,
        alpha=alpha,
        dropout=getattr(one.lora_dropout[first], "p", 0.0),
        layers="|".join(sorted(map(escaped, layers))),
        rank_stabilized=bool(stabilized),
        rank_pattern={escaped(name): layer_rank for name, layer_rank in ranks.items() if layer_rank != rank},
        alpha_pattern={escaped(name): layer_alpha for name, layer_alpha in alphas.items() if layer_alpha != alpha},
        token_rows=() if rows is None else tuple(rows.ids.tolist()),
        modules_to_save=tuple(sorted(wrappers(model))),
    )


# The kind and its files


class LoRAKind(InjectedKind):
    """LoRA and DoRA, which for peft is an option of LoRA."""

    peft_type = "LORA"
    weights = ".lora_"
    options = frozenset(
        {
            "r",
            "lora_alpha",
            "lora_dropout",
            "use_rslora",
            "use_dora",
            "layers_to_transform",
            "layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "trainable_token_indices",
            "ensure_weight_tying",
        }
    )

    def layers(self, model: nn.Module) -> "dict[str, LoraLayer]":
        return lora_layers(model)

    def attach(self, model: nn.Module, spec: LowRankSpec) -> None:
        attach_lora(model, spec)

    def changes_when_off(self, model: nn.Module) -> list[Change]:
        """All updates off but that of the adapter that the run started from."""
        stays = {id(layer) for layer in lora_layers(model).values() if START in layer.lora_A}
        return [
            (module, "_active_adapter", [START]) if id(module) in stays else (module, name, value)
            for module, name, value in super().changes_when_off(model)
        ]

    def put_into(self, model: nn.Module, state: State, plain: State) -> None:
        for name, update in lora_updates(model, state).items():
            weight = plain[f"{name}.weight"]
            plain[f"{name}.weight"] = update.applied(weight.cpu()).to(weight.dtype)

    def own_settings(self, model: nn.Module, state: State) -> dict[str, object]:
        return asdict(spec_of(model, lora_updates(model, state)))

    def to_file(self, model: nn.Module, state: State) -> tuple[State, dict[str, Any]]:
        from peft import LoraConfig

        updates = lora_updates(model, state)
        tensors, options = extras_to_file(model, state)
        spec = spec_of(model, updates)
        parts = list(self.file_parts(model))
        ranks = {}
        alphas = {}
        for layer, heights in parts:
            fused = _fused([updates.get(name) for name in layer.layers], heights, layer.groups)
            here = f"{BEFORE}{layer.file_name}"
            rank = len(fused.down)
            tensors |= {f"{here}.lora_A.weight": fused.down, f"{here}.lora_B.weight": fused.up}
            if fused.magnitude is not None:
                tensors[f"{here}.lora_magnitude_vector"] = fused.magnitude
            by_rank = sqrt(rank) if spec.rank_stabilized else rank
            if rank != spec.rank:
                ranks[layer.file_name] = rank
            if rank != spec.rank or fused.scale != spec.alpha / by_rank:
                alphas[layer.file_name] = fused.scale * by_rank
        return tensors, LoraConfig(
            r=spec.rank,
            lora_alpha=cast(int, spec.alpha),
            lora_dropout=spec.dropout,
            use_rslora=spec.rank_stabilized,
            use_dora=isinstance(spec, DoRASpec),
            target_modules=sorted(layer.file_name for layer, _ in parts),
            rank_pattern=ranks,
            alpha_pattern=alphas,
            fan_in_fan_out=any(layer.transposed for layer, _ in parts),
            **cast(Any, options),
        ).to_dict()

    def read_spec(self, config: Mapping[str, object], directory: Path) -> LoRASpec | DoRASpec:
        rows = config.get("trainable_token_indices") or []
        if isinstance(rows, dict) and len(rows) != 1:
            raise UserError(
                f"{directory}/{CONFIG}: trainable_token_indices names {len(rows)} tables, {', '.join(rows)}; only rows "
                "of the token embedding, and of a head that is tied to it, are supported"
            )
        settings = {
            "rank": config.get("r"),
            "alpha": config.get("lora_alpha"),
            "rank_pattern": config.get("rank_pattern") or {},
            "alpha_pattern": config.get("alpha_pattern") or {},
            "rank_stabilized": bool(config.get("use_rslora")),
            "token_rows": next(iter(rows.values())) if isinstance(rows, dict) else rows,
        }
        return self.read_options(DoRASpec if config.get("use_dora") else LoRASpec, settings, config, directory)

    def _unsupported(self, config: Mapping[str, object]) -> Iterator[str]:
        init = config.get("init_lora_weights", True)
        if init not in UNCHANGED_BASE:
            yield (
                f"init_lora_weights = {init!r} belongs to changed base weights; convert it to plain LoRA with peft "
                "first"
            )
        yield from super()._unsupported({key: config[key] for key in config if key != "init_lora_weights"})

    def from_file(
        self, model: nn.Module, spec: LowRankSpec, tensors: State, directory: Path
    ) -> dict[str, Tensor | None]:
        ours = (directory / SPEC).is_file()
        if not ours:
            spec = replace(
                _with_layers_of_file(spec, tensors, file_layers(model)),
                modules_to_save=modules_of_file(directory, tensors),
            )
        downs = [tensor for name, tensor in tensors.items() if "lora_A" in name and tensor.dim()]
        check_size(max([spec.rank, *spec.rank_pattern.values()]), downs)
        attach_lora(model, spec)
        weights: dict[str, Tensor | None] = {}
        for layer, heights in self.file_parts(model):
            weights |= _cut(layer, lora_layers(model), tensors, heights, block_diagonal=ours)
        return weights | extras_from_file(model, tensors)


def _fused(parts: list[LowRankUpdate | None], heights: list[int], groups: int) -> LowRankUpdate:
    """The updates of several layers as one of the matrix that they are fused into; None: a layer without an update."""
    there = [part for part in parts if part is not None]
    scale = there[0].scale
    ups = [
        torch.zeros(height, 0) if part is None else part.up if part.scale == scale else part.up * (part.scale / scale)
        for part, height in zip(parts, heights, strict=True)
    ]
    magnitudes = [part.magnitude for part in there if part.magnitude is not None]
    return LowRankUpdate(
        torch.cat([part.down for part in there]),
        fuse_rows(list(torch.block_diag(*ups).split(heights)), groups),
        scale,
        fuse_rows(magnitudes, groups) if magnitudes else None,
    )


def _cut(
    layer: FileLayer, adapted: "Mapping[str, LoraLayer]", tensors: State, heights: list[int], *, block_diagonal: bool
) -> dict[str, Tensor | None]:
    """The tensors of one layer of a file by our names; they are removed from `tensors`.

    A `block_diagonal` update of a fused matrix consists of one block per layer; else its layers share one lora_A.
    """
    here = f"{BEFORE}{layer.file_name}."
    down = tensors.pop(f"{here}lora_A.weight", None)
    up = tensors.pop(f"{here}lora_B.weight", None)
    magnitudes = [tensors.pop(f"{here}lora_magnitude_vector{end}", None) for end in ("", ".weight")]
    magnitude = next((value for value in magnitudes if value is not None), None)
    for leaf, tensor in (("lora_B", up), ("lora_magnitude_vector", magnitude)):
        if tensor is not None and len(tensor) != sum(heights):
            raise UserError(
                f"{WEIGHTS}: {layer.file_name}.{leaf} has {len(tensor)} rows, the model wants {sum(heights)}"
            )
    none = [None] * len(heights)
    ups = none if up is None else cut_rows(up, heights, layer.groups)
    lengths = none if magnitude is None else cut_rows(magnitude, heights, layer.groups)
    weights: dict[str, Tensor | None] = {}
    before = 0  # columns of lora_B that belong to earlier layers
    scale = 0.0
    for name, rows, length in zip(layer.layers, ups, lengths, strict=True):
        if name not in adapted:
            continue
        rank = adapted[name].r[DEFAULT]
        block = slice(before, before + rank) if block_diagonal else slice(None)
        before += rank
        weights[f"{name}.lora_A.{DEFAULT}.weight"] = None if down is None else down[block]
        scale = scale or adapted[name].scaling[DEFAULT]  # of the file: that of the first layer
        factor = scale / adapted[name].scaling[DEFAULT] if block_diagonal else 1.0
        layer_up = None if rows is None else rows[:, block]
        weights[f"{name}.lora_B.{DEFAULT}.weight"] = (
            layer_up if layer_up is None or factor == 1.0 else layer_up * factor
        )
        if adapted[name].use_dora[DEFAULT]:
            weights[f"{name}.lora_magnitude_vector.{DEFAULT}.weight"] = length
    return weights


def _with_layers_of_file(spec: LowRankSpec, tensors: State, in_file: list[FileLayer]) -> LowRankSpec:
    """The settings with exactly the layers, ranks and scales of a file that another program wrote."""
    ranks = {}
    alphas = {}
    for layer in in_file:
        down = tensors.get(f"{BEFORE}{layer.file_name}.lora_A.weight")
        if down is not None:
            matches = (
                alpha
                for key, alpha in spec.alpha_pattern.items()
                if search_names(rf"^(.*\.)?({key})$", [layer.file_name], f"alpha_pattern {key!r}")
            )
            ranks |= dict.fromkeys(layer.layers, len(down))
            alphas |= dict.fromkeys(layer.layers, next(matches, spec.alpha))
    if not ranks:
        raise UserError(f"{WEIGHTS} updates none of the linear layers of its base model")
    return replace(
        spec,
        layers="|".join(sorted(map(escaped, ranks))),
        rank_pattern={escaped(name): rank for name, rank in ranks.items() if rank != spec.rank},
        alpha_pattern={escaped(name): alpha for name, alpha in alphas.items() if alpha != spec.alpha},
    )

"""LoRA and DoRA: peft's layers injected into our modules, and several LoRAs of one layer as one.

A layer may have up to three low-rank updates, all of which add up: `default` is trained; `start` is the frozen one of the
adapter that the run started from; `initial` is frozen and minus what `default` started as (PiSSA), so that the base
weights stay as they are.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from alignment.adapters.extras import attach_extras, extras_switched_off, is_extra_weight, merge_layers
from alignment.adapters.layer_names import file_layers, matching, matching_layers, names_in_file
from alignment.adapters.specs import DoRASpec, LowRankSpec
from alignment.errors import UserError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

DEFAULT, START, INITIAL = "default", "start", "initial"
INITS = {"default": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}  # ours -> peft's init_lora_weights


@dataclass(frozen=True)
class LowRankUpdate:
    """What is added to a linear layer's weight: scale * up @ down; with a magnitude, DoRA's length of each row of the sum.

    Attributes:
        down: A, [rank, inputs].
        up: B, [outputs, rank].
        scale: factor on B A.
        magnitude: m, [outputs], or None.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    def applied(self, weight: Tensor) -> Tensor:
        """The layer's weight with the update, [outputs, inputs]."""
        changed = weight + self.scale * self.up @ self.down
        if self.magnitude is None:
            return changed
        return changed * (self.magnitude / torch.linalg.norm(changed, dim=1))[:, None]


def attach_lora(model: nn.Module, spec: LowRankSpec, name: str = DEFAULT) -> None:
    """Freeze the model and add a low-rank update to each linear layer that `spec.layers` matches.

    Args:
        model: may have a frozen LoRA of another name, below the new one.
        spec: rank, layers and the rest.
        name: what peft calls the new adapter: `default` is trained, `start` is loaded and frozen.

    Raises:
        UserError: no layer matches, or a pattern takes too long; or DoRA on a LoRA, which no file can hold.
    """
    from peft import LoraConfig, inject_adapter_in_model

    wanted = matching_layers(model, spec.layers, spec.exclude)
    ranks, alphas = by_layer(model, wanted, spec, "rank_pattern"), by_layer(model, wanted, spec, "alpha_pattern")
    if isinstance(spec, DoRASpec) and lora_layers(model):
        raise UserError("adapter: dora cannot lie on another adapter, whose sum would be no DoRA; merge that one first")
    if isinstance(spec, DoRASpec):
        _refuse_parts_of_a_matrix(model, set(wanted))
    model.requires_grad_(False)
    if hasattr(model, "peft_config"):
        del model.peft_config  # of the LoRA below; the two are told apart by name in the layers
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # any number works
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        use_dora=isinstance(spec, DoRASpec),
        init_lora_weights=INITS.get(spec.init, True),  # pyright: ignore[reportArgumentType]
        target_modules=wanted,
        rank_pattern={re.escape(layer): rank for layer, rank in ranks.items()},
        alpha_pattern={re.escape(layer): alpha for layer, alpha in alphas.items()},  # pyright: ignore[reportArgumentType]
    )
    inject_adapter_in_model(config, model, name)
    if spec.init.startswith("pissa"):
        config.lora_dropout = 0.0
        inject_adapter_in_model(config, model, INITIAL)
        for layer in lora_layers(model).values():
            if name in layer.lora_A:
                _start_at_principal_vectors(layer, name, spec.init)
    activate_loras(model)
    attach_extras(model, spec.modules_to_save, spec.token_rows)


def by_layer(model: nn.Module, wanted: list[str], spec: LowRankSpec, key: str) -> dict[str, int | float]:
    """The values of `rank_pattern` or `alpha_pattern` by our full names of the layers; an earlier line wins.

    Raises:
        UserError: a line names no layer.
    """
    pattern, found = getattr(spec, key), {}
    names = (
        {name: file_name for name, file_name in names_in_file(model).items() if name in set(wanted)} if pattern else {}
    )
    for text, value in pattern.items():
        layers = matching((text,), names, key)
        if not layers:
            raise UserError(
                f"adapter.{key} {text!r} names none of the layers that have an update: {', '.join(wanted[:8])}"
            )
        found |= {layer: value for layer in layers if layer not in found}
    return found


def _refuse_parts_of_a_matrix(model: nn.Module, wanted: set[str]) -> None:
    """Refuse DoRA on some of the layers that a file holds as one, whose rows all have a length there."""
    for layer in file_layers(model):
        without = [name for name in layer.layers if name not in wanted]
        if without and len(without) < len(layer.layers):
            raise UserError(
                f"adapter: a file holds {', '.join(layer.layers)} as one matrix, {layer.file_name}, and dora on it changes "
                f"every row; let `layers` match {', '.join(without)} too, or use lora"
            )


def activate_loras(model: nn.Module) -> None:
    """Let every LoRA of a layer act; `default` alone is trained."""
    for layer in lora_layers(model).values():
        # peft's own switch also changes requires_grad, which sharded optimizers must not see later.
        layer._active_adapter = [name for name in (START, DEFAULT, INITIAL) if name in layer.lora_A]
        for name, parameter in cast(nn.Module, layer).named_parameters():
            if is_lora_weight(f".{name}"):
                parameter.requires_grad_(f".{DEFAULT}." in f".{name}")


def is_lora_weight(name: str) -> bool:
    """Whether a name of a model's state dict is a weight of a LoRA or DoRA, or of what it trains besides."""
    return ".lora_" in name or is_extra_weight(name)


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """The linear layers with a LoRA update by name; empty without LoRA."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def has_plain_lora(model: nn.Module) -> bool:
    """Whether a model has a LoRA that is no DoRA."""
    return any(not any(layer.use_dora.values()) for layer in lora_layers(model).values())


def has_dora(model: nn.Module) -> bool:
    """Whether a model has a DoRA."""
    return any(any(layer.use_dora.values()) for layer in lora_layers(model).values())


@contextmanager
def lora_switched_off(model: nn.Module) -> Iterator[None]:
    """Leave all updates out within the block but that of the adapter that the run started from."""
    layers = list(lora_layers(model).values())
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    # peft's own switch also changes requires_grad, which sharded optimizers must not see.
    for layer in layers:
        if START in layer.lora_A:
            layer._active_adapter = [START]
        else:
            layer._disable_adapters = True
    try:
        with extras_switched_off(model):
            yield
    finally:
        for layer, (was_disabled, was_active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = was_disabled, was_active


def lora_updates(model: nn.Module, state: dict[str, Tensor]) -> dict[str, LowRankUpdate]:
    """The update of every layer by our names, all LoRAs of a layer as one of the sum of their ranks.

    Args:
        model: a model with LoRA or DoRA.
        state: the weights of its adapter by our names; whole ones where the model is sharded.
    """
    return {name: _update(name, layer, state) for name, layer in lora_layers(model).items()}


def _update(name: str, layer: "LoraLayer", state: dict[str, Tensor]) -> LowRankUpdate:
    names = [each for each in (DEFAULT, START, INITIAL) if each in layer.lora_A]
    downs = [state[f"{name}.lora_A.{each}.weight"].cpu() for each in names]
    ups = [state[f"{name}.lora_B.{each}.weight"].cpu() for each in names]
    scale = layer.scaling[names[0]]
    if len(names) == 1:
        magnitude = state.get(f"{name}.lora_magnitude_vector.{names[0]}.weight")
        return LowRankUpdate(downs[0], ups[0], scale, None if magnitude is None else magnitude.cpu())
    ups = [up * (layer.scaling[each] / scale) for each, up in zip(names, ups, strict=True)]
    return LowRankUpdate(torch.cat(downs), torch.cat(ups, dim=1), scale)


def merge_lora(model: nn.Module) -> None:
    """Add each update to its layer's weight and remove the adapter; all parameters are trainable afterwards."""
    merge_layers(model, lora_layers(model))


def spec_scale(spec: LowRankSpec, rank: int) -> float:
    """The factor on B A that the settings give an update of a rank."""
    return spec.alpha / (sqrt(rank) if spec.rank_stabilized else rank)


@torch.no_grad()
def _start_at_principal_vectors(layer: "LoraLayer", name: str, init: str) -> None:
    """Start an update at the principal part of the layer's weight, and the frozen one at minus that.

    With W = U S V^T: scale * B A is the part of the largest singular values, B = U sqrt(S / scale), A likewise. The base
    weight stays, unlike in the paper, and `initial` takes the part off again.

    Source: Meng et al. 2024, arXiv:2404.02948, equations 2 to 4.
    """
    from peft.utils.integrations import dequantize_module_weight

    base, rank, scale = layer.get_base_layer(), layer.r[name], layer.scaling[name]
    weight = dequantize_module_weight(base).float()
    if tuple(weight.shape) != (layer.out_features, layer.in_features) or getattr(layer, "fan_in_fan_out", False):
        weight = weight.T  # transformers' Conv1D
    if START in layer.lora_A:
        below = _matrix(layer.lora_B, START) @ _matrix(layer.lora_A, START)
        weight = weight + layer.scaling[START] * below
    if init == "pissa":
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
    else:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(0)  # a resumed run must find the same vectors
            left, sizes, right = torch.svd_lowrank(weight, q=rank, niter=int(init.rpartition("_")[2]))
            right = right.T
    root = (sizes / scale).sqrt()
    for each, sign in ((name, 1.0), (INITIAL, -1.0)):
        _matrix(layer.lora_A, each).copy_(root[:, None] * right)
        _matrix(layer.lora_B, each).copy_(sign * left * root)


def _matrix(layers: nn.ModuleDict, name: str) -> Tensor:
    """A or B of one LoRA of a layer."""
    return cast(nn.Linear, layers[name]).weight

"""LoRA through peft's layers, put into our own modules from outside. Files are in files.py."""

import re
import time
from typing import Any

import regex
from torch import nn

from alignment.adapters.specs import LoRASpec
from alignment.errors import UserError

PATTERN_SECONDS = 1.0  # for all names of a model; an honest pattern takes microseconds


def attach_lora(model: Any, spec: LoRASpec) -> Any:
    """Freeze the model and put an update beside each linear layer that `spec.layers` names.

    Raises:
        UserError: as `layers_of`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    wanted = layers_of(model, spec)
    model.requires_grad_(False)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # peft divides it; it need not be whole
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        target_modules=wanted,
    )
    return inject_adapter_in_model(config, model)


def layers_of(model: Any, spec: LoRASpec) -> list[str]:
    """Names of the linear layers that `spec.layers` names.

    Raises:
        UserError: there are none, or the pattern takes too long to say so.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    pattern = regex.compile(rf"(?:{spec.layers})$")
    end = time.monotonic() + PATTERN_SECONDS
    try:
        # `re` cannot be interrupted: with (.*)*(.*)*! on one long name it does not end.
        wanted = [name for name in names if pattern.search(name, timeout=max(end - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"adapter.layers {spec.layers!r} takes more than {PATTERN_SECONDS:g} seconds on the names of the layers; "
            "nest no repetitions, as in (a*)*"
        ) from error
    if not wanted:
        raise UserError(f"adapter.layers {spec.layers!r} names no linear layer; there are: {', '.join(_kinds(names))}")
    return wanted


def lora_layers(model: Any) -> dict[str, Any]:
    """The adapted linear layers by name; empty where there is no LoRA."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merge_lora(model: Any) -> Any:
    """Add each update to the weight beside it and take the adapter out; gradients are on again everywhere."""
    for name, layer in lora_layers(model).items():
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model.requires_grad_(True)


def _kinds(names: list[str]) -> list[str]:
    """Layer names without their numbers."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})

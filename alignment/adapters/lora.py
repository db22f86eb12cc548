"""LoRA through peft's layers, put into our own modules from outside. Files are in files.py."""

import re
from typing import Any

from torch import nn

from alignment.adapters.spec import LoRASpec
from alignment.errors import UserError


def attach_lora(model: Any, spec: LoRASpec) -> Any:
    """Freeze the model and put an update beside each linear layer that `spec.layers` names.

    Raises:
        UserError: no layer has such a name.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = [name for name in names if re.search(rf"(?:{spec.layers})$", name)]
    if not wanted:
        raise UserError(f"adapter.layers {spec.layers!r} names no linear layer; there are: {', '.join(_kinds(names))}")
    model.requires_grad_(False)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # peft divides it; it need not be whole
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilised,
        target_modules=wanted,
    )
    return inject_adapter_in_model(config, model)


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

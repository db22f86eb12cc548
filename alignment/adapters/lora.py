"""LoRA: peft's layers injected into our modules."""

import re
import time
from typing import TYPE_CHECKING, TypeVar

import regex
from torch import nn

from alignment.adapters.specs import LoRASpec
from alignment.errors import UserError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Model = TypeVar("Model", bound=nn.Module)
PATTERN_SECONDS = 1.0  # for all names of a model; an ordinary pattern takes microseconds


def attach_lora(model: Model, spec: LoRASpec) -> Model:
    """Freeze the model, add a low-rank update to each linear layer that `spec.layers` matches, and return the model.

    Raises:
        UserError: no layer matches, or the pattern takes too long.
    """
    from peft import LoraConfig, inject_adapter_in_model

    wanted = matching_layers(model, spec)
    model.requires_grad_(False)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # any number works
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        target_modules=wanted,
    )
    inject_adapter_in_model(config, model)
    return model


def matching_layers(model: nn.Module, spec: LoRASpec) -> list[str]:
    """Names of the linear layers that `spec.layers` matches.

    Raises:
        UserError: no layer matches, or the pattern takes too long.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    pattern = regex.compile(rf"(?:{spec.layers})$")
    end = time.monotonic() + PATTERN_SECONDS
    try:
        # `re` has no timeout, and (.*)*(.*)*! on one long name never ends.
        wanted = [name for name in names if pattern.search(name, timeout=max(end - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"adapter.layers {spec.layers!r} takes more than {PATTERN_SECONDS:g} seconds on the names of the layers; "
            "nest no repetitions, as in (a*)*"
        ) from error
    if not wanted:
        raise UserError(
            f"adapter.layers {spec.layers!r} names no linear layer; there are: {', '.join(_without_numbers(names))}"
        )
    return wanted


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """The linear layers with a LoRA update by name; empty without LoRA."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merge_lora(model: Model) -> Model:
    """Add each update to its layer's weight and remove the adapter; all parameters are trainable afterwards."""
    for name, layer in lora_layers(model).items():
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model.requires_grad_(True)


def _without_numbers(names: list[str]) -> list[str]:
    """Layer names with * for each number, every one once."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})

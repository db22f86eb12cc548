"""LoRA: peft's layers injected into our modules."""

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from alignment.adapters.specs import LoRASpec
from alignment.errors import UserError
from alignment.patterns import search_names, without_numbers

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Model = TypeVar("Model", bound=nn.Module)


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
    wanted = search_names(rf"(?:{spec.layers})$", names, f"adapter.layers {spec.layers!r}")
    if not wanted:
        raise UserError(
            f"adapter.layers {spec.layers!r} names no linear layer; there are: {', '.join(without_numbers(names))}"
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

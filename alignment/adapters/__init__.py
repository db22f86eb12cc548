"""Adapters, attached from outside and lifted off again: LoRA (lora.py) and prefix tuning (prefix.py), in peft's file format."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alignment.adapters.lora import attach_lora, lora_layers, merge_lora
from alignment.adapters.peft_files import (
    adapter_state,
    is_adapter,
    is_scalar_adapter,
    load_adapter,
    read_base,
    read_revision,
    read_spec,
    save_adapter,
)
from alignment.adapters.prefix import attach_prefix
from alignment.adapters.specs import AdapterSpec, LoRASpec, PrefixSpec
from alignment.errors import UserError

__all__ = [
    "AdapterSpec", "LoRASpec", "PrefixSpec", "adapter_state", "attach", "disabled", "is_adapter", "is_scalar_adapter",
    "load_adapter",
    "merge_adapter", "read_base", "read_revision", "read_spec", "save_adapter",
]  # fmt: skip


def attach(model: Any, spec: AdapterSpec) -> Any:
    """Freeze `model`, give it a fresh adapter and return it; the score head of a scalar model goes on training.

    Raises:
        UserError: the adapter does not fit the model.
    """
    if model.source != "native":
        raise UserError(
            f"adapters need an architecture of our own, and {model.config['model_type']!r} runs as transformers' class; "
            "leave `adapter` out and train all weights"
        )
    model = attach_lora(model, spec) if isinstance(spec, LoRASpec) else attach_prefix(model, spec)
    if model.head.weight.dim() == 2 and model.head.weight.shape[0] == 1:
        model.head.requires_grad_(True)
    return model


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """The model without its adapter, within the block and whatever happens in it."""
    layers = list(lora_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    had_prefix = model.prefix_enabled
    # peft's own switch also turns gradients off and on, which sharded optimizers must not see.
    for layer in layers:
        layer._disable_adapters = True
    model.prefix_enabled = False
    try:
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled
        model.prefix_enabled = had_prefix


def merge_adapter(model: Any) -> Any:
    """Put a model's LoRA into its weights for good and return it.

    Raises:
        UserError: its adapter is a prefix, which is no change of weights.
    """
    if model.prefix is not None:
        raise UserError(
            "a prefix adapter is no change of weights and cannot be merged; keep it as an adapter directory"
        )
    return merge_lora(model)

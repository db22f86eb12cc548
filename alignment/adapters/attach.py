"""Attach an adapter to a model, switch it off for a while, merge it into the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from alignment.adapters.lora import attach_lora, lora_layers, merge_lora
from alignment.adapters.prefix import attach_prefix
from alignment.adapters.specs import AdapterSpec, LoRASpec
from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel

Loaded = TypeVar("Loaded", bound=NativeModel | ExternalModel)


def attach(model: Loaded, spec: AdapterSpec) -> Loaded:
    """Freeze `model`, attach a new adapter and return the model; the score head of a scalar model stays trainable.

    Raises:
        UserError: the model runs through transformers' class, or the adapter does not fit it.
    """
    native = require_native(model)
    native = attach_lora(native, spec) if isinstance(spec, LoRASpec) else attach_prefix(native, spec)
    if isinstance(native, ScalarModel):
        native.head.requires_grad_(True)
    return model


def require_native(model: NativeModel | ExternalModel) -> NativeModel:
    """The model itself.

    Raises:
        UserError: it runs through transformers' class, which takes no adapter.
    """
    if isinstance(model, ExternalModel):
        raise UserError(
            f"adapters need an architecture of our own, and {model.config['model_type']!r} runs as transformers' class; "
            "leave `adapter` out and train all weights"
        )
    return model


@contextmanager
def disabled(model: NativeModel) -> Iterator[None]:
    """Switch the model's adapter off within the block, also when the block raises."""
    layers = list(lora_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    had_prefix = model.prefix_enabled
    # peft's own switch also changes requires_grad, which sharded optimizers must not see.
    for layer in layers:
        layer._disable_adapters = True
    model.prefix_enabled = False
    try:
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled
        model.prefix_enabled = had_prefix


def merge_adapter(model: Loaded) -> Loaded:
    """Merge a model's LoRA into its weights and return the model.

    Raises:
        UserError: the adapter is a prefix, which is no change of weights.
    """
    if model.prefix is not None:
        raise UserError(
            "a prefix adapter is no change of weights and cannot be merged; keep it as an adapter directory"
        )
    return merge_lora(model)

"""Adapters on a frozen model: LoRA, DoRA, (IA)^3, prompts and prefixes in peft's file format; bottleneck adapters."""

from alignment.adapters.attach import (
    adapter_state,
    attach,
    check_adapters,
    disabled,
    load_adapter,
    load_adapters,
    merge_adapter,
    read_spec,
    save_adapter,
)
from alignment.adapters.files import is_adapter, is_scalar_adapter, read_base, read_revision
from alignment.adapters.specs import AdapterSpec, BottleneckSpec, DoRASpec, IA3Spec, LoRASpec, PrefixSpec, PromptSpec

__all__ = [
    "AdapterSpec",
    "BottleneckSpec",
    "DoRASpec",
    "IA3Spec",
    "LoRASpec",
    "PrefixSpec",
    "PromptSpec",
    "adapter_state",
    "attach",
    "check_adapters",
    "disabled",
    "is_adapter",
    "is_scalar_adapter",
    "load_adapter",
    "load_adapters",
    "merge_adapter",
    "read_base",
    "read_revision",
    "read_spec",
    "save_adapter",
]

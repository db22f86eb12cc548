"""Adapters beside a frozen model: LoRA, DoRA, (IA)^3 and prefix tuning, in peft's file format."""

from alignment.adapters.attach import attach, disabled, merge_adapter
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
from alignment.adapters.specs import AdapterSpec, DoRASpec, IA3Spec, LoRASpec, PrefixSpec

__all__ = [
    "AdapterSpec", "DoRASpec", "IA3Spec", "LoRASpec", "PrefixSpec", "adapter_state", "attach", "disabled", "is_adapter",
    "is_scalar_adapter", "load_adapter", "merge_adapter", "read_base", "read_revision", "read_spec", "save_adapter",
]  # fmt: skip

"""Activation checkpointing: which layers are computed again in the backward pass, and what of them is kept anyway."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Keep = Literal["nothing", "attention", "products"]


def _kept_operations(keep: Keep) -> list[Any]:
    """Operations whose results are kept: the costly ones to repeat."""
    aten = torch.ops.aten
    attention = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
    return {"nothing": [], "attention": attention, "products": [*attention, aten.mm.default, aten.addmm.default]}[keep]


def recomputed(keep: Keep) -> Callable[..., Any]:
    """call(function, *args) that repeats `function` in the backward pass, all but what `keep` names.

    Args:
        keep: "nothing" needs the least memory; "attention" keeps what the attention kernel gave; "products" also keeps
            every matrix product, so that only norms and activations are repeated.
    """
    if keep == "nothing":
        return partial(checkpoint, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _kept_operations(keep))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)

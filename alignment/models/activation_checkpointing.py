"""Activation checkpointing: which layers are computed again in the backward pass, and what of them is kept anyway."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import nn
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


def recompute_calls(module: nn.Module, enabled: bool = True) -> None:
    """Let every call of a module that is not ours be repeated in the backward pass, in training and in eval mode."""
    if enabled:
        module.forward = MethodType(_repeated, module)  # bound, so that a deep copy of the module calls itself
    else:
        vars(module).pop("forward", None)


def _repeated(self: nn.Module, *args: Any, **options: Any) -> Any:
    forward = partial(type(self).forward, self)
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return recomputed("nothing")(forward, *args, **options)

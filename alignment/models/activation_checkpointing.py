"""Activation checkpointing: layers recomputed in the backward pass, and which of their activations are kept anyway."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Keep = Literal["nothing", "attention", "products"]


def _kept_operations(keep: Keep) -> list[Any]:
    """Operations whose outputs are kept: those that cost most to recompute."""
    import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn; loads the compiler, so not above

    aten = torch.ops.aten
    attention = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
    return {"nothing": [], "attention": attention, "products": [*attention, aten.mm.default, aten.addmm.default]}[keep]


def checkpointed(keep: Keep) -> Callable[..., Any]:
    """call(function, *args) that recomputes `function` in the backward pass, except the operations that `keep` names.

    Args:
        keep: "nothing" needs the least memory; "attention" keeps the outputs of the attention kernel; "products" also
            keeps every matrix product, so that only norms and activation functions are recomputed.
    """
    if keep == "nothing":
        return partial(checkpoint, use_reentrant=False)
    return partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _kept_operations(keep)),
    )


def checkpoint_calls(module: nn.Module, enabled: bool = True) -> None:
    """Checkpoint every call of a module that is not ours, in training and in eval mode."""
    if enabled:
        module.forward = MethodType(_checkpointed_forward, module)  # bound: a deep copy of the module calls itself
    else:
        vars(module).pop("forward", None)


def _checkpointed_forward(self: nn.Module, *args: Any, **options: Any) -> Any:
    forward = partial(type(self).forward, self)
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpointed("nothing")(forward, *args, **options)

"""Prefix tuning: trained keys and values before every document, through peft's encoder. Files are in files.py."""

from typing import Any

import torch
from torch import Tensor, nn

from alignment.adapters.specs import PrefixSpec
from alignment.errors import UserError


class Prefix(nn.Module):
    """The prefix of every layer, [layers, 2 (keys, values), P, K, head width].

    Source: Li and Liang 2021, arXiv:2101.00190; parameters laid out as peft's `PrefixEncoder`.
    """

    def __init__(self, spec: PrefixSpec, layers: int, heads: int, head_dim: int):
        super().__init__()
        from peft import PrefixEncoder

        self.spec, self.shape = spec, (spec.tokens, layers, 2, heads, head_dim)
        self.encoder = PrefixEncoder(peft_config(spec, layers, heads, head_dim))
        self.register_buffer("tokens", torch.arange(spec.tokens), persistent=False)

    def forward(self) -> Tensor:
        """[layers, 2, P, K, head width]."""
        return self.encoder(self.tokens).view(self.shape).permute(1, 2, 0, 3, 4)

    def flat(self) -> Tensor:
        """As peft stores it, any projection applied: [P, layers * 2 * K * head width]."""
        return self.encoder(self.tokens).detach()


def peft_config(spec: PrefixSpec, layers: int, heads: int, head_dim: int, **more: Any) -> Any:
    """peft's settings for such a prefix; its "attention heads" are the key-value heads that the cache has."""
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(
        num_virtual_tokens=spec.tokens,
        token_dim=heads * head_dim,
        num_transformer_submodules=1,
        num_attention_heads=heads,
        num_layers=layers,
        prefix_projection=spec.projection_width > 0,
        encoder_hidden_size=spec.projection_width or heads * head_dim,
        **more,
    )


def dimensions(model: Any) -> tuple[int, int, int]:
    """Layers, key-value heads and head width, which all layers must share.

    Raises:
        UserError: layers differ, or there are two stacks of them.
    """
    if not hasattr(model.spec, "blocks"):
        raise UserError("prefix tuning needs a model of one stack, not an encoder-decoder; use LoRA instead")
    shapes = {(block.attention.key_value_heads, block.attention.head_dim) for block in model.spec.blocks}
    if len(shapes) != 1:
        raise UserError("prefix tuning needs the same key-value heads and head width in every layer; use LoRA instead")
    return (len(model.spec.blocks), *shapes.pop())


def attach_prefix(model: Any, spec: PrefixSpec) -> Any:
    """Freeze the model and give it a fresh prefix; the score head of a scalar model goes on training."""
    model.requires_grad_(False)
    model.prefix = Prefix(spec, *dimensions(model)).to(next(model.parameters()).device)
    return model

"""Prefix tuning: trained keys and values before every document, computed by peft's encoder."""

from typing import Any

import torch
from torch import Tensor, nn

from alignment.adapters.specs import PrefixSpec
from alignment.errors import UserError
from alignment.models.native_model import NativeModel


class PrefixAdapter(nn.Module):
    """Keys and values of P virtual tokens for every layer, [layers, 2, P, K, head_dim].

    Source: Li and Liang 2021, arXiv:2101.00190; the parameters are those of peft's `PrefixEncoder`.
    """

    def __init__(self, spec: PrefixSpec, layers: int, heads: int, head_dim: int):
        super().__init__()
        from peft import PrefixEncoder

        self.spec, self.shape = spec, (spec.tokens, layers, 2, heads, head_dim)
        self.encoder = PrefixEncoder(peft_config(spec, layers, heads, head_dim))
        self.register_buffer("tokens", torch.arange(spec.tokens), persistent=False)

    def forward(self) -> Tensor:
        """Keys and values, [layers, 2, P, K, head_dim]."""
        return self.encoder(self.tokens).view(self.shape).permute(1, 2, 0, 3, 4)

    def prompt_embeddings(self) -> Tensor:
        """The prefix in peft's file format, after any projection, [P, layers * 2 * K * head_dim]."""
        return self.encoder(self.tokens).detach()


def peft_config(spec: PrefixSpec, layers: int, heads: int, head_dim: int, **options: Any) -> Any:
    """The prefix as peft's config; its "attention heads" are the key-value heads of the cache."""
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(
        num_virtual_tokens=spec.tokens,
        token_dim=heads * head_dim,
        num_transformer_submodules=1,
        num_attention_heads=heads,
        num_layers=layers,
        prefix_projection=spec.projection_width > 0,
        encoder_hidden_size=spec.projection_width or heads * head_dim,
        **options,
    )


def prefix_dimensions(model: NativeModel) -> tuple[int, int, int]:
    """Number of layers, key-value heads and head_dim, which all layers must share.

    Raises:
        UserError: layers differ, or the model is an encoder-decoder.
    """
    if not hasattr(model.spec, "blocks"):
        raise UserError("prefix tuning needs a decoder or encoder, not an encoder-decoder; use LoRA instead")
    shapes = {(block.attention.key_value_heads, block.attention.head_dim) for block in model.spec.blocks}
    if len(shapes) != 1:
        raise UserError("prefix tuning needs the same key-value heads and head_dim in every layer; use LoRA instead")
    return (len(model.spec.blocks), *shapes.pop())


def attach_prefix(model: NativeModel, spec: PrefixSpec) -> NativeModel:
    """Freeze the model, attach a new prefix and return the model."""
    model.requires_grad_(False)
    model.prefix = PrefixAdapter(spec, *prefix_dimensions(model)).to(next(model.parameters()).device)
    return model

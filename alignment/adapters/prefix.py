"""Prefix tuning: trained keys and values before every document, computed by peft's encoder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alignment.adapters.files import CONFIG, build_spec, check_size
from alignment.adapters.specs import PrefixSpec
from alignment.errors import UserError
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel

if TYPE_CHECKING:
    from peft import PeftConfig


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


def peft_config(spec: PrefixSpec, layers: int, heads: int, head_dim: int) -> Any:
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
    )


def prefix_dimensions(model: NativeModel | ExternalModel) -> tuple[int, int, int]:
    """Number of layers, key-value heads and head_dim, which all layers must share.

    Raises:
        UserError: layers differ, or the model is an encoder-decoder or runs as transformers' class.
    """
    if isinstance(model, ExternalModel):
        raise UserError(
            f"prefix tuning needs an architecture of our own, and {model.config['model_type']!r} runs as transformers' "
            "class; use LoRA instead"
        )
    if not hasattr(model.spec, "blocks"):
        raise UserError("prefix tuning needs a decoder or encoder, not an encoder-decoder; use LoRA instead")
    shapes = {(block.attention.key_value_heads, block.attention.head_dim) for block in model.spec.blocks}
    if len(shapes) != 1:
        raise UserError("prefix tuning needs the same key-value heads and head_dim in every layer; use LoRA instead")
    return (len(model.spec.blocks), *shapes.pop())


def attach_prefix(model: NativeModel | ExternalModel, spec: PrefixSpec) -> None:
    """Freeze the model and attach a new prefix."""
    dimensions = prefix_dimensions(model)
    model.requires_grad_(False)
    model.prefix = PrefixAdapter(spec, *dimensions).to(next(model.parameters()).device)


@contextmanager
def prefix_switched_off(model: NativeModel | ExternalModel) -> Iterator[None]:
    """Leave the prefix out within the block."""
    before, model.prefix_enabled = model.prefix_enabled, False
    try:
        yield
    finally:
        model.prefix_enabled = before


def prefix_to_file(model: NativeModel, state: dict[str, Tensor]) -> "tuple[dict[str, Tensor], PeftConfig]":
    """Tensors and config of a prefix in peft's format; `state`: see `AdapterKind.to_file`."""
    own = {name.removeprefix("prefix."): value for name, value in state.items() if name.startswith("prefix.")}
    # Computed by a copy: the model's own prefix may be sharded, and every rank would have to join its forward.
    assert isinstance(model.prefix, PrefixAdapter)
    prefix = PrefixAdapter(model.prefix.spec, *prefix_dimensions(model))
    prefix.load_state_dict(own)
    tensors = {"prompt_embeddings": prefix.prompt_embeddings()}  # any projection applied
    stored = PrefixSpec(tokens=model.prefix.spec.tokens)  # the projection is needed in training only
    return tensors, peft_config(stored, *prefix_dimensions(model))


def read_prefix_spec(config: Mapping[str, object], directory: Path) -> PrefixSpec:
    """The settings of a prefix in peft's format."""
    return build_spec(PrefixSpec, {"tokens": config.get("num_virtual_tokens")}, f"{directory}/{CONFIG}")


def prefix_from_file(
    model: NativeModel, spec: PrefixSpec, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor | None]:
    """Attach a prefix and take its tensors out of the file's; see `AdapterKind.from_file`."""
    check_size(directory, spec.tokens * 2 * prod(prefix_dimensions(model)), tensors)
    attach_prefix(model, spec)
    return {"prefix.encoder.embedding.weight": tensors.pop("prompt_embeddings", None)}

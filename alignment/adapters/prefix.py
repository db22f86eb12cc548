"""Prefix tuning: trained keys and values before every document, computed by peft's encoder.

An encoder-decoder has them before its targets, in the decoder's attention on itself.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alignment.adapters.files import CONFIG, build_spec, check_size
from alignment.adapters.specs import PrefixSpec
from alignment.errors import UserError
from alignment.files import read_json_object
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.external.models import ExternalModel, ExternalSeq2SeqModel
from alignment.models.external.padding import accepts
from alignment.models.layers import AttentionSpec
from alignment.models.native_model import NativeModel

if TYPE_CHECKING:
    from peft import PeftConfig


NO_PREFIX_IN_TRANSFORMERS = ("albert", "distilbert", "modernbert")  # encoders


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


def peft_config(spec: PrefixSpec, layers: int, heads: int, head_dim: int, *, submodules: int = 1) -> Any:
    """The prefix as peft's config; its "attention heads" are the key-value heads of the cache.

    Args:
        submodules: 2 for an encoder-decoder, as peft has it.
    """
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(
        num_virtual_tokens=spec.tokens,
        token_dim=heads * head_dim,
        num_transformer_submodules=submodules,
        num_attention_heads=heads,
        num_layers=layers,
        prefix_projection=spec.projection_width > 0,
        encoder_hidden_size=spec.projection_width or heads * head_dim,
    )


def prefix_dimensions(model: NativeModel | ExternalModel) -> tuple[int, int, int]:
    """Number of layers, key-value heads and head_dim, which all layers must share.

    Raises:
        UserError: layers differ, or they keep no keys and values that a prefix could stand before.
    """
    if isinstance(model, ExternalModel):
        shapes = _external_shapes(model)
    else:
        spec = model.spec.decoder if isinstance(model.spec, EncoderDecoderSpec) else model.spec
        attentions = [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]
        if len(attentions) < len(spec.layers):
            raise UserError("disentangled attention takes no prefix; use LoRA instead")
        if model.config["model_type"] in NO_PREFIX_IN_TRANSFORMERS:
            raise UserError(
                f"transformers' class for {model.config['model_type']!r} ignores a prefix, so that peft could not use "
                "this adapter; take prompt, lora or bottleneck instead"
            )
        shapes = [(attention.key_value_heads, attention.head_dim) for attention in attentions]
    if len(set(shapes)) != 1:
        raise UserError("prefix tuning needs the same key-value heads and head_dim in every layer; use LoRA instead")
    heads, head_dim = shapes[0]
    return len(shapes), heads, head_dim


@torch.no_grad()
def _external_shapes(model: ExternalModel) -> list[tuple[int, int]]:
    """Key-value heads and head_dim of each layer of transformers' class, as its cache has them after one token."""
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    target = {"decoder_input_ids": token} if isinstance(model, ExternalSeq2SeqModel) else {}
    past = None
    if accepts(model.inner, "past_key_values"):  # encoders do not
        past = getattr(model.inner(input_ids=token, use_cache=True, **target), "past_key_values", None)
    past = getattr(past, "self_attention_cache", past)
    keys = [getattr(layer, "keys", None) for layer in getattr(past, "layers", ())]
    if not keys or any(not isinstance(x, Tensor) or x.dim() != 4 for x in keys):
        raise UserError(
            f"prefix tuning needs layers that keep keys and values, and {type(model.inner).__name__} does not keep them "
            "in a cache; use LoRA instead"
        )
    return [(x.shape[1], x.shape[3]) for x in keys if isinstance(x, Tensor)]


def attach_prefix(model: NativeModel | ExternalModel, spec: PrefixSpec) -> None:
    """Freeze the model and attach a new prefix."""
    dimensions = prefix_dimensions(model)
    model.requires_grad_(False)
    model.prefix = PrefixAdapter(spec, *dimensions).to(next(model.parameters()).device)


def prefix_to_file(
    model: NativeModel | ExternalModel, state: dict[str, Tensor]
) -> "tuple[dict[str, Tensor], PeftConfig]":
    """Tensors and config of a prefix in peft's format; `state`: see `AdapterKind.to_file`.

    peft gives layer l of an encoder-decoder's decoder the slot 2 l of the file, modulo the number of slots. There the
    file has twice as many slots as layers, the odd ones of zeros, so that every layer has a slot of its own.
    """
    own = {name.removeprefix("prefix."): value for name, value in state.items() if name.startswith("prefix.")}
    # Computed by a copy: the model's own prefix may be sharded, and every rank would have to join its forward.
    assert isinstance(model.prefix, PrefixAdapter)
    layers, heads, head_dim = prefix_dimensions(model)
    prefix = PrefixAdapter(model.prefix.spec, layers, heads, head_dim)
    prefix.load_state_dict(own)
    keys_values = prefix.prompt_embeddings()  # any projection applied
    stored = PrefixSpec(tokens=model.prefix.spec.tokens)  # the projection is needed in training only
    if not _is_encoder_decoder(model):
        return {"prompt_embeddings": keys_values}, peft_config(stored, layers, heads, head_dim)
    slots = keys_values.new_zeros(stored.tokens, layers, 2, keys_values.shape[1] // layers)
    slots[:, :, 0] = keys_values.unflatten(1, (layers, -1))
    config = peft_config(stored, 2 * layers, heads, head_dim, submodules=2)
    return {"prompt_embeddings": slots.flatten(1)}, config


def read_prefix_spec(config: Mapping[str, object], directory: Path) -> PrefixSpec:
    """The settings of a prefix in peft's format."""
    return build_spec(PrefixSpec, {"tokens": config.get("num_virtual_tokens")}, f"{directory}/{CONFIG}")


def prefix_from_file(
    model: NativeModel | ExternalModel, spec: PrefixSpec, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor | None]:
    """Attach a prefix and take its tensors out of the file's; see `AdapterKind.from_file`."""
    layers, heads, head_dim = prefix_dimensions(model)
    check_size(directory, spec.tokens * 2 * prod((layers, heads, head_dim)), tensors)
    attach_prefix(model, spec)
    keys_values = tensors.pop("prompt_embeddings", None)
    if keys_values is not None and _is_encoder_decoder(model):
        keys_values = _slots_of_layers(keys_values, layers, 2 * heads * head_dim, directory)
    return {"prefix.encoder.embedding.weight": keys_values}


def _slots_of_layers(keys_values: Tensor, layers: int, width: int, directory: Path) -> Tensor:
    """The slots that peft gives the layers of an encoder-decoder's decoder: see `prefix_to_file`.

    Args:
        keys_values: of a file, [P, slots * width].
        width: numbers of one layer and token.
    """
    config = read_json_object(directory / CONFIG)
    slots = keys_values.shape[-1] // width
    if config.get("num_transformer_submodules") != 2 or keys_values.shape[-1] != slots * width or slots < layers:
        raise UserError(
            f"{directory}: a prefix for the decoder of an encoder-decoder has num_transformer_submodules 2 and at least "
            f"{layers} slots of {width} numbers, and this one has num_transformer_submodules "
            f"{config.get('num_transformer_submodules')} and {keys_values.shape[-1]} numbers; train it again with peft's "
            "task_type SEQ_2_SEQ_LM"
        )
    chosen = [2 * layer % slots for layer in range(layers)]
    return keys_values.unflatten(1, (slots, width))[:, chosen].flatten(1)


def _is_encoder_decoder(model: NativeModel | ExternalModel) -> bool:
    return isinstance(model, ExternalSeq2SeqModel) or isinstance(model.spec, EncoderDecoderSpec)

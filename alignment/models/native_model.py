"""Base class of our models: config, spec, activation checkpointing and the prefix of prefix tuning."""

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.activation_checkpointing import Keep
from alignment.models.compilation import compile_blocks
from alignment.models.frozen_weights import like_hidden_states
from alignment.models.layers import AttentionSpec
from alignment.models.layers.kv_cache import Cache
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer

Spec = TypeVar("Spec")


class NativeModel(nn.Module, Generic[Spec]):
    """A trunk, or an encoder and a decoder, with a head.

    Attributes:
        spec: the architecture: `TransformerSpec`, or `EncoderDecoderSpec`.
        config: the Hugging Face config.json it was built from and is saved with.
        task: which of its family's heads it has.
        generation_config: content of generation_config.json, if the model generates and the file is there.
        prefix: module whose call gives keys and values in front of every document, [layers, 2, P, K, head_dim].
        prefix_enabled: whether `prefix` acts.
    """

    source = "native"
    generation_config: dict[str, Any] | None = None

    def __init__(self, spec: Spec, config: HFConfig, task: str):
        super().__init__()
        self.spec, self.config, self.task = spec, config, task
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    def active_prefix(self) -> Tensor | None:
        """The prefix's keys and values, [layers, 2, P, K, head_dim]; None where there is none or it is disabled."""
        return self.prefix() if self.prefix is not None and self.prefix_enabled else None

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass instead of keeping their activations; `keep`: see `checkpointed`."""
        for stack in self.children():
            if isinstance(stack, Transformer):
                stack.kept_activations = keep if enabled else None

    def compile_blocks(self) -> None:
        """Run the blocks through torch.compile from now on; see models/compilation.py."""
        for stack in self.children():
            if isinstance(stack, Transformer):
                compile_blocks(stack.blocks, stack.embed.weight.device)
                stack.compiled = True


def empty_cache(trunk: Transformer, rows: int, capacity: int) -> Cache:
    """An empty cache for `rows` documents of up to `capacity` tokens each, prefix included.

    Raises:
        UserError: `capacity` is more than the model's positions.
    """
    if capacity > trunk.spec.max_positions:
        raise UserError(
            f"{capacity} tokens (prompt, prefix and new tokens) do not fit the model's {trunk.spec.max_positions} "
            "positions; lower max_new_tokens or shorten the prompts"
        )
    attention, weight = trunk.spec.blocks[0].attention, like_hidden_states(trunk.embed)
    if not isinstance(attention, AttentionSpec):
        raise ValueError("this attention is bidirectional; nothing can be decoded token by token")
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return Cache(
        len(trunk.spec.layers), rows, capacity, attention.key_value_heads, attention.head_dim,
        dtype=dtype, device=weight.device,
    )  # fmt: skip

"""Base class of the models of this library: a trunk, or an encoder and a decoder, with a head."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.models.activation_checkpointing import Keep
from alignment.models.frozen_weights import like_hidden_states
from alignment.models.layers import AttentionSpec
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import select_rows
from alignment.models.model import Model, check_capacity
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged, with_virtual_tokens

Spec = TypeVar("Spec")


class DocumentStates(NamedTuple):
    """Hidden states [N', D] of documents with a soft prompt in front; indices of their own tokens, [N], None: all."""

    states: Tensor
    batch: Ragged
    own_tokens: Tensor | None

    def own_states(self) -> Tensor:
        """Hidden states of the documents' own tokens, [N, D]."""
        return self.states if self.own_tokens is None else select_rows(self.states, self.own_tokens)


class NativeModel(Model, Generic[Spec]):
    """A model that runs as modules of this library; its `spec` is a `TransformerSpec` or an `EncoderDecoderSpec`."""

    source = "native"

    def __init__(self, spec: Spec, config: HFConfig, task: str):
        super().__init__(config, task)
        self.spec = spec

    def read(
        self,
        stack: Transformer,
        batch: Ragged,
        *,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> DocumentStates:
        """Run documents through a stack, behind the soft prompt where there is one; arguments as for the stack.

        `select` is of the documents' own tokens; the states are then of the selected ones alone.
        """
        if self.row_adapters is not None and self.row_adapters.documents:
            return self.row_adapters.read(stack, batch, cache=cache, rows=rows, select=select)
        vectors = self.active_soft_prompt()
        if vectors is None:
            return DocumentStates(stack(batch, prefix=prefix, cache=cache, rows=rows, select=select), batch, None)
        batch, own_tokens, virtual = with_virtual_tokens(batch, len(vectors))
        of_all = None if select is None else lambda states: select(select_rows(states, own_tokens))
        of_each = vectors.repeat(len(virtual) // len(vectors), 1)
        states = stack(batch, prefix=prefix, prompt=(virtual, of_each), cache=cache, rows=rows, select=of_all)
        return DocumentStates(states, batch, own_tokens if select is None else None)

    def hidden_states(
        self,
        stack: Transformer,
        batch: Ragged,
        *,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of the batch's own (selected) tokens behind prefix and soft prompt, [N, D] or [M, D]."""
        return self.read(stack, batch, prefix=self.active_prefix(), cache=cache, rows=rows, select=select).own_states()

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass instead of keeping their activations; `keep`: see `checkpointed`."""
        for stack in self.children():
            if isinstance(stack, Transformer):
                stack.kept_activations = keep if enabled else None

    def compile_blocks(self) -> None:
        """Run the blocks through torch.compile from now on; see models/compilation.py."""
        from alignment.models.compilation import compile_blocks

        for stack in self.children():
            if isinstance(stack, Transformer):
                compile_blocks(stack.blocks, stack.embed.weight.device)
                stack.compiled = True


def empty_cache(trunk: Transformer, rows: int, capacity: int) -> Cache:
    """An empty cache for `rows` documents of up to `capacity` tokens each, prefix or soft prompt included."""
    check_capacity(capacity, trunk.spec.max_positions)
    attention = trunk.spec.blocks[0].attention
    weight = like_hidden_states(trunk.embed)
    if not isinstance(attention, AttentionSpec):
        raise UserError(
            f"{type(attention).__name__}: this attention keeps no cache of keys and values, so that nothing can be "
            "generated token by token; take a model with AttentionSpec"
        )
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return Cache(
        len(trunk.spec.layers),
        rows,
        capacity,
        attention.key_value_heads,
        attention.head_dim,
        dtype=dtype,
        device=weight.device,
        windows=[getattr(layer.attention, "reach", None) for layer in trunk.spec.layers],
    )

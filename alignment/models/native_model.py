"""Base class of our models: config, spec, activation checkpointing, and adapters that stand before every document."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.activation_checkpointing import Keep
from alignment.models.frozen_weights import like_hidden_states
from alignment.models.layers import AttentionSpec
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import select_rows
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged, with_virtual_tokens

Spec = TypeVar("Spec")


class DocumentStates(NamedTuple):
    """Documents as a stack read them, and their hidden states.

    Attributes:
        states: [N', D].
        batch: the documents, with the tokens of a soft prompt in front of each.
        own_tokens: indices of the tokens that are not a prompt's, [N]; None: all are their own.
    """

    states: Tensor
    batch: Ragged
    own_tokens: Tensor | None

    def own_states(self) -> Tensor:
        """Hidden states of the documents' own tokens, [N, D]."""
        return self.states if self.own_tokens is None else select_rows(self.states, self.own_tokens)


class NativeModel(nn.Module, Generic[Spec]):
    """A trunk, or an encoder and a decoder, with a head.

    Attributes:
        spec: the architecture: `TransformerSpec`, or `EncoderDecoderSpec`.
        config: the Hugging Face config.json it was built from and is saved with.
        task: which of its family's heads it has.
        generation_config: content of generation_config.json, if the model generates and the file is there.
        prefix: module whose call gives keys and values in front of every document, [layers, 2, P, K, head_dim].
        prefix_enabled: whether `prefix` acts.
        soft_prompt: module whose call gives the vectors that are read as the first tokens of every document, [P, E].
        soft_prompt_enabled: whether `soft_prompt` acts.
    """

    source = "native"
    generation_config: dict[str, Any] | None = None

    def __init__(self, spec: Spec, config: HFConfig, task: str):
        super().__init__()
        self.spec, self.config, self.task = spec, config, task
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True
        self.soft_prompt: nn.Module | None = None
        self.soft_prompt_enabled = True

    def active_prefix(self) -> Tensor | None:
        """The prefix's keys and values, [layers, 2, P, K, head_dim]; None where there is none or it is disabled."""
        return self.prefix() if self.prefix is not None and self.prefix_enabled else None

    def active_soft_prompt(self) -> Tensor | None:
        """The soft prompt's vectors, [P, E]; None where there is none or it is disabled."""
        return self.soft_prompt() if self.soft_prompt is not None and self.soft_prompt_enabled else None

    def virtual_tokens(self) -> int:
        """Positions that a prefix or soft prompt takes in front of every document; no weight is read, which may be sharded."""
        active = ((self.prefix, self.prefix_enabled), (self.soft_prompt, self.soft_prompt_enabled))
        return sum(
            int(cast(Any, adapter).spec.tokens) for adapter, enabled in active if adapter is not None and enabled
        )

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
        prompt, own_tokens = self.active_soft_prompt(), None
        if prompt is not None:
            batch, own_tokens = with_virtual_tokens(batch, len(prompt))
            select = _selected_of_own(own_tokens, select)
        states = stack(batch, prefix=prefix, prompt=prompt, cache=cache, rows=rows, select=select)
        return DocumentStates(states, batch, None if select is not None else own_tokens)

    def hidden_states(
        self,
        stack: Transformer,
        batch: Ragged,
        *,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of the batch's own tokens (the selected ones) behind prefix and soft prompt, [N, D] or [M, D]."""
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


def _selected_of_own(
    own_tokens: Tensor, select: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor] | None:
    """`select`, of the own tokens among all."""
    return None if select is None else lambda states: select(select_rows(states, own_tokens))


def empty_cache(trunk: Transformer, rows: int, capacity: int) -> Cache:
    """An empty cache for `rows` documents of up to `capacity` tokens each, prefix or soft prompt included.

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

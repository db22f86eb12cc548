"""Trunk and language head: decoders that write on, encoders that fill in. Reward models and classifiers: readers.py."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.losses import chunked_token_log_probs
from alignment.models.activation_checkpointing import Keep
from alignment.models.heads import VocabularyHead
from alignment.models.layers.experts import balance_loss
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import take
from alignment.models.outputs import LanguageOutput, LogitsOutput
from alignment.models.padded import from_padded, given, to_padded
from alignment.models.spec import AttentionSpec, ExpertsSpec, TransformerSpec
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged


class LanguageModel(nn.Module):
    """A decoder with a language head.

    Attributes:
        spec: what the trunk is.
        config: the Hugging Face config.json it was made from and is saved with.
        task: which of its family's heads it has.
        prefix: module whose call gives keys and values in front of every document, [layers, 2, P, K, head_dim].
        prefix_enabled: whether `prefix` acts.
    """

    source = "native"

    def __init__(self, trunk: Transformer, head: VocabularyHead, config: dict[str, Any], task: str = "language"):
        super().__init__()
        self.trunk, self.head = trunk, head
        if trunk.spec.tied_head:
            self.head.weight = trunk.embed.weight
        self.config, self.task = config, task
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    @property
    def spec(self) -> TransformerSpec:
        """What the trunk is."""
        return self.trunk.spec

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass instead of keeping their activations; see `recompute.recomputed`."""
        self.trunk.recompute = keep if enabled else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Logits of a padded rectangle, or log-probabilities of a ragged batch's targets.

        log_probs_t = log_softmax(logits_{t-1} / temperature)[token_t], in fp32

        Args:
            input_ids: [B, T], padded on either side.
            attention_mask: [B, T], 1 or True at real tokens; None: all are.
            batch: documents end to end, instead of `input_ids`; the head runs on the M rows before its targets only.
            temperature: > 0, for the batch call.
            entropy: also give the entropy of each predicting distribution.
            return_logits: for the batch call: return the logits behind every target and the states they came from.

        Returns:
            `LogitsOutput` of a padded call or with `return_logits`, else `LanguageOutput`.
        """
        if batch is None:
            batch, places = from_padded(given(input_ids), attention_mask)
            logits = self.head(self.trunk(batch, prefix=active_prefix(self)))
            return LogitsOutput(to_padded(logits, places, given(input_ids).shape))
        routed: list[Tensor] = []
        hidden = self.trunk(batch, prefix=active_prefix(self), router_logits=routed)
        before = take(hidden, batch.target_index - 1)
        if return_logits:
            return LogitsOutput(self.head(before), before)
        log_probs, entropies = chunked_token_log_probs(
            self.head, before, batch.tokens[batch.target_index], temperature=temperature, entropy=entropy
        )
        return LanguageOutput(log_probs, entropies, expert_balance(self.spec, routed))

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` documents of up to `capacity` tokens each; room for a prefix is added."""
        prefix = active_prefix(self)
        return new_cache(self.trunk, rows, capacity + (0 if prefix is None else prefix.shape[2]))

    @torch.no_grad()
    def prefill(self, batch: Ragged, cache: Cache, rows: Tensor | None = None) -> Tensor:
        """Logits [B, V] after each document's last token; the documents now fill cache `rows` [B] (None: 0, 1, ...)."""
        hidden = self.trunk(batch, prefix=active_prefix(self), cache=cache, rows=rows)
        return self.head(hidden[batch.last])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        return self.head(self.trunk.step(tokens, cache))


class MaskedLanguageModel(nn.Module):
    """An encoder with a language head that predicts the tokens themselves, and perhaps whether two sentences follow.

    Attributes:
        next_sentence: read-out of the first token, or None.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """

    source = "native"
    prefix = None

    def __init__(
        self,
        trunk: Transformer,
        head: VocabularyHead,
        config: dict[str, Any],
        task: Literal["language", "next_sentence"],
        next_sentence: nn.Module | None = None,
    ):
        super().__init__()
        self.trunk, self.head, self.next_sentence = trunk, head, next_sentence
        if trunk.spec.tied_head:
            self.head.weight = trunk.embed.weight
        self.config, self.task = config, task

    spec = LanguageModel.spec
    checkpoint_activations = LanguageModel.checkpoint_activations

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Logits of a padded rectangle, or log-probabilities of a ragged batch's labels at its targets.

        Args:
            input_ids, attention_mask, token_type_ids: [B, T].
            batch: documents end to end, instead; its `labels` are what belongs at its `targets`.
            return_logits: for the batch call: return the logits at every target and the states they came from.

        Returns:
            `LogitsOutput` of a padded call or with `return_logits`, else `LanguageOutput`.
        """
        if batch is None:
            batch, places = from_padded(given(input_ids), attention_mask, token_type_ids)
            hidden = self.trunk(batch)
            logits = to_padded(self.head(hidden), places, given(input_ids).shape)
            return LogitsOutput(logits, next_sentence_logits=self._next_sentence_logits(hidden, batch))
        hidden = self.trunk(batch)
        masked = take(hidden, batch.target_index)
        if return_logits:
            return LogitsOutput(self.head(masked), masked, self._next_sentence_logits(hidden, batch))
        labels = batch.tokens[batch.target_index] if batch.labels is None else batch.labels
        log_probs, _ = chunked_token_log_probs(self.head, masked, labels)
        return LanguageOutput(log_probs, next_sentence_logits=self._next_sentence_logits(hidden, batch))

    def _next_sentence_logits(self, hidden: Tensor, batch: Ragged) -> Tensor | None:
        return None if self.next_sentence is None else self.next_sentence(hidden[batch.firsts])


def active_prefix(model: Any) -> Tensor | None:
    """The model's prefix keys and values, or None where it has none or it is switched off."""
    return model.prefix() if model.prefix is not None and model.prefix_enabled else None


def new_cache(trunk: Transformer, rows: int, capacity: int) -> Cache:
    """An empty cache for `rows` documents of up to `capacity` tokens each, prefix included."""
    if capacity > trunk.spec.max_positions:
        raise UserError(
            f"{capacity} tokens (prompt, prefix and new tokens) do not fit the model's {trunk.spec.max_positions} "
            "positions; lower max_new_tokens or shorten the prompts"
        )
    attention, weight = trunk.spec.blocks[0].attention, trunk.embed.weight
    if not isinstance(attention, AttentionSpec):
        raise ValueError("this attention sees both sides; nothing can be decoded token by token")
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return Cache(
        len(trunk.spec.layers), rows, capacity, attention.key_value_heads, attention.head_dim,
        dtype=dtype, device=weight.device,
    )  # fmt: skip


def expert_balance(spec: TransformerSpec, router_logits: list[Tensor]) -> Tensor | None:
    """The load-balancing loss times its coefficient, or None where the model has no experts to balance."""
    experts = spec.blocks[0].feedforward
    if not router_logits or not isinstance(experts, ExpertsSpec):
        return None
    return experts.balance_coef * balance_loss(router_logits, experts.chosen)

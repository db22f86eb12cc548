"""What sits on the trunk: the language model and the scalar model (reward, value). No classification over labels.

Both take documents end to end, or a padded rectangle through a thin adaptor over the same forward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alignment.errors import UserError
from alignment.models.cache import Cache
from alignment.models.masks import take
from alignment.models.spec import TransformerSpec
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged

# Logits alive at once in `token_scores`. On a CPU 32 MiB of fp32: the most that glibc keeps for the next allocation
# instead of giving it back to the system, which costs a page fault for every 4 KiB. A GPU wants longer matrices.
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}


class Output(NamedTuple):
    """What a forward gives; a tuple, so that wrappers (DDP, FSDP) find the tensors in it.

    Attributes:
        logits: language model, padded call: [B, T, V], zeros at padding; scalar model, padded call: [B, 1].
        log_probs: language model, batch call: of each target token, nats, fp32, [M].
        entropy: of the distribution behind each target, nats, without gradient, [M]; where asked for.
        values: scalar model: one per token, fp32, [N] or [B, T].
    """

    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


class LanguageModel(nn.Module):
    """Trunk and language head.

    Attributes:
        spec: what the trunk is.
        config: the Hugging Face config.json it was made from and is saved with.
        prefix: module whose call gives keys and values in front of every document, [layers, 2, P, K, head_width].
        prefix_enabled: whether `prefix` acts.
    """

    source = "native"

    def __init__(self, trunk: Transformer, config: dict[str, Any]):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.spec.width, trunk.spec.vocabulary, bias=False)
        if trunk.spec.tied_head:
            self.head.weight = trunk.embed.weight
        self.config = config
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    @property
    def spec(self) -> TransformerSpec:
        """What the trunk is."""
        return self.trunk.spec

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass."""
        return self.trunk.gradient_checkpointing

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Recompute blocks in the backward pass (non-reentrant) instead of keeping their activations."""
        self.trunk.gradient_checkpointing = enabled

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Output:
        """Logits of a padded rectangle, or log-probabilities of a ragged batch's targets.

        log_probs_t = log_softmax(logits_{t-1} / temperature)[token_t], in fp32

        Args:
            input_ids: [B, T], padded on either side.
            attention_mask: [B, T], 1 or True at real tokens; None: all are.
            batch: documents end to end, instead of `input_ids`; the head runs on the M rows before its targets only.
            temperature: > 0, for the batch call.
            entropy: also give the entropy of each predicting distribution.

        Returns:
            Output with `logits`, or with `log_probs` (and `entropy`).
        """
        if batch is None:
            batch, places = from_padded(_given(input_ids), attention_mask)
            logits = self.head(self.trunk(batch, prefix=active_prefix(self)))
            return Output(logits=to_padded(logits, places, _given(input_ids).shape))
        hidden = take(self.trunk(batch, prefix=active_prefix(self)), batch.targets - 1)
        return token_scores(self.head, hidden, batch.tokens[batch.targets], temperature, entropy)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` documents of up to `capacity` tokens each; room for a prefix is added."""
        prefix = active_prefix(self)
        capacity += 0 if prefix is None else prefix.shape[2]
        if capacity > self.spec.max_positions:
            raise UserError(
                f"{capacity} tokens (prompt, prefix and new tokens) do not fit the model's {self.spec.max_positions} "
                "positions; lower max_new_tokens or shorten the prompts"
            )
        attention, weight = self.spec.blocks[0].attention, self.trunk.embed.weight
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        return Cache(
            len(self.spec.blocks), rows, capacity, attention.key_value_heads, attention.head_width,
            dtype=dtype, device=weight.device,
        )  # fmt: skip

    @torch.no_grad()
    def prefill(self, batch: Ragged, cache: Cache, rows: Tensor | None = None) -> Tensor:
        """Logits [B, V] after each document's last token; the documents now fill cache `rows` [B] (None: 0, 1, ...)."""
        hidden = self.trunk(batch, prefix=active_prefix(self), cache=cache, rows=rows)
        return self.head(hidden[batch.last])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        return self.head(self.trunk.step(tokens, cache))


class ScalarModel(nn.Module):
    """Trunk and one number per token: a reward model reads it at the last token, a value model at every one."""

    source = "native"

    def __init__(self, trunk: Transformer, config: dict[str, Any]):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.spec.width, 1, bias=False)
        self.config = config
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    spec = LanguageModel.spec
    gradient_checkpointing = LanguageModel.gradient_checkpointing
    checkpoint_activations = LanguageModel.checkpoint_activations

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *, batch: Ragged | None = None
    ) -> Output:
        """Values of every token.

        Args:
            input_ids, attention_mask, batch: as for `LanguageModel.forward`.

        Returns:
            Batch call: `values` [N]. Padded call: `values` [B, T], zeros at padding, and `logits` [B, 1], the value at
            each row's last real token as the mask has it, wherever the padding sits.
        """
        if batch is not None:
            return Output(values=self._values(batch))
        shape = _given(input_ids).shape
        batch, places = from_padded(_given(input_ids), attention_mask)
        values = self._values(batch)
        return Output(logits=values[batch.last, None], values=to_padded(values, places, shape))

    def _values(self, batch: Ragged) -> Tensor:
        hidden = self.trunk(batch, prefix=active_prefix(self))
        # Scores are compared with each other: bfloat16's 8 bits would make ties of close ones.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()


def active_prefix(model: "LanguageModel | ScalarModel") -> Tensor | None:
    """The model's prefix keys and values, or None where it has none or it is switched off."""
    return model.prefix() if model.prefix is not None and model.prefix_enabled else None


def token_scores(head: nn.Linear, hidden: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> Output:
    """Log-probabilities (and entropies) of `tokens` [M] under head(hidden [M, D]), with few logits alive at a time."""
    chunk = max(1, CHUNK_ELEMENTS.get(hidden.device.type, 2**25) // head.out_features)
    if len(tokens) <= chunk:
        return Output(None, *_chunk_scores(head, hidden, tokens, temperature, entropy))
    pieces = [
        checkpoint(_chunk_scores, head, h, t, temperature, entropy, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return Output(log_probs=torch.cat(log_probs), entropy=torch.cat(entropies) if entropy else None)


def _chunk_scores(
    head: nn.Linear, hidden: Tensor, tokens: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """`token_scores` of rows whose logits fit in memory together."""
    logits = head(hidden).float()  # bfloat16 keeps 8 bits: sums over 500 tokens drift by whole nats
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = -F.cross_entropy(logits, tokens, reduction="none")
    return log_probs, _entropy(logits.detach()) if entropy else None


@torch.no_grad()
def _entropy(logits: Tensor) -> Tensor:
    """-sum p log p over the vocabulary, [..., V] -> [...]."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).nan_to_num(0.0).sum(-1)


def from_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Ragged, Tensor | None]:
    """A padded rectangle as documents end to end, and where its tokens were (flat indices [N]; None: everywhere)."""
    rows, columns = input_ids.shape
    device = input_ids.device
    real = torch.ones(rows, columns, dtype=torch.bool, device=device) if attention_mask is None else attention_mask > 0
    lengths = tuple(real.sum(1).tolist())
    if not rows or min(lengths) == 0:
        raise ValueError(f"attention_mask marks no token in row {lengths.index(0) if rows else 0}")
    starts = F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    places = None if min(lengths) == columns else real.flatten().nonzero().squeeze(1)
    positions = (real.cumsum(1) - 1).flatten()
    nothing = torch.empty(0, dtype=torch.long, device=device)
    batch = Ragged(
        tokens=input_ids.flatten() if places is None else input_ids.flatten()[places],
        positions=positions if places is None else positions[places],
        starts=starts,
        lengths=lengths,
        targets=nothing,
        target_rows=nothing,
        weight=0.0,
    )
    return batch, places


def to_padded(x: Tensor, places: Tensor | None, shape: torch.Size) -> Tensor:
    """Tokens [N, ...] back in their rectangle [B, T, ...], zeros elsewhere; the inverse of `from_padded`."""
    if places is not None:
        x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, places, x)
    return x.unflatten(0, tuple(shape))


def _given(input_ids: Tensor | None) -> Tensor:
    if input_ids is None:
        raise ValueError("a model call needs input_ids or batch")
    return input_ids

"""Multi-head and grouped-query attention: projections of queries, keys, values and output.

The scores are computed by the `AttentionContext` that a layer is called with; DeBERTa's attention is in disentangled.py.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from alignment.models.layers.attention_context import AttentionContext
from alignment.models.layers.norms import NormSpec
from alignment.models.layers.position_bias import PositionBiasSpec
from alignment.models.layers.rotary import RotarySpec, rotate


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; grouped-query where `key_value_heads` is below `heads`, which it divides.

    Attributes:
        scale: factor on the scores, commonly head_dim ** -0.5.
        bias: whether query, key and value have one; `output_bias` for the layer after.
        dropout: probability on the attention weights, in training only.
        causal: a token sees itself and the tokens before it; else all tokens.
        window: a token sees only tokens less than so many positions away; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        query_key_norm: norm of queries and keys, of each head by itself or of all heads as one vector.
        rotary, position_bias: how positions act on the scores.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    scale: float
    bias: bool
    output_bias: bool
    dropout: float = 0.0
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    query_key_norm: NormSpec | None = None
    norm_heads: Literal["each", "all"] = "each"
    rotary: RotarySpec | None = None
    position_bias: PositionBiasSpec | None = None

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return Attention(self, width)


class Attention(nn.Module):
    """output(attend(query(x), key(x), value(x))), `attend` being the context's.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; grouped-query: Ainslie et al. 2023, arXiv:2305.13245;
    norm of queries and keys: Henry et al. 2020, arXiv:2010.04245.
    """

    def __init__(self, spec: AttentionSpec, width: int):
        super().__init__()
        inner, shared = spec.heads * spec.head_dim, spec.key_value_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias)
        self.key = nn.Linear(width, shared, bias=spec.bias)
        self.value = nn.Linear(width, shared, bias=spec.bias)
        self.output = nn.Linear(inner, width, bias=spec.output_bias)
        if spec.query_key_norm is not None:
            alone = spec.norm_heads == "each"
            self.query_norm = spec.query_key_norm.build(spec.head_dim if alone else inner)
            self.key_norm = spec.query_key_norm.build(spec.head_dim if alone else shared)
        self.normed = spec.query_key_norm is not None
        self.spec = spec

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D], or [M, D] of the tokens that are needed."""
        query, key, value = self.query(x), self.key(x), self.value(x).unflatten(-1, (-1, self.spec.head_dim))
        if self.normed:
            query, key = self._norm(query, self.query_norm), self._norm(key, self.key_norm)
        query = query.unflatten(-1, (-1, self.spec.head_dim))
        key = key.unflatten(-1, (-1, self.spec.head_dim))
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if self.normed:  # under autocast a norm's fp32 weight makes them fp32, and the kernel takes one type
            query, key = query.to(value.dtype), key.to(value.dtype)
        mixed = context.attend(query, key, value, self.spec.dropout if self.training else 0.0)
        return self.output(context.needed(mixed.reshape(len(x), -1)))

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x [N, H * K], normalized head by head or as one vector."""
        return norm(x) if self.spec.norm_heads == "all" else norm(x.unflatten(-1, (-1, self.spec.head_dim))).flatten(1)


class CrossAttention(nn.Module):
    """output(attend(query(x), ...)), with keys and values projected from an encoder's states.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    def __init__(self, spec: AttentionSpec, width: int, states_width: int):
        super().__init__()
        inner, shared = spec.heads * spec.head_dim, spec.key_value_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias)
        self.key = nn.Linear(states_width, shared, bias=spec.bias)
        self.value = nn.Linear(states_width, shared, bias=spec.bias)
        self.output = nn.Linear(inner, width, bias=spec.output_bias)
        self.spec = spec

    def project_key_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of an encoder's states [M, D'], [M, KV, K] each."""
        head_dim = self.spec.head_dim
        return self.key(states).unflatten(-1, (-1, head_dim)), self.value(states).unflatten(-1, (-1, head_dim))

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        if context.cross_attend is None:
            raise ValueError("a decoder with cross-attention was called without an encoder's states")
        query = self.query(x).unflatten(-1, (-1, self.spec.head_dim))
        mixed = context.cross_attend(query, self.project_key_value, self.spec.dropout if self.training else 0.0)
        return self.output(mixed.reshape(len(x), -1))

"""Multi-head and grouped-query attention on the same documents, and cross-attention on what an encoder read.

What may be seen is not decided here: a layer is handed its `AttentionContext` (sight.py). DeBERTa's attention is in disentangled.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from alignment.models.layers.rotary import rotate
from alignment.models.spec import AttentionSpec

if TYPE_CHECKING:
    from alignment.models.layers.sdpa import AttentionContext


class Attention(nn.Module):
    """output(look(query(x), key(x), value(x))); which tokens are in sight is for `sight.look` to know.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; grouped-query: Ainslie et al. 2023, arXiv:2305.13245;
    norm of queries and keys: Henry et al. 2020, arXiv:2010.04245.
    """

    def __init__(self, spec: AttentionSpec, width: int, norm: Callable[[int], nn.Module] | None = None):
        super().__init__()
        inner, shared = spec.heads * spec.head_dim, spec.key_value_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias)
        self.key = nn.Linear(width, shared, bias=spec.bias)
        self.value = nn.Linear(width, shared, bias=spec.bias)
        self.output = nn.Linear(inner, width, bias=spec.output_bias)
        if norm is not None:
            alone = spec.norm_heads == "each"
            self.query_norm = norm(spec.head_dim if alone else inner)
            self.key_norm = norm(spec.head_dim if alone else shared)
        self.normed = norm is not None
        self.spec = spec

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        query, key, value = self.query(x), self.key(x), self.value(x).unflatten(-1, (-1, self.spec.head_dim))
        if self.normed:
            query, key = self._norm(query, self.query_norm), self._norm(key, self.key_norm)
        query = query.unflatten(-1, (-1, self.spec.head_dim))
        key = key.unflatten(-1, (-1, self.spec.head_dim))
        if sight.rotation is not None:
            query, key = rotate(query, sight.rotation), rotate(key, sight.rotation)
        if self.normed:  # under autocast a norm's fp32 weight makes them fp32, and the kernel takes one type
            query, key = query.to(value.dtype), key.to(value.dtype)
        mixed = sight.look(query, key, value, self.spec.dropout if self.training else 0.0)
        return self.output(mixed.reshape(len(x), -1))

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x [N, H * K], normed head by head or whole."""
        return norm(x) if self.spec.norm_heads == "all" else norm(x.unflatten(-1, (-1, self.spec.head_dim))).flatten(1)


class CrossAttention(nn.Module):
    """output(look(query(x), ...)), the keys and values being an encoder's.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    def __init__(self, spec: AttentionSpec, width: int, memory_width: int):
        super().__init__()
        inner, shared = spec.heads * spec.head_dim, spec.key_value_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias)
        self.key = nn.Linear(memory_width, shared, bias=spec.bias)
        self.value = nn.Linear(memory_width, shared, bias=spec.bias)
        self.output = nn.Linear(inner, width, bias=spec.output_bias)
        self.spec = spec

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of an encoder's states [M, D'], [M, KV, K] each."""
        head_dim = self.spec.head_dim
        return self.key(memory).unflatten(-1, (-1, head_dim)), self.value(memory).unflatten(-1, (-1, head_dim))

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        if sight.across is None:
            raise ValueError("a decoder with cross-attention was called without an encoder's states")
        query = self.query(x).unflatten(-1, (-1, self.spec.head_dim))
        mixed = sight.across(query, self.remember, self.spec.dropout if self.training else 0.0)
        return self.output(mixed.reshape(len(x), -1))

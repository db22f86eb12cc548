"""Multi-head and grouped-query attention: projections of queries, keys, values and output, and a layer's arguments.

The scores are computed by `AttentionContext.attend` (sdpa.py); DeBERTa's attention is in disentangled.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.norms import NormSpec, computed_in
from alignment.models.layers.padded_layout import GlobalTokens, PaddedLayout
from alignment.models.layers.positions import AlibiSpec, PositionBiasSpec
from alignment.models.layers.rotary import RotarySpec, Rotation, rotate

# (queries [N, H, K], keys [N, KV, K], values [N, KV, K], dropout) -> [N, H, K]
AttentionFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Joined = tuple[Tensor, Tensor | None]  # weight and bias of several linear layers as one product
ProjectKeyValue = Callable[[Tensor], tuple[Tensor, Tensor]]  # an encoder's states [M, D] -> keys and values [M, KV, K]
# (queries [N, H, K], projection of the encoder's states, dropout) -> [N, H, K]
CrossAttentionFn = Callable[[Tensor, ProjectKeyValue, float], Tensor]


@dataclass(frozen=True)
class AttentionContext:
    """Input of an attention layer beside x; `layer_contexts` makes one for each layer and forward.

    Attributes:
        attend: attention among the batch's own tokens.
        rotation: angles of the tokens' positions, where the layer rotates queries and keys.
        cross_attend: attention on an encoder's states.
        layout: how documents lie in rectangles, for layers that do more than `attend`, such as DeBERTa's.
        relative: vectors of relative positions, for DeBERTa's layers, [2 * S, D].
        global_tokens: of each rectangle of `layout`, for Longformer's layers; None: there are none.
        select: keeps the tokens whose output is needed, [N, ...] -> [M, ...]; None: all. The last layer of a trunk
            needs keys and values of all tokens, and the output of few.
    """

    attend: AttentionFn
    rotation: Rotation | None = None
    cross_attend: CrossAttentionFn | None = None
    layout: PaddedLayout | None = None
    relative: Tensor | None = None
    global_tokens: Sequence[GlobalTokens] | None = None
    select: Callable[[Tensor], Tensor] | None = None

    def needed(self, x: Tensor) -> Tensor:
        """The tokens of x [N, ...] whose output is needed."""
        return x if self.select is None else self.select(x)

    def outside_graphs(self) -> "AttentionContext":
        """The same context, its attention left out of the graphs of torch.compile."""
        from alignment.models.compilation import OutsideGraphs  # loads the compiler

        cross_attend = None if self.cross_attend is None else OutsideGraphs(self.cross_attend)
        return replace(self, attend=OutsideGraphs(self.attend), cross_attend=cross_attend)


class OwnScoresSpec(Protocol):
    """Attention that computes its own scores from `AttentionContext.layout`.

    Examples: DeBERTa's, Longformer's, and those of recipes/history/efficient.py.
    """

    @property
    def heads(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; grouped-query where `key_value_heads` is below `heads`, which it divides.

    Attributes:
        scale: factor on the scores, commonly head_dim ** -0.5.
        bias: queries, keys and values have one; `output_bias`: so has the output.
        dropout: probability on the attention weights, in training only.
        causal: a token sees itself and the tokens before it; else all tokens.
        window: a token sees only tokens less than this many positions away; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        query_key_norm: norm of queries and keys, of each head alone or of all heads as one vector.
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

    @property
    def reach(self) -> int | None:
        """Keys next to a query that are all it needs, its own included; None: all keys, each at its place."""
        bias = self.position_bias
        from_first = isinstance(bias, AlibiSpec) and bias.bfloat16  # its biases count from the first key of all
        return None if from_first else self.window

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return Attention(self, width)


class Attention(nn.Module):
    """output(attend(query(x), key(x), value(x))), `attend` being the context's.

    Attributes:
        joined: weight and bias of queries, keys and values as one product while responses are decoded, see
            decoding_weights.py.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; grouped-query: Ainslie et al. 2023, arXiv:2305.13245;
    norm of queries and keys: Henry et al. 2020, arXiv:2010.04245.
    """

    joined: Joined | None = None

    def __init__(self, spec: AttentionSpec, width: int, states_width: int | None = None):
        super().__init__()
        inner = spec.heads * spec.head_dim
        shared = spec.key_value_heads * spec.head_dim
        self.query = nn.Linear(width, inner, bias=spec.bias)
        self.key = nn.Linear(states_width or width, shared, bias=spec.bias)
        self.value = nn.Linear(states_width or width, shared, bias=spec.bias)
        self.output = nn.Linear(inner, width, bias=spec.output_bias)
        if spec.query_key_norm is not None:
            alone = spec.norm_heads == "each"
            self.query_norm = spec.query_key_norm.build(spec.head_dim if alone else inner)
            self.key_norm = spec.query_key_norm.build(spec.head_dim if alone else shared)
        self.spec = spec

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D], or [M, D] of the tokens that are needed."""
        query, key, value = self._rotated(computed_in(x), context.rotation)
        mixed = context.attend(query, key, value, self.spec.dropout if self.training else 0.0)
        return self.output(context.needed(mixed.reshape(len(x), -1)))

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, K], keys and values [N, KV, K]; the first two normed and rotated."""
        normed = self.spec.query_key_norm is not None
        heads = self.spec.heads
        shared = self.spec.key_value_heads
        if self.joined is None:
            query = self.query(x)
            key = self.key(x)
            value = self._heads(self.value(x))
        else:
            mixed = self._heads(F.linear(x, *self.joined))
            both, value = mixed.split([heads + shared, shared], dim=1)
            if not normed:
                both = both if rotation is None else rotate(both, rotation)
                query, key = both.split([heads, shared], dim=1)
                return query, key, value
            query, key = (part.flatten(1) for part in both.split([heads, shared], dim=1))
        if normed:
            query = self._norm(query, self.query_norm)
            key = self._norm(key, self.key_norm)
        query = self._heads(query)
        key = self._heads(key)
        if rotation is not None:
            query = rotate(query, rotation)
            key = rotate(key, rotation)
        # Under autocast a norm's fp32 weight makes them fp32, and the kernel takes one type.
        return query.to(value.dtype), key.to(value.dtype), value

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim))

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x [N, H * K], normalized head by head or as one vector."""
        return norm(x) if self.spec.norm_heads == "all" else norm(self._heads(x)).flatten(1)


class CrossAttention(Attention):
    """output(attend(query(x), ...)), with keys and values projected from an encoder's states.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    def project_key_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of an encoder's states [M, D'], [M, KV, K] each."""
        return self._heads(self.key(states)), self._heads(self.value(states))

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        if context.cross_attend is None:
            raise ValueError("a decoder with cross-attention was called without an encoder's states")
        mixed = context.cross_attend(
            self._heads(self.query(x)), self.project_key_value, self.spec.dropout if self.training else 0.0
        )
        return self.output(mixed.reshape(len(x), -1))

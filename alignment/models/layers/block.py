"""One layer of a transformer: the residual wiring of attention and feed-forward, and where the norms stand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from alignment.models.layers.attention import AttentionSpec, CrossAttention
from alignment.models.layers.attention_context import AttentionContext
from alignment.models.layers.disentangled import ConvolutionSpec, ConvolvedBlock, DisentangledSpec
from alignment.models.layers.experts import Experts, FeedForwardSpec
from alignment.models.layers.norms import NormSpec

Norm = Callable[[], nn.Module]


@dataclass(frozen=True)
class BlockSpec:
    """One layer; `dropout` acts on the outputs of attention and feed-forward.

    Attributes:
        wiring: where the norms stand. pre: before each part. post: after each sum. sandwich: before each part and on
            its output. output: only on the output of each part. parallel: both parts read the same x, each through its
            own norm. parallel_shared: both through one norm. residual: before each part, which adds to the normed x.
        attention_norm: where attention's norm is not `norm`.
        cross: attention on an encoder's states.
        convolution: of the layer's input, added to its output.
    """

    attention: AttentionSpec | DisentangledSpec
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float = 0.0
    wiring: Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared", "residual"] = "pre"
    attention_norm: NormSpec | None = None
    cross: AttentionSpec | None = None
    convolution: ConvolutionSpec | None = None

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        attention, feedforward = self.attention.build(width), self.feedforward.build(width)
        cross = None if self.cross is None else CrossAttention(self.cross, width, width)
        norm, dropout = partial(self.norm.build, width), nn.Dropout(self.dropout) if self.dropout else nn.Identity()
        match self.wiring:
            case "pre":
                first = None if self.attention_norm is None else partial(self.attention_norm.build, width)
                return Block(attention, feedforward, norm, dropout, attention_norm=first, cross=cross)
            case "post":
                block = PostNormBlock(attention, feedforward, norm, dropout, cross=cross)
                if self.convolution is None:
                    return block
                return ConvolvedBlock(block, self.convolution.build(width, dropout), norm())
            case "residual":
                return NormedResidualBlock(attention, feedforward, norm, dropout)
            case "sandwich" | "output":
                inner = norm if self.wiring == "sandwich" else nn.Identity
                return SandwichBlock(attention, feedforward, norm, dropout, inner)
            case "parallel" | "parallel_shared":
                return ParallelBlock(attention, feedforward, norm, dropout, shared=self.wiring == "parallel_shared")


def selects_tokens(block: nn.Module) -> bool:
    """Whether a block can compute its output for some tokens alone, after keys and values of all; see `AttentionContext`.

    Experts are balanced over all tokens, and attention on an encoder's states is laid out for all.
    """
    if not isinstance(block, Block | NormedResidualBlock | SandwichBlock | ParallelBlock):
        return False
    return not getattr(block, "crosses", False) and not isinstance(block.feedforward, Experts)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)). Pre-norm, as in GPT-2 and Llama.

    With `cross` a third part between the two attends to an encoder's states, as in T5.
    """

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        norm: Norm,
        dropout: nn.Module,
        *,
        attention_norm: Norm | None = None,
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.attention_norm, self.attention = (attention_norm or norm)(), attention
        if cross is not None:
            self.cross_norm, self.cross = norm(), cross
        self.feedforward_norm, self.feedforward = norm(), feedforward
        self.dropout, self.crosses = dropout, cross is not None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = context.needed(x) + self.dropout(self.attention(self.attention_norm(x), context))
        if self.crosses:
            x = x + self.dropout(self.cross(self.cross_norm(x), context))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class NormedResidualBlock(nn.Module):
    """n + attention(n) of n = norm(x), the feed-forward likewise: what a part adds to is normed too (some BLOOMs)."""

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.feedforward_norm, self.feedforward = norm(), feedforward
        self.dropout = dropout

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x)
        x = self.feedforward_norm(context.needed(x) + self.dropout(self.attention(x, context)))
        return x + self.dropout(self.feedforward(x))


class PostNormBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feedforward(x)), as in the first Transformer and BERT."""

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        norm: Norm,
        dropout: nn.Module,
        *,
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.attention, self.attention_norm = attention, norm()
        if cross is not None:
            self.cross, self.cross_norm = cross, norm()
        self.feedforward, self.feedforward_norm = feedforward, norm()
        self.dropout, self.crosses = dropout, cross is not None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, context)))
        if self.crosses:
            x = self.cross_norm(x + self.dropout(self.cross(x, context)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


class SandwichBlock(nn.Module):
    """x + norm(attention(norm(x))), the feed-forward likewise: Gemma 2. Without the inner norms: OLMo 2.

    Source: Ding et al. 2021, arXiv:2105.13290, section 2.4.
    """

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module, inner: Norm):
        super().__init__()
        self.attention_norm, self.attention, self.attention_output_norm = inner(), attention, norm()
        self.feedforward_norm, self.feedforward, self.feedforward_output_norm = inner(), feedforward, norm()
        self.dropout = dropout

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = context.needed(x) + self.dropout(
            self.attention_output_norm(self.attention(self.attention_norm(x), context))
        )
        return x + self.dropout(self.feedforward_output_norm(self.feedforward(self.feedforward_norm(x))))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feedforward(norm(x)): both read the same x. One norm may serve both.

    Source: Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022, arXiv:2204.06745, section 2.1.
    """

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module, *, shared: bool):
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        if not shared:
            self.feedforward_norm = norm()
        self.feedforward, self.dropout, self.shared = feedforward, dropout, shared

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        normed = self.attention_norm(x)
        attended = self.dropout(self.attention(normed, context))
        x, normed = context.needed(x), context.needed(normed)
        return x + attended + self.dropout(self.feedforward(normed if self.shared else self.feedforward_norm(x)))

"""One layer of a transformer: the residual wiring of attention and feed-forward, and where the norms stand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor, nn

from alignment.models.layers.attention import AttentionContext, AttentionSpec, CrossAttention, OwnScoresSpec
from alignment.models.layers.disentangled import ConvolutionSpec, ConvolvedBlock
from alignment.models.layers.feedforward import Experts, FeedForwardSpec
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

    attention: AttentionSpec | OwnScoresSpec
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float = 0.0
    wiring: Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared", "residual"] = "pre"
    attention_norm: NormSpec | None = None
    cross: AttentionSpec | None = None
    convolution: ConvolutionSpec | None = None

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        attention = self.attention.build(width)
        feedforward = self.feedforward.build(width)
        cross = None if self.cross is None else CrossAttention(self.cross, width)
        norm = partial(self.norm.build, width)
        dropout = nn.Dropout(self.dropout) if self.dropout else nn.Identity()
        norms: dict[str, Norm | None] = {}
        if self.attention_norm is not None:
            norms = {"attention_norm": partial(self.attention_norm.build, width)}
        elif self.wiring == "output":
            norms = {"attention_norm": nn.Identity, "feedforward_norm": nn.Identity}
        elif self.wiring == "parallel_shared":
            norms = {"feedforward_norm": None}
        block = BLOCKS[self.wiring](attention, feedforward, norm, dropout, cross=cross, **norms)
        if self.convolution is None:
            return block
        return ConvolvedBlock(block, self.convolution.build(width, dropout), norm())


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)). Pre-norm, as in GPT-2 and Llama; base of other wirings.

    With `cross` a third part between the two attends to an encoder's states, as in T5.

    Attributes:
        ORDER: the modules, in the order of their parameters.
    """

    ORDER: ClassVar[tuple[str, ...]] = (
        "attention_norm",
        "attention",
        "cross_norm",
        "cross",
        "feedforward_norm",
        "feedforward",
    )
    attention: nn.Module
    attention_norm: nn.Module
    cross: nn.Module
    cross_norm: nn.Module
    feedforward: nn.Module
    feedforward_norm: nn.Module  # None in a parallel block whose parts share one norm

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        norm: Norm,
        dropout: nn.Module,
        *,
        cross: nn.Module | None = None,
        **norms: Norm | None,
    ):
        super().__init__()
        parts = {"attention": attention, "cross": cross, "feedforward": feedforward}
        for name in self.ORDER:
            build = norms.get(name, norm)
            if cross is None and name.startswith("cross"):
                continue
            self.add_module(name, parts[name] if name in parts else build and build())
        self.dropout = dropout
        self.crosses = cross is not None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = context.needed(x) + self.dropout(self.attention(self.attention_norm(x), context))
        if self.crosses:
            x = x + self.dropout(self.cross(self.cross_norm(x), context))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class NormedResidualBlock(Block):
    """n + attention(n) with n = norm(x), the feed-forward alike: the residual branch uses the normed input (BLOOM)."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x)
        x = self.feedforward_norm(context.needed(x) + self.dropout(self.attention(x, context)))
        return x + self.dropout(self.feedforward(x))


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + feedforward(x)), as in the first Transformer and BERT."""

    ORDER = ("attention", "attention_norm", "cross", "cross_norm", "feedforward", "feedforward_norm")

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, context)))
        if self.crosses:
            x = self.cross_norm(x + self.dropout(self.cross(x, context)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), the feed-forward alike: Gemma 2. Without the inner norms: OLMo 2.

    Source: Ding et al. 2021, arXiv:2105.13290, section 2.4.
    """

    ORDER = (
        "attention_norm",
        "attention",
        "attention_output_norm",
        "feedforward_norm",
        "feedforward",
        "feedforward_output_norm",
    )
    attention_output_norm: nn.Module
    feedforward_output_norm: nn.Module

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = context.needed(x) + self.dropout(
            self.attention_output_norm(self.attention(self.attention_norm(x), context))
        )
        return x + self.dropout(self.feedforward_output_norm(self.feedforward(self.feedforward_norm(x))))


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)): both read the same x. One norm may serve both.

    Source: Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022, arXiv:2204.06745, section 2.1.
    """

    ORDER = ("attention_norm", "attention", "feedforward_norm", "feedforward")

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        normed = self.attention_norm(x)
        attended = self.dropout(self.attention(normed, context))
        x = context.needed(x)
        normed = context.needed(normed)
        normed = normed if self.feedforward_norm is None else self.feedforward_norm(x)
        return x + attended + self.dropout(self.feedforward(normed))


BLOCKS: dict[str, type[Block]] = {
    "pre": Block,
    "post": PostNormBlock,
    "sandwich": SandwichBlock,
    "output": SandwichBlock,
    "parallel": ParallelBlock,
    "parallel_shared": ParallelBlock,
    "residual": NormedResidualBlock,
}


def selects_tokens(block: nn.Module) -> bool:
    """True for blocks that compute output for some tokens alone, after keys and values of all; see `AttentionContext`.

    Experts are balanced over all tokens, and attention on an encoder's states is laid out for all.
    """
    if not isinstance(block, Block) or isinstance(block, PostNormBlock):
        return False
    return not block.crosses and not isinstance(block.feedforward, Experts)

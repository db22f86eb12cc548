"""Residual wiring of one layer: where the norms stand. The parts are handed in and not asked what they are."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from alignment.models.layers.sdpa import AttentionContext

Norm = Callable[[], nn.Module]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)). Pre-norm, as in GPT-2 and Llama.

    With `cross` a third part between the two reads an encoder's states, as in T5.
    """

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        norm: Norm,
        dropout: nn.Module,
        attention_norm: Norm | None = None,
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.attention_norm, self.attention = (attention_norm or norm)(), attention
        if cross is not None:
            self.cross_norm, self.cross = norm(), cross
        self.feedforward_norm, self.feedforward = norm(), feedforward
        self.dropout, self.crosses = dropout, cross is not None

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), sight))
        if self.crosses:
            x = x + self.dropout(self.cross(self.cross_norm(x), sight))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x), sight))


class NormedResidualBlock(nn.Module):
    """n + attention(n) of n = norm(x), the feed-forward likewise: what a part adds to is normed too (some BLOOMs)."""

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.feedforward_norm, self.feedforward = norm(), feedforward
        self.dropout = dropout

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x)
        x = self.feedforward_norm(x + self.dropout(self.attention(x, sight)))
        return x + self.dropout(self.feedforward(x, sight))


class PostNormBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feedforward(x)), as in the first Transformer and BERT."""

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        norm: Norm,
        dropout: nn.Module,
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.attention, self.attention_norm = attention, norm()
        if cross is not None:
            self.cross, self.cross_norm = cross, norm()
        self.feedforward, self.feedforward_norm = feedforward, norm()
        self.dropout, self.crosses = dropout, cross is not None

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, sight)))
        if self.crosses:
            x = self.cross_norm(x + self.dropout(self.cross(x, sight)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x, sight)))


class SandwichBlock(nn.Module):
    """x + norm(attention(norm(x))), the feed-forward likewise: Gemma 2. Without the inner norms: OLMo 2.

    Source: Ding et al. 2021, arXiv:2105.13290, section 2.4.
    """

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module, inner: Norm):
        super().__init__()
        self.attention_norm, self.attention, self.attention_output_norm = inner(), attention, norm()
        self.feedforward_norm, self.feedforward, self.feedforward_output_norm = inner(), feedforward, norm()
        self.dropout = dropout

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = x + self.dropout(self.attention_output_norm(self.attention(self.attention_norm(x), sight)))
        return x + self.dropout(self.feedforward_output_norm(self.feedforward(self.feedforward_norm(x), sight)))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feedforward(norm(x)): both read the same x. One norm may serve both.

    Source: Wang & Komatsuzaki 2021 (GPT-J); Black et al. 2022, arXiv:2204.06745, section 2.1.
    """

    def __init__(self, attention: nn.Module, feedforward: nn.Module, norm: Norm, dropout: nn.Module, shared: bool):
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        if not shared:
            self.feedforward_norm = norm()
        self.feedforward, self.dropout, self.shared = feedforward, dropout, shared

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        normed = self.attention_norm(x)
        attended = self.dropout(self.attention(normed, sight))
        return x + attended + self.dropout(self.feedforward(normed if self.shared else self.feedforward_norm(x), sight))

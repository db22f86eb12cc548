"""Residual wiring of one layer. Pre-norm only."""

from collections.abc import Callable

from torch import Tensor, nn

from alignment.models.attention import Look
from alignment.models.positions import Rotation


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)). Pre-norm, as in GPT-2 and Llama."""

    def __init__(
        self, attention: nn.Module, feedforward: nn.Module, norm: Callable[[], nn.Module], dropout: float = 0.0
    ):
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.feedforward_norm, self.feedforward = norm(), feedforward
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation | None, look: Look) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, look))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))

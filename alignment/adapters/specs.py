"""What an adapter is: its settings, checked on their own. How it is attached: lora.py and prefix.py."""

import re
from dataclasses import dataclass
from typing import Literal

MOST = 65_536  # more of anything is a slip of the hand, and would ask for terabytes
# Of experts each one; not the router that chooses among them.
EVERY_LINEAR = r"(attention|cross)\.(query|key|value|output)|feedforward\.(experts\.\d+\.)?(gate|up|down)"


@dataclass(frozen=True)
class LoRASpec:
    """Low-rank updates beside frozen linear layers: W x + (alpha / rank) B A x.

    Attributes:
        rank: rank of the update, r.
        alpha: its scale; the update is multiplied by alpha / rank (alpha / sqrt(rank) with `rank_stabilized`).
        dropout: on the update's input, while training.
        layers: regular expression over the ends of our layer names, such as `attention\\.(query|value)`.
        rank_stabilized: rsLoRA's scale.

    Source: Hu et al. 2021, arXiv:2106.09685; rsLoRA Kalajdzievski 2023, arXiv:2312.03732.
    """

    kind: Literal["lora"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    layers: str = EVERY_LINEAR
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}; 8 to 64 is usual")
        if self.rank > MOST:  # wider than any layer that it could stand beside
            raise ValueError(f"rank must be at most {MOST:,}, got {self.rank}; 8 to 64 is usual")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}; twice the rank is usual")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        try:
            re.compile(self.layers)
        except re.error as error:
            raise ValueError(f"layers is no regular expression: {error}") from error


@dataclass(frozen=True)
class PrefixSpec:
    """Trained keys and values in front of every document, in every layer; the model itself stays frozen.

    Attributes:
        tokens: number of virtual tokens.
        projection_width: width of the two-layer network through which the prefix is trained; 0 trains it directly.

    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    kind: Literal["prefix"] = "prefix"
    tokens: int = 16
    projection_width: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}; 10 to 100 is usual")
        if self.tokens > MOST:
            raise ValueError(f"tokens must be at most {MOST:,}, got {self.tokens}; 10 to 100 is usual")
        if not 0 <= self.projection_width <= MOST:
            raise ValueError(f"projection_width must be 0 (off) or up to {MOST:,}, got {self.projection_width}")


AdapterSpec = LoRASpec | PrefixSpec


def refuse_dropout(adapter: AdapterSpec | None, stage: str) -> None:
    """Refuse an adapter's dropout where the policy is compared with its reference token by token, dropout off.

    Raises:
        ValueError: the adapter has some.
    """
    if isinstance(adapter, LoRASpec) and adapter.dropout > 0:
        raise ValueError(
            f"adapter.dropout must be 0 in {stage}, got {adapter.dropout}: dropout is off there, so that policy and "
            "reference start equal"
        )

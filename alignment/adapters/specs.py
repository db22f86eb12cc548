"""Settings of adapters, with their checks."""

import re
from dataclasses import dataclass
from typing import Literal

MAX_SIZE = 65_536  # a larger rank or prefix is a typing error and would need terabytes
# Every expert of a mixture, but not its router.
EVERY_LINEAR = r"(attention|cross)\.(query|key|value|output)|feedforward\.(experts\.\d+\.)?(gate|up|down)"


@dataclass(frozen=True)
class LoRASpec:
    """Low-rank updates of frozen linear layers: W x + (alpha / rank) B A x.

    Attributes:
        rank: rank of the update, r.
        alpha: scale; the update is multiplied by alpha / rank, or by alpha / sqrt(rank) with `rank_stabilized`.
        dropout: dropout on the update's input in training.
        layers: regular expression that matches the end of our layer names, such as `attention\\.(query|value)`.
        rank_stabilized: use rsLoRA's scale.

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
        if self.rank > MAX_SIZE:  # larger than any layer it could be added to
            raise ValueError(f"rank must be at most {MAX_SIZE:,}, got {self.rank}; 8 to 64 is usual")
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
    """Trained keys and values before every document in every layer of a frozen model.

    Attributes:
        tokens: number of virtual tokens.
        projection_width: hidden width of the two-layer network that computes the prefix in training; 0: no network.

    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    kind: Literal["prefix"] = "prefix"
    tokens: int = 16
    projection_width: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}; 10 to 100 is usual")
        if self.tokens > MAX_SIZE:
            raise ValueError(f"tokens must be at most {MAX_SIZE:,}, got {self.tokens}; 10 to 100 is usual")
        if not 0 <= self.projection_width <= MAX_SIZE:
            raise ValueError(f"projection_width must be 0 (off) or up to {MAX_SIZE:,}, got {self.projection_width}")


AdapterSpec = LoRASpec | PrefixSpec


def refuse_dropout(adapter: AdapterSpec | None, stage: str) -> None:
    """Refuse adapter dropout in stages that compare the policy with its reference token by token, without dropout.

    Raises:
        ValueError: `adapter.dropout` is above 0.
    """
    if isinstance(adapter, LoRASpec) and adapter.dropout > 0:
        raise ValueError(
            f"adapter.dropout must be 0 in {stage}, got {adapter.dropout}: dropout is off there, so that policy and "
            "reference start equal"
        )

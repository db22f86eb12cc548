"""Ways to say where a token stands, as frozen specifications: on the embedding, on queries and keys, on the scores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LearnedPositionsSpec:
    """One trained vector per place, added to the token's; place 0 reads row `first` of the table."""

    count: int
    first: int = 0


@dataclass(frozen=True)
class SinusoidalPositionsSpec:
    """Sines and cosines of the place, added to the token's vector."""


PositionsSpec = LearnedPositionsSpec | SinusoidalPositionsSpec


@dataclass(frozen=True)
class LinearScaling:
    """Every rotary frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with a document that is longer than the model was trained for ("dynamic NTK").

    Source: transformers, `rope_type="dynamic"`.
    """

    factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Slow pairs divided by `factor`, fast ones kept, a ramp between; all scores a little larger.

    Attributes:
        attention_factor: on cosines and sines, so that scores grow by its square.
        beta_fast, beta_slow: turns over the original context where the ramp begins and ends.
        truncate: round the ends of the ramp to whole pairs.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth step between.

    Source: transformers, `rope_type="llama3"`; Dubey et al. 2024, arXiv:2407.21783, section 3.4.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class LongScaling:
    """Each pair divided by its own number; other numbers beyond the original context (Phi-3).

    Source: Ding et al. 2024, arXiv:2402.13753; transformers, `rope_type="longrope"`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongScaling


@dataclass(frozen=True)
class RotarySpec:
    """Queries and keys turned by an angle that grows with the place.

    Attributes:
        width: leading coordinates of each head that are turned; the rest stay ("partial rotary").
    """

    theta: float
    width: int
    scaling: RotaryScaling | None = None


@dataclass(frozen=True)
class AlibiSpec:
    """Scores lowered in proportion to the distance, by a fixed slope per head; `scale` multiplies the slopes.

    Source: Press et al. 2021, arXiv:2108.12409, section 3.
    """

    scale: float = 1.0


@dataclass(frozen=True)
class RoundedAlibiSpec:
    """ALiBi that was trained with slopes, places and their products in bfloat16; `scale` multiplies the outcome.

    Source: transformers, `models/falcon`.
    """

    scale: float = 1.0


@dataclass(frozen=True)
class RelativeBiasSpec:
    """One trained number per head and bucket of distances, added to the scores; all layers share it (T5).

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    buckets: int
    max_distance: int

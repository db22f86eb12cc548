"""The embedded world as a stage of a recipe: settings and one call. What it writes is datasets.py's matter."""

from dataclasses import dataclass, field
from pathlib import Path

from alignment.hotel_world.datasets import WorldConfig, write_world


@dataclass(frozen=True)
class WorldRunConfig:
    """Settings of one world.

    Attributes:
        output: the stage's directory; the files go into its `data`.
        seed: of everything random in it.
        rows: rows per file.
    """

    output: str
    seed: int = 0
    rows: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:  # Python's generator takes -3 for 3
            raise ValueError(f"seed must not be negative, got {self.seed}")


def run_world(config: WorldRunConfig) -> Path:
    """Write the world's files into `output/data` and return that directory."""
    directory = Path(config.output) / "data"
    write_world(directory, seed=config.seed, sizes=config.rows)
    return directory

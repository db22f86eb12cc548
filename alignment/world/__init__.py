"""The embedded world: generated hotel texts, their gold reward and simulated labelers. No model, no training."""

from alignment.world.datasets import WorldConfig, write_world
from alignment.world.gold import GoldScore, score
from alignment.world.writers import best_reply

__all__ = ["GoldScore", "WorldConfig", "best_reply", "score", "write_world"]

"""A generated data set about hotels: texts, their gold reward and simulated labelers. No model, no training."""

from alignment.hotel_world.datasets import RowCounts, write_world
from alignment.hotel_world.gold import GoldScore, score
from alignment.hotel_world.grammar import best_reply

__all__ = ["GoldScore", "RowCounts", "best_reply", "score", "write_world"]

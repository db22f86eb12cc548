"""Reward models from a directory or the Hub: texts in, scores out."""

from alignment.reward_model.load import load_frozen_reward_model, load_reward_model, load_reward_network, member_count
from alignment.reward_model.model import Combine, RewardModel

__all__ = [
    "Combine",
    "RewardModel",
    "load_frozen_reward_model",
    "load_reward_model",
    "load_reward_network",
    "member_count",
]

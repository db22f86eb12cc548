"""Reward models from a directory or the Hub: texts in, scores out."""

from alignment.reward_model.load import load_frozen_reward_model, load_reward_model, load_reward_network
from alignment.reward_model.model import RewardModel

__all__ = ["RewardModel", "load_frozen_reward_model", "load_reward_model", "load_reward_network"]

"""Proximal policy optimization (PPO) against a reward model, with a KL penalty and InstructGPT's pretraining mix.

Read in this order: ppo.py, the run and its iteration; advantages.py; loss_functions.py, the losses of an update; the
formulas in losses/policy.py. Sampling and the loop are in the folder rollouts. config.py has the settings, setup.py
networks and state of a run, state.py the KL controller and the normalizer of scores, metrics.py what PPO alone logs.
"""

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.ppo import iterate, run
from alignment.algorithms.ppo.state import AdaptiveKL, FixedKL

__all__ = ["AdaptiveKL", "FixedKL", "PPOConfig", "iterate", "run"]

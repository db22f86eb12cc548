"""Proximal policy optimization (PPO) against a reward model, with a KL penalty and InstructGPT's pretraining mix.

Read in this order: ppo.py, the run and its iteration; rollout.py, sampling and what the networks say of samples;
advantages.py; loss_functions.py, the losses of an update; the formulas in losses/policy.py.
config.py has the settings, setup.py data and networks, state.py what an iteration reads and changes, loop.py the loop
of iterations and the evaluation on held-out prompts, metrics.py everything that is logged.
"""

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.ppo import iterate, run
from alignment.algorithms.ppo.state import AdaptiveKL, FixedKL

__all__ = ["AdaptiveKL", "FixedKL", "PPOConfig", "iterate", "run"]

"""Proximal policy optimization (PPO) against a reward model, with a KL penalty and InstructGPT's pretraining mix.

ppo.py has the run and its iteration, rollout.py sampling, advantages.py advantages, loss_functions.py the losses of an
update, update_config.py their settings, metrics.py what is logged of a rollout,
setup.py settings, networks and state, controllers.py what adapts during a run; the formulas are in losses/policy.py.
"""

from alignment.algorithms.ppo.controllers import AdaptiveKL, FixedKL
from alignment.algorithms.ppo.ppo import iterate, run
from alignment.algorithms.ppo.setup import PPOConfig

__all__ = ["AdaptiveKL", "FixedKL", "PPOConfig", "iterate", "run"]

"""Proximal policy optimization (PPO) against a reward model, with a KL penalty and InstructGPT's pretraining mix.

ppo.py has the run and its iteration, rollout.py sampling and what the networks say of samples, samples.py responses
that wait for the next iteration, vllm_sampler.py sampling by vLLM, advantages.py advantages, loss_functions.py the
losses of an update, update_config.py their settings, rewards.py who scores, setup.py settings, networks and state,
controllers.py what adapts during a run. metrics.py, diagnostics.py and utilization.py say what is logged, alarms.py
what is noted of a collapse; held_out.py and evaluation.py score held-out prompts and end the run. The formulas are in
losses/policy.py, importance.py and advantages.py.
"""

from alignment.algorithms.ppo.controllers import AdaptiveKL, FixedKL
from alignment.algorithms.ppo.ppo import iterate, run
from alignment.algorithms.ppo.setup import PPOConfig

__all__ = ["AdaptiveKL", "FixedKL", "PPOConfig", "iterate", "run"]

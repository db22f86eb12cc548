"""Sampling and learning in turn: what PPO, online DPO and distillation share.

Read in this order: loop.py, the loop of iterations and the evaluation on held-out prompts; rollout.py, sampled
responses with log-probabilities, values and scores; state.py, what an iteration reads and changes. config.py has the
settings, setup.py the prompts and the policy, metrics.py and alarms.py what is logged, servers.py vLLM servers.
"""

"""The methods, each a page that can be read alone; its `__init__` or its first lines name the files to read with it.

DPO in five files: dpo/dpo.py, the run and its loss function; losses/preference.py, the formulas; dpo/responses.py,
log-probabilities and the metrics made of them; training/loop.py and training/engine.py, updates until the run ends.
KTO, AOT and BCO need dpo/global_inputs.py too.
PPO in five files: ppo/ppo.py, the run and its iteration; rollouts/rollout.py, samples; ppo/advantages.py;
ppo/loss_functions.py; losses/policy.py, the formulas. Online DPO (online_dpo.py) has rollouts with DPO's update,
on-policy distillation (distill.py) with a loss of losses/language.py.
SFT is sft.py, with losses/language.py; a reward model reward.py, with losses/ranking.py.

policies.py loads and saves the networks, runs.py opens a run and reads its rows, scoring.py scores samples.
"""

"""Online DPO: a policy learns from pairs of its own responses, which a reward model or a judge has ranked.

online_dpo.py has the run, its iteration and networks, judges.py the scores of responses, config.py the settings; the rollout
is PPO's, updates and losses are those of DPO's family.
"""

from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.online_dpo.online_dpo import run, sample_and_update

__all__ = ["OnlineDPOConfig", "run", "sample_and_update"]

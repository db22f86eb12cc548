"""Direct preference optimization (DPO) and its kin: a policy learns from preferences, without a reward model.

dpo.py has the run and the loss function, setup.py the settings and the choice of losses, updates.py what an update takes
beside its rows, responses.py log-probabilities and what is watched of them, reference_cache.py the reference's numbers on
disk; the formulas are in losses/, by name in losses/preference_table.py.
"""

from alignment.algorithms.dpo.dpo import dpo_loss_fn, run
from alignment.algorithms.dpo.setup import DPOConfig

__all__ = ["DPOConfig", "dpo_loss_fn", "run"]

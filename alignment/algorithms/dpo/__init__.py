"""Direct preference optimization (DPO) and its variants: a policy learns from preferences, without a reward model.

Read in this order: dpo.py, the run and its loss function; losses/preference.py, the formulas; responses.py,
log-probabilities and the metrics made of them; config.py, the settings. variants.py calls other losses by name,
global_inputs.py has what KTO, AOT and BCO take of the whole global batch. reference_cache.py keeps the reference's
numbers on disk.
"""

from alignment.algorithms.dpo.config import DPOConfig
from alignment.algorithms.dpo.dpo import dpo_loss_fn, run

__all__ = ["DPOConfig", "dpo_loss_fn", "run"]

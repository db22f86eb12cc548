"""The whole of RLHF: a transformer stack, pretraining, SFT, reward models, PPO, DPO, adapters, evaluation.

The names below load their rooms when first used, so that `import alignment` costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "load_model": "alignment.loading",
    "load_tokenizer": "alignment.loading",
    "load_reward_model": "alignment.loading",
    "generate": "alignment.generation",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'alignment' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

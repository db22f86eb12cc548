"""The whole of RLHF: a transformer stack, pretraining, SFT, reward models, PPO, DPO, adapters, evaluation.

The names below are imported on first use, so that `import alignment` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment.generation import generate
    from alignment.loading import load_model, load_tokenizer
    from alignment.pipeline.in_memory import best_of_n, dpo, evaluate, finetune, online_dpo, ppo, pretrain, reward, sft
    from alignment.reward_model import load_reward_model

_STAGES = ("pretrain", "sft", "reward", "dpo", "online_dpo", "ppo", "finetune", "best_of_n", "evaluate")
_MODULES = {
    "load_model": "alignment.loading",
    "load_tokenizer": "alignment.loading",
    "load_reward_model": "alignment.reward_model",
    "generate": "alignment.generation",
    **dict.fromkeys(_STAGES, "alignment.pipeline.in_memory"),
}

__all__ = [
    "best_of_n", "dpo", "evaluate", "finetune", "generate", "load_model", "load_reward_model", "load_tokenizer",
    "online_dpo", "ppo", "pretrain", "reward", "sft",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'alignment' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

"""The whole of RLHF: a transformer stack, pretraining, SFT, reward models, PPO, DPO, adapters, evaluation.

The names below are imported on first use, so that `import alignment` is fast.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment.generation import generate
    from alignment.loading import load_model, load_tokenizer
    from alignment.pipeline.in_memory import (
        best_of_n,
        distill,
        dpo,
        evaluate,
        finetune,
        online_dpo,
        ppo,
        pretrain,
        reward,
        sft,
    )
    from alignment.reward_model import load_reward_model

_STAGES = ("pretrain", "sft", "reward", "dpo", "online_dpo", "ppo", "distill", "finetune", "best_of_n", "evaluate")
_MODULES = {
    "load_model": "alignment.loading",
    "load_tokenizer": "alignment.loading",
    "load_reward_model": "alignment.reward_model",
    "generate": "alignment.generation",
    **dict.fromkeys(_STAGES, "alignment.pipeline.in_memory"),
}

__all__ = [
    "best_of_n",
    "distill",
    "dpo",
    "evaluate",
    "finetune",
    "generate",
    "load_model",
    "load_reward_model",
    "load_tokenizer",
    "online_dpo",
    "ppo",
    "pretrain",
    "reward",
    "sft",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'alignment' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


class _BitsandbytesFinder:
    """Lets bitsandbytes be imported, by peft too, without a kernel for the CPU that it would fetch from the Hub.

    Where the package `kernels` is installed, bitsandbytes asks it for code while it is imported; it has its own else.
    """

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "bitsandbytes" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def without_kernels(module: ModuleType) -> None:
            modules: dict[str, Any] = sys.modules
            before = modules.get("kernels")
            logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
            modules["kernels"] = None  # None: an import of it fails, and that is no news
            logger.disabled = True
            try:
                execute(module)
            finally:
                logger.disabled = False
                modules.pop("kernels")
                if before is not None:
                    modules["kernels"] = before

        spec.loader.exec_module = without_kernels
        return spec


sys.meta_path.insert(0, _BitsandbytesFinder)

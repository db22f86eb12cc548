"""Counts, on a CPU, what a GPU would be asked to do: kernels, waits for the device, shapes of attention."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.generation import engine
from alignment.losses import language
from alignment.models.layers import feedforward, layer_contexts, norms, rotary, sdpa

NO_KERNEL = frozenset({  # that make a tensor without computing anything
    "detach", "alias", "empty", "empty_strided", "empty_like", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias",
})  # fmt: skip
WAITING = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "unique", "bincount", "masked_select", "__bool__", "__int__",
                     "__float__", "__index__", "new_tensor", "argwhere", "histc", "equal", "allclose"})  # fmt: skip


@torch.library.custom_op("alignment_tests::rms_norm", mutates_args=())
def one_kernel_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.rms_norm`, which a CPU computes in six parts, as the one kernel that it is on a GPU."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype, copy=True)


def choose_as_on_a_gpu(monkeypatch: Any) -> None:
    """Let models choose as on a GPU from now on."""
    for module in (engine, feedforward, layer_contexts, norms, rotary, sdpa):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(language, "computes_float32_logits", lambda head, hidden: False)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: one_kernel_norm(x, weight, eps))


class Kernels(TorchDispatchMode):
    """Counts the operations that a device computes, by name: all but views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.count.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        name = func.name().split("::")[1].split(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts the calls that would wait for a GPU: reads of its numbers, and results whose shape depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call and count it if it waits."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        by_mask = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        ragged = name == "repeat_interleave" and kwargs.get("output_size") is None and _counts_by_tensor(args)
        if name in WAITING or by_mask or ragged:
            self.count[name] += 1
        return func(*args, **kwargs)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def _counts_by_tensor(args: Any) -> bool:
    return len(args) > 1 and isinstance(args[1], torch.Tensor)

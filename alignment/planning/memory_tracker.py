"""The bytes of live tensor storages while code runs, and what was alive when they were most."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Categorize = Callable[[Tensor], str]  # a new tensor -> the name that its bytes are counted under


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operations make inside the `with` block, each once and until it is freed.

    Works on real tensors and on fake ones alike, so that the peak of a step can be found without its memory. What a
    kernel allocates for itself while it runs is not seen.

    Attributes:
        live, total: bytes alive now, by category and together.
        peak: the most bytes alive at once, since the start or `reset_peak`.
        at_peak: bytes by category at that moment.
        storages_at_peak: number of storages at that moment.
    """

    def __init__(
        self, categorize: Categorize = lambda tensor: "activations", scale: Callable[[str], float] = lambda name: 1.0
    ):
        """Start with nothing alive.

        Args:
            categorize: the category of a tensor that an operation has made.
            scale: factor on the bytes of a category, such as 1/8 for tensors that lie sharded on 8 devices.
        """
        super().__init__()
        self._categorize, self._scale = categorize, scale
        self._storages: dict[int, tuple[str, int]] = {}  # address of the storage -> category, bytes
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.storages_at_peak = 0

    def count(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of these tensors under `category`, also where they are counted under another one."""
        for tensor in tensors:
            self._add(tensor, category)
        self._note_peak()

    def count_bytes(self, category: str, size: int) -> None:
        """Count bytes that stay to the end and belong to no tensor here, such as an optimizer's state."""
        self.live[category] += int(size * self._scale(category))
        self.total += int(size * self._scale(category))
        self._note_peak()

    def watch_gradients(self, model: nn.Module, category: str = "gradients") -> None:
        """Count each trainable parameter's gradient under `category` as soon as backward has stored it."""

        def stored(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._add(parameter.grad, category)

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(stored)

    def reset_peak(self) -> None:
        """Begin a new search for the peak with what is alive now."""
        self.peak, self.at_peak, self.storages_at_peak = self.total, dict(self.live), len(self._storages)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, None)
        if not (func is torch.ops.aten.add.Tensor and _adds_inplace(args[0])):
            self._note_peak()
        return result

    def _add(self, tensor: Tensor, category: str | None) -> None:
        """Count a tensor's storage; None: as `categorize` says, unless it is counted already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            if category is None:
                return
            self._forget(address)
        else:
            weakref.finalize(storage, self._forget, address)
        category = self._categorize(tensor) if category is None else category
        size = int(storage.nbytes() * self._scale(category))
        self._storages[address] = category, size
        self.live[category] += size
        self.total += size

    def _forget(self, address: int) -> None:
        category, size = self._storages.pop(address)
        self.live[category] -= size
        self.total -= size

    def _note_peak(self) -> None:
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, {name: size for name, size in self.live.items() if size}
            self.storages_at_peak = len(self._storages)


def _adds_inplace(gradients: object) -> bool:
    """True while autograd adds up, in place, the gradients of a tensor that was used several times.

    While a mode such as `MemoryTracker` is active, the sum is a new tensor for a moment, beside the two that are freed
    next. Without one it is so only where the sum so far is a view, such as the transposed gradient of a linear layer's
    weight: a view shares its storage with the tensor that it was made of.
    """
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return in_backward and isinstance(gradients, Tensor) and not gradients._is_view()

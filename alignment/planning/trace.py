"""The peak of a phase of training, found by running the phase itself on fake tensors.

A phase is what a stage runs on one micro-batch: forward, backward, and what stays for the next one. The kernels'
own working memory is not seen; on a CPU a part of its own stands for it, on a GPU it belongs to the reserve of plan.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.losses import language
from alignment.models.layers import layer_contexts
from alignment.models.layers.sdpa import varlen_computes
from alignment.planning.batches import as_fake
from alignment.planning.layout import Layout
from alignment.planning.memory_tracker import MemoryTracker
from alignment.planning.networks import Networks, trained_bytes
from alignment.planning.quantized_layers import FURTHER_TENSORS, QuantizedStandIn
from alignment.ragged import DeviceBatch
from alignment.training import LossFn
from alignment.training.backends.whole_weights import computing_types, whole_bytes

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CACHE, UNSHARDED = "activations", "logits", "key-value cache", "unsharded blocks and buckets"
KERNELS, OBJECTS = "working memory of kernels", "objects of modules and tensors"
WHOLE = WEIGHTS + " of {} (quantized)"  # FSDP2 does not cut them
# On a CPU, measured (scripts/plan_vs_measured.py): MKL keeps its copy of the largest block of a matrix that it multiplied,
# 192 rows of up to 6,500 float32 numbers; pages of the libraries' code that the run's shapes call for are 1.3 to 2.1 MB,
# and a little more than 1 MB has no known cause.
BLOCK_ROWS, BLOCK_COLUMNS, CODE_BYTES = 192, 6_500, 3_500_000
# On a CPU, measured likewise, for each module and each storage: its objects in Python and C++, its nodes in the graph of
# autograd, and what is left free of the last page of a mapped tensor.
OBJECT_BYTES = 5_000
STATES = 3  # tensors of a trained weight in AdamW's state
USABLE = 0.9  # share of the room within which sampling takes whole weights, as ppo/rollout_weights.py has it


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once on one device during a phase.

    Attributes:
        phase: its name.
        parts: bytes by what they are for, such as `weights of policy`; they add up to `total`.
    """

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def of_kind(self, kind: str) -> int:
        """Bytes of one kind, all roles together."""
        return sum(size for name, size in self.parts.items() if name.split(" of ")[0] == kind)


class Tracer:
    """Runs phases over the networks of a stage and keeps the peak of each.

    Attributes:
        networks: on fake tensors while the tracer is open.
        peaks: of the phases that were run.
    """

    def __init__(self, networks: Networks, layout: Layout, *, precision: str, gpu: bool, room: int | None = None):
        """Take the networks over: their weights become fake tensors.

        Args:
            layout: which part of weights, gradients and optimizer state one device holds.
            precision: of the computation, fp32 or bf16.
            gpu: run what a GPU would run, as far as it can be known without one.
            room: bytes of a device that the run's tensors can take; None: not known.
        """
        self.room = room
        self.networks, self.layout, self.precision, self.gpu = networks, layout, precision, gpu
        self.mode = FakeTensorMode()
        networks.on(self.mode)
        self.peaks: list[Peak] = []
        self._vocabularies = {model.spec.vocabulary for model in networks.by_role.values()}
        self.tracker = MemoryTracker(self._category, self._share)
        for role, tensors in networks.categories():
            cut = [tensor for tensor in tensors if tensor.is_floating_point() or not layout.sharded]
            self.tracker.count(cut, f"{WEIGHTS} of {role}")
            self.tracker.count([x for x in tensors if layout.sharded and not x.is_floating_point()], WHOLE.format(role))

    def autocast(self, *, sampling: bool = False) -> Any:
        """The context in which the run's networks compute; with sharded weights it keeps no copies of them."""
        keep = self.layout.backend != "fsdp2" and not (sampling and self.layout.sharded)
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=keep)

    def train(self, role: str, optimizer_bytes: int) -> Any:
        """Prepare a network as an engine does, and count its optimizer's state; returns the module to call."""
        model = self.networks.by_role[role]
        self.tracker.count_bytes(f"{OPTIMIZER} of {role}", optimizer_bytes)
        if self.layout.has_masters:
            self.tracker.count_bytes(f"{OPTIMIZER} of {role}", trained_bytes([model]))
        self.tracker.watch_gradients(model, f"{GRADIENTS} of {role}")
        forward = model.forward

        def cast(*args: object, **kwargs: object) -> object:
            with self.autocast():
                return forward(*args, **kwargs)

        model.forward = cast
        return model

    def update(
        self,
        phase: str,
        role: str,
        terms: Sequence[tuple[LossFn, DeviceBatch]],
        *,
        repeated: bool,
        kept: Sequence[str] = (),
    ) -> None:
        """Run forward and backward of one micro-batch of each term, gradients adding up; keep the peak.

        Args:
            phase: its name.
            role: the network that trains.
            terms: each term's micro-batch with its loss function.
            repeated: whether other micro-batches of the update came before, so that every gradient is there already.
            kept: as for `running`.
        """
        model = self.networks.by_role[role]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if repeated:
            with self.mode:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            self.tracker.count(gradients, f"{GRADIENTS} of {role}")
            del gradients
        with self.running(phase, [role], kept=kept, backward=True):
            for loss_fn, batch in terms:
                loss = loss_fn(as_fake(batch, self.mode))
                (loss.total * 0.5).backward()
                del loss
        for parameter in trained:
            parameter.grad = None

    @contextmanager
    def running(
        self, phase: str, roles: Sequence[str], *, kept: Sequence[str] = (), backward: bool = False
    ) -> Iterator[None]:
        """Track what runs inside and keep its peak.

        Args:
            phase: its name.
            roles: networks that run, whose sharded weights are made whole block by block.
            kept: networks that ran before without a backward pass: FSDP2 keeps their weights outside of blocks whole.
            backward: whether gradients are made.
        """
        self.tracker.reset_peak()
        with _gpu_choices(self.gpu and self.precision == "bf16", self.gpu), self.mode, self.tracker:
            yield
        parts = {name: size for name, size in self.tracker.at_peak.items() if size}
        unsharded = max((self._unsharded(role, backward) for role in roles), default=0)
        if self.layout.backend == "fsdp2":
            unsharded += sum(self.layout.outside_bytes(self.networks.by_role[role]) for role in kept)
        if unsharded:
            parts[UNSHARDED] = unsharded
        if not self.gpu:
            networks = self.networks.by_role.values()
            modules = {module for model in networks for module in model.modules()}
            trained = sum(parameter.requires_grad for model in networks for parameter in model.parameters())
            weights = [
                each.weight for each in modules if not isinstance(each, nn.Embedding) and hasattr(each, "weight")
            ]
            widest = max((max(weight.shape) for weight in weights if weight.ndim > 1), default=0)
            parts[KERNELS] = CODE_BYTES + 4 * BLOCK_ROWS * min(BLOCK_COLUMNS, widest)
            packed = sum(FURTHER_TENSORS[each.kind] for each in modules if isinstance(each, QuantizedStandIn))
            parts[OBJECTS] = OBJECT_BYTES * (len(modules) + STATES * trained + packed + self.tracker.storages_at_peak)
        self.peaks.append(Peak(phase, parts))

    def choose_rollout_weights(self, role: str, choice: str) -> None:
        """Take whole copies of a sharded network's weights for the last phase, or block by block where they do not fit.

        Args:
            choice: auto, gathered or sharded, as `rollout_weights` of ppo.
        """
        if not self.layout.sharded:
            return
        types = computing_types(self.networks.by_role[role], self.precision)
        peak = self.peaks.pop()
        parts = {**peak.parts, UNSHARDED: whole_bytes(types, lambda parameter: parameter.is_floating_point())}
        if choice == "auto":
            fits = self.room is None or sum(parts.values()) <= USABLE * self.room
            choice = "gathered" if fits else "sharded"
        self.peaks.append(Peak(f"{peak.phase} ({choice})", parts if choice == "gathered" else peak.parts))

    def _unsharded(self, role: str, backward: bool) -> int:
        if role in self.networks.frozen:
            return 0
        model = self.networks.by_role[role]
        trained = trained_bytes([model])
        size = self.layout.unsharded_bytes(model, trained)
        return size + (self.layout.unsharded_gradient_bytes(model, trained) if backward else 0)

    def _category(self, tensor: Tensor) -> str:
        return LOGITS if tensor.ndim > 1 and tensor.shape[-1] in self._vocabularies else ACTIVATIONS

    def _share(self, category: str) -> float:
        kind, _, role = category.partition(" of ")
        if role in self.networks.frozen or role not in self.networks.by_role:
            return 1.0
        shares = {
            WEIGHTS: self.layout.weights_share,
            GRADIENTS: self.layout.gradients_share,
            OPTIMIZER: self.layout.optimizer_share,
        }
        return shares.get(kind, 1.0)


# What a GPU runs


@contextmanager
def _gpu_choices(varlen: bool, gpu: bool) -> Iterator[None]:
    """While open, models make a GPU's choices: larger pieces of logits, and the variable-length attention kernel.

    Fake CUDA tensors would need CUDA for their backward pass.
    """
    if not gpu:
        yield
        return
    chunk, kept, applies = language.CHUNK_ELEMENTS["cpu"], language.KEPT_ELEMENTS["cpu"], layer_contexts.varlen_applies
    language.CHUNK_ELEMENTS["cpu"] = language.CHUNK_ELEMENTS["cuda"]
    language.KEPT_ELEMENTS["cpu"] = language.KEPT_ELEMENTS["cuda"]
    if varlen:
        layer_contexts.varlen_applies = lambda specs, _, training: varlen_computes(specs, training)
    try:
        yield
    finally:
        language.CHUNK_ELEMENTS["cpu"], language.KEPT_ELEMENTS["cpu"] = chunk, kept
        layer_contexts.varlen_applies = applies

"""Peaks of the phases of a run on one device.

Weights, optimizer state and whole copies of shards are counted by formula. Activations, logits and gradients are found
by running forward and backward of one micro-batch on fake tensors, so that every architecture, adapter and precision
counts as it computes. The working memory of kernels is not seen: it belongs to the reserve.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.algorithms.pretrain import distillation_loss_fn
from alignment.data.batches import TokenizedRow
from alignment.generation.sampling import sampling_log_probs
from alignment.losses import language
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import ExternalSeq2SeqModel
from alignment.models.language_model import LanguageModel
from alignment.models.layers import layer_contexts, norms, rotary, sdpa
from alignment.models.layers.sdpa import varlen_computes
from alignment.models.new_weights import attach_value_head
from alignment.models.shared_prompts import prompt_sharing
from alignment.planning.layout import Layout
from alignment.planning.networks import Networks
from alignment.planning.stages import DOCUMENTS, StageConfig, Workload, is_encoder
from alignment.ragged import DeviceBatch, Ragged, Seq2Seq, Sharing, allowed, common_prompt, cut_at_targets
from alignment.training.backends.base import blocks_of, computing_types, whole_bytes
from alignment.training.optim import hidden_matrices, optimizer_bytes

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
SHARDED_SAMPLING = "sampling (sharded)"  # a phase
ACTIVATIONS = "activations"
LOGITS = "logits"
CACHE = "key-value cache"
UNSHARDED = "unsharded blocks and buckets"
SHARED = "shared base"
USABLE = 0.9  # share of the room within which sampling takes whole weights, as rollouts/setup.py has it
MASKED_SHARE = 0.15  # of the tokens, in masked text
TARGET_SHARE = 0.25  # of the source's length, that a corrupted text's target has

Moved = TypeVar("Moved", bound=DeviceBatch)
Length = tuple[int, int]  # tokens, and how many of them are predicted: the last ones


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once on one device during a phase, by what they are for, such as `weights of policy`."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def of_kind(self, kind: str) -> int:
        """Bytes of one kind, all roles together."""
        return sum(size for name, size in self.parts.items() if name.split(" of ")[0] == kind)


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operations make inside the `with` block, each once and until it is freed.

    `live`: bytes alive now, by category; `at_peak`: the same at the moment when they were most.
    """

    def __init__(self, categorize: Callable[[Tensor], str] = lambda tensor: ACTIVATIONS):
        super().__init__()
        self._categorize = categorize
        self._storages: dict[int, tuple[str, int]] = {}  # address of the storage -> category, bytes
        self.live: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return sum(self.at_peak.values())

    def count(self, tensors: Iterable[Tensor], category: str, share: float = 1.0) -> None:
        """Count a share of the storages of these tensors under a category, in place of any other one."""
        for tensor in tensors:
            self._add(tensor, category, share)
        self._note_peak()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        share = 0.0 if func is torch.ops.aten._to_copy.default and self._is_gathered(args[0]) else 1.0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._storages:
                self._add(leaf, self._categorize(leaf), share)
        if not (func is torch.ops.aten.add.Tensor and _adds_inplace(args[0])):
            self._note_peak()
        return result

    def _is_gathered(self, tensor: object) -> bool:
        """True for a sharded weight: it is gathered in the type that is computed in, and freed after its block."""
        return isinstance(tensor, Tensor) and self._storages.get(tensor.untyped_storage()._cdata, ("",))[0] == UNSHARDED

    def _add(self, tensor: Tensor, category: str, share: float) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            self._forget(storage._cdata)
        else:
            weakref.finalize(storage, self._forget, storage._cdata)
        size = int(storage.nbytes() * share)
        self._storages[storage._cdata] = category, size
        self.live[category] += size

    def _forget(self, address: int) -> None:
        category, size = self._storages.pop(address)
        self.live[category] -= size

    def _note_peak(self) -> None:
        if sum(self.live.values()) > self.peak:
            self.at_peak = {name: size for name, size in self.live.items() if size}


def _adds_inplace(gradients: object) -> bool:
    """True while autograd adds up, in place, the gradients of a tensor that was used several times.

    While a mode is active the sum is a new tensor for a moment. Without one it is so only where the sum so far is a
    view, such as the transposed gradient of a linear layer's weight.
    """
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return in_backward and isinstance(gradients, Tensor) and not gradients._is_view()


@dataclass(frozen=True)
class DeviceRows:
    """Rows that a device sees: tokens of a micro-batch, rows of an update, and the longest ones if they are known."""

    tokens: int
    per_update: int
    longest: Sequence[TokenizedRow] = ()

    def take(self, rows: Sequence[Sequence[Length]]) -> tuple[list[Length], bool]:
        """Documents of the first rows that fit a micro-batch, of one at least; and whether rows are left over."""
        taken: list[Length] = []
        for index, row in enumerate(rows):
            if index and sum(size for size, _ in [*taken, *row]) > self.tokens:
                return taken, True
            taken += row
        return taken, False


class Tracer:
    """Runs the phases of a stage and returns the peak of each."""

    def __init__(
        self,
        config: StageConfig,
        stage: Workload,
        networks: Networks,
        layout: Layout,
        *,
        gpu: bool,
    ):
        """Take the networks over: their weights become fake tensors. `gpu`: models make the choices of a GPU."""
        self.config = config
        self.stage = stage
        self.networks = networks
        self.layout = layout
        self.gpu = gpu
        self.mode = FakeTensorMode()
        make_fake(networks.values(), self.mode)
        if stage.options.get("values"):
            with self.mode:
                attach_value_head(networks["policy"])
        self._trained = [role for role, network in stage.networks.items() if network.updates]
        states = {f"{OPTIMIZER} of {role}": self._optimizer_bytes(role) for role in self._trained}
        self._held = self._held_weights() | states
        for role in self._trained:
            networks[role].train(stage.dropout)
            if config.training.gradient_checkpointing:
                networks[role].checkpoint_activations(True, config.training.keep_activations)

    def _held_weights(self) -> dict[str, int]:
        """Bytes of all weights and buffers by role, those that several networks hold as the shared base."""
        holders: dict[int, tuple[set[str], Tensor]] = {}
        for role, model in self.networks.items():
            for tensor in [*model.parameters(), *model.buffers()]:
                holders.setdefault(id(tensor), (set(), tensor))[0].add(role)
        held: Counter[str] = Counter()
        for roles, tensor in holders.values():
            role = SHARED if len(roles) > 1 else next(iter(roles))
            cut = role in self._trained and tensor.is_floating_point()  # FSDP2 and ZeRO leave the others whole
            held[f"{WEIGHTS} of {role}"] += int(tensor.nbytes * (self.layout.weights_share if cut else 1.0))
        return dict(held)

    def _optimizer_bytes(self, role: str) -> int:
        optim = self.config.optim
        if role == "value model":
            optim = getattr(self.config, "value_optim", None) or optim
        trained = {name: x for name, x in self.networks[role].named_parameters() if x.requires_grad}
        hidden = hidden_matrices(self.networks[role]) if optim.name == "muon" else {}
        state = optimizer_bytes({name: tuple(x.shape) for name, x in trained.items()}, optim, hidden=hidden)
        masters = sum(x.nbytes for x in trained.values()) if self.layout.has_masters else 0
        return int((state + masters) * self.layout.optimizer_share)

    def peaks(self, rows: DeviceRows, room: int | None) -> list[Peak]:
        """The peaks of all phases; `room`: bytes of a device that the run's tensors can take, None if not known."""
        peaks = []
        if self.stage.responses:
            peaks.append(self.sampling(rows, room))
            asked = self.networks.keys() - {"policy", "teacher"}  # a teacher is asked during the updates
            if asked or self.stage.networks["policy"].forwards > 1:
                peaks.append(self.forwards("scoring", self.rollouts(rows)[0]))
        for role in self._trained:
            peaks.append(self.update(role, *self.rows_of_update(rows)))
        if self.stage.texts:
            length, count = self.stage.texts
            texts, _ = rows.take([[(length, length - 1)]] * count)
            peaks.append(self.update("policy", texts, True, "policy update on texts"))
        return peaks

    def update(self, role: str, documents: Sequence[Length], more: bool, phase: str = "") -> Peak:
        """Forward and backward of one micro-batch; `more`: others came before, so every gradient is there already."""
        model = self.networks[role]
        share = self.layout.gradients_share
        kind = f"{GRADIENTS} of {role}"
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        batch = self.batch(documents)
        with self.running() as tracker:
            hooks = [
                x.register_post_accumulate_grad_hook(lambda done: tracker.count([done.grad], kind, share))
                for x in trained
            ]
            if more:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
                    tracker.count([parameter.grad], kind, share)
            self.loss(role, batch).backward()
            for parameter, hook in zip(trained, hooks, strict=True):
                parameter.grad = None
                hook.remove()
        later = self._trained[self._trained.index(role) + 1 :]
        return self._peak(phase or f"{role} update", tracker, self._whole(role, kept=later, backward=True))

    def _whole(self, role: str, *, kept: Sequence[str] = (), backward: bool = False) -> int:
        """Bytes beside the shards while a network runs; `kept` ran before without a backward pass."""
        running = self.layout.transient_bytes(self.networks[role], backward=backward)
        return running + sum(self.layout.outside_bytes(self.networks[kept_role]) for kept_role in kept)

    def loss(self, role: str, batch: Ragged) -> Tensor:
        """A number whose gradient takes the memory of the stage's own loss: the sum of all that the network returns."""
        model = self.networks[role]
        stage = self.stage
        distillation = getattr(self.config, "distillation", None)
        options = dict(stage.options) if role == "policy" else {}
        if stage.networks[role].task == "scalar" and not is_encoder(model.config):  # the last layer computes no others
            options["tokens"] = batch.last if stage.kind in DOCUMENTS else batch.before
        with self.autocast():
            if distillation is not None:
                return distillation_loss_fn(model, self.networks["teacher"], distillation)(batch).total
            if "teacher" in self.networks:
                with torch.no_grad():
                    likeliest = getattr(self.config, "likeliest", None)
                    options["token_loss"] = self.networks["teacher"].teacher_loss(batch, likeliest)
            output = model(batch=batch, **options)
            if stage.asked:
                with torch.no_grad():
                    self.networks[stage.asked](batch=batch)
        values = [x for x in output if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([value.float().sum() for value in values]).sum()

    def forwards(self, phase: str, documents: Sequence[Length]) -> Peak:
        """Forwards of all networks that compute without gradients, one after another."""
        batch = self.batch(documents)
        with self.running() as tracker, torch.no_grad(), self.autocast():
            for role, network in self.stage.networks.items():
                if network.forwards:
                    self.networks[role](batch=batch)
        *before, last = self._trained
        return self._peak(phase, tracker, self._whole(last, kept=before))

    def sampling(self, rows: DeviceRows, room: int | None) -> Peak:
        """Prefill and the last step of decoding, when the cache is full.

        Sharded weights are whole meanwhile, or gathered block by block where whole ones do not fit.
        """
        config: Any = self.config
        policy = self.networks["policy"]
        responses = rows.per_update * self.stage.responses
        prompt = self.longest_prompt(rows)
        count = min(config.micro_rollout_batch_size, responses)
        batch = self.batch([(prompt, prompt - 1)] * count)
        with self.running() as tracker, torch.no_grad(), self.autocast(keep_casts=not self.layout.sharded):
            cache = policy.new_cache(count, prompt + config.max_new_tokens)
            tracker.count([*getattr(cache, "keys", []), *getattr(cache, "values", [])], CACHE)
            logits = policy.prefill(batch, cache)
            drawn = sampling_log_probs(logits, config.sampling).argmax(-1)
            if hasattr(cache, "longest"):
                cache.longest = prompt + config.max_new_tokens - 1
            logits = policy.decode(drawn, cache)
            sampling_log_probs(logits, config.sampling)
        if not self.layout.sharded:
            return self._peak("sampling", tracker, 0)
        types = computing_types(policy, config.training.precision)
        whole = self._peak(
            "sampling (gathered)", tracker, whole_bytes(types, lambda parameter: parameter.is_floating_point())
        )
        fits = room is None or whole.total <= USABLE * room
        if config.rollout_weights == "gathered" or (config.rollout_weights == "auto" and fits):
            return whole
        return self._peak(SHARDED_SAMPLING, tracker, self._whole("policy"))

    @contextmanager
    def running(self) -> Iterator[MemoryTracker]:
        """While open, operations run on fake tensors and are tracked."""
        vocabularies = {model.spec.vocabulary for model in self.networks.values()}
        tracker = MemoryTracker(lambda x: LOGITS if x.ndim > 1 and x.shape[-1] in vocabularies else ACTIVATIONS)
        for model in self.networks.values():
            tracker.count([*model.parameters(), *model.buffers()], WEIGHTS, 0.0)  # counted by formula
        for block in (
            block for role in self._trained * self.layout.sharded for block in blocks_of(self.networks[role])
        ):
            tracker.count(block.parameters(), UNSHARDED, 0.0)
        with _gpu_choices(self.gpu, self.config.training.precision), self.mode, tracker:
            yield tracker

    def autocast(self, *, keep_casts: bool = True) -> Any:
        """Context in which the run's networks compute; sharded weights leave no copies in it, nor do DeepSpeed's."""
        keep = keep_casts and not self.layout.sharded
        on = self.config.training.precision == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=on, cache_enabled=keep)

    def _peak(self, phase: str, tracker: MemoryTracker, unsharded: int) -> Peak:
        parts = {**self._held, **tracker.at_peak, UNSHARDED: unsharded}
        return Peak(phase, {name: size for name, size in parts.items() if size})

    # Micro-batches

    def longest_prompt(self, rows: DeviceRows) -> int:
        """Tokens of the longest prompt that is sampled from."""
        return max((len(ids) for row in rows.longest for ids in row.documents), default=self.config.data.max_length)

    def rollouts(self, rows: DeviceRows) -> tuple[list[Length], bool]:
        """Prompts with responses of full length, as many as fit."""
        new: int = self.config.max_new_tokens  # type: ignore[union-attr]
        return rows.take([[(self.longest_prompt(rows) + new, new)]] * (rows.per_update * self.stage.responses))

    def rows_of_update(self, rows: DeviceRows) -> tuple[list[Length], bool]:
        """The largest micro-batch of an update: the longest rows, or rows as long as the config allows."""
        stage = self.stage
        length = self.config.data.max_length
        if stage.responses:
            learned = 1 if stage.documents > 1 else stage.responses  # of each prompt: one pair, or every response
            count = math.ceil(rows.per_update * learned / stage.minibatches)
            return rows.take([self.rollouts(rows)[0][:1] * stage.documents] * count)
        if not rows.longest:
            return rows.take([[(length, length - 1)] * stage.documents] * rows.per_update)
        share = prompt_sharing(
            list(self.networks.values()), wanted=self.config.training.share_prompts, note=lambda line: None
        )
        return rows.take([_computed(row, share) for row in rows.longest])

    def batch(self, documents: Sequence[Length]) -> Any:
        """A micro-batch of fake tensors."""
        masks = [[False] * (size - targets) + [True] * targets for size, targets in documents]
        batch: Any = Ragged.build([[0] * size for size, _ in documents], masks)
        objective = self.stage.objective
        if objective in ("masked", "sentence_pairs"):
            index = torch.arange(0, len(batch.tokens), round(1 / MASKED_SHARE))
            batch = replace(batch, target_index=index, labels=torch.zeros_like(index), weight=float(len(index)))
            if objective == "sentence_pairs":
                batch = replace(batch, segments=torch.zeros_like(batch.tokens))
        elif objective not in ("", "causal") and not isinstance(self.networks["policy"], LanguageModel):
            targets = [max(2, round(size * TARGET_SHARE / (1 + TARGET_SHARE))) for size, _ in documents]
            sources = [size - target for (size, _), target in zip(documents, targets, strict=True)]
            batch = Seq2Seq(*(Ragged.build([[0] * size for size in sizes]) for sizes in (sources, targets)))
        elif isinstance(self.networks.get("policy"), Seq2SeqModel | ExternalSeq2SeqModel):
            batch = cut_at_targets(batch, 0)
        return as_fake(batch, self.mode)


def _computed(row: TokenizedRow, share: Sharing) -> list[Length]:
    """The tokens that are computed of each document of a row: of a shared prompt once."""
    sizes = [len(ids) for ids in row.documents]
    masks = getattr(row, "masks", None)
    common = common_prompt(row.documents, masks) if masks is not None and allowed(share, sizes) else 0
    return [(size, max(size - 1, 1)) for size in (sizes[0], *(size - common for size in sizes[1:]))]


def make_fake(models: Iterable[nn.Module], mode: FakeTensorMode) -> None:
    """Give models on the meta device fake tensors on the CPU; what they share stays shared."""
    new: dict[int, Any] = {}
    for module in (module for model in models for module in model.modules()):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in new:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        whole = isinstance(tensor, nn.Parameter)
                        new[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if whole else fake
                held[name] = new[id(tensor)]


def as_fake(batch: Moved, mode: FakeTensorMode) -> Moved:
    """The batch with fake tensors in the place of its real ones."""
    changed: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = mode.from_tensor(value)
        elif isinstance(value, DeviceBatch):
            changed[field.name] = as_fake(value, mode)
    return replace(batch, **changed)


@contextmanager
def _gpu_choices(gpu: bool, precision: str) -> Iterator[None]:
    """While open, models choose as on a GPU: larger pieces of logits, in bf16 the variable-length attention kernel."""
    if not gpu:
        yield
        return
    with ExitStack() as stack:
        for size in (language.CHUNK_ELEMENTS, language.KEPT_ELEMENTS):
            stack.enter_context(patch.dict(size, cpu=size["cuda"]))
        for module in (layer_contexts, norms, rotary, sdpa):
            stack.enter_context(patch.object(module, "on_gpu", lambda x: True))
        stack.enter_context(patch.object(language, "computes_float32_logits", lambda head, hidden: False))
        stack.enter_context(patch.object(functional, "rms_norm", _FusedNorm.apply))
        if precision == "bf16":
            of_kernel = lambda specs, _, training: varlen_computes(specs, training)  # noqa: E731
            stack.enter_context(patch.object(layer_contexts, "varlen_applies", of_kernel))
        yield


class _FusedNorm(torch.autograd.Function):
    """`rms_norm` with the memory of a GPU's kernel, which keeps its input and a number per row; computes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight), None

"""The plan of a run: what it holds on each device, how long it is, and whether it fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alignment.adapters.specs import LoRASpec
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.data.table import totals_of
from alignment.errors import UserError
from alignment.models.weights_config import WeightsConfig
from alignment.planning.batches import longest
from alignment.planning.device import GB, Device
from alignment.planning.layout import Layout
from alignment.planning.micro_batch import largest_that_fits
from alignment.planning.run_length import (
    Data,
    RunLength,
    parameter_count,
    responses_per_row,
    run_length,
    updates_share,
)
from alignment.planning.stages import DeviceRows, StageConfig, build_networks, trace, trace_caching
from alignment.planning.trace import Peak, Tracer

DEFAULT_TOKENS = 8192  # of a micro-batch, where `auto` has no memory to go by
MOST_TOKENS = {True: 131_072, False: 16_384}  # of a micro-batch on a GPU, on a CPU: larger ones run no faster


@dataclass(frozen=True)
class RoleCount:
    """A network of the run.

    Attributes:
        parameters, trained: numbers of weights.
        adapters: frozen adapters of its checkpoint, below the one that trains.
        base: the checkpoint that its shapes are those of, and the file in which they were found.
    """

    role: str
    parameters: int
    trained: int
    adapters: int
    base: str
    shapes_from: str


@dataclass(frozen=True)
class Plan:
    """What a run needs and how long it is.

    Attributes:
        tokens: of a micro-batch.
        roles: the networks.
        peaks: of the run's phases, per device.
        reserve: bytes of a process beside its tensors.
        fits: None where the device's memory is not known.
    """

    config: StageConfig
    layout: Layout
    device: Device
    tokens: int
    roles: Sequence[RoleCount]
    peaks: Sequence[Peak]
    length: RunLength

    @property
    def peak(self) -> Peak:
        """The phase that needs most."""
        return max(self.peaks, key=lambda peak: peak.total)

    @property
    def reserve(self) -> int:
        """Bytes of a process beside its tensors."""
        return self.device.reserve(self.peak.total, self.layout.gpus)

    @property
    def needed(self) -> int:
        """Bytes that one device must have; on a CPU, that the processes of the machine need together."""
        own = self.peak.total + self.reserve
        return own if self.device.gpu else own * self.layout.gpus

    @property
    def fits(self) -> bool | None:
        """Whether the device has so many; None where its memory is not known."""
        return None if self.device.memory is None else self.needed <= self.device.memory

    def seconds(self, mfu: float) -> float | None:
        """Time of the run at a share `mfu` of the devices' peak rate, and of their memory's bandwidth while it samples."""
        if self.length.operations is None:
            return None
        sampling = self.length.decoding_bytes / (mfu * self.device.bandwidth)
        return sampling + self.length.operations / (mfu * self.device.tflops * 1e12 * self.layout.gpus)


def make_plan(
    config: StageConfig, layout: Layout, device: Device, *, data: Data | None = None, near: Path | None = None
) -> Plan:
    """The plan of a run.

    Args:
        data: what is known of the training rows.
        near: folder of the user's config.

    Raises:
        UserError: nothing is known about a checkpoint that the config names, or not even one row fits, with `auto`.
    """
    data = data or Data()
    if config.training.micro_batch_tokens != "auto":
        return plan_at(config, layout, device, config.training.micro_batch_tokens, data=data, near=near)
    if device.memory is None:
        return plan_at(config, layout, device, DEFAULT_TOKENS, data=data, near=near)
    plans: dict[int, Plan] = {}

    def needed(tokens: int) -> int:
        plans[tokens] = plan_at(config, layout, device, tokens, data=data, near=near)
        return plans[tokens].needed

    row, most = token_range(config, layout, device, data)
    return plans[largest_that_fits(needed, device.memory, row=row, most=most)]


def token_range(config: StageConfig, layout: Layout, device: Device, data: Data) -> tuple[int, int]:
    """Tokens of the longest row, and of the largest micro-batch that can come up on one device."""
    row = config.data.max_length
    if data.examples:
        row = int(totals_of(data.examples).max())
    elif not isinstance(config, OnlineDPOConfig):
        row *= responses_per_row(config)
    row += getattr(config, "max_new_tokens", 0)
    if isinstance(config, OnlineDPOConfig):
        row *= 2  # what is learned from is a pair
    rows = updates_share(config, layout.gpus)
    return row, max(row, min(row * rows, MOST_TOKENS[device.gpu] // row * row))


def plan_at(
    config: StageConfig,
    layout: Layout,
    device: Device,
    tokens: int,
    *,
    data: Data,
    near: Path | None,
) -> Plan:
    """The plan with a given number of tokens in a micro-batch; otherwise as `make_plan`."""
    networks, starts = build_networks(config, layout, near)
    roles = [
        RoleCount(
            role, *parameter_count(model), len(starts[role].adapters), starts[role].base, starts[role].shapes_from
        )
        for role, model in networks.by_role.items()
    ]
    length = run_length(config, data, networks.by_role, layout.gpus)
    tracer = Tracer(
        networks, layout, precision=config.training.precision, gpu=device.gpu, room=device.room(layout.gpus)
    )
    per_update = updates_share(config, layout.gpus)
    rows = DeviceRows(tokens, per_update, longest(data.examples or [], per_update))
    trace(config, tracer, rows)
    peaks = tracer.peaks
    if isinstance(config, DPOConfig) and config.refers and not config.holds_reference:
        before = replace(config, reference_log_probs="compute", reference_cache=None)
        both, _ = build_networks(before, layout, near)
        first = Tracer(both, layout, precision=config.training.precision, gpu=device.gpu)
        trace_caching(before, first, rows)
        peaks = [*first.peaks, *peaks]
    return Plan(config, layout, device, tokens, roles, peaks, length)


# What would make it fit


@dataclass(frozen=True)
class Change:
    """A change of settings, on top of those before it, and what the run needs then."""

    settings: str
    plan: Plan


def changes_that_help(plan: Plan, *, data: Data, near: Path | None) -> list[Change]:
    """Changes of settings in the order of what they cost the run, each on top of those before, until it fits.

    Those that leave what is trained as it is come first; an adapter and quantization follow, then more devices.
    """
    found: list[Change] = []
    for settings, config, layout, tokens in _candidates(plan):
        try:
            tried = plan_at(config, layout, plan.device, tokens, data=data, near=near)
        except (UserError, ValueError):  # a setting that does not go with this model
            continue
        found.append(Change(settings, tried))
        if tried.fits:
            break
    return found


def _candidates(plan: Plan) -> list[tuple[str, StageConfig, Layout, int]]:
    """Settings in words, and the run with them and all those before."""
    config, layout, tokens = plan.config, plan.layout, plan.tokens
    found: list[tuple[str, StageConfig, Layout, int]] = []

    def note(settings: str) -> None:
        found.append((settings, config, layout, tokens))

    if not config.training.gradient_checkpointing or config.training.keep_activations != "nothing":
        training = replace(config.training, gradient_checkpointing=True, keep_activations="nothing")
        config = replace(config, training=training)
        note("training.gradient_checkpointing=true")
    row, _ = token_range(config, layout, plan.device, Data())
    if tokens > row:
        tokens = row
        note(f"training.micro_batch_tokens={tokens}")
    if isinstance(config, PPOConfig | OnlineDPOConfig) and config.micro_rollout_batch_size > 8:
        config = replace(config, micro_rollout_batch_size=8)
        note("micro_rollout_batch_size=8")
    whole = config, layout
    if config.optim.name == "adamw" and layout.backend in ("single", "ddp"):
        config = replace(config, optim=replace(config.optim, name="adamw_8bit"))
        note("optim.name=adamw_8bit")
    if getattr(config, "adapter", None) is None and hasattr(config, "adapter"):
        config = replace(config, adapter=LoRASpec())
        note("adapter.kind=lora")
    if config.weights.quantize is None and layout.backend in ("single", "ddp"):
        config = replace(config, weights=WeightsConfig(config.weights.dtype, "nf4"))
        note("weights.quantize=nf4")
    config, layout = whole
    for gpus in (2, 4, 8, 16):
        if plan.device.gpu and gpus > layout.gpus:
            layout = Layout("fsdp2", gpus, gpus)
            note(f"--gpus {gpus} --launch launch/fsdp2 (without the adapter, quantization and 8-bit optimizer above)")
    if layout.sharded and not layout.offload:
        layout = replace(layout, offload=True)
        note("the same with CPU offload")
    return found


def shortfall(plan: Plan) -> str:
    """The message for a run that does not fit."""
    assert plan.device.memory is not None
    return (
        f"{plan.needed / GB:.1f} GB are needed and {plan.device.memory / GB:.1f} GB are there: {plan.config.output} "
        "does not fit; the changes listed above make it smaller"
    )

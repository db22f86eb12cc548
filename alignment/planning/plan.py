"""The plan of a run: what it holds on each device, how long it is, and whether it fits."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from alignment.config.yaml_source import read_yaml
from alignment.data.table import longest_rows, totals_of
from alignment.errors import UserError
from alignment.planning.layout import Device, Layout, free_memory, layout_of
from alignment.planning.memory import DeviceRows, Peak, Tracer
from alignment.planning.networks import build_networks, parameter_count
from alignment.planning.run_length import Data, RunLength, read_training_rows, run_length
from alignment.planning.stages import StageConfig, Workload, workload_of
from alignment.training.distributed import init_distributed, launched_rank

DEFAULT_TOKENS = 8192  # of a micro-batch, where `auto` has no memory to go by
MOST_TOKENS = {True: 131_072, False: 16_384}  # of a micro-batch on a GPU, on a CPU: larger ones run no faster
CPU_SHARE, GPU_SHARE = 0.8, 0.9  # of the free memory, that `auto` may count on
MOST_TRIALS = 6  # of the search for the largest micro-batch; each is a trace of the model

SMALLER = (
    "smaller, from what costs the run least: training.gradient_checkpointing=true, a smaller training.micro_batch_tokens, "
    "optim.name=adamw_8bit, adapter.kind=lora, weights.quantize=nf4, more GPUs with --launch launch/fsdp2"
)

Config = TypeVar("Config")


@dataclass(frozen=True)
class RoleCount:
    """A network of the run.

    Attributes:
        parameters, trained: numbers of weights.
        adapters: frozen adapters of its checkpoint, below the one that trains.
        base: the checkpoint that its shapes are those of; `shapes_from` is the file in which they were found.
    """

    role: str
    parameters: int
    trained: int
    adapters: int
    base: str
    shapes_from: str


@dataclass(frozen=True)
class Plan:
    """The needs and the length of a run.

    Attributes:
        tokens: of a micro-batch.
        roles: the networks.
        peaks: of the run's phases, per device.
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
        """True where the device has so many; None where its memory is not known."""
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
    """
    data, tokens = data or Data(), config.training.micro_batch_tokens
    if tokens != "auto" or device.memory is None:
        number = DEFAULT_TOKENS if tokens == "auto" else tokens
        return plan_at(config, layout, device, number, data=data, near=near)
    plans: dict[int, Plan] = {}

    def needed(tokens: int) -> int:
        plans[tokens] = plan_at(config, layout, device, tokens, data=data, near=near)
        return plans[tokens].needed

    row, most = token_range(config, workload_of(config, near), layout, device, data)
    return plans[largest_that_fits(needed, device.memory, row=row, most=most)]


def token_range(config: StageConfig, stage: Workload, layout: Layout, device: Device, data: Data) -> tuple[int, int]:
    """Tokens of the longest row that is learned from, and of the largest micro-batch that can come up on one device."""
    row = config.data.max_length * (1 if stage.responses else stage.documents)
    if data.examples:
        row = int(totals_of(data.examples).max())
    if stage.responses:
        row = (row + getattr(config, "max_new_tokens", 0)) * stage.documents
    rows = math.ceil(config.training.batch_size / layout.gpus)
    return row, max(row, min(row * rows, MOST_TOKENS[device.gpu] // row * row))


def largest_that_fits(needed: Callable[[int], int], memory: int, *, row: int, most: int) -> int:
    """The largest number of tokens, a multiple of `row`, whose need fits; `needed` was called with it.

    Memory grows about linearly with the tokens, so that each trial is placed by interpolation.

    Args:
        needed: tokens -> bytes.
        memory: bytes.
        row: tokens of the longest row.
        most: tokens beyond which nothing is gained.
    """
    largest = needed(most)
    if largest <= memory:
        return most
    least = largest if most == row else needed(row)
    if least > memory:
        raise UserError(
            f"training.micro_batch_tokens: auto: not even one row of {row} tokens fits: {least / 1e9:.2f} GB are needed "
            f"and {memory / 1e9:.2f} GB are free; {SMALLER}"
        )
    fits, fits_bytes, fails, fails_bytes = row, least, most, largest
    for _ in range(MOST_TRIALS):
        slope = (fails_bytes - fits_bytes) / (fails - fits)
        guess = int(fits + (memory - fits_bytes) / slope) // row * row if slope > 0 else fits
        guess = min(max(guess, fits + row), fails - row)
        if fails - fits <= row:
            break
        size = needed(guess)
        if size <= memory:
            fits, fits_bytes = guess, size
        else:
            fails, fails_bytes = guess, size
    return fits


def plan_at(config: StageConfig, layout: Layout, device: Device, tokens: int, *, data: Data, near: Path | None) -> Plan:
    """The plan with a given number of tokens in a micro-batch; otherwise as `make_plan`."""
    stage = workload_of(config, near)
    networks = build_networks(stage, config.weights, shared=not layout.shards_optimizer)
    roles = [
        RoleCount(role, *parameter_count(networks[role]), len(start.adapters), start.base, start.shapes_from)
        for role, start in ((role, network.start) for role, network in stage.networks.items())
    ]
    length = run_length(config, stage, data, networks, layout.gpus)
    per_update = math.ceil(config.training.batch_size / layout.gpus)
    rows = DeviceRows(tokens, per_update, longest_rows(data.examples or [], per_update))
    room = device.room(layout.gpus)
    peaks = Tracer(config, stage, networks, layout, gpu=device.gpu).peaks(rows, room)
    return Plan(config, layout, device, tokens, roles, peaks, length)


# `training.micro_batch_tokens: auto` at the start of a run


def resolve_micro_batch(config: Config) -> Config:
    """The config with a number in the place of `training.micro_batch_tokens: auto`; any other config as it is.

    A run that is resumed keeps the number of its config.yaml. On several processes the smallest free memory decides,
    and all of them take the same number; every process must call this.
    """
    if not isinstance(config, StageConfig) or config.training.micro_batch_tokens != "auto":
        return config
    tokens = _earlier_choice(config) or _choose(config)
    if launched_rank() == 0:
        print(f"training.micro_batch_tokens: auto: {tokens}", file=sys.stderr, flush=True)
    return replace(config, training=replace(config.training, micro_batch_tokens=tokens))


def _earlier_choice(config: StageConfig) -> int | None:
    """The number with which the run in the config's directory began; None where there is nothing to resume."""
    output = Path(config.output)
    if not (config.training.resume and (output / "checkpoints").is_dir() and (output / "config.yaml").is_file()):
        return None
    tokens = read_yaml(output / "config.yaml").values["training"]["micro_batch_tokens"]
    return tokens if isinstance(tokens, int) else None


def _choose(config: StageConfig) -> int:
    group = init_distributed()
    gpu = group.device.type == "cuda"
    # Processes of a CPU run share the memory of their machine.
    own = free_memory() * (GPU_SHARE if gpu else CPU_SHARE / group.size)
    memory = int(min(values[0] for values in group.gather([own])))
    # Rank 0 traces the model: the others would find the same, and may have less time.
    tokens, refused = 0, ""
    if group.is_main:
        layout = layout_of(group.kind, group.size, os.environ)
        # The need of a CPU plan is that of all its processes.
        device = Device(gpu, memory * (1 if gpu else group.size), group.device.type, 1.0)
        try:
            tokens = make_plan(config, layout, device, data=read_training_rows(config, workload_of(config))).tokens
        except UserError as error:
            refused = str(error)
    tokens, refused = group.broadcast_object((tokens, refused))
    if refused:
        raise UserError(refused)
    return tokens

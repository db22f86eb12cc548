"""The plan of a run: what it holds on each device, how long it is, and whether it fits."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import nn

from alignment.algorithms.reward import OBJECTIVES, RewardConfig
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml, override, read_yaml, strings
from alignment.data.batches import TokenizedRow
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare, prepare_with
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Demonstration, Prompt, Record, Steps, Text, replies_of
from alignment.data.stream import epoch_rows, mixing_shares, tables_of
from alignment.data.table import column_of, longest_rows
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_tokenizer
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.planning.layout import GB, MACHINE_GPUS, Device, Layout, free_memory, layout_from_env, read_layout
from alignment.planning.memory import SHARDED_SAMPLING, DeviceRows, Peak, Tracer
from alignment.planning.networks import build_networks, parameter_count
from alignment.planning.stages import StageConfig, Workload, workload_of
from alignment.reward_model.model import AdapterEnsemble
from alignment.training.backends.base import computing_types, whole_bytes
from alignment.training.distributed import init_distributed, launched_rank

DEFAULT_TOKENS = 8192  # of a micro-batch, where `auto` has no memory to go by
MOST_TOKENS = {True: 131_072, False: 16_384}  # of a micro-batch on a GPU, on a CPU: larger ones run no faster
# of the free memory, that `auto` may count on
CPU_SHARE = 0.8
GPU_SHARE = 0.9
CHARACTERS = 4  # of a token: usual for English text and vocabularies of 30,000 tokens and more
MOST_TRIALS = 6  # of the search for the largest micro-batch; each is a trace of the model

LEAST_SAVING = 0.001  # share of what is needed, below which a setting is not advised
MICRO_BATCH = "training.micro_batch_tokens="
SMALLER = ("optim.name=adamw_8bit", "adapter.kind=lora", "weights.quantize=nf4")  # from what costs a run least

Config = TypeVar("Config")


@dataclass(frozen=True)
class Data:
    """The training rows, as far as they are known.

    Attributes:
        rows: rows of one epoch; None where the data is not there.
        examples: tokenized; None where the tokenizer is not there either.
        characters: of a row, on average, its prompt once for each response; None where rows are tokenized.
    """

    rows: int | None = None
    examples: Sequence[Any] | None = None
    characters: float | None = None


@dataclass(frozen=True)
class RunLength:
    """The length of a run; None for what depends on rows that are not known.

    Attributes:
        counted: the tokens are those of the data, its characters where the tokenizer is not there, or the most that
            `data.max_length` allows.
        decoding_bytes: weights that one device reads to sample, at most: each token of a batch of responses reads all.
    """

    rows: int | None
    steps: int | None = None
    tokens: float | None = None
    operations: float | None = None
    counted: Literal["tokens", "characters", "max_length"] = "max_length"
    decoding_bytes: float = 0.0


@dataclass(frozen=True)
class RoleCount:
    """Weights of a network, and the checkpoint (`base`, with frozen `adapters` on it) that gives its shapes."""

    role: str
    parameters: int
    trained: int
    adapters: int
    base: str


@dataclass(frozen=True)
class Plan:
    """The needs and the length of a run: `tokens` of a micro-batch, and the peaks of its phases on one device."""

    config: StageConfig
    layout: Layout
    device: Device
    tokens: int
    roles: Sequence[RoleCount]
    peaks: Sequence[Peak]
    length: RunLength
    data: Data
    near: Path | None

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
        process_bytes = self.peak.total + self.reserve
        return process_bytes if self.device.gpu else process_bytes * self.layout.gpus

    @property
    def fits(self) -> bool | None:
        """True where the device has so many; None where its memory is not known."""
        return None if self.device.memory is None else self.needed <= self.device.memory

    @property
    def samples_sharded(self) -> bool:
        """True where the policy's weights stay sharded while it samples."""
        return any(peak.phase == SHARDED_SAMPLING for peak in self.peaks)

    def seconds(self, mfu: float) -> float | None:
        """Time of the run at a share `mfu` of the devices' peak rate, and of their memory's bandwidth while it samples.

        Sharded sampling gathers for each token what a device lacks of the weights.
        """
        if self.length.operations is None:
            return None
        sampling = self.length.decoding_bytes / (mfu * self.device.bandwidth)
        if self.samples_sharded:
            sampling += self.length.decoding_bytes * (1 - self.layout.weights_share) / self.layout.link
        return sampling + self.length.operations / (mfu * self.device.tflops * 1e12 * self.layout.gpus)


def make_plan(
    config: StageConfig, layout: Layout, device: Device, *, data: Data | None = None, near: Path | None = None
) -> Plan:
    """The plan of a run; `near`: folder of the user's config."""
    data = data or Data()
    tokens = config.training.micro_batch_tokens
    if tokens != "auto" or device.memory is None:
        return plan_at(config, layout, device, DEFAULT_TOKENS if tokens == "auto" else tokens, data=data, near=near)

    @cache
    def plan(tokens: int) -> Plan:
        return plan_at(config, layout, device, tokens, data=data, near=near)

    row, most = token_range(config, workload_of(config, near), layout, device, data)
    if not plan(row).fits:
        return plan(row)
    return plan(largest_that_fits(lambda tokens: plan(tokens).needed, device.memory, row=row, most=most))


def token_range(config: StageConfig, stage: Workload, layout: Layout, device: Device, data: Data) -> tuple[int, int]:
    """Tokens of the longest row that is learned from, and of the largest micro-batch that can come up on one device."""
    row = config.data.max_length * (1 if stage.responses else stage.documents)
    if data.examples:
        row = int(column_of(data.examples, "total").max())
    if stage.responses:
        row = (row + getattr(config, "max_new_tokens", 0)) * stage.documents
    rows = math.ceil(config.training.batch_size / layout.gpus)
    return row, max(row, min(row * rows, MOST_TOKENS[device.gpu] // row * row))


def largest_that_fits(needed: Callable[[int], int], memory: int, *, row: int, most: int) -> int:
    """The largest number of tokens up to `most`, a multiple of `row`, which fits, of which the bytes `needed` fit."""
    if needed(most) <= memory:
        return most
    fits = 1
    fails = most // row
    for _ in range(MOST_TRIALS):
        middle = (fits + fails) // 2
        if middle > fits:
            fits, fails = (middle, fails) if needed(middle * row) <= memory else (fits, middle)
    return fits * row


def plan_at(config: StageConfig, layout: Layout, device: Device, tokens: int, *, data: Data, near: Path | None) -> Plan:
    """The plan with a given number of tokens in a micro-batch; otherwise as `make_plan`."""
    stage = workload_of(config, near)
    networks = build_networks(stage, config.weights, shared=not layout.shards_optimizer)
    roles = [
        RoleCount(role, *parameter_count(networks[role]), len(network.start.adapters), network.start.base)
        for role, network in stage.networks.items()
    ]
    length = run_length(config, stage, data, networks, layout.gpus)
    per_update = math.ceil(config.training.batch_size / layout.gpus)
    rows = DeviceRows(tokens, per_update, longest_rows(data.examples or [], per_update))
    tracer = Tracer(config, stage, networks, layout, gpu=device.gpu)
    peaks = tracer.peaks(rows, device.available_bytes(layout.gpus))
    return Plan(config, layout, device, tokens, roles, peaks, length, data, near)


# A run that does not fit


def require_fit(plan: Plan, source: str) -> None:
    """Refuse a run that does not fit its device, with the settings that would make it fit."""
    if plan.fits is False:
        lacking = (plan.needed - (plan.device.memory or 0)) / GB
        raise UserError(f"{source} does not fit: {lacking:.1f} GB are missing; {smaller_settings(plan)}")


def smaller_settings(plan: Plan) -> str:
    """The settings that save memory, from what costs the run least, one on top of the other until it fits.

    Each has the bytes that it saves. Left out is what saves nothing, being set already or for another reason.
    """
    row, _ = token_range(plan.config, workload_of(plan.config, plan.near), plan.layout, plan.device, plan.data)
    gpus = 2 * plan.layout.gpus if plan.layout.sharded else max(MACHINE_GPUS, plan.layout.gpus)
    more_gpus = f"--gpus {gpus} --launch launch/fsdp2"
    side_by_side = getattr(plan.config, "micro_rollout_batch_size", 1)
    fewer = [f"micro_rollout_batch_size={side_by_side // parts}" for parts in (2, 4, 8) if side_by_side >= parts]
    saving = []
    for change in (*fewer, "training.gradient_checkpointing=true", f"{MICRO_BATCH}{row}", *SMALLER, more_gpus):
        smaller = _changed(plan, change, row, gpus)
        saved = 0 if smaller is None else plan.needed - smaller.needed
        if smaller is not None and saved > LEAST_SAVING * plan.needed:
            saving.append(f"{change} saves {saved / GB:.3g} GB")
            plan = smaller
        if plan.fits:
            return f"{'; then '.join(saving)}: with that it needs {plan.needed / GB:.3g} GB and fits"
    advice = "take a smaller base, a smaller data.max_length, or a device with more memory"
    return "; then ".join([*saving, f"{plan.needed / GB:.3g} GB are still needed: {advice}"])


def _changed(plan: Plan, change: str, row: int, gpus: int) -> Plan | None:
    """The plan with a change of `smaller_settings`; None where the config does not take it."""
    if change.startswith("--gpus"):
        config = plan.config
        layout = read_layout("launch/fsdp2", gpus)
    else:
        layout = plan.layout
        try:
            config = build(type(plan.config), override(SourcedYaml(asdict(plan.config)), [change]))
        except UserError:
            return None
    tokens = min(plan.tokens, row) if change.startswith(MICRO_BATCH) else plan.tokens
    return plan_at(config, layout, plan.device, tokens, data=plan.data, near=plan.near)


# The length of a run


def read_training_rows(config: StageConfig, stage: Workload) -> Data:
    """The training rows of a config, where their files are on this disk; tokenized where the tokenizer is too."""
    name = getattr(config, "tokenizer", None) or config.policy
    files = [Path(source.source) for source in config.data.sources("train")]
    if stage.kind is None or config.data.streaming or not all(file.is_file() for file in files):
        return Data()
    new = {key: getattr(config, key, ()) for key in ("add_tokens", "add_special_tokens")}
    tokenizer = None
    if name and Path(name).is_dir():
        with suppress(UserError):  # a base without the files of a tokenizer
            tokenizer = load_tokenizer(str(name), getattr(config, "chat_template", None), **new)
    if tokenizer is None:
        data = config.data
        sources = config.data.sources("train")
        groups = [sources] if data.mixing == "concatenate" else [[source] for source in sources]
        read = [read_rows(group, stage.kind, max_rows=data.max_rows, on_bad_row="skip")[0] for group in groups]
        characters = mean_over_sources(data, [np.array(list(map(characters_of, rows))) for rows in read])
        return Data(epoch_rows(data, list(map(len, read))), characters=characters)
    if isinstance(config, RewardConfig):
        preparation = OBJECTIVES[config.loss].preparation_for(Checkpoint(config.policy))
        examples, _ = prepare_with(preparation, config.data, tokenizer, part="train")
    else:
        examples, _ = prepare(config.data, stage.kind, tokenizer)
    return Data(epoch_rows(config.data, list(map(len, tables_of(examples)))), examples)


def mean_tokens(data: DataConfig, examples: Sequence[TokenizedRow]) -> float:
    """Tokens of a row, on average over the rows that a run sees."""
    return mean_over_sources(data, [column_of(table, "total") for table in tables_of(examples)])


def mean_over_sources(data: DataConfig, values: Sequence[np.ndarray]) -> float:
    """The mean of one value per row, [rows of the source], over the rows that a run sees."""
    sizes = list(map(len, values))
    shares = [size / sum(sizes) for size in sizes] if data.mixing == "concatenate" else mixing_shares(data, sizes)
    return float(sum(share * source_values.mean() for share, source_values in zip(shares, values, strict=True)))


def characters_of(record: Record) -> int:
    """Characters of a record; its prompt counts once for each of its responses."""
    if isinstance(record, Text):
        return len(record.text)
    if isinstance(record, Demonstration) and record.messages is not None:
        return sum(map(len, strings(record.messages)))
    replies = replies_of(record)
    prompts = 1 if isinstance(record, Prompt | Steps) else len(replies)
    return sum(map(len, replies)) + prompts * sum(map(len, strings(record.prompt)))


def run_length(
    config: StageConfig, stage: Workload, data: Data, networks: Mapping[str, nn.Module], gpus: int
) -> RunLength:
    """Rows, updates, tokens and operations of a run whose rows `gpus` devices share."""
    training = config.training
    if training.max_steps is None and data.rows is None:
        return RunLength(None)
    steps = training.steps(data.rows or 0)
    of_row = 1 if stage.responses else stage.documents  # documents that the data holds of a row
    counted: Literal["tokens", "characters", "max_length"] = "max_length"
    mean: float = config.data.max_length * of_row
    if data.examples:
        mean = mean_tokens(config.data, data.examples)
        counted = "tokens"
    elif data.characters is not None:
        mean = min(data.characters / CHARACTERS, mean)
        counted = "characters"
    if stage.responses:
        mean = (mean + getattr(config, "max_new_tokens", 0)) * stage.responses
    length = max(1, round(mean / (stage.responses or of_row)))
    operations = 0.0
    for role, network in stage.networks.items():
        forward = forward_per_token(networks[role], length)
        total, trained = parameter_count(networks[role])
        operations += forward * (network.forwards + network.updates * (2 + trained / total))
    tokens = steps * training.batch_size * mean
    decoding = 0.0
    if isinstance(config, SamplingSettings):
        responses = math.ceil(training.batch_size / gpus) * stage.responses
        passes = steps * math.ceil(responses / config.micro_rollout_batch_size) * config.max_new_tokens
        decoding = float(passes * whole_bytes(computing_types(networks["policy"], training.precision), lambda _: True))
    return RunLength(data.rows, steps, tokens, tokens * operations, counted, decoding)


def forward_per_token(model: nn.Module, length: int) -> float:
    """Operations of a forward per token: of matrices and attention where they can be counted, else twice the weights.

    An adapter's own matrices come on top.
    """
    if isinstance(model, AdapterEnsemble):  # each member runs the base by itself
        return sum(forward_per_token(member, length) for member in model.members)
    adapters = sum(x.numel() for name, x in model.named_parameters() if "lora_" in name)
    if isinstance(model.spec, TransformerSpec) and is_counted(model.spec):
        return forward_operations(model.spec, length) + 2 * adapters
    return 2.0 * parameter_count(model)[0]


# `training.micro_batch_tokens: auto` at the start of a run


def resolve_micro_batch(config: Config) -> Config:
    """The config with a number in the place of `training.micro_batch_tokens: auto`; any other config as it is.

    A run that is resumed keeps the number of its config.yaml. All processes call this and take the same number.
    """
    if not isinstance(config, StageConfig) or config.training.micro_batch_tokens != "auto":
        return config
    tokens = _earlier_choice(config) or _choose(config)
    if launched_rank() == 0:
        print(f"training.micro_batch_tokens: auto: {tokens}", file=sys.stderr, flush=True)
    return replace(config, training=replace(config.training, micro_batch_tokens=tokens))


def _earlier_choice(config: StageConfig) -> int | None:
    """The number with which the run in the config's directory began; None where there is nothing to resume."""
    file = Path(config.output) / "config.yaml"
    if not (config.training.resume and (file.parent / "checkpoints").is_dir() and file.is_file()):
        return None
    tokens = read_yaml(file).values["training"]["micro_batch_tokens"]
    return tokens if isinstance(tokens, int) else None


def _choose(config: StageConfig) -> int:
    group = init_distributed()
    gpu = group.device.type == "cuda"
    # Processes of a CPU run share the memory of their machine.
    available = free_memory() * (GPU_SHARE if gpu else CPU_SHARE / group.size)
    memory = int(min(values[0] for values in group.gather([available])))

    def largest() -> int:
        layout = layout_from_env(group.kind, group.size, os.environ)
        # The need of a CPU plan is that of all its processes.
        device = Device(gpu, memory * (1 if gpu else group.size), group.device.type, 1.0)
        plan = make_plan(config, layout, device, data=read_training_rows(config, workload_of(config)))
        require_fit(plan, f"training.micro_batch_tokens: auto: one row of {plan.tokens} tokens")
        return plan.tokens

    return group.on_main(largest)  # it traces the model: the others would find the same, and may have less time

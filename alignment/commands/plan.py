"""The command `alignment plan`: what a config's run holds on each device, how long it is, and whether it fits."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from alignment.config.load import find_packaged, load_config
from alignment.config.yaml_source import read_yaml
from alignment.errors import UserError, without_secrets
from alignment.pipeline.stages import find_stage
from alignment.planning.layout import GB, find_device, read_layout
from alignment.planning.plan import CHARACTERS, Data, Plan, make_plan, read_training_rows
from alignment.planning.stages import StageConfig, workload_of
from alignment.training.speed import PEAK_TFLOPS, measured_tflops

COLUMN = 24  # characters of a phase's name and of its sizes
PLANNED = ("sft", "reward", "dpo", "ppo", "online_dpo", "distill", "pretrain", "finetune")
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "key-value cache")  # in the order of the lines


def plan_config(
    source: str,
    overrides: Sequence[str],
    *,
    gpus: int | None = None,
    gpu_memory: float | None = None,
    launch: str | None = None,
    stage: str | None = None,
    tflops: float | None = None,
) -> Plan:
    """The plan of a config.

    Args:
        gpus: number of GPUs; None: that of the launch file, or one device.
        gpu_memory: of one GPU, 10^9 bytes; None: that of the GPU here, if there is one.
        tflops: the device's peak rate; None: from a table, or measured.
    """
    file = find_packaged(source, "configs")
    stage = (stage or stage_of(source, file)).replace("-", "_")
    if stage not in PLANNED:
        raise UserError(f"--stage {stage}: give one of {', '.join(PLANNED)}")
    config: StageConfig = load_config(find_stage(stage)[0], source, overrides)
    layout = read_layout(launch, gpus)
    device = find_device(gpu_memory, gpus if launch is None else layout.gpus, config.training.precision, tflops)
    data = Data()
    with suppress(UserError):  # bad rows are the stage's to report
        data = read_training_rows(config, workload_of(config, file.parent))
    return make_plan(config, layout, device, data=data, near=file.parent)


def stage_of(source: str, file: Path) -> str:
    """The stage of a config: its folder's or file's name, or the only one that has all its keys."""
    for name in (source.split("/")[0], file.parent.name, file.stem):
        if name in PLANNED:
            return name
    values = read_yaml(file).values
    keys = set(values) if isinstance(values, dict) else set()
    stages = [stage for stage in PLANNED if keys <= {field.name for field in fields(find_stage(stage)[0])}]
    if len(stages) != 1:
        raise UserError(
            f"{source}: neither its name nor its keys tell which stage it configures; say so: --stage sft (or one of "
            f"{', '.join(PLANNED[1:])})"
        )
    return stages[0]


# As text


def plan_lines(plan: Plan, mfu: float) -> Iterator[str]:
    """Lines of the plan for a terminal."""
    yield f"{'network':14s} {'parameters':>16s} {'trained':>16s}  base"
    for role in plan.roles:
        on_top = f" + {role.adapters} frozen adapter{'s' if role.adapters > 1 else ''}" if role.adapters else ""
        yield f"{role.role:14s} {role.parameters:16,d} {role.trained:16,d}  {role.base}{on_top}"
    yield ""
    yield from _describe_memory(plan)
    yield ""
    yield from _describe_length(plan, mfu)


def _describe_memory(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    training = plan.config.training
    kept = "all activations kept"
    if training.gradient_checkpointing:
        kept = f"gradient checkpointing, {training.keep_activations} kept"
    over = f", sharded over {layout.shard_over}" if layout.sharded else ""
    yield (
        f"one device of {layout.backend} on {layout.gpus}{over}, {training.precision}, "
        f"micro-batches of {plan.tokens} tokens, {kept}; GB (10^9 bytes):"
    )
    yield f"{'':34s}" + "".join(f"{peak.phase:>{COLUMN}s}" for peak in plan.peaks)
    parts = sorted({part for peak in plan.peaks for part in peak.parts})
    for part in sorted(parts, key=lambda part: KINDS.index(kind) if (kind := part.split(" of ")[0]) in KINDS else 9):
        yield _line(part, *(peak.parts.get(part, 0) for peak in plan.peaks))
    yield _line("peak", *(peak.total for peak in plan.peaks))
    yield _line("reserve: libraries, fragments", plan.reserve)
    yield _line("needed" if plan.device.gpu else "needed by all processes", plan.needed)
    if plan.device.memory is None:
        yield "the device's memory is not known: give --gpu-memory to learn whether it fits"
    else:
        yield _line(f"available on {plan.device.name}", plan.device.memory)
    if plan.device.gpu:
        yield (
            "computed, not measured: one micro-batch was run on tensors without memory; kernels' own is in the reserve"
        )


def _line(name: str, *sizes: int) -> str:
    return f"{name:34s}" + "".join(f"{size / GB:{COLUMN}.3f}" for size in sizes)


def _describe_length(plan: Plan, mfu: float) -> Iterator[str]:
    length = plan.length
    device = plan.device
    seconds = plan.seconds(mfu)
    if length.steps is None or length.operations is None or length.tokens is None or seconds is None:
        yield "rows: not known, since the data is not here; set training.max_steps for the length of the run"
        return
    rows = "rows: not known" if length.rows is None else f"{length.rows:,} rows"
    most = {"tokens": "", "characters": "about ", "max_length": "at most "}[length.counted]
    why = f" ({CHARACTERS} characters a token: the tokenizer is not here)" if length.counted == "characters" else ""
    yield (
        f"{rows}, {length.steps:,} updates of {plan.config.training.batch_size} rows, "
        f"{most}{length.tokens:.4g} tokens{why}"
    )
    yield f"{length.operations:.3g} operations (6 per trained weight and token, 4 per frozen one, 2 without gradients)"
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, size = next((candidate for candidate in units if seconds >= 2 * candidate[1]), units[-1])
    about = sampling = ""
    if length.decoding_bytes:
        about = "about "
        sampling = "; responses are taken to be as long as they may"
    if plan.samples_sharded:
        sampling += f", and the weights are gathered for each token, at {plan.layout.link / GB:.0f} GB/s"
    rate = f"{plan.layout.gpus} x {device.tflops:.3g} TFLOP/s ({device.name})"
    yield f"{about}{seconds / size:.1f} {unit} at {mfu:.0%} of {rate}{sampling}"
    if not device.gpu:
        other = "fp32" if plan.config.training.precision == "bf16" else "bf16"
        yield f"in {other} this machine's processor multiplies matrices at {measured_tflops(other):.3g} TFLOP/s"
    if device.assumed:
        cards = ", ".join(f"{name} {rates['bf16']:.0f} in bf16" for name, rates in PEAK_TFLOPS.items())
        yield f"the card is taken to be an {device.name}; give --tflops for another one: {cards}"


# For machines


def as_json(plan: Plan, mfu: float) -> dict[str, Any]:
    """The plan as plain values; bytes are whole numbers, per device."""
    return {
        "config": without_secrets(asdict(plan.config)),
        "layout": asdict(plan.layout),
        "device": asdict(plan.device),
        "micro_batch_tokens": plan.tokens,
        "networks": [asdict(role) for role in plan.roles],
        "phases": {peak.phase: peak.parts for peak in plan.peaks},
        "peak_bytes": plan.peak.total,
        "reserve_bytes": plan.reserve,
        "needed_bytes": plan.needed,
        "fits": plan.fits,
        **asdict(plan.length),
        "mfu": mfu,
        "seconds": plan.seconds(mfu),
    }

"""The command `alignment plan`: what a config's run holds on each device, how long it is, and whether it fits."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alignment.config.load import find_packaged, load_config
from alignment.config.yaml_source import read_yaml
from alignment.errors import UserError, without_secrets
from alignment.pipeline.stages import find_stage
from alignment.planning.layout import GB, find_device, read_layout
from alignment.planning.plan import Change, Plan, changes_that_help, make_plan
from alignment.planning.run_length import CHARACTERS, Data, read_training_rows
from alignment.planning.stages import StageConfig, workload_of
from alignment.training.speed import PEAK_TFLOPS

PLANNED = ("sft", "reward", "dpo", "ppo", "online_dpo", "pretrain", "finetune")
TELLING_KEYS = (  # the first stage decides of which a config has all these keys
    ("ppo", {"advantages"}), ("ppo", {"kl_coef"}), ("ppo", {"value_model"}), ("online_dpo", {"judge"}),
    ("online_dpo", {"tie_margin"}), ("online_dpo", {"rewards", "beta"}), ("online_dpo", {"rewards", "loss"}),
    ("ppo", {"rewards"}), ("online_dpo", {"responses_per_prompt"}), ("ppo", {"reward_model"}), ("dpo", {"beta"}),
    ("finetune", {"task"}), ("pretrain", {"objective"}), ("pretrain", {"model"}),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of the command.

    Attributes:
        gpus: number of GPUs; None: that of the launch file, or one device.
        gpu_memory: of one GPU, 10^9 bytes; None: that of the GPU here, if there is one.
        launch: Accelerate's launch file.
        stage: of the config, where its name and keys do not tell.
        mfu: share of the devices' peak rate that training reaches, for the time.
        tflops: the peak rate; None: from a table, or measured.
    """

    gpus: int | None = None
    gpu_memory: float | None = None
    launch: str | None = None
    stage: str | None = None
    mfu: float = 0.4
    tflops: float | None = None


def plan_config(source: str, overrides: Sequence[str], options: PlanOptions) -> tuple[Plan, list[Change]]:
    """The plan of a config, and the changes that would make it fit where it does not.

    Args:
        source: path of a YAML file, or a packaged name such as `sft/tiny`.

    Raises:
        UserError: the config is wrong, its stage unknown, or a checkpoint of it cannot be traced to a config.json.
    """
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu must lie above 0 and at most at 1, got {options.mfu}; 0.3 to 0.5 is usual")
    file = find_packaged(source, "configs")
    stage = (options.stage or stage_of(source, file)).replace("-", "_")
    if stage not in PLANNED:
        raise UserError(f"--stage {stage}: give one of {', '.join(PLANNED)}")
    config: StageConfig = load_config(find_stage(stage)[0], source, overrides)
    layout = read_layout(options.launch, options.gpus)
    gpus = options.gpus if options.launch is None else layout.gpus
    device = find_device(options.gpu_memory, gpus, config.training.precision, options.tflops)
    data = Data()
    with suppress(UserError):  # bad rows are the stage's to report
        data = read_training_rows(config, workload_of(config, file.parent))
    plan = make_plan(config, layout, device, data=data, near=file.parent)
    changes = [] if plan.fits is not False else changes_that_help(plan, data=data, near=file.parent)
    return plan, changes


def stage_of(source: str, file: Path) -> str:
    """The stage of a config: its folder's name, that of a run's lineage, or what its keys tell.

    Raises:
        UserError: neither tells.
    """
    for name in (source.split("/")[0], file.parent.name, file.stem):
        if name in PLANNED:
            return name
    values = read_yaml(file).values
    keys = set(values) if isinstance(values, dict) else set()
    found = [stage for stage, telling in TELLING_KEYS if telling <= keys]
    if not found:
        raise UserError(
            f"{source}: neither its name nor its keys tell which stage it configures; say so: --stage sft (or one of "
            f"{', '.join(PLANNED[1:])})"
        )
    return found[0]


# As text


def plan_lines(plan: Plan, changes: Sequence[Change], mfu: float) -> Iterator[str]:
    """Lines of the plan for a terminal."""
    yield from _describe_roles(plan)
    yield ""
    yield from _describe_memory(plan)
    yield ""
    yield from _describe_length(plan, mfu)
    if changes:
        yield ""
        yield "What would make it fit, each line on top of those before:"
        for change in changes:
            verdict = "fits" if change.plan.fits else "does not fit"
            yield f"  {change.settings:58s} {change.plan.needed / GB:9.2f} GB  {verdict}"


def _describe_roles(plan: Plan) -> Iterator[str]:
    yield f"{'network':14s} {'parameters':>16s} {'trained':>16s}  base"
    for role in plan.roles:
        on_top = f" + {role.adapters} frozen adapter{'s' if role.adapters > 1 else ''}" if role.adapters else ""
        yield f"{role.role:14s} {role.parameters:16,d} {role.trained:16,d}  {role.base}{on_top}"
    for found in sorted({role.shapes_from for role in plan.roles}):
        yield f"shapes from {found}; no weights were read"


def _describe_memory(plan: Plan) -> Iterator[str]:
    layout, training = plan.layout, plan.config.training
    checkpointing = (
        f"gradient checkpointing, {training.keep_activations} kept" if training.gradient_checkpointing else ""
    )
    placed = f"{layout.backend} on {layout.gpus} device{'s' if layout.gpus > 1 else ''}"
    yield (
        f"one device of {placed}, {training.precision}, micro-batches of {plan.tokens} tokens, "
        f"{checkpointing or 'all activations kept'}:"
    )
    phases = list(plan.peaks)
    yield f"{'':34s}" + "".join(f"{phase.phase[:19]:>24s}" for phase in phases)
    yield f"{'':34s}" + "".join(f"{'GB (10^9)':>13s}{'GiB':>11s}" for _ in phases)
    for part in sorted({part for phase in phases for part in phase.parts}, key=_order):
        yield f"{part:34s}" + "".join(_sizes(phase.parts.get(part, 0)) for phase in phases)
    yield f"{'peak':34s}" + "".join(_sizes(phase.total) for phase in phases)
    yield f"{'reserve: libraries, fragments':34s}{_sizes(plan.reserve)}"
    yield f"{'needed' if plan.device.gpu else 'needed by all processes':34s}{_sizes(plan.needed)}"
    if plan.device.memory is None:
        yield "the device's memory is not known: give --gpu-memory to learn whether it fits"
    else:
        yield f"{'there on ' + plan.device.name:34s}{_sizes(plan.device.memory)}"
    if plan.device.gpu:
        yield (
            "computed, not measured: forward and backward of one micro-batch were run on tensors without memory, with a GPU's "
            "sizes of logits and, in bf16, its variable-length attention; working memory of kernels is in the reserve"
        )


def _order(part: str) -> tuple[int, str]:
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "key-value cache")
    kind = part.split(" of ")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), part)


def _sizes(size: int) -> str:
    return f"{size / GB:13.3f}{size / 2**30:11.3f}"


def _describe_length(plan: Plan, mfu: float) -> Iterator[str]:
    length = plan.length
    if length.steps is None or length.operations is None or length.tokens is None:
        yield "rows: not known, since the data is not here; set training.max_steps for the length of the run"
        return
    rows = "rows: not known" if length.rows is None else f"{length.rows:,} rows"
    most = {"tokens": "", "characters": "about ", "max_length": "at most "}[length.counted]
    why = f" ({CHARACTERS} characters a token: the tokenizer is not here)" if length.counted == "characters" else ""
    yield f"{rows}, {length.steps:,} updates of {plan.config.training.batch_size} rows, {most}{length.tokens:.4g} tokens{why}"
    yield f"{length.operations:.3g} operations (6 per trained weight and token, 4 per frozen one, 2 without gradients)"
    seconds = plan.seconds(mfu)
    assert seconds is not None
    rate = f"{plan.layout.gpus} x {plan.device.tflops:.3g} TFLOP/s ({plan.device.name})"
    limit = "at most " if length.decoding_bytes else most
    yield f"{limit}{_written_time(seconds)} at {mfu:.0%} of {rate}" + _sampling_words(plan, mfu)
    if plan.device.assumed:
        yield f"the card is taken to be an {plan.device.name}; give --tflops for another one: " + ", ".join(
            f"{name} {rates[0]:.0f} in bf16" for name, rates in PEAK_TFLOPS.items()
        )


def _sampling_words(plan: Plan, mfu: float) -> str:
    """The part of the time that sampling takes, where the stage samples."""
    size = plan.length.decoding_bytes
    if not size:
        return ""
    rate = mfu * plan.device.bandwidth
    sharded = any("(sharded)" in peak.phase for peak in plan.peaks)
    return (
        f"; {_written_time(size / rate)} of it to sample responses of full length, read at {rate / 1e12:.3g} TB/s"
        + (", and more where blocks are gathered for every token" if sharded else "")
    )


def _written_time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


# For machines


def as_json(plan: Plan, changes: Sequence[Change], mfu: float) -> dict[str, Any]:
    """The plan as plain values; bytes are whole numbers, per device."""
    return {
        "config": without_secrets(dataclasses.asdict(plan.config)),
        "layout": dataclasses.asdict(plan.layout),
        "device": dataclasses.asdict(plan.device),
        "micro_batch_tokens": plan.tokens,
        "networks": [dataclasses.asdict(role) for role in plan.roles],
        "phases": {phase.phase: phase.parts for phase in plan.peaks},
        "peak_bytes": plan.peak.total,
        "reserve_bytes": plan.reserve,
        "needed_bytes": plan.needed,
        "fits": plan.fits,
        **dataclasses.asdict(plan.length),
        "mfu": mfu,
        "seconds": plan.seconds(mfu),
        "changes": [
            {"settings": change.settings, "needed_bytes": change.plan.needed, "fits": change.plan.fits}
            for change in changes
        ],
    }

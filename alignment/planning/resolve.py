"""`training.micro_batch_tokens: auto` at the start of a run: the number that this device takes."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from alignment.config.yaml_source import read_yaml
from alignment.errors import UserError
from alignment.planning.layout import Device, free_memory, launched_layout
from alignment.planning.plan import make_plan
from alignment.planning.run_length import read_training_rows
from alignment.planning.stages import StageConfig, workload_of
from alignment.training.distributed import init_distributed, launched_rank, launched_size

CPU_SHARE, GPU_SHARE = 0.8, 0.9  # of the free memory, that the choice may count on

Config = TypeVar("Config")


def resolve_micro_batch(config: Config) -> Config:
    """The config with a number in the place of `training.micro_batch_tokens: auto`; any other config as it is.

    A run that is resumed keeps the number of its config.yaml. On several processes the smallest free memory decides,
    and all of them take the same number; every process must call this.

    Raises:
        UserError: not even one row fits; on every process, with the same text.
    """
    if not isinstance(config, StageConfig) or config.training.micro_batch_tokens != "auto":
        return config
    tokens = earlier_choice(config) or _choose(config)
    if launched_rank() == 0:
        print(f"training.micro_batch_tokens: auto: {tokens}", file=sys.stderr, flush=True)
    return replace(config, training=replace(config.training, micro_batch_tokens=tokens))


def earlier_choice(config: StageConfig) -> int | None:
    """The number with which the run in the config's directory began; None where there is nothing to resume."""
    output = Path(config.output)
    if not (config.training.resume and (output / "checkpoints").is_dir() and (output / "config.yaml").is_file()):
        return None
    values = read_yaml(output / "config.yaml").values
    tokens = values.get("training", {}).get("micro_batch_tokens") if isinstance(values, dict) else None
    return tokens if isinstance(tokens, int) else None


def _choose(config: StageConfig) -> int:
    group = init_distributed()
    gpu = group.device.type == "cuda"
    # Processes of a CPU run share the memory of their machine.
    own = free_memory() * (GPU_SHARE if gpu else CPU_SHARE / max(1, launched_size()))
    memory = int(min(values[0] for values in group.gather([own])))
    layout = launched_layout(group.kind, group.size)
    # Rank 0 traces the model: the others would find the same, and may have less time.
    tokens, refused = 0, ""
    if group.is_main:
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

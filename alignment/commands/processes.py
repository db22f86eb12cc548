"""Commands in several processes: starting them, and which of them prints."""

import os
import sys
from collections.abc import Sequence

from alignment.errors import UserError


def relaunch(arguments: Sequence[str], gpus: int | None, launch: str | None) -> None:
    """Replace this process by a launcher that starts the command in several processes; does not return.

    Args:
        gpus: number of processes; None: that of the launch file.
        launch: file or packaged name for Accelerate's launcher; None: torch's launcher, with the whole model on every GPU.

    Raises:
        UserError: fewer GPUs than asked for, no such launch file, or this is a launched process already.
    """
    import torch

    from alignment.config.load import find_packaged

    if "LOCAL_RANK" in os.environ:
        raise UserError(
            "--gpus and --launch start processes themselves; leave them out under accelerate launch or torchrun"
        )
    if gpus is not None and torch.cuda.device_count() < gpus:
        file = find_packaged(launch or "launch/ddp", "launch")
        raise UserError(
            f"--gpus {gpus}: {torch.cuda.device_count()} found; for processes on the CPU use "
            f"`accelerate launch --config_file {file} --num_processes {gpus} -m alignment {arguments[0]} ...`"
        )
    if launch is None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    else:
        processes = [] if gpus is None else ["--num_processes", str(gpus)]
        file = str(find_packaged(launch, "launch"))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", file, *processes]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "alignment", *arguments])


def print_error(text: str) -> None:
    """Print an error on standard error; of several processes with the rank, and once for all that have the same."""
    rank = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from alignment.training.ranks import is_first_to_say

        if not is_first_to_say(text):
            return
        rank = f"rank {os.environ.get('RANK', '0')}: "
    print(f"error: {rank}{text}", file=sys.stderr)

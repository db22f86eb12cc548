"""Every training stage on two processes against one, by scripts/two_processes.py, whose bounds hold here too."""

import os
import subprocess
import sys

import pytest

from tests.distributed.processes import EVERY_KIND, ROOT, needs_deepspeed


def check(*arguments: str) -> str:
    """The table; the script's whole output is the message where a cell is outside its bounds."""
    command = [sys.executable, str(ROOT / "scripts" / "two_processes.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.distributed_slow
@pytest.mark.parametrize("way", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_sharded_ppo_with_unequal_shares_equals_one_process(way):
    """7 prompts, small micro-batches, responses that end at different steps: ranks have unequal work in each phase."""
    assert check("--ways", way, "--stages", "ppo", "--adapters", "full").count("ppo     full") == 1


@pytest.mark.distributed_slow
@pytest.mark.parametrize("way", EVERY_KIND)
def test_every_stage_and_adapter_equals_one_process_and_resumes(way):
    assert check("--ways", way).count(way) >= 12


@pytest.mark.distributed_slow
@pytest.mark.parametrize("way", EVERY_KIND)
def test_further_kinds_of_adapter_equal_one_process_and_resume(way):
    kinds = ["dora", "ia3", "prompt", "prefix_network", "bottleneck", "pissa", "patterns", "token_rows", "modules"]
    assert check("--ways", way, "--stages", "sft", "--adapters", *kinds).count(f"{way} ") >= len(kinds)


@pytest.mark.distributed_slow
@pytest.mark.parametrize("way", EVERY_KIND)
def test_lora_over_quantized_weights_equals_one_process_and_resumes(way):
    """Quantized weights are whole on each rank under FSDP2, while the LoRA is sharded."""
    pytest.importorskip("bitsandbytes")
    table = check("--ways", way, "--stages", "sft", "--adapters", "nf4", "int8")
    assert sum(line.startswith(way) for line in table.splitlines()) == 2

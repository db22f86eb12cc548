"""Two processes, each way to spread a model: the same weights as in one, from the same launch files as on GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.processes import EVERY_KIND, ROOT, needs_deepspeed, relative_error

KINDS = {"ddp": "ddp", "fsdp2": "fsdp2", "zero2": "deepspeed", "zero3": "deepspeed"}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
REPLICAS_AND_ZERO_3 = [
    pytest.param("ddp", marks=pytest.mark.distributed_slow),
    pytest.param("zero3", marks=[pytest.mark.distributed_slow, needs_deepspeed]),
]


def launch(output: Path, mode: str, *launcher: str) -> None:
    """Run the worker; its whole output is the message where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *launcher, "tests.distributed.worker", str(output), *mode.split()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def launch_two(output: Path, mode: str, name: str) -> None:
    """The worker in two processes, as configs/launch/NAME.yaml says."""
    port = str(20000 + os.getpid() % 20000)
    options = ["--config_file", f"configs/launch/{name}.yaml", "--num_processes", "2", "--main_process_port", port]
    launch(output, mode, "accelerate.commands.launch", *options, "-m")


@cache
def in_one_process(parent: Path, mode: str) -> Path:
    """The same run without a launcher."""
    output = parent / f"one-{mode}"
    launch(output, mode)
    return output


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Any:
    """Makes the results of one process, once per mode."""
    parent = tmp_path_factory.mktemp("alone")
    return lambda mode: in_one_process(parent, mode)


def check_equal(two: Path, one: Path, name: str, bound: float) -> None:
    """Weights, metrics and the sampler's logits of two processes against one."""
    for file in ("toy.safetensors", "language.safetensors", "logits.safetensors"):
        assert relative_error(load_file(two / file), load_file(one / file)) <= bound, file
    ours, theirs = (json.loads((output / "report.json").read_text()) for output in (two, one))
    assert (ours["kind"], ours["size"], theirs["kind"], theirs["size"]) == (KINDS[name], 2, "single", 1)
    for mine, other in zip(ours["history"], theirs["history"], strict=True):
        assert mine == pytest.approx(other, rel=max(bound, 2e-5))
    assert ours["collectives"] == []  # while weights are whole, ranks may do unequal work
    assert len(set(ours["draws"])) == 2  # or every rank would drop out the same activations
    check_sampling(ours["sampling"], theirs["sampling"]["gathered"]["responses"], name, bound)
    # rank 1 alone met the bad loss, and every rank names its rows
    assert "update 6" in ours["message"] and "row-9-1, row-9-3, row-9-5, row-9-7" in ours["message"]


def check_sampling(found: dict[str, Any], expected: list[Any], name: str, bound: float) -> None:
    """Sampled with whole weights and with sharded ones: what one process samples, and equally many sharded forwards."""
    assert len({len(tokens) for _, tokens, _ in expected}) > 1
    for weights, way in found.items():
        for (row, tokens, log_probs), (same_row, same, others) in zip(way["responses"], expected, strict=True):
            assert row == same_row
            if bound <= 1e-5:  # a rounded probability may draw another token
                assert tokens == same and log_probs == pytest.approx(others, abs=1e-4), (weights, row)
    assert len(set(found["gathered"]["forwards"])) == 2  # each rank has work of its own ...
    if name in ("fsdp2", "zero3"):
        assert len(set(found["sharded"]["forwards"])) == 1  # ... and here as much as the one with most
        assert found["gathered"]["whole"] and not found["sharded"]["whole"]
        assert found["sharded"]["responses"] == [
            [row, tokens, pytest.approx(log_probs, abs=max(bound, 1e-5))]
            for row, tokens, log_probs in found["gathered"]["responses"]
        ]


@pytest.mark.parametrize("name", REPLICAS_AND_ZERO_3)
def test_two_processes_train_the_same_weights_as_one(tmp_path, alone, name):
    launch_two(tmp_path, "plain", name)
    check_equal(tmp_path, alone("plain"), name, 1e-5)


@pytest.mark.distributed_slow
@pytest.mark.parametrize("name", EVERY_KIND)
def test_resumed_in_two_processes_equals_one_process(tmp_path, alone, name):
    launch_two(tmp_path, "resume", name)
    check_equal(tmp_path, alone("plain"), name, 1e-5)


@pytest.mark.distributed_slow
@pytest.mark.parametrize("name", EVERY_KIND)
def test_bf16_differs_by_rounding_alone(tmp_path, alone, name):
    launch_two(tmp_path, "bf16", name)
    check_equal(tmp_path, alone("bf16"), name, 2e-2)


@pytest.mark.distributed_slow
@pytest.mark.parametrize(
    ("name", "optimizers"),
    [
        ("fsdp2", "sgd muon"),
        pytest.param("zero2", "sgd adamw_8bit", marks=[needs_deepspeed, needs_bitsandbytes]),
        pytest.param("zero3", "sgd adamw_8bit", marks=[needs_deepspeed, needs_bitsandbytes]),
    ],
)
def test_other_optimizers_in_two_processes_equal_one_and_resume(tmp_path, name, optimizers):
    launch(tmp_path / "one", f"optimizers {optimizers}")
    launch_two(tmp_path / "two", f"optimizers {optimizers}", name)
    for each in optimizers.split():
        file = f"{each}.safetensors"
        bound = 2e-3 if each == "adamw_8bit" else 1e-5  # ZeRO's vectors have 8 bits where small tensors alone have 32
        assert relative_error(load_file(tmp_path / "two" / file), load_file(tmp_path / "one" / file)) <= bound, each

"""Launch scripts for several nodes: what Slurm's starts on each node, and two torchrun nodes on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLURM, TORCHRUN = ROOT / "configs/launch/slurm.sh", ROOT / "configs/launch/torchrun.sh"
WRITE_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which each of these programs is the given shell script."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_slurm_starts_one_launcher_on_each_node_with_its_own_rank(tmp_path):
    # `srun` runs its command once per node; a `python` that only writes its arguments down stands for the launcher.
    python = f"""[ "$1" = -m ] || exec {sys.executable} "$@"\nexec {sys.executable} -c '{WRITE_ARGUMENTS}' "$@" """
    srun = 'shift; for node in 0 1; do SLURM_NODEID=$node "$@" || exit 1; done'
    environment = programs(tmp_path, srun=srun, scontrol="printf 'first\\nsecond\\n'", python=python)
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "h100:8"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [str(SLURM), "sft", "my config.yaml", "optim.learning_rate=1e-5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    nodes = [json.loads(line) for line in done.stdout.splitlines()]
    options = [dict(zip(node[2:-5:2], node[3:-5:2], strict=True)) for node in nodes]
    assert [node["--machine_rank"] for node in options] == ["0", "1"]
    for node, option in zip(nodes, options, strict=True):
        assert option["--num_processes"] == "16" and option["--num_machines"] == "2"
        assert option["--main_process_ip"] == "first"
        assert Path(option["--config_file"]).name == "fsdp2.yaml"
        assert node[-5:] == ["-m", "alignment", *command[1:]]


@pytest.mark.distributed_slow
def test_two_torchrun_nodes_train_together(tmp_path, checkpoints, world):
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"policy: {checkpoints['llama']}\noutput: {tmp_path / 'run'}\ndata: {{train: {world['demonstrations']}, max_length: 256}}\n"
        "optim: {learning_rate: 1.0e-3}\ntraining: {max_steps: 2, batch_size: 4}\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"NODES": "2", "HEAD": "127.0.0.1", "GPUS": "1", "PORT": str(20000 + os.getpid() % 20000)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    nodes = [
        subprocess.Popen(
            [str(TORCHRUN), "sft", str(config)], env=environment | {"NODE_RANK": rank}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run/model/model.safetensors").is_file()

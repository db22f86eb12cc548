"""The scripts for Slurm on a real cluster of two nodes on this machine: the life of a job over its time limit."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import read_lines
from tests.distributed.processes import ROOT, free_port, run_ranks
from tests.distributed.test_several_nodes import LAUNCH, programs
from tests.stopping import assert_same_runs

MISSING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.distributed_slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a cluster is started as root"),
]
VLLM = """import sys, threading
from tests.algorithms.test_servers import StandIn
StandIn(sys.argv[2], int(sys.argv[-1]))
threading.Event().wait()"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """An environment whose sbatch, squeue and scontrol speak with a cluster; jobs find this Python and run on CPUs."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    script = [str(ROOT / "scripts/slurm_here.sh")]
    environment = {**os.environ, "PORT": str(20000 + os.getpid() % 10000)}
    done = subprocess.run([*script, "start", str(folder)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stand_ins = programs(folder, vllm=f"exec {sys.executable} -c '{VLLM}' \"$@\"")
    yield stand_ins | {
        "SLURM_CONF": done.stdout.strip().partition("=")[2],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run([*script, "stop", str(folder)], check=True, timeout=60)
    assert str(folder) not in Path("/etc/hosts").read_text()


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Job:
    """A job of two nodes with the log and the output of its run in a folder."""

    def __init__(self, folder: Path, environment: dict[str, str], script: str, *arguments: str):
        self.environment, self.folder, self.output = environment, folder, folder / "run"
        options = ["--parsable", "--nodes", "2", "--gpus-per-node", "1", "--time", "10", "--output", "log"]
        command = ["sbatch", *options, str(LAUNCH / script), *arguments, f"output={self.output}"]
        self.number = self.call(*command).strip()

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", self.number))
        assert found is not None
        return found[1]

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def wait_for_steps(self, count: int) -> None:
        path = self.output / "metrics.jsonl"
        wait_until(lambda: (path.exists() and path.read_text().count("\n") >= count) or "rror" in self.log)
        assert "rror" not in self.log, self.log

    def reach_time_limit(self) -> None:
        """Let the limit of now be five minutes, and hold rank 0 until Slurm has signaled, so that the run is not over before."""
        rank_0 = int((self.output / ".lock").read_text().split()[0])
        os.kill(rank_0, signal.SIGSTOP)
        try:
            self.call("scontrol", "update", f"JobId={self.number}", "TimeLimit=5")
            wait_until(lambda: "CANCELLED" in self.log)
        finally:
            os.kill(rank_0, signal.SIGCONT)

    def start_again(self) -> None:
        """Let a requeued job start now; Slurm would wait for two minutes."""
        wait_until(lambda: self.shown("JobState") == "PENDING")
        time.sleep(3)  # a node refuses a job that it ended just now
        self.call("scontrol", "update", f"JobId={self.number}", "StartTime=now", "TimeLimit=10")

    def wait_for_end(self) -> str:
        wait_until(lambda: self.shown("JobState") not in ("PENDING", "RUNNING", "COMPLETING"))
        return self.shown("JobState")


def assert_requeued(job: Job) -> None:
    """A job over its time limit is requeued once, says so in its last lines, and ends well."""
    job.wait_for_steps(3)
    job.reach_time_limit()
    job.start_again()
    ours = [line for line in job.log.splitlines() if not line.startswith(("slurmstepd", "srun"))]
    assert re.fullmatch(r"stopped by signal 15 after step \d+; a checkpoint is saved", ours[-2])
    assert ours[-1] == "the job is requeued, and goes on from its checkpoint" == job.log.splitlines()[-1]
    assert not (job.output / "model").exists()
    assert job.wait_for_end() == "COMPLETED", job.log
    assert job.shown("Restarts") == "1" and "resumed from" in job.log and "Traceback" not in job.log


def test_a_job_over_its_time_limit_requeues_itself_and_ends_as_one_below(tmp_path, cluster, checkpoints, world):
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"policy: {checkpoints['llama']}\noutput: {tmp_path / 'whole'}\noptim: {{learning_rate: 1.0e-3}}\n"
        f"data: {{train: {world['demonstrations']}, max_length: 256}}\ntraining: {{max_steps: 100, batch_size: 4}}\n"
    )
    job = Job(tmp_path, cluster | {"LAUNCH": "launch/ddp", "PORT": free_port()}, "slurm.sh", "sft", str(config))
    assert_requeued(job)
    run_ranks(2, "alignment", "sft", str(config))
    assert_same_runs(tmp_path / "whole/model", job.output / "model")


def test_a_job_that_fails_or_is_canceled_is_not_requeued(tmp_path, cluster, checkpoints, world):
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"policy: {checkpoints['llama']}\ndata: {{train: {world['demonstrations']}, max_length: 256}}\n"
        "training: {max_steps: 10000, batch_size: 4}\n"
    )
    environment = cluster | {"LAUNCH": "launch/ddp", "PORT": free_port()}
    job = Job(tmp_path, environment, "slurm.sh", "sft", str(config))
    job.wait_for_steps(3)
    job.call("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED" and job.shown("Restarts") == "0"
    wait_until(lambda: "goes on from its checkpoint" in job.log)
    assert "a checkpoint is saved" in job.log and "Traceback" not in job.log
    folder = tmp_path / "failing"
    folder.mkdir()
    failing = Job(folder, environment, "slurm.sh", "sft", str(config), f"policy={folder / 'none'}")
    assert failing.wait_for_end() == "FAILED" and failing.shown("Restarts") == "0"
    assert "no such model directory" in failing.log and "requeued" not in failing.log


def test_a_job_with_servers_requeues_itself_too(tmp_path, cluster, stage, world):
    policy, reward_model = stage("sft") / "model", stage("reward") / "model"
    config = tmp_path / "ppo.yaml"
    config.write_text(
        f"policy: {policy}\nreward_model: {reward_model}\ndata: {{train: {world['prompts']}, max_length: 256}}\n"
        "max_new_tokens: 8\ntraining: {max_steps: 12, batch_size: 4}\n"
    )
    environment = cluster | {"SHARD": "ddp", "PORT": free_port(), "WEIGHTS": str(tmp_path / "weights")}
    job = Job(tmp_path, environment, "slurm_servers.sh", str(policy), "ppo", str(config))
    assert_requeued(job)
    assert [line["step"] for line in read_lines(job.output / "metrics.jsonl")] == list(range(1, 13))

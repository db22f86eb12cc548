"""What a GPU does with this library: the tests that need one, then figures; everything is written to a folder.

    python scripts/gpu.py [--output runs/gpu] [--only tests train decode ...] [--size 1b]          # `make test-gpu`

A part that fails does not stop the others: its log stays in the folder, and the exit code is 1. `table.md` is the table of
the README: absolute tokens per second, the share of the card's rate (MFU), the share of its bandwidth in decoding, and the
peak of memory beside what `alignment plan` says. On a CPU `--size tiny` runs the same parts, as a test does.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, matrix_rate, seconds_of, write_checkpoint, write_rows

SIZES: dict[str, dict[str, Any]] = {
    "1b": {  # Llama 3.2 1B's: a vocabulary of 128 thousand, four query heads to a key head
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
LENGTHS = {"1b": [1024, 2048, 3072, 4096, 1536, 2560], "tiny": [16, 32, 48, 64]}
ROWS, NEW_TOKENS = {"1b": 64, "tiny": 4}, {"1b": 256, "tiny": 8}
ROUNDS = 5
OUTSIDE = {  # parts that are programs of their own
    "tests": ["-m", "pytest", "-m", "gpu", "tests/gpu", "-q"],
    "model": ["scripts/bench_model.py", "--sizes", "llama-1b", "--dtype", "bfloat16", "--batches", "full", "half", "ragged"],
    "compiled": ["scripts/bench_model.py", "--sizes", "llama-1b", "--dtype", "bfloat16", "--batches", "full", "--work",
                 "train", "--compile"],
    "trainers": ["scripts/bench.py", "--only", "sft", "reward", "dpo", "--sizes", "1b", "--precision", "bf16", "--steps", "8"],
}  # fmt: skip


def main() -> int:
    """Run the parts one after another, each in a process of its own; 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", nargs="+", choices=[*OUTSIDE, *PARTS], default=[*OUTSIDE, *PARTS])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--part", choices=PARTS, help="run this part here and print its figures")
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(PARTS[arguments.part](arguments.size)))
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for part in arguments.only:
        own = ["scripts/gpu.py", "--part", part, "--size", arguments.size]
        log, began = arguments.output / f"{part}.log", time.time()
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, *OUTSIDE.get(part, own)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
            )
        figures = json.loads(log.read_text().splitlines()[-1]) if part in PARTS and not done.returncode else {}
        results[part] = {"exit": done.returncode, "seconds": round(time.time() - began, 1), **figures}
        print(part, json.dumps(results[part]), flush=True)
        (arguments.output / "results.json").write_text(json.dumps({"machine": machine(), "parts": results}, indent=1))
        (arguments.output / "table.md").write_text(table(results))
    return int(any(part["exit"] for part in results.values()))


def machine() -> dict[str, Any]:
    """The card and the versions behind the figures."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "cards": torch.cuda.device_count(), "torch": torch.__version__, "cuda": torch.version.cuda}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Rows of the README's table."""
    found = machine()
    lines = [f"{found['device']}, torch {found['torch']}", "", "| figure | value |", "|---|---|"]
    for part, values in results.items():
        shown = {key: value for key, value in values.items() if key not in ("exit", "seconds")}
        lines += [f"| {part}: {key.replace('_', ' ')} | {value} |" for key, value in shown.items()]
        lines += [f"| {part} | FAILED, see {part}.log |"] if values["exit"] else []
    return "\n".join(lines) + "\n"


# Parts


def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def built(size: str) -> Any:
    """A random model with float32 weights on the device."""
    from alignment.models.build import build_language_model

    torch.manual_seed(0)
    with device_of():
        return build_language_model(SIZES[size])


def median_seconds(call: Callable[[], Any]) -> float:
    call()
    return sorted(seconds_of(call, device_of().type) for _ in range(ROUNDS))[ROUNDS // 2]


def train(size: str) -> dict[str, Any]:
    """Forward and backward of rows of one to four thousand tokens in bfloat16: tokens per second, MFU, peak memory."""
    from alignment.models.operations import forward_operations
    from alignment.ragged import Ragged

    model, device = built(size), device_of()
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(SIZES[size]["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS[size]
    ]
    batch, tokens = Ragged.build(rows).to(device), sum(map(len, rows))

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = -model(batch=batch).log_probs.mean()
        loss.backward()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step)
    work = sum(3 * length * forward_operations(model.spec, length) for length in LENGTHS[size])
    found = {
        "tokens_per_second": round(tokens / seconds),
        "mfu": share(work / seconds, matrix_rate(device.type, torch.bfloat16)),
    }
    if device.type == "cuda":
        found["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found


def share(part: float, whole: float) -> float:
    return round(part / whole, 3)


def decode(size: str, **options: Any) -> dict[str, Any]:
    """Responses side by side in bfloat16: tokens per second, and the bytes that a step has to read over the bandwidth."""
    from alignment.generation.engine import decode_responses
    from alignment.generation.sampling import SamplingConfig
    from alignment.training.speed import card_bandwidth

    model, device = built(size).to(torch.bfloat16).eval(), device_of()
    prompts, sampling = [[1 + row] * 32 for row in range(ROWS[size])], SamplingConfig(NEW_TOKENS[size], 1.0)
    seconds = median_seconds(lambda: decode_responses(model, prompts, sampling, [], **options))
    found: dict[str, Any] = {"tokens_per_second": round(len(prompts) * NEW_TOKENS[size] / seconds)}
    if device.type == "cuda":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        spec = model.spec.blocks[0].attention
        cached = 2 * 2 * len(model.spec.layers) * spec.key_value_heads * spec.head_dim * (32 + NEW_TOKENS[size] / 2)
        read = NEW_TOKENS[size] * (weights + len(prompts) * cached)
        found["share_of_bandwidth"] = share(read / seconds, card_bandwidth(device))
    return found


def graphs(size: str) -> dict[str, Any]:
    """`decode` with CUDA graphs."""
    return decode(size, cuda_graphs=True)


def cudnn(size: str) -> dict[str, Any]:
    """`decode` with cuDNN's attention among the kernels, which a run leaves out: how much slower new shapes are."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    return decode(size)


def memory(size: str) -> dict[str, Any]:
    """Peak memory of SFT stages on the card beside the plan of `alignment plan`, in GB, and their ratio."""
    from alignment.commands.plan import plan_config
    from alignment.config.load import load_config
    from alignment.pipeline.stages import find_stage

    found: dict[str, Any] = {}
    lora = {"adapter": {"kind": "lora", "rank": 16, "alpha": 32}}
    cases = {"nf4": {**lora, "weights": {"quantize": "nf4"}}, "lora": lora, "full": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = " ".join(f"w{number * 7 % 50}" for number in range(3000))
        write_checkpoint(folder / "base", {**SIZES[size], "dtype": "bfloat16"}, [text] * 20, 400)
        longest = max(LENGTHS[size])
        rows = [{"prompt": text[:40], "completion": " " + text[: 3 * longest]}] * 16
        write_rows(folder / "rows.jsonl", rows)
        for case, changes in cases.items():
            training = {"max_steps": 2, "batch_size": 4, "micro_batch_tokens": 2 * longest, "precision": "bf16"}
            data = {"train": str(folder / "rows.jsonl"), "max_length": longest, "max_cut_share": 1.0}
            config = {"policy": str(folder / "base"), "data": data, "training": training, **changes}
            path = folder / f"{case}.yaml"
            path.write_text(json.dumps({**config, "output": str(folder / case)}))
            planned = plan_config(str(path), [], stage="sft", tflops=1.0).peak.total
            found[f"{case}_planned_GB"] = round(planned / 1e9, 2)
            gc.collect()  # models of the case before lie in cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            config_class, run = find_stage("sft")
            run(load_config(config_class, str(path)))
            if torch.cuda.is_available():
                measured = torch.cuda.max_memory_allocated()
                found |= {f"{case}_measured_GB": round(measured / 1e9, 2), f"{case}_ratio": share(planned, measured)}
            print(json.dumps(found), flush=True)
    return found


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "train": train, "decode": decode, "graphs": graphs, "cudnn": cudnn, "memory": memory,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

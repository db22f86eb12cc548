"""What every rank runs to load a model as shards, and to train it. Started by the tests.

python -m tests.distributed.sharded slices DIRECTORY...          shards equal the rows of the whole model, bit for bit
python -m tests.distributed.sharded memory DIRECTORY OUTPUT      peak memory of loading, on each rank
"""

import json
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from alignment.adapters.attach import attach
from alignment.adapters.specs import LoRASpec
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.safetensors_files import read_config
from alignment.training import Engine, OptimConfig, TrainingConfig
from alignment.training.backends.sharding import local_rows
from alignment.training.distributed import init_distributed


def engine(model: Any) -> Engine:
    """An engine around a model."""
    return Engine(model, OptimConfig(1e-3), TrainingConfig(), total_steps=1)


def check_slices(directory: Path) -> None:
    """Each rank's shards equal the rows of the whole model; also under an adapter, and of a scalar model's trunk."""
    whole = dict(load_language_model(directory).named_parameters())
    torch.manual_seed(init_distributed().rank)  # ranks draw different adapters and heads, and must end with rank 0's
    adapted = attach(load_language_model(directory, device="meta"), LoRASpec(rank=2, layers="(query|down)"))
    loaded = {"plain": load_language_model(directory, device="meta"), "adapted": adapted}
    if read_config(directory)["model_type"] in ("llama", "gpt2"):
        loaded["scalar"] = load_scalar_model(directory, device="meta", new_head="normal")
    for kind, model in loaded.items():
        trained = engine(model).backend.unwrapped
        ties = {id(parameter) for parameter in trained.parameters()}
        assert len(ties) == len(list(trained.named_parameters(remove_duplicate=True)))
        compared = 0
        for name, parameter in trained.named_parameters():
            assert isinstance(parameter, DTensor) and not parameter.is_meta, name
            start, stop = local_rows(parameter)
            local = parameter.to_local()
            assert local.shape[0] == stop - start
            original = name.replace(".base_layer", "")
            if original in whole and not (kind == "scalar" and name.startswith("head.")):
                assert torch.equal(local, whole[original][start:stop]), (kind, name)
                compared += 1
            else:
                assert "lora_" in name or name.startswith("head."), name
                assert not parameter.full_tensor().isnan().any(), name
        assert compared >= len(whole) - (kind == "scalar"), kind


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def measure_memory(directory: Path, output: Path, start: Path) -> None:
    """Write the peak above the start, this rank's shard, and the largest block, all in bytes."""
    group = init_distributed()
    engine(load_language_model(start, device="meta"))  # what the first model allocates for good
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = engine(load_language_model(directory, device="meta")).backend.unwrapped
    time.sleep(0.05)
    done.set()
    watcher.join()
    tensors = list(model.parameters())
    assert all(isinstance(tensor, DTensor) for tensor in tensors)
    shard = sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)  # type: ignore[attr-defined]
    block = max(sum(x.numel() * x.element_size() for x in block.parameters()) for block in model.trunk.blocks)
    root = max(x.numel() * x.element_size() for x in tensors)
    report = {"peak": peak[0] - before, "shard": shard, "block": max(block, root)}
    reports = group.gather_objects(report)
    if group.is_main:
        output.write_text(json.dumps(reports))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    mode, *paths = sys.argv[1:]
    if mode == "slices":
        for path in paths:
            check_slices(Path(path))
    else:
        measure_memory(*map(Path, paths))

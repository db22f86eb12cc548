"""What every rank runs to load a model as shards, and to train it. Started by the tests.

python -m tests.distributed.sharded slices DIRECTORY...          shards equal the rows of the whole model, bit for bit
python -m tests.distributed.sharded memory DIRECTORY OUTPUT      peak memory of loading, on each rank
python -m tests.distributed.sharded train DIRECTORY OUTPUT UPDATES KIND...     go on to this update; weights from rank 0
"""

import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from alignment.adapters.attach import attach
from alignment.adapters.specs import LoRASpec
from alignment.data.batches import collate
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig
from alignment.training import (
    Engine,
    OptimConfig,
    Term,
    TrainingConfig,
    latest_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    shard_rows,
)
from alignment.training.backends.state_files import local_rows
from alignment.training.distributed import init_distributed, launched_kind
from tests.distributed.worker import documents, next_token


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


def start(directory: Path, kind: str) -> Engine:
    """An engine of a model of the directory: `full`, `lora` over bfloat16, or `bf16`, full in bfloat16's precision."""
    device = "meta" if launched_kind() == "fsdp2" else "cpu"
    torch.manual_seed(3)
    model = load_language_model(directory, None if kind == "lora" else torch.float32, device)
    if kind == "lora":
        model = train_in_float32(attach(store_frozen(model, WeightsConfig("bfloat16")), LoRASpec(rank=2)))
    training = TrainingConfig(precision="bf16" if kind == "bf16" else "fp32", gradient_checkpointing=kind == "bf16")
    return Engine(model, OptimConfig(1e-3, weight_decay=0.1), training, total_steps=4)


def gathered_types(model: Any) -> set[torch.dtype]:
    """The types in which the linear layers of the first block lie while they run."""
    found: set[torch.dtype] = set()
    for module in model.trunk.blocks[0].modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: found.add(module.weight.dtype))
    return found


def train(directory: Path, output: Path, updates: int, kinds: list[str]) -> None:
    """Train each kind from its newest checkpoint to this update, save one, and write what `save_model` makes of it."""
    for kind in kinds:
        trained = start(directory, kind)
        types, group = gathered_types(trained.backend.unwrapped), trained.process_group
        path = latest_checkpoint(output / kind)
        if path is not None:
            restore_checkpoint(path, trained, {})
        while trained.step < updates:  # one row in each micro-batch: the same products whatever the number of ranks
            rows = documents(trained.step)[:5]
            batches = shard_rows(
                rows, lambda part: [b for row in part for b in collate([row], 64)], group.rank, group.size
            )
            trained.update(Term(batches, next_token(trained)))
        save_checkpoint(output / kind, updates, trained, {}, {}, keep=9, drawn=False)
        if kind == "bf16" and group.kind == "fsdp2":
            assert types == {torch.bfloat16}, types
        names = list(trained.backend.unwrapped.state_dict())
        state = dict(trained.backend.gather(names))
        if group.is_main:
            save_file({name: x.clone() for name, x in state.items()}, output / f"{kind}.safetensors")
        group.barrier()


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def watched_peak(load: Callable[[], Any]) -> tuple[Any, int]:
    """The model that `load` returns, and how far resident memory rose meanwhile, in bytes."""
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load()
    time.sleep(0.05)
    done.set()
    watcher.join()
    return model, peak[0] - before


def report(output: Path, measured: dict[str, int]) -> None:
    """Write the numbers of all ranks."""
    group = init_distributed()
    reports = group.gather_objects(measured)
    if group.is_main:
        output.write_text(json.dumps(reports))


def measure_memory(directory: Path, output: Path, start: Path) -> None:
    """Write the peak above the start, this rank's shard, and the largest block, all in bytes."""

    def load(path: Path) -> Any:
        return engine(load_language_model(path, device="meta")).backend.unwrapped

    load(start)  # what the first model allocates for good
    model, peak = watched_peak(lambda: load(directory))
    tensors = list(model.parameters())
    assert all(isinstance(tensor, DTensor) for tensor in tensors)
    shard = sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)  # type: ignore[attr-defined]
    block = max(sum(x.numel() * x.element_size() for x in block.parameters()) for block in model.trunk.blocks)
    root = max(x.numel() * x.element_size() for x in tensors)
    report(output, {"peak": peak, "shard": shard, "block": max(block, root)})


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    mode, *paths = sys.argv[1:]
    if mode == "slices":
        for path in paths:
            check_slices(Path(path))
    elif mode == "train":
        train(Path(paths[0]), Path(paths[1]), int(paths[2]), paths[3:])
    else:
        measure_memory(*map(Path, paths))

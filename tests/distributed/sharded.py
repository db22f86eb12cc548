"""What every rank runs to load a model as shards (FSDP2) or parts (ZeRO-3), and to train it. Started by the tests.

python -m tests.distributed.sharded slices DIRECTORY...          they equal those of the whole model, bit for bit
python -m tests.distributed.sharded memory DIRECTORY OUTPUT START    peak memory of loading, on each rank
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
from torch import Tensor
from torch.distributed.tensor import DTensor

from alignment.adapters import LoRASpec, attach
from alignment.data.batches import collate
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged
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


def own_part(parameter: Any) -> Tensor:
    """The part of a sharded parameter that this rank holds: some rows, or under ZeRO-3 some elements."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    assert isinstance(parameter, DTensor) and not parameter.is_meta
    return parameter.to_local()


def part_of(whole: Tensor, parameter: Any, rank: int) -> Tensor:
    """The same part of the whole tensor."""
    if hasattr(parameter, "ds_tensor"):
        size = parameter.ds_tensor.ds_numel
        return whole.detach().flatten()[size * rank : size * (rank + 1)]
    return whole[slice(*local_rows(parameter))]


def check_slices(directory: Path) -> None:
    """Each rank's parts equal those of the whole model; also under an adapter, and of a scalar model's trunk."""
    group, original = init_distributed(), load_language_model(directory)
    whole = dict(original.named_parameters())
    torch.manual_seed(group.rank)  # ranks draw different adapters and heads, and must end with rank 0's
    adapted = attach(load_language_model(directory, device="meta"), LoRASpec(rank=2, layers="(query|down)"))
    loaded = {"plain": load_language_model(directory, device="meta"), "adapted": adapted}
    if read_config(directory)["model_type"] in ("llama", "gpt2"):
        loaded["scalar"] = load_scalar_model(directory, device="meta", new_head="normal")
    for kind, model in loaded.items():
        trained = engine(model)
        compared = 0
        for name, parameter in trained.backend.unwrapped.named_parameters():
            source = whole.get(name.replace(".base_layer", ""))
            if source is not None and not (kind == "scalar" and name.startswith("head.")):
                expected = part_of(source, parameter, group.rank)
                assert torch.equal(own_part(parameter)[: len(expected)], expected), (kind, name)
                compared += 1
            else:
                assert "lora_" in name or name.startswith("head."), name
            _, tensor = next(trained.backend.gather([name]), ("", torch.zeros(1)))
            assert not tensor.isnan().any(), name
        assert compared >= len(whole) - (kind == "scalar"), kind
        if kind != "scalar":  # a fresh adapter changes nothing
            batch = Ragged.build([[3, 1, 4, 1, 5]])
            with torch.no_grad():
                found = trained.model(batch=batch).log_probs
                assert torch.allclose(found, original(batch=batch).log_probs, atol=1e-5), kind


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


def measure_memory(directory: Path, output: Path, start: Path) -> None:
    """Write each rank's peak above the start, its part, and the largest block, all in bytes, of a frozen base."""

    def load(path: Path) -> Any:
        model = attach(load_language_model(path, device="meta"), LoRASpec(rank=2, layers="query"))
        return engine(model).backend.unwrapped

    load(start)  # what the first model allocates for good
    model, peak = watched_peak(lambda: load(directory))
    parts = [own_part(parameter) for parameter in model.parameters()]
    sizes = {name: getattr(x, "ds_numel", x.numel()) * x.element_size() for name, x in model.named_parameters()}
    blocks = [
        sum(size for name, size in sizes.items() if name.startswith(f"trunk.blocks.{number}."))
        for number in range(len(model.trunk.blocks))
    ]
    shard = sum(part.numel() * part.element_size() for part in parts)
    reports = init_distributed().gather_objects({"peak": peak, "shard": shard, "block": max(*blocks, *sizes.values())})
    if init_distributed().is_main:
        output.write_text(json.dumps(reports))


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

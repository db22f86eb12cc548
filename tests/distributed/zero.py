"""What every rank runs to load a model under ZeRO-3, each reading its part of every parameter. Started by the tests.

python -m tests.distributed.zero slices DIRECTORY...          parts equal those of the whole model, bit for bit
python -m tests.distributed.zero memory DIRECTORY OUTPUT START    peak memory of loading, on each rank
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from alignment.adapters.attach import attach
from alignment.adapters.specs import LoRASpec
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.safetensors_files import read_config
from alignment.ragged import Ragged
from alignment.training.distributed import init_distributed
from tests.distributed.sharded import engine, report, watched_peak


def check_slices(directory: Path) -> None:
    """Each rank's part of every parameter equals that of the whole model; also under an adapter, and of a trunk."""
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
        for name, parameter in model.named_parameters():
            part, first = parameter.ds_tensor, parameter.ds_tensor.ds_numel * group.rank
            source = whole.get(name.replace(".base_layer", ""))
            if source is not None and not (kind == "scalar" and name.startswith("head.")):
                expected = source.detach().flatten()[first : first + part.ds_numel]
                assert torch.equal(part[: len(expected)], expected), (kind, name)
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


def measure_memory(directory: Path, output: Path, start: Path) -> None:
    """Write the peak above the start, this rank's part, and the largest block, all in bytes, of a frozen base."""

    def load(path: Path) -> Any:
        spec = LoRASpec(rank=2, layers="query")
        return engine(attach(load_language_model(path, device="meta"), spec)).backend.unwrapped

    load(start)  # what the first model allocates for good
    model, peak = watched_peak(lambda: load(directory))
    sizes = {name: x.ds_numel * x.element_size() for name, x in model.named_parameters()}
    shard = sum(x.ds_tensor.numel() * x.ds_tensor.element_size() for x in model.parameters())
    blocks = [
        sum(size for name, size in sizes.items() if name.startswith(f"trunk.blocks.{number}."))
        for number in range(len(model.trunk.blocks))
    ]
    report(output, {"peak": peak, "shard": shard, "block": max(*blocks, *sizes.values())})


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    mode, *paths = sys.argv[1:]
    if mode == "slices":
        for path in paths:
            check_slices(Path(path))
    else:
        measure_memory(*map(Path, paths))

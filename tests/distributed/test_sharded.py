"""Models loaded as shards or ZeRO's parts: each rank reads its own, holds no more and a block, ends with the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from tests.distributed.processes import FSDP2, ZERO, needs_deepspeed, relative_error, run_ranks

pytestmark = pytest.mark.distributed_slow
WAYS = pytest.mark.parametrize(
    "way", [pytest.param(FSDP2, id="fsdp2"), pytest.param(ZERO[3], marks=needs_deepspeed, id="zero3")]
)

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {  # plain, fused and transposed, fused, fused head by head, tied, experts
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "phi3": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {**SMALL, "intermediate_size": 48, "tie_word_embeddings": False},
    "gemma": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "mixtral": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 3},
}


def write(family: str, directory, **changes) -> str:
    torch.manual_seed(0)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(build_language_model({"model_type": family, **FAMILIES[family], **changes}), directory)
    return str(directory)


@WAYS
def test_shards_equal_the_rows_of_the_whole_model_bit_for_bit(tmp_path, way):
    """3 ranks: no size of these models is a multiple of 3."""
    run_ranks(3, "tests.distributed.sharded", "slices", *(write(name, tmp_path / name) for name in FAMILIES), **way)


@WAYS
def test_loading_holds_the_shard_and_one_block_at_most(tmp_path, way):
    """About 290 MB in float32: 72 MB on each of 4 ranks, and blocks of 30 MB."""
    wide = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = write("llama", tmp_path / "wide", **wide, num_attention_heads=12, num_key_value_heads=12)
    start = write("llama", tmp_path / "start")
    run_ranks(4, "tests.distributed.sharded", "memory", model, str(tmp_path / "report.json"), start, **way)
    for rank in json.loads((tmp_path / "report.json").read_text()):
        assert rank["shard"] > 60 * 10**6
        assert rank["peak"] <= 1.15 * (rank["shard"] + rank["block"]), rank


KINDS = ("full", "lora", "bf16")


def train(count: int, model: str, output: Path, updates: int, **environment: str) -> None:
    output.mkdir(exist_ok=True)
    settings = {**(FSDP2 if count > 1 else {}), **environment}
    run_ranks(count, "tests.distributed.sharded", "train", model, str(output), str(updates), *KINDS, **settings)


def test_a_checkpoint_of_four_goes_on_in_two_and_in_one(tmp_path):
    """4 updates in one process, against 2 in four and 2 more in four (hybrid), in two (offloaded) and in one."""
    model = write("llama", tmp_path / "start")
    train(1, model, tmp_path / "one", 4)
    train(4, model, tmp_path / "four", 2)
    checkpoint = tmp_path / "four" / "full" / "step-000002"
    shards = [path.relative_to(checkpoint).as_posix() for path in checkpoint.glob("*-shards/*")]
    assert len(shards) == 2 * 4 and all(name.endswith(".safetensors") for name in shards)  # of each rank, no pickle
    assert set(shards) < json.loads((checkpoint / "manifest.json").read_text())["files"].keys()
    ways = {
        "hybrid": (
            4,
            {"LOCAL_WORLD_SIZE": "2", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "FSDP_FORWARD_PREFETCH": "true"},
        ),
        "offloaded": (2, {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}),
        "alone": (1, {}),
    }
    for name, (count, environment) in ways.items():
        shutil.copytree(tmp_path / "four", tmp_path / name)
        train(count, model, tmp_path / name, 4, **environment)
        for kind in KINDS:
            ours, theirs = (load_file(tmp_path / run / f"{kind}.safetensors") for run in (name, "one"))
            assert relative_error(ours, theirs) <= 1e-5, (name, kind)
    shutil.copytree(tmp_path / "alone", tmp_path / "spread")  # what one process saved goes on in two
    train(2, model, tmp_path / "spread", 5)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_zero_resumes_on_as_many_processes_alone(tmp_path, stage):
    run_ranks(1, "tests.distributed.worker", str(tmp_path / "one"), "plain")
    run_ranks(2, "tests.distributed.worker", str(tmp_path / "two"), "save", **ZERO[stage])
    files = [file.name for file in (tmp_path / "two" / "checkpoints" / "step-000002").rglob("*") if file.is_file()]
    assert len(files) > 6 and all(name.endswith((".json", ".safetensors")) for name in files)
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    run_ranks(2, "tests.distributed.worker", str(tmp_path / "two"), "continue", **ZERO[stage])
    for file in ("toy.safetensors", "language.safetensors"):
        assert relative_error(load_file(tmp_path / "two" / file), load_file(tmp_path / "one" / file)) <= 1e-5, file
    with pytest.raises(AssertionError, match="resume with the launch configuration that saved it"):
        run_ranks(1, "tests.distributed.worker", str(tmp_path / "alone"), "continue")

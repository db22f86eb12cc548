"""ZeRO: each rank reads its part of a model, checkpoints go on with as many processes."""

import importlib.util
import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.distributed.processes import run_ranks
from tests.distributed.test_launch import relative_error
from tests.distributed.test_sharded import FAMILIES, write

ZERO = {stage: {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)} for stage in (2, 3)}
pytestmark = [
    pytest.mark.distributed_slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


def test_parts_equal_those_of_the_whole_model_bit_for_bit(tmp_path):
    """3 ranks: no size of these models is a multiple of 3."""
    models = [write(name, tmp_path / name) for name in FAMILIES]
    run_ranks(3, "tests.distributed.zero", "slices", *models, **ZERO[3])


def test_loading_holds_the_part_and_one_block_at_most(tmp_path):
    """About 290 MB in float32: 72 MB on each of 4 ranks, and blocks of 30 MB."""
    wide = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = write("llama", tmp_path / "wide", **wide, num_attention_heads=12, num_key_value_heads=12)
    start = write("llama", tmp_path / "start")
    run_ranks(4, "tests.distributed.zero", "memory", model, str(tmp_path / "report.json"), start, **ZERO[3])
    for rank in json.loads((tmp_path / "report.json").read_text()):
        print(rank)
        assert rank["shard"] > 60 * 10**6
        assert rank["peak"] <= 1.15 * (rank["shard"] + rank["block"]), rank


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_resumes_on_as_many_processes_and_on_no_others(tmp_path, stage):
    run_ranks(1, "tests.distributed.worker", str(tmp_path / "one"), "plain")
    run_ranks(2, "tests.distributed.worker", str(tmp_path / "two"), "save", **ZERO[stage])
    files = [file.name for file in (tmp_path / "two" / "checkpoints" / "step-000002").rglob("*") if file.is_file()]
    assert len(files) > 6 and all(name.endswith((".json", ".safetensors")) for name in files)
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    run_ranks(2, "tests.distributed.worker", str(tmp_path / "two"), "continue", **ZERO[stage])
    for file in ("toy.safetensors", "language.safetensors"):
        error = relative_error(load_file(tmp_path / "two" / file), load_file(tmp_path / "one" / file))
        assert error <= 1e-5, file
    with pytest.raises(AssertionError, match="resume with the launch configuration that saved it"):
        run_ranks(1, "tests.distributed.worker", str(tmp_path / "alone"), "continue")

"""Models loaded as shards: each rank reads its own rows, holds no more than them and a block, and ends with the same bits."""

import json

import pytest
import torch

from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from tests.distributed.processes import FSDP2, run_ranks

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


@pytest.mark.distributed
def test_shards_equal_the_rows_of_the_whole_model_bit_for_bit(tmp_path):
    """3 ranks: no size of these models is a multiple of 3."""
    run_ranks(3, "tests.distributed.sharded", "slices", *(write(name, tmp_path / name) for name in FAMILIES), **FSDP2)


@pytest.mark.distributed_slow
def test_loading_holds_the_shard_and_one_block_at_most(tmp_path):
    """About 290 MB in float32: 72 MB on each of 4 ranks, and blocks of 30 MB."""
    wide = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = write("llama", tmp_path / "wide", **wide, num_attention_heads=12, num_key_value_heads=12)
    start = write("llama", tmp_path / "start")
    run_ranks(4, "tests.distributed.sharded", "memory", model, str(tmp_path / "report.json"), start, **FSDP2)
    for rank in json.loads((tmp_path / "report.json").read_text()):
        print(rank)
        assert rank["shard"] > 60 * 10**6
        assert rank["peak"] <= 1.15 * (rank["shard"] + rank["block"]), rank

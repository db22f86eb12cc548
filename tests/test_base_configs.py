"""Packaged configs for real bases: each runs, as it is, on a small random checkpoint of its base's architecture."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment.config.load import load_config, packaged_folder
from alignment.pipeline.stages import find_stage

ROOT = packaged_folder("configs")
sys.path.insert(0, str(ROOT.parent / "scripts"))
import shrink  # noqa: E402

STAGES = ("sft", "reward", "dpo", "ppo")
BASES = {  # base of a config -> file of its config.json
    "qwen3_0.6b": "qwen3-0.6b", "qwen3_1.7b": "qwen3-1.7b", "qwen3_8b": "qwen3-8b", "llama3.2_1b": "llama-3.2-1b",
    "llama3.1_8b": "llama-3.1-8b", "gemma3_1b": "gemma-3-1b", "smollm3_3b": "smollm3-3b", "olmo2_7b": "olmo-2-7b",
}  # fmt: skip
CHAINS = sorted(path.stem for path in (ROOT / "sft").glob("*.yaml") if path.stem.startswith(tuple(BASES)))
QUICK = ("gemma3_1b", "qwen3_8b_24gb")  # in `make test`; the others are slow together
SMALL = {"max_steps": 1, "epochs": None, "batch_size": 4, "micro_batch_tokens": 512, "save_every_steps": 0}


@pytest.fixture(scope="session")
def shrunken(tmp_path_factory, world) -> Any:
    """`shrunken("qwen3_8b")`: directory of a small checkpoint of that architecture, made once."""
    texts = [json.loads(line)["text"] for line in Path(world["pretrain"]).read_text().splitlines()]
    made: dict[str, str] = {}

    def make(base: str) -> str:
        if base not in made:
            made[base] = str(tmp_path_factory.mktemp(base))
            shrink.write_small(shrink.read_base(BASES[base]), texts, Path(made[base]))
        return made[base]

    return make


def base_of(chain: str) -> str:
    return max((base for base in BASES if chain.startswith(base)), key=len)


def small(config: Any, stage: str, world: dict[str, str], shrunken: Any, chain: str, root: Path) -> Any:
    """The very config, with the checkpoint, the rows and the length of a trial."""
    rows = {"sft": "demonstrations", "reward": "comparisons", "dpo": "comparisons", "ppo": "prompts"}[stage]
    held_out = {"evaluation": world["comparisons_heldout"]} if config.data.evaluation else {}
    data = dataclasses.replace(config.data, train=world[rows], max_length=256, **held_out)
    changes: dict[str, Any] = {"data": data, "output": str(root / stage)}
    changes["policy"] = shrunken(base_of(chain)) if stage == "sft" else str(root / "sft/model")
    if stage == "ppo":
        changes["reward_model"] = str(root / "reward/model")
        changes["pretrain"] = dataclasses.replace(config.pretrain, train=world["pretrain"], max_length=128)
        changes |= {"max_new_tokens": 8, "pretrain_batch_size": 2, "minibatches": 2}
    changes["training"] = dataclasses.replace(config.training, **SMALL)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    "chain", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS]
)
def test_every_stage_of_a_base_runs_on_a_small_checkpoint(chain, shrunken, world, read_metrics, tmp_path):
    if chain.endswith("24gb"):
        pytest.importorskip("bitsandbytes")
    for stage in STAGES:
        config_class, run = find_stage(stage)
        config = small(load_config(config_class, f"{stage}/{chain}"), stage, world, shrunken, chain, tmp_path)
        run(config)
        [line] = read_metrics(tmp_path / stage)
        assert line["loss"] == line["loss"]
        if stage == "dpo":
            assert line["loss"] == pytest.approx(0.693147, abs=2e-3)  # computed in bfloat16


def test_every_base_has_every_stage():
    for stage in STAGES:
        assert {path.stem for path in (ROOT / stage).glob("*.yaml") if path.stem.startswith(tuple(BASES))} == set(
            CHAINS
        )
    assert {base_of(chain) for chain in CHAINS} == set(BASES)

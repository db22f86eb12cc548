"""For all tests: real data where there is any, a tiny world, tiny checkpoints, and one short run of each stage."""

import gc
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ALIGNMENT_DATA") or ROOT.parent / "shared" / "data")
BASES = Path(os.environ.get("ALIGNMENT_BASES") or ROOT / "build" / "bases")

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_positions": 320, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {
        "model_type": "llama", "max_position_embeddings": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without real data, or real bases, their tests are skipped, and counted as such."""
    skips = {}
    if not DATA.is_dir():
        skips["real_data"] = pytest.mark.skip(reason=f"no real data in {DATA}; set ALIGNMENT_DATA")
    if not (BASES / "smollm2").is_dir():
        skips["real_base"] = pytest.mark.skip(reason=f"no SmolLM2 in {BASES}; run `make bases`")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Each garbage collection of each test would look at thousands of collected tests otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_prepared_rows(tmp_path_factory) -> Iterator[None]:
    """Prepared rows go into a cache of this test session, also those of processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGNMENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_download_of_another_test() -> None:
    """A model of the Hub is fetched once a process, here once a test."""
    if loading := sys.modules.get("alignment.loading"):
        loading._download.cache_clear()


@pytest.fixture
def data_folder() -> Path:
    """Folder of real data; for tests marked `real_data`."""
    return DATA


@pytest.fixture
def stories260k(tmp_path) -> str:
    """The real checkpoint as a Hugging Face directory; for tests marked `real_data`."""
    from alignment.config.load import packaged_folder
    from alignment.pipeline.stages import load_stage_file

    llama2c: Any = load_stage_file(packaged_folder("recipes") / "stories/llama2c.py")
    files = [str(DATA / "stories260k" / name) for name in ("stories260K.bin", "tok512.bin")]
    return str(llama2c.run_import(llama2c.ImportConfig(*files, str(tmp_path / "stories260k"))))


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> dict[str, str]:
    """Files of a tiny embedded world by name."""
    from alignment.hotel_world.datasets import RowCounts, write_world

    sizes = RowCounts(
        pretrain=40,
        pretrain_heldout=8,
        demonstrations=24,
        comparisons=24,
        comparisons_heldout=8,
        prompts=16,
        prompts_eval=4,
    )
    return {name: str(path) for name, path in write_world(tmp_path_factory.mktemp("world"), sizes=sizes).items()}


@pytest.fixture(scope="session")
def tokenizer(world):
    """Byte-level BPE of 384 tokens, trained on the world's text."""
    from alignment.data.tokenizers.train import train_bpe

    return train_bpe((row["text"] for row in read_lines(world["pretrain"])), 384)


@pytest.fixture(scope="session")
def write_checkpoint(tokenizer) -> Callable[..., str]:
    """Writes a model directory, `write_checkpoint(directory, "llama", **config changes)`, and returns its name."""
    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.models.build import build_language_model
    from alignment.models.huggingface.checkpoint import save_model

    def write(directory: Path, family: str, seed: int = 0, **changes: Any) -> str:
        torch.manual_seed(seed)
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = FAMILIES[family] | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | special
        directory.mkdir(parents=True, exist_ok=True)
        save_model(roughen(build_language_model(config | changes)), directory)
        save_tokenizer(tokenizer, directory)
        return str(directory)

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, write_checkpoint) -> dict[str, str]:
    """A tiny language model of each family, every weight (biases and norms too) away from its initial value."""
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="session")
def stage(tmp_path_factory, world, checkpoints) -> Callable[[str], Path]:
    """Directory of a short run by name, such as "reward" or "dpo lora gpt2"; each run is made once, when first asked for.

    A stage goes on from the one before it of the same adapter and family: `dpo lora` from `sft lora`.
    """
    root, done = tmp_path_factory.mktemp("stages"), {}

    def output(name: str) -> Path:
        if name not in done:
            run_stage(name, root / name.replace(" ", "-"))
            done[name] = root / name.replace(" ", "-")
        return done[name]

    def run_stage(name: str, directory: Path) -> None:
        kind, *variant = name.split()
        start = checkpoints["gpt2" if "gpt2" in variant else "llama"]
        changes: dict[str, Any] = {"adapter": adapter_of(variant)} if kind != "pretrain" else {}
        if kind in ("reward", "dpo", "ppo"):
            start = str(output(" ".join(["sft", *variant])) / "model")
        if kind == "ppo":
            changes["reward_model"] = str(output(" ".join(["reward", *variant])) / "model")
        run, config = stage_of(kind, start, world, directory, **changes)
        run(config)

    return output


@pytest.fixture(scope="session")
def make_stage(world, checkpoints) -> Callable[..., tuple[Callable[[Any], Path], Any]]:
    """`make_stage("dpo", policy, output, **config changes)` -> the stage's `run` and its config, small and quick."""

    def make(kind: str, policy: str, output: Path, **changes: Any) -> tuple[Callable[[Any], Path], Any]:
        return stage_of(kind, policy, world, output, **changes)

    return make


@pytest.fixture(scope="session")
def ran(make_stage) -> Callable[..., Path]:
    """`ran("dpo", policy, output, **config changes)` runs a small stage and returns its model's directory."""

    def run_small(kind: str, policy: str, output: Path, **changes: Any) -> Path:
        run, config = make_stage(kind, policy, output, **changes)
        return run(config)

    return run_small


@pytest.fixture
def foreign(tmp_path, world) -> str:
    """Directory of a reward model with a tokenizer of its own."""
    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe
    from alignment.models.build import build_scalar_model
    from alignment.models.huggingface.checkpoint import save_model

    directory = tmp_path / "foreign"
    directory.mkdir()
    other = train_bpe((Path(world["comparisons"]).read_text(encoding="utf-8"),), 300)
    torch.manual_seed(0)
    model = build_scalar_model({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 1024, "pad_token_id": other.pad_token_id,
    })  # fmt: skip
    torch.nn.init.normal_(model.head.weight)
    save_model(model, directory)
    save_tokenizer(other, directory)
    return str(directory)


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """Lines of a run's metrics.jsonl."""
    return lambda output: read_lines(Path(output) / "metrics.jsonl")


def stage_of(kind: str, policy: str, world: dict[str, str], output: Path, **changes: Any) -> tuple[Any, Any]:
    """A stage's `run` function and a small config for it."""
    from alignment.algorithms import distill, dpo, online_dpo, pretrain, reward, sft
    from alignment.algorithms.ppo import ppo
    from alignment.data.config import DataConfig
    from alignment.training import OptimConfig, TrainingConfig

    module, Config, rows = {
        "pretrain": (pretrain, pretrain.PretrainConfig, "pretrain"),
        "sft": (sft, sft.SFTConfig, "demonstrations"),
        "reward": (reward, reward.RewardConfig, "comparisons"),
        "dpo": (dpo, dpo.DPOConfig, "comparisons"),
        "ppo": (ppo, ppo.PPOConfig, "prompts"),
        "online_dpo": (online_dpo, online_dpo.OnlineDPOConfig, "prompts"),
        "distill": (distill, distill.DistillConfig, "prompts"),
    }[kind]
    settings: dict[str, Any] = {
        "policy": policy,
        "data": DataConfig(train=world[rows], max_length=256),
        "output": str(output),
        "optim": OptimConfig(learning_rate=3e-3, eps=1e-5),
        "training": TrainingConfig(batch_size=8, max_steps=2 if rows == "prompts" else None),
    }
    if rows == "prompts":
        settings |= {"max_new_tokens": 12, "epochs": 2, "minibatches": 2}
    return module.run, Config(**(settings | changes))


def adapter_of(variant: list[str]) -> Any:
    """The adapter that a run's name asks for."""
    from alignment.adapters import LoRASpec, PrefixSpec

    adapters = {"lora": LoRASpec(rank=4, alpha=16.0), "prefix": PrefixSpec(tokens=4)}
    return next((adapters[word] for word in variant if word in adapters), None)


def roughen(model: Any, seed: int = 0, size: float = 0.05) -> Any:
    """Move every weight, so that biases and norms matter too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def lines_file(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines, compressed where it is named so; a row that is text is a line as it is."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def write_lines(path: str | Path, rows: Iterable[Any]) -> str:
    """Write rows to a JSON-lines file; its name."""
    return str(lines_file(Path(path), rows))

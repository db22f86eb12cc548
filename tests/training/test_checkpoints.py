"""Checkpoints: whole or not at all, found by their content, continued bit by bit."""

import hashlib
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from alignment.errors import UserError
from alignment.files import hash_of, hashes_below, write_json
from alignment.training import (
    Engine,
    OptimConfig,
    Term,
    TrainingConfig,
    latest_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from alignment.training.run.checkpoints import random_state, set_random_state
from tests.killing import run_killed
from tests.training.toys import equal, squared_error, toy_batches, toy_engine, toy_rows

IDENTITY = {"config": {"optim": {"learning_rate": 1e-2}}, "data": {"train": "abc"}}


def advance(engine: Engine, updates: int) -> None:
    for _ in range(updates):
        engine.update(Term(toy_batches(toy_rows(engine.step), [3, 3, 2]), squared_error(engine.model)))


def saved(root: Path, steps: int = 3, keep: int = 9) -> Engine:
    """An engine with a checkpoint after every one of its first `steps` updates."""
    engine = toy_engine()
    for step in range(1, steps + 1):
        advance(engine, 1)
        save_checkpoint(root, step, engine, {"kl_coef": 0.2}, IDENTITY, keep=keep)
    return engine


def test_files_are_as_documented_and_none_is_a_pickle(tmp_path):
    saved(tmp_path, 1)
    files = {file.name: file.read_bytes() for file in (tmp_path / "step-000001").iterdir()}
    manifest = json.loads(files.pop("manifest.json"))
    assert set(files) == {"model.safetensors", "optimizer.safetensors", "state.json", "identity.json", "random.json"}
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def test_saved_and_loaded_goes_on_bit_by_bit(tmp_path):
    torch.manual_seed(3)
    whole = toy_engine(dropout=0.1)
    advance(whole, 2)
    save_checkpoint(tmp_path, 2, whole, {"kl_coef": 0.2}, IDENTITY, keep=1)
    advance(whole, 3)
    resumed = toy_engine(dropout=0.1, seed=77)
    state = restore_checkpoint(tmp_path / "step-000002", resumed, IDENTITY)
    assert state == {"kl_coef": 0.2, "step": 2, "extended": False} and resumed.step == 2
    advance(resumed, 3)
    assert equal(resumed, whole)


def test_optimizer_state_follows_names_and_not_order(tmp_path):
    class Pair(nn.Module):
        def __init__(self, names: list[str]):
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(5, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + 2 * self.b(x)

    def engine(names: list[str]) -> Engine:
        torch.manual_seed(0)
        return Engine(Pair(names), OptimConfig(1e-2), TrainingConfig(), total_steps=9)

    first = engine(["a", "b"])
    advance(first, 2)
    save_checkpoint(tmp_path, 2, first, {}, {}, keep=1)
    other = engine(["b", "a"])
    restore_checkpoint(tmp_path / "step-000002", other, {})
    advance(first, 1)
    advance(other, 1)
    assert equal(other, first)


def test_frozen_weights_are_not_stored_and_engines_have_folders(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    engines = {"policy": Engine(model, OptimConfig(1e-2), TrainingConfig(), total_steps=2), "value": toy_engine()}
    advance(engines["policy"], 1)
    path = save_checkpoint(tmp_path, 1, engines, {}, {}, keep=1)
    assert set(load_file(path / "policy" / "model.safetensors")) == {"1.weight", "1.bias"}
    restore_checkpoint(path, engines, {})
    with pytest.raises(UserError, match=r"engines \['policy', 'value'\]"):
        restore_checkpoint(path, engines["value"], {})


def seal(path: Path, **changes: object) -> None:
    """Give a checkpoint whose files were changed a manifest with the right sums."""
    manifest = {"format": 4, "step": 1, "files": hashes_below(path)} | changes
    del manifest["files"]["manifest.json"]
    write_json(path / "manifest.json", manifest | {"sum": hash_of(manifest)})


@pytest.mark.parametrize("written", [3, 5, 99, "x", None])
def test_a_checkpoint_of_another_format_is_refused(tmp_path, written):
    engine = saved(tmp_path, 1)
    seal(tmp_path / "step-000001", format=written)
    with pytest.raises(UserError, match=rf"step-000001 has the format {written!r}.*version"):
        restore_checkpoint(tmp_path / "step-000001", engine, IDENTITY)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_an_optimizer_file_without_a_tensor_is_refused_by_name(tmp_path, lost):
    engine = saved(tmp_path, 1)
    file = tmp_path / "step-000001" / "optimizer.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != f"last.weight/{lost}"}, file)
    seal(file.parent)
    with pytest.raises(UserError, match=rf"last\.weight lacks one of: .*{lost}"):
        restore_checkpoint(file.parent, engine, IDENTITY)


@pytest.mark.parametrize("name", ["state.json", "random.json"])
def test_a_file_nested_too_deep_is_refused_by_name(tmp_path, name):
    engine = saved(tmp_path, 1)
    (tmp_path / "step-000001" / name).write_text("[" * 100_000)
    seal(tmp_path / "step-000001")
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        restore_checkpoint(tmp_path / "step-000001", engine, IDENTITY)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("fault", [flip_bit, cut_in_half])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "random.json"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, capsys, fault, name):
    saved(tmp_path)
    fault(tmp_path / "step-000003" / name)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000002"
    assert f"step-000003/{name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["optimizer.safetensors", "random.json"])
def test_a_file_that_was_deleted_is_a_refusal_that_names_it(tmp_path, name):
    saved(tmp_path)
    (tmp_path / "step-000003" / name).unlink()
    with pytest.raises(UserError, match=f"step-000003/{name} is missing"):
        latest_checkpoint(tmp_path)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    engine = saved(tmp_path, 1)
    with torch.no_grad():
        engine.backend.unwrapped.last.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"last\.weight"):
        save_checkpoint(tmp_path, 2, engine, {}, IDENTITY, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    engine = saved(tmp_path / "whole", 2)
    advance(engine, 1)
    found = []
    for after in range(100):
        root = tmp_path / str(after)
        shutil.copytree(tmp_path / "whole", root)
        code = run_killed(
            lambda root=root: save_checkpoint(root, 3, engine, {}, IDENTITY, keep=2),
            after,
            ("replace", "fsync", "rename"),
        )
        path = latest_checkpoint(root)
        assert path is not None and not list(root.glob(".*")), "left-overs are removed"
        again = toy_engine(seed=5)
        restore_checkpoint(path, again, IDENTITY)
        found.append(again.step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    # Step 2 until the one rename that makes step 3 appear, step 3 from then on.
    assert found == sorted(found) and found[0] == 2 and found[-1] == 3 and 15 < len(found) < 100


def test_random_states_come_back(tmp_path):
    import random

    import numpy as np

    state = json.loads(json.dumps(random_state()))
    first = (random.random(), np.random.rand(), torch.rand(3))
    set_random_state(state)
    second = (random.random(), np.random.rand(), torch.rand(3))
    assert first[:2] == second[:2] and torch.equal(first[2], second[2])


def test_a_damaged_checkpoint_never_outlives_a_sound_one(tmp_path, capsys):
    engine = saved(tmp_path, 3)
    cut_in_half(tmp_path / "step-000003" / "model.safetensors")
    found = latest_checkpoint(tmp_path)
    assert found == tmp_path / "step-000002"
    restore_checkpoint(found, engine, IDENTITY)
    save_checkpoint(tmp_path, 3, engine, {}, IDENTITY, keep=1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-000003", "step-000003"]
    assert "kept as damaged-step-000003" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", ["step-000000", "step-099999"])
def test_an_empty_directory_beside_checkpoints_neither_counts_nor_goes(tmp_path, name, keep):
    engine = saved(tmp_path, 2, keep=2)
    (tmp_path / name).mkdir()
    advance(engine, 1)
    save_checkpoint(tmp_path, 3, engine, {}, IDENTITY, keep=keep)
    expected = {name, "step-000003"} | ({"step-000002"} if keep == 2 else set())
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000003"


def test_every_flipped_bit_of_a_manifest_is_laid_to_the_manifest(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
        with pytest.raises(UserError) as caught:
            latest_checkpoint(tmp_path)
        assert "manifest.json" in str(caught.value) and "safetensors" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["[]", "3", '"files"', "null", '{"files": {}}', '{"format": 2, "files": []}', "{", "[" * 100_000, b"\xff\xfe{}"],
)
def test_a_manifest_that_is_none_is_named(tmp_path, content):
    saved(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"step-000001/manifest\.json"):
        latest_checkpoint(tmp_path)


def test_a_full_disk_is_named_with_path_and_bytes(tmp_path, monkeypatch):
    engine = saved(tmp_path, 1)

    def fails(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"12345")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("alignment.training.backends.state_files.save_file", fails)
    with pytest.raises(UserError, match=r"step-000002: the disk is full: 5 bytes of it are written.* \d+ are free"):
        save_checkpoint(tmp_path, 2, engine, {}, IDENTITY, keep=1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


# Checkpoints of several ranks


def sharded(root: Path) -> Engine:
    """An engine with a checkpoint after its second update, whose files are those of a sharded model."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    engine = saved(root, 2)
    for kind in ("model", "optimizer"):
        whole = root / "step-000002" / f"{kind}.safetensors"
        writer = HuggingFaceStorageWriter(str(whole.with_name(f"{kind}-shards")), save_distributed=True)
        save(load_file(whole), storage_writer=writer)
        whole.unlink()
    return engine


def test_shards_go_on_in_one_process_bit_by_bit(tmp_path):
    engine, other = sharded(tmp_path), toy_engine(seed=9)
    restore_checkpoint(tmp_path / "step-000002", other, IDENTITY)
    for model in (engine, other):
        advance(model, 1)
    assert equal(other, engine)


def test_a_missing_shard_is_told_by_tensor(tmp_path):
    sharded(tmp_path)
    [shard] = (tmp_path / "step-000002" / "model-shards").iterdir()
    tensors = load_file(shard)
    offsets = {name: {"saved_offsets": [tensor.shape[0], *[0] * (tensor.ndim - 1)]} for name, tensor in tensors.items()}
    save_file(tensors, shard, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})  # the second half of each tensor
    with pytest.raises(UserError, match=r"parts of last\.weight are missing"):
        restore_checkpoint(tmp_path / "step-000002", toy_engine(), IDENTITY)

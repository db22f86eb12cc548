"""How an adapter names its base model: so that both can be moved, and shared with machines that have another cache."""

import json
import os
import shutil

import pytest
import torch

from alignment import load_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.errors import UserError
from alignment.training import TrainingConfig

SPECS = pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=2)], ids=["LoRA", "prefix"])
IDS = torch.arange(3, 30)[None]


@pytest.fixture
def family():
    return "llama"  # names do not depend on it


@pytest.fixture
def train(make_stage):
    """`train(policy, output, adapter)` -> the directory of an adapter after one update."""

    def run(policy, output, adapter=None):
        training = TrainingConfig(batch_size=4, max_steps=1)
        run, config = make_stage("sft", str(policy), output, adapter=adapter, training=training)
        return run(config)

    return run


def named(directory):
    return json.loads((directory / "adapter_config.json").read_text())


def relative_base(directory):
    return json.loads((directory / "alignment_adapter.json").read_text())["base"]


@torch.no_grad()
def logits(directory):
    return load_model(str(directory))(IDS).logits


@pytest.fixture
def house(base, tmp_path):
    """A folder with a copy of the base model."""
    shutil.copytree(base, tmp_path / "here" / "base model")
    return tmp_path / "here"


@SPECS
def test_an_adapter_and_its_local_base_can_be_moved_together(house, spec, train):
    adapter = train(house / "base model", house / "run", spec)
    wanted, moved = logits(adapter), house.parent / "there"
    assert named(adapter)["base_model_name_or_path"] == str(house / "base model")
    assert relative_base(adapter) == "../../base model" and named(adapter)["revision"] is None
    os.rename(house, moved)
    assert torch.equal(logits(moved / "run" / "model"), wanted)
    assert len(load_tokenizer(str(moved / "run" / "model"))) == 384


def test_an_adapter_on_another_kind_names_the_merged_base_relatively(house, train):
    first = train(house / "base model", house / "first", LoRASpec(rank=2))
    second = train(first, house / "second", PrefixSpec(tokens=2))
    assert relative_base(second) == "../base"
    wanted = logits(second)
    shutil.move(house / "second", house.parent / "alone")
    assert torch.equal(logits(house.parent / "alone" / "model"), wanted)


def test_a_lora_on_a_lora_names_the_same_base_and_its_rank_is_their_sum(house, train):
    first = train(house / "base model", house / "first", LoRASpec(rank=2))
    second = train(first, house / "deep" / "second", LoRASpec(rank=3))
    assert relative_base(second) == "../../../base model" and named(second)["r"] == 5
    assert not (house / "deep" / "second" / "base").exists()
    third = train(second, house / "third", LoRASpec(rank=1))
    assert named(third)["r"] == 6


@SPECS
def test_an_adapter_of_a_hub_model_names_it_and_its_commit(base, spec, train, tmp_path, monkeypatch):
    asked = []
    snapshot = tmp_path / "cache" / "models--someone--model" / "snapshots" / "1a2b3c"
    shutil.copytree(base, snapshot)

    def fetch(name, *, revision=None, **options):
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    adapter = train("someone/model", tmp_path / "run", spec)
    config = named(adapter)
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/model", "1a2b3c")
    asked.clear()
    load_model(str(adapter))
    assert asked == [("someone/model", "1a2b3c")]


@SPECS
def test_peft_and_transformers_open_an_adapter_by_its_directory_alone(house, spec, train, tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapter = train(house / "base model", house / "run", spec)
    wanted = logits(adapter)
    openers = [AutoPeftModelForCausalLM]
    if isinstance(spec, LoRASpec):  # transformers itself does not attach prompts and prefixes
        openers.append(AutoModelForCausalLM)
    for folder, name in ((house / "run", "model"), (tmp_path, adapter)):
        monkeypatch.chdir(folder)
        for opener in openers:
            with torch.no_grad():
                found = opener.from_pretrained(name).eval()(IDS).logits
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_a_base_that_is_missing_is_named_with_the_adapter_that_wants_it(house, train):
    adapter = train(house / "base model", house / "run", LoRASpec(rank=2))
    shutil.rmtree(house / "base model")
    for open_it in (load_model, lambda source: train(source, house / "again", LoRASpec(rank=2))):
        with pytest.raises(UserError, match=r"run/model: the adapter's base model is missing .*base model"):
            open_it(str(adapter))

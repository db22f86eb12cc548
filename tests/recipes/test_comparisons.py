"""Comparisons of policies' replies: whose they are, who chooses, what repeats, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import Generation
from alignment.hotel_world.grammar import best_reply
from alignment.pipeline.stages import load_stage_file
from tests.conftest import read_lines

comparisons: Any = load_stage_file(packaged_folder("recipes") / "overoptimization/comparisons.py")


def config_of(world, tmp_path, checkpoints, **changes):
    settings = {
        "models": {"A": checkpoints["llama"], "B": checkpoints["gpt2"]},
        "pairs": [("A", "B"), ("A", "A")],
        "data": DataConfig(train=world["comparisons"], max_length=256, max_rows=10),
        "output": str(tmp_path / "later"),
        "max_new_tokens": 6,
    }
    return comparisons.ComparisonsConfig(**settings | changes)


def rows_of(directory):
    return read_lines(directory / "comparisons.jsonl")


def test_each_pair_is_of_the_policies_whose_turn_it_is(world, tmp_path, checkpoints, monkeypatch):
    def says(model, tokenizer, prompts, *, max_new_tokens, seed):
        texts = [f" {type(model.config).__name__} {model.config['model_type']} {seed} {prompt}" for prompt in prompts]
        return Generation(texts, [], [], [])

    monkeypatch.setattr(comparisons, "generate", says)
    found = comparisons.sample_replies(config_of(world, tmp_path, checkpoints, seed=3), ["one", "two", "three"])
    assert [(first.split()[1:], second.split()[1:]) for first, second in found] == [
        (["llama", "6", "one"], ["gpt2", "7", "one"]),
        (["llama", "6", "two"], ["llama", "7", "two"]),
        (["llama", "6", "three"], ["gpt2", "7", "three"]),
    ]


def test_rows_are_complete_and_a_run_repeats(world, tmp_path, checkpoints):
    config = config_of(world, tmp_path, checkpoints)
    found = rows_of(comparisons.run(config))
    counts = json.loads((tmp_path / "later" / "results.json").read_text())
    assert counts == {"prompts": 10, "comparisons": len(found)} and found
    prompts = [json.loads(line)["prompt"] for line in Path(world["comparisons"]).read_text().splitlines()[:10]]
    assert all(row["prompt"] in prompts and row["chosen"] != row["rejected"] for row in found)
    assert rows_of(comparisons.run(config)) == found
    assert rows_of(comparisons.run(config_of(world, tmp_path, checkpoints, seed=1))) != found


def test_labelers_choose_and_equal_and_empty_replies_are_left_out(world, tmp_path, checkpoints, monkeypatch):
    bad = " Read the sign, you oaf."

    def replies(config, prompts):
        return [(bad, best_reply(prompts[0])), (bad, bad), ("", bad), (bad, " \n"), ("", "")] * 2

    monkeypatch.setattr(comparisons, "sample_replies", replies)
    assert [row["rejected"] for row in rows_of(comparisons.run(config_of(world, tmp_path, checkpoints)))] == [bad, bad]
    assert json.loads((tmp_path / "later" / "results.json").read_text()) == {"prompts": 10, "comparisons": 2}


def test_refused_before_a_model_is_loaded(world, tmp_path, checkpoints, monkeypatch):
    monkeypatch.setattr(comparisons, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"^pairs must hold two of the names"):
        config_of(world, tmp_path, checkpoints, pairs=[("A", "C")])
    with pytest.raises(UserError, match="nowhere"):
        comparisons.run(config_of(world, tmp_path, checkpoints, models={"A": "nowhere", "B": checkpoints["gpt2"]}))
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "What is two and two?"}\n')
    with pytest.raises(UserError, match=r"other.jsonl.*only prompts of the generated hotel world"):
        comparisons.run(config_of(world, tmp_path, checkpoints, data=DataConfig(train=str(other), max_length=64)))

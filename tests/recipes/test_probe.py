"""The recipe's probes: frozen models compared on the same rows, what is refused before one is loaded, and the rows."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.hotel_world.datasets import FOLDS, RANGES
from alignment.hotel_world.grammar import find_claims, fold
from alignment.pipeline.stages import load_stage_file
from tests.conftest import write_lines

probes: Any = load_stage_file(packaged_folder("recipes") / "alignment_tax/probe.py")


def write(path, rows):
    write_lines(path, ({"text": text, "label": label} for text, label in rows))
    return str(path)


@pytest.fixture
def texts(tmp_path):
    """Texts whose last word is the label, and held-out ones."""
    words = ("spa", "pool", "bar")
    rows = [(f"guest {i} where is the {words[i % 3]}", words[i % 3]) for i in range(90)]
    train, held_out = write(tmp_path / "train.jsonl", rows[:60]), write(tmp_path / "heldout.jsonl", rows[60:])
    return DataConfig(train=train, evaluation=held_out, max_length=64)


def test_a_word_at_the_end_is_found_and_the_model_stays_as_it_is(texts, checkpoints, tmp_path, monkeypatch):
    loaded, before = [], []
    load = probes.load_model

    def spy(*args, **options):
        loaded.append(load(*args, **options))
        before.append(deepcopy(loaded[-1].state_dict()))
        return loaded[-1]

    monkeypatch.setattr(probes, "load_model", spy)
    models = {"SFT": checkpoints["llama"], "again": checkpoints["llama"], "other": checkpoints["gpt2"]}
    results = json.loads(probes.run(probes.ProbeConfig(models, "SFT", texts, str(tmp_path / "out"))).read_text())
    assert (results["rows"], results["held_out_rows"]) == (60, 30) and results["labels"] == ["bar", "pool", "spa"]
    assert results["majority"] == pytest.approx(1 / 3)
    assert results["models"]["SFT"] == results["models"]["again"]
    for found in results["models"].values():
        assert found["accuracy"]["rate"] == found["fit_accuracy"] == 1 and found["accuracy"]["n"] == 30
        assert found["gain"]["difference"] == 0 and found["gain"]["low"] < 0 < found["gain"]["high"]
    for model, weights in zip(loaded, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("an unknown label", "garden")], "label 'garden' is unknown; known: bar, pool, spa"),
        ([("guest 1 where is the pool", "pool")], "1 held-out texts, the first .*bad.jsonl:1, are among the rows of the fit"),
    ],
)  # fmt: skip
def test_wrong_rows_are_refused_before_a_model_is_loaded(rows, words, texts, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    data = DataConfig(train=texts.train, evaluation=write(tmp_path / "bad.jsonl", rows), max_length=64)
    with pytest.raises(UserError, match=words):
        probes.run(probes.ProbeConfig({"A": checkpoints["llama"]}, "A", data, str(tmp_path / "out")))


def test_the_label_is_the_one_fact_that_has_not_come_again():
    text = "Dear Iris, we loved our week by the sea. At the Hotel Oak the bar serves beer and the spa is on floor two. "
    text += "Do not forget. The spa is on floor two. The bar serves beer. Yours, Leo"
    found = probes.unfinished_text(text)
    assert found["label"] == "bar" and found["text"].endswith("Do not forget. The spa is on floor two.")


def test_hotel_rows_are_balanced_disjoint_and_never_trained_on(tmp_path):
    directory = probes.write_rows(probes.ProbeRowsConfig(str(tmp_path), rows=300, heldout=200))
    lines = {name: (directory / f"{name}.jsonl").read_text().splitlines() for name in ("train", "heldout")}
    parts = {name: list(map(json.loads, those)) for name, those in lines.items()}
    assert [len(rows) for rows in parts.values()] == [300, 200]
    folds = {}
    for name, rows in parts.items():
        facts = [dict(find_claims(row["text"])) for row in rows]
        folds[name] = {fold(tuple(each.items()), FOLDS) for each in facts}
        assert not any("\nGuest " in row["text"] for row in rows)
        for row, each in zip(rows, facts, strict=True):
            claimed = [topic for topic, _ in find_claims(row["text"])]
            assert len(each) == 3 and min(map(claimed.count, each)) == claimed.count(row["label"])
            assert sum(claimed.count(topic) == claimed.count(row["label"]) for topic in each) == 1
    assert folds["train"] | folds["heldout"] <= set(RANGES["pretrain_heldout"])
    assert not folds["train"] & folds["heldout"]
    assert len({row["label"] for row in parts["train"]}) == 10
    again = probes.write_rows(probes.ProbeRowsConfig(str(tmp_path / "again"), rows=300, heldout=200))
    assert (again / "train.jsonl").read_bytes() == (directory / "train.jsonl").read_bytes()

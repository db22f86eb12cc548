"""Linear probes: the closed form, separable and shuffled labels, frozen models, and what is refused before one is loaded."""

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.hotel_world.datasets import FOLDS, RANGES
from alignment.hotel_world.grammar import find_claims, fold
from alignment.loading import load_model
from alignment.pipeline.stages import load_stage_file

probes: Any = load_stage_file(packaged_folder("recipes") / "alignment_tax/probe.py")


def write(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return str(path)


def states_of(classes, *, noise, seed=0, size=6):
    """States around one random center for each class."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes.max() + 1, size))
    return centers[classes] + noise * rng.normal(size=(len(classes), size))


def test_by_hand():
    # One feature, -1, -1, 1, 1: standardized as it is. Indicators of class 1 less their mean: -1/2, -1/2, 1/2, 1/2.
    # weight = (1 + ridge)^-1 * 1/2 = 0.4 with ridge 1/4
    found = probes.fit_probe(np.array([[-1.0], [-1.0], [1.0], [1.0]]), np.array([0, 0, 1, 1]), count=2, ridge=0.25)
    np.testing.assert_allclose(found.weight, [[-0.4, 0.4]])
    np.testing.assert_allclose(found.bias, [0.5, 0.5])
    assert found.classify(np.array([[-0.1], [0.1]])).tolist() == [0, 1]


def test_a_state_that_never_changes_and_more_states_than_rows_do_no_harm():
    classes = np.array([0, 1] * 4)
    states = np.concatenate([states_of(classes, noise=0.01, size=30), np.full((8, 1), 7.0)], 1)
    found = probes.fit_probe(states, classes, count=2, ridge=0.01)
    assert np.isfinite(found.weight).all() and (found.classify(states) == classes).all()


def test_states_are_those_of_each_text_alone(checkpoints, monkeypatch):
    model = load_model(checkpoints["llama"])
    documents = [[5, 6, 7], [8], [9, 10, 11, 12, 5]]
    alone = [
        model.hidden_states(model.trunk, probes.Ragged.build([document])).detach().numpy() for document in documents
    ]
    monkeypatch.setattr(probes, "BATCH_TOKENS", 6)
    for pooling, expected in (("last", [each[-1] for each in alone]), ("mean", [each.mean(0) for each in alone])):
        np.testing.assert_allclose(probes.pooled_states(model, documents, pooling), expected, atol=1e-5)


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


@pytest.mark.parametrize("kind", ["bert", "gptj"])
def test_models_of_another_kind_are_refused_before_one_is_loaded(kind, texts, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": kind}))
    models = {"A": checkpoints["llama"], "B": str(tmp_path / "other")}
    with pytest.raises(UserError, match="other: a probe reads the states of decoders of this library's own families"):
        probes.run(probes.ProbeConfig(models, "A", texts, str(tmp_path / "out")))


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

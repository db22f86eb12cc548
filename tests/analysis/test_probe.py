"""Probes: the closed form, states of every layer against transformers', planted and shuffled labels, control tasks, the page."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from alignment import cli, load_model
from alignment.adapters import PromptSpec, attach
from alignment.analysis import layer_states
from alignment.analysis.probe import ProbeRows, control_classes, probe_layers, probe_outcomes, read_probe_rows
from alignment.data.rows.records import Tally
from alignment.data.tasks import LabeledExamples, LabeledRow, TaskExample
from alignment.data.text.special_tokens import EncodedText
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.external.load import load_external
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.ragged import Ragged
from tests.conftest import write_lines

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from parity_reference import read_cases, write_checkpoint  # noqa: E402


def test_by_hand():
    # One feature, -1, -1, 1, 1: standardized as it is. Indicators of class 1 less their mean: -1/2, -1/2, 1/2, 1/2.
    # weight = (1 + ridge)^-1 * 1/2 = 0.4 with ridge 1/4, bias 1/2: class 1 above 0. With the classes 0, 0, 0, 1 the weight
    # is (1 + ridge)^-1 * 1/4 = 0.2 and the bias 1/4, against 3/4 - 0.2 z: class 1 above 5/4.
    states, held_out = np.array([[-1.0], [-1.0], [1.0], [1.0]]), np.array([[-0.1], [0.1], [1.2], [1.3]])
    fitted, right = probe_outcomes((states, held_out), (np.array([0, 0, 1, 1]),) * 2, count=2, ridge=0.25)
    assert fitted.tolist() == [1, 1, 1, 1] and right.tolist() == [1, 0, 1, 1]
    _, right = probe_outcomes((states, held_out), (np.array([0, 0, 0, 1]),) * 2, count=2, ridge=0.25)
    assert right.tolist() == [1, 1, 1, 1]


def test_a_state_that_never_changes_and_more_states_than_rows_do_no_harm():
    classes, rng = np.array([0, 1] * 4), np.random.default_rng(0)
    states = np.concatenate([rng.normal(size=(2, 30))[classes], np.full((8, 1), 7.0)], 1)
    states[:, :30] += 0.01 * rng.normal(size=(8, 30))
    fitted, right = probe_outcomes((states, states), (classes, classes), count=2, ridge=0.01)
    assert fitted.tolist() == right.tolist() == [1] * 8


# States


def encoded_text(ids: list[int]) -> EncodedText:
    return EncodedText(ids, [0] * len(ids), [True] * len(ids), (0,))


@pytest.mark.parametrize("family", [
    "llama", "gpt2", "bert", "albert", "t5",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "openai-gpt", "modernbert", "electra", "bart")),
])  # fmt: skip
def test_states_are_transformers_ours_and_foreign(family, tmp_path):
    """Of documents of several lengths, each as if it were alone."""
    case = next(iter(read_cases(family).values()))
    reference = write_checkpoint(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(5, case.config["vocab_size"], (n,), generator=generator).tolist() for n in (11, 3, 17)]
    body = reference.get_encoder() if case.kind == "seq2seq" else reference
    batch = Ragged.build(documents)
    ours, foreign = (layer_states(model, batch) for model in (load_pretrained(tmp_path), load_external(tmp_path)))
    assert len(ours) == len(foreign) > 2
    with torch.no_grad():
        alone = [body(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in documents]
    for number, expected in enumerate(zip(*alone, strict=True)):
        expected = torch.cat([states[0] for states in expected])
        assert_close(ours[number], expected, atol=1e-5, rtol=1e-5)
        assert_close(foreign[number], expected, atol=1e-5, rtol=1e-5)


def test_states_leave_a_soft_prompt_out(checkpoints):
    model, batch = load_model(checkpoints["llama"]), Ragged.build([[5, 6, 7], [8, 9]])
    attach(model, PromptSpec(tokens=3))
    states = layer_states(model, batch)
    assert [len(layer) for layer in states] == [5] * 3
    assert_close(states[-1], model.hidden_states(model.trunk, batch))
    assert_close(states[0], model.trunk.embed(batch.tokens))  # llama adds no positions


def test_rows_are_in_order_whatever_the_batches(checkpoints, monkeypatch):
    model, documents = load_model(checkpoints["gpt2"]), [[5, 6, 7], [8], [9, 10, 11, 12, 5]]
    monkeypatch.setattr("alignment.analysis.probe.BATCH_TOKENS", 4)
    alone = [layer_states(model, Ragged.build([ids])) for ids in documents]
    for pooling, read in (("first", lambda x: x[0]), ("last", lambda x: x[-1]), ("mean", lambda x: x.mean(0))):
        found = read_probe_rows(model, examples_of(documents, [0, 1, 0]), pooling)
        for number, layer in enumerate(found.states):
            expected = torch.stack([read(layers[number]) for layers in alone])
            np.testing.assert_allclose(layer, expected, atol=1e-5)


def test_states_that_are_not_finite_are_refused_by_row(checkpoints):
    """[B-H1] A probe on them gives the first class."""
    model = load_model(checkpoints["gpt2"])
    model.trunk.norm.weight.data.fill_(np.nan)
    with pytest.raises(UserError, match="1: the state of a layer is not finite"):
        read_probe_rows(model, examples_of([[5, 6, 7], [8]], [0, 1]), "last")


# What probes find

CONFIGS = {
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 32},
    "bert": {"max_position_embeddings": 32, "num_labels": 2},
}


def examples_of(documents: list[list[int]], labels: list[int]) -> LabeledExamples:
    rows = [LabeledRow((f"text {ids[-1]}", None), (str(label),), str(i)) for i, (ids, label) in
            enumerate(zip(documents, labels, strict=True))]  # fmt: skip
    examples = [
        TaskExample((encoded_text(ids),), [label], str(i))
        for i, (ids, label) in enumerate(zip(documents, labels, strict=True))
    ]
    return LabeledExamples(examples, rows, Tally(), {0: "no", 1: "yes"})


@pytest.mark.parametrize(("family", "pooling"), [("llama", "last"), ("bert", "mean")])
def test_a_planted_feature_is_found_where_it_is_and_after(family, pooling):
    """The label is the parity of a document's ids, which no layer knows; one block's output says it in one direction."""
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {"model_type": family, "vocab_size": 64, **shape, **CONFIGS[family]}
    model = build_model(config, "language" if family == "llama" else "sequence")
    documents = torch.randint(5, 64, (600, 8)).tolist()
    labels = [sum(ids) % 2 for ids in documents]
    direction, batches = torch.randn(24), []

    def note(trunk, inputs):
        batches.append(inputs[0])

    def plant(block, inputs, output):
        [lengths, tokens] = [torch.tensor(batches[-1].lengths), batches[-1].tokens]
        signs = torch.stack([2.0 * (ids.sum() % 2) - 1 for ids in tokens.split(lengths.tolist())])
        return output + signs.repeat_interleave(lengths)[:, None] * direction

    model.trunk.register_forward_pre_hook(note)
    model.trunk.blocks[1].register_forward_hook(plant)  # layer 2, as states are counted
    parts = examples_of(documents[:400], labels[:400]), examples_of(documents[400:], labels[400:])
    fit, judged = (read_probe_rows(model, part, pooling) for part in parts)
    layers, baselines = probe_layers(fit, judged, count=2)
    assert [one["accuracy"]["rate"] > 0.97 for one in layers] == [False, False, True, True, True]
    for one in layers[:2]:
        assert one["accuracy"]["low"] < 0.5 < one["accuracy"]["high"]
    for one in layers[2:]:
        assert one["selectivity"]["low"] > 0.15 and one["accuracy"]["low"] > baselines["majority"]
    assert baselines["control_seen"] == 1  # "text 17": the last word is the last token
    order = np.random.default_rng(1).permutation
    shuffled, _ = probe_layers(*(part._replace(classes=order(part.classes)) for part in (fit, judged)), count=2)
    assert all(one["accuracy"]["low"] < 0.5 < one["accuracy"]["high"] for one in shuffled)


def test_a_label_that_the_word_alone_gives_has_no_selectivity():
    """A table of vectors: the probe learns the label of each word by heart, and so it does any other."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(20, 32))
    words = rng.integers(0, 20, size=900)
    states, types, classes = table[words] + 0.01 * rng.normal(size=(900, 32)), [f"w{i}" for i in words], words % 2
    parts = (
        ProbeRows([states[part]], classes[part], types[part], words[part]) for part in (slice(600), slice(600, None))
    )
    [layer], baselines = probe_layers(*parts, count=2)
    assert layer["accuracy"]["rate"] == layer["control"]["rate"] == 1 and layer["selectivity"]["difference"] == 0
    assert layer["selectivity"]["low"] < 0 < layer["selectivity"]["high"] and baselines["control_seen"] == 1


def test_words_of_one_text_count_as_a_cluster():
    """Twenty texts of 15 words that are right or wrong together: the interval is that of about twenty answers, not 300."""
    right = np.repeat(np.arange(20) % 4 > 0, 15)
    states = np.where(right, 1.0, -1.0)[:, None] * np.array([[1.0]])
    fit = ProbeRows([np.array([[-1.0], [1.0]] * 20)], np.array([0, 1] * 20), ["a", "b"] * 20, range(40))
    widths = []
    for texts in (range(300), np.repeat(np.arange(20), 15).tolist()):
        [layer], _ = probe_layers(fit, ProbeRows([states], np.ones(300, int), ["b"] * 300, texts), count=2)
        assert layer["accuracy"]["rate"] == 0.75
        widths.append(layer["accuracy"]["high"] - layer["accuracy"]["low"])
    assert widths[1] > 3 * widths[0]  # the root of 15 is 3.9


def test_control_classes_are_of_the_word_alone_and_have_the_shares():
    words = [f"word{i}" for i in range(4000)]
    found = control_classes([*words, "word7"], np.array([0.7, 0.2, 0.1]))
    assert found[-1] == found[7] and (control_classes(words[::-1], np.array([0.7, 0.2, 0.1])) == found[3999::-1]).all()
    np.testing.assert_allclose(np.bincount(found) / 4001, [0.7, 0.2, 0.1], atol=0.03)
    # SHA-256 of "a" in its quotes begins ac8d 8342 bbb2: 0.6740..., the second class by shares 0.6, 0.3, 0.1
    assert control_classes(["a"], np.array([0.6, 0.3, 0.1])).tolist() == [1]


# The command


def test_the_command_writes_a_page_and_results(checkpoints, tmp_path, capsys):
    words = ("spa", "pool", "bar")
    data = write_lines(
        tmp_path / "rows.jsonl", [{"q": f"guest {i}: <i> the {words[i % 3]}", "label": words[i % 3]} for i in range(90)]
    )
    page = tmp_path / "page.html"
    arguments = ["inspect", "probe", checkpoints["llama"], "--data", data, "--columns", "text=q", "--output", str(page)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"{page}\n"
    found = json.loads(page.with_suffix(".json").read_text())
    assert (
        found["labels"] == ["bar", "pool", "spa"]
        and found["pooling"] == "last"
        and found["rows"] + found["held_out_rows"] == 90
    )
    assert len(found["layers"]) == 3
    rate = found["layers"][1]["accuracy"]
    assert rate["rate"] == 1 and 0.5 < rate["low"] < rate["high"] == 1 and rate["n"] == found["held_out_rows"]
    html = page.read_text()
    assert html.count("<svg") == 1 and "http" not in html.replace("http-equiv", "") and "<script" not in html


def test_words_with_labels_are_probed_one_by_one(checkpoints, tmp_path):
    rows = [{"words": ["see", f"the{i % 7}", "hotel"], "labels": ["V", "D", "N"]} for i in range(60)]
    data, held_out = (
        write_lines(tmp_path / "a.jsonl", rows[:40]),
        write_lines(tmp_path / "b.jsonl", [{**rows[0], "words": ["go", "a", "hotel"]}] * 2),
    )
    page = tmp_path / "page.html"
    assert (
        cli.main(
            [
                "inspect",
                "probe",
                checkpoints["gpt2"],
                "--data",
                data,
                "--evaluation",
                held_out,
                "--words",
                "--output",
                str(page),
            ]
        )
        == 0
    )
    found = json.loads(page.with_suffix(".json").read_text())
    assert (found["rows"], found["held_out_rows"]) == (120, 6) and found["control_seen"] == pytest.approx(1 / 3)
    assert found["pooling"] is None and found["labels"] == ["D", "N", "V"]


def test_mistakes_are_told_before_a_model_is_loaded(checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("alignment.analysis.probe.load_any", lambda _: pytest.fail("a model was loaded"))
    good = [{"text": f"text {i}", "label": i % 2} for i in range(20)]
    data, same = write_lines(tmp_path / "a.jsonl", good), write_lines(tmp_path / "b.jsonl", good[:1])
    start = ["inspect", "probe", checkpoints["gpt2"], "--data", data]
    for more, message in (
        (["--words", "--pooling", "last"], "--pooling is for texts"),
        (["--columns", "text"], "--columns 'text': write our name"),
        (["--evaluation", same], "1 held-out texts, the first"),
        (["--words"], "words"),
    ):
        assert cli.main([*start, *more]) == 2
        assert message in capsys.readouterr().err


def test_long_texts_are_refused_not_cut(checkpoints):
    model = load_model(checkpoints["gpt2"])
    with pytest.raises(UserError, match="1 of 1 documents do not fit the model's 320 positions"):
        read_probe_rows(model, examples_of([[5] * 400], [0]), "last")

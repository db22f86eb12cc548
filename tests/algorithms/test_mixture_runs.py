"""Runs on several sources: what is logged of each, that both are learned, and that a stopped run goes on as it was."""

import json
import math

import pytest

from alignment.data.config import DataConfig, SourceConfig
from alignment.training import OptimConfig, TrainingConfig
from tests.stopping import assert_goes_on


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two sources of short demonstrations that have nothing in common, and held-out rows of both."""
    folder = tmp_path_factory.mktemp("sources")
    colors, numbers = ["red", "blue", "green", "gray"], ["one", "two", "three", "four"]
    rows = {
        "colors": [(f"color {a} {b}?", f" {b} {a}") for a in colors for b in colors],
        "numbers": [(f"After {n}:", f" {numbers[(i + 1) % 4]}") for i, n in enumerate(numbers)],
    }
    for name, pairs in rows.items():
        lines = [json.dumps({"question": prompt, "answer": response}) for prompt, response in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {name: str(folder / f"{name}.jsonl") for name in rows}


def mixture(sources, **settings):
    columns = {"prompt": "question", "response": "answer"}
    weights = {"colors": 3.0, "numbers": 1.0}
    train = [SourceConfig(sources[name], name=name, weight=weights[name], columns=columns) for name in sources]
    evaluation = [SourceConfig(sources[name], name=name, columns=columns) for name in sources]
    return DataConfig(train=train, evaluation=evaluation, mixing="weights", max_length=64, **settings)


def test_a_mixture_of_three_to_one_is_learned_from_both_sources(sources, checkpoints, ran, tmp_path, read_metrics):
    training = TrainingConfig(batch_size=8, max_steps=40, evaluate_every_steps=20)
    ran(
        "sft", checkpoints["llama"], tmp_path, data=mixture(sources), training=training,
        optim=OptimConfig(learning_rate=1e-2),
    )  # fmt: skip
    lines = read_metrics(tmp_path)
    for name in sources:
        held_out = [line[f"held_out_loss/{name}"] for line in lines if f"held_out_loss/{name}" in line]
        first = next(line[f"loss/{name}"] for line in lines if f"loss/{name}" in line)
        assert held_out[-1] < held_out[0] and held_out[-1] < 0.5 * first
    last = lines[-1]
    assert last["held_out_perplexity"] == pytest.approx(math.exp(last["held_out_loss"]))
    assert last["held_out_perplexity/colors"] == pytest.approx(math.exp(last["held_out_loss/colors"]))
    assert all(line["share/colors"] + line["share/numbers"] == pytest.approx(1) for line in lines)
    for line in lines:  # the mean over all tokens is the mean of the sources' means by their shares
        parts = [line[f"share/{name}"] * line.get(f"loss/{name}", 0.0) for name in sources]
        assert line["loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert not any(isinstance(value, float) and math.isnan(value) for line in lines for value in line.values())
    shares = json.loads((tmp_path / "sources.json").read_text())
    assert [(each["name"], each["rows"], each["share"]) for each in shares] == [
        ("colors", 16, 0.75),
        ("numbers", 4, 0.25),
    ]
    assert [each["epochs"] for each in shares] == [0.75 * 320 / 16, 0.25 * 320 / 4]


def test_the_report_shows_the_sources(sources, checkpoints, ran, tmp_path):
    from alignment.reports.page import further_panels, source_table, write_run_report
    from alignment.reports.run_log import read_log_rows

    training = TrainingConfig(batch_size=8, max_steps=2)
    ran("sft", checkpoints["llama"], tmp_path, data=mixture(sources), training=training)
    log = read_log_rows(tmp_path / "metrics.jsonl")
    table = source_table(tmp_path, log)
    assert [(row["source"], row["rows"], row["share of draws"]) for row in table] == [
        ("colors", 16, 0.75), ("numbers", 4, 0.25)
    ]  # fmt: skip
    assert table[0]["held out loss"] == log[-1]["held_out_loss/colors"]
    assert table[1]["loss"] == [line["loss/numbers"] for line in log if "loss/numbers" in line][-1]
    assert "accuracy" not in table[0]
    assert {panel.title for key, panel in further_panels(log).items() if key.endswith("/")} == {
        "Loss by source",
        "Perplexity by source",
        "Share by source",
    }
    page = write_run_report(tmp_path).read_text()
    assert "Loss by source" in page and "share of draws" in page and "numbers" in page


def test_an_epoch_of_a_mixture_is_the_rows_of_all_sources(sources, checkpoints, ran, tmp_path, read_metrics):
    training = TrainingConfig(batch_size=8, epochs=1.5)
    ran("sft", checkpoints["llama"], tmp_path, data=mixture(sources), training=training)
    assert len(read_metrics(tmp_path)) == 4  # 1.5 * 20 rows in batches of 8, the last of 6


@pytest.mark.parametrize("stop", [2, 3])
def test_a_stopped_mixture_goes_on_bit_for_bit(stop, sources, checkpoints, make_stage, tmp_path):
    changes = {"data": mixture(sources), "training": TrainingConfig(batch_size=8, max_steps=5)}
    assert_goes_on(lambda name: make_stage("sft", checkpoints["llama"], tmp_path / name, **changes), stop, tmp_path)


def test_a_plain_run_logs_no_sources(checkpoints, ran, tmp_path, read_metrics):
    ran("sft", checkpoints["llama"], tmp_path, training=TrainingConfig(batch_size=8, max_steps=1))
    assert not any("/" in key for line in read_metrics(tmp_path) for key in line)
    assert not (tmp_path / "sources.json").exists()


def test_each_source_is_rendered_by_a_template_of_its_own(checkpoints, tmp_path):
    from alignment.data.prepare import prepare
    from alignment.data.text.templates import with_chat_template
    from alignment.loading import load_tokenizer

    row = {"messages": [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "blue"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tokenizer = load_tokenizer(checkpoints["llama"])
    plain, zephyr = (with_chat_template(tokenizer, name) for name in ("plain", "zephyr"))
    [wanted], [other] = (prepare(DataConfig(str(path)), "demonstrations", each)[0] for each in (zephyr, plain))
    sources = [SourceConfig(str(path), "a", chat_template="zephyr"), SourceConfig(str(path), "b")]
    joined = prepare(DataConfig(sources), "demonstrations", plain)[0]
    assert [(each.source, each.ids) for each in joined] == [(0, wanted.ids), (1, other.ids)]
    assert wanted.ids != other.ids

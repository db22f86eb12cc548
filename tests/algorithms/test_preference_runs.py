"""Runs on rankings and on labels, demonstrations beside preferences, and the reference's numbers on disk."""

import dataclasses
import json
import math
import zipfile

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.algorithms.runs import to_dict
from alignment.data.config import DataConfig
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import write_lines
from tests.distributed.processes import run_ranks

ANSWERS = (" The pool opens in July.", " I am not sure.", " No.", " Go away!")
QUICK = OptimConfig(learning_rate=1e-2, schedule="constant")


@pytest.fixture(scope="module")
def rankings(tmp_path_factory) -> str:
    """Two, three or four responses to each prompt, not in their order; of one row all are tied."""
    rows = []
    for number in range(8):
        size = 2 + number % 3
        order = [(place + number) % size for place in range(size)]
        prompt = f"Guest {number}: when does the pool of house number {number} open?\nConcierge:"
        answers = [ANSWERS[place] for place in order]
        ranking = [order.index(place) for place in range(size)]  # indices of the responses, the best one first
        rows.append({"prompt": prompt, "responses": answers, "ranking": ranking})
    tied = {"prompt": "Guest: hello?\nConcierge:", "responses": [" Yes.", " Hello."], "ranking": [[0, 1]]}
    return write_lines(tmp_path_factory.mktemp("rankings") / "rankings.jsonl", [*rows, tied])


@pytest.fixture(scope="module")
def labels(tmp_path_factory, world) -> str:
    """Prompt, completion and label: a chosen response, then the rejected one of another row."""
    with open(world["comparisons"], encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file][:16]
    rows = [
        {
            "prompt": row["prompt"],
            "completion": row["rejected" if number % 3 == 2 else "chosen"],
            "label": number % 3 < 2,
        }
        for number, row in enumerate(pairs)
    ]
    return write_lines(tmp_path_factory.mktemp("labels") / "labels.jsonl", rows)


def notes(output) -> str:
    return " ".join(json.loads((output / "lineage.json").read_text())["notes"])


# Rankings


def test_a_policy_learns_rankings_of_different_length_with_prompts_shared(rankings, stage, ran, tmp_path, read_metrics):
    """The loss starts at the mean of log K! over the prompts of two, three and four responses: (3, 3, 2) of them."""
    ends = []
    for share in (True, False):
        output = tmp_path / str(share)
        training = TrainingConfig(batch_size=8, max_steps=8, share_prompts=share)
        data = DataConfig(train=rankings, evaluation=rankings, max_length=256)
        ran(
            "dpo", str(stage("sft") / "model"), output, data=data, training=training, optim=QUICK,
            loss="plackett_luce", beta=0.5,
        )  # fmt: skip
        first, *_, last = read_metrics(output)
        start = (3 * math.log(2) + 3 * math.log(6) + 2 * math.log(24)) / 8
        assert first["loss"] == pytest.approx(start, abs=1e-4) and first["margin"] == pytest.approx(0, abs=1e-4)
        assert last["loss"] < start - 0.5 and last["accuracy"] > 0.9 and last["margin"] > 0.5
        assert last["held_out_accuracy"] > 0.9 and last["chosen_reward"] > last["rejected_reward"]
        assert "all responses of the ranking are tied" in notes(output)
        ends.append(load_file(output / "model" / "model.safetensors"))
    assert_close(ends[0], ends[1], atol=2e-4, rtol=1e-3)


# Labels


def test_kto_learns_labels_and_micro_batches_change_no_weight(labels, stage, ran, tmp_path, read_metrics):
    """The weights of whole runs are equal, whose reference points are those of the global batch."""
    ends = []
    for tokens in (160, 100_000):
        output = tmp_path / str(tokens)
        training = TrainingConfig(batch_size=8, max_steps=8, micro_batch_tokens=tokens)
        data = DataConfig(train=labels, evaluation=labels, max_length=256)
        ran(
            "dpo", str(stage("sft") / "model"), output, data=data, training=training, loss="kto", beta=0.5,
            undesirable_weight=1.5, optim=OptimConfig(learning_rate=2e-3, eps=1e-3, schedule="constant"),
        )  # fmt: skip
        first, *_, last = read_metrics(output)
        assert first["chosen_reward"] == pytest.approx(0, abs=1e-4) and first["kl"] == 0
        assert last["held_out_loss"] < first["loss"] - 0.05 and last["margin"] > 0.2
        ends.append(load_file(output / "model" / "model.safetensors"))
    assert_close(ends[0], ends[1], atol=1e-5, rtol=0)


def test_kto_reads_a_pair_as_two_labels(world, stage, ran, tmp_path, read_metrics):
    data = DataConfig(train=world["comparisons"], max_rows=8, max_length=256)
    training = TrainingConfig(batch_size=16, max_steps=6)
    ran("dpo", str(stage("sft") / "model"), tmp_path, data=data, training=training, loss="kto", beta=0.5, optim=QUICK)
    lines = read_metrics(tmp_path)
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-4)  # 1 - sigmoid(0) for each
    assert lines[-1]["margin"] > 0.2 and lines[-1]["loss"] < 0.5


# Demonstrations beside the preferences


@pytest.fixture
def cached(stage, make_stage, tmp_path):
    """A run of one update that keeps the reference's numbers, its config, and their file in tmp_path/log_probs."""
    folder, policy = tmp_path / "log_probs", str(stage("sft") / "model")
    training = TrainingConfig(batch_size=8, max_steps=1)
    more = {"reference_log_probs": "cache", "reference_cache": str(folder), "training": training}
    run, config = make_stage("dpo", policy, tmp_path / "first", **more)
    run(config)
    (file,) = folder.iterdir()
    return run, config, file


@pytest.mark.parametrize("form", ["short", "a flipped bit", "no header", "a header of 10^12 numbers", "a directory"])
def test_damaged_numbers_are_computed_again_with_a_note(form, cached, tmp_path, read_metrics, capsys):
    run, config, file = cached
    content = file.read_bytes()
    match form:
        case "short":
            file.write_bytes(content[:-4])
        case "a flipped bit":
            file.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
        case "no header":
            file.write_bytes(b"x")
        case "a header of 10^12 numbers":
            with zipfile.ZipFile(file, "w") as opened, opened.open("values.npy", "w") as member:
                header = {"descr": "<f4", "fortran_order": False, "shape": (10**12,)}
                np.lib.format.write_array_header_1_0(member, header)
        case "a directory":
            file.unlink()
            (file / "inside").mkdir(parents=True)
    run(dataclasses.replace(config, output=str(tmp_path / "second")))
    assert "it is computed again" in capsys.readouterr().err and file.read_bytes() == content
    assert len(list(file.parent.glob("damaged-*/inside"))) == (form == "a directory")  # nobody's files are deleted
    assert read_metrics(tmp_path / "first")[0]["loss"] == read_metrics(tmp_path / "second")[0]["loss"]


def test_other_rows_weights_or_templates_have_numbers_of_their_own(world, stage, ran, tmp_path, write_checkpoint):
    """[H40]"""
    folder, policy = tmp_path / "log_probs", str(stage("sft") / "model")
    messages = tmp_path / "messages.jsonl"
    with open(world["comparisons"], encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file][:4]
    write_lines(messages, [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in pairs])
    training = TrainingConfig(batch_size=4, max_steps=1)

    def files(name, source=policy, **changes):
        data = changes.pop("data", DataConfig(train=str(messages), max_length=256))
        ran(
            "dpo", source, tmp_path / name, data=data, training=training, reference_log_probs="cache",
            reference_cache=str(folder), **{"chat_template": "zephyr", **changes},
        )  # fmt: skip
        return len(list(folder.iterdir()))

    assert files("first") == 1 and files("again") == 1
    assert files("template", chat_template="vicuna") == 2
    assert files("weights", reference=write_checkpoint(tmp_path / "other", "llama", seed=3)) == 3
    assert files("fewer rows", data=DataConfig(train=str(messages), max_rows=3, max_length=256)) == 4


# Two ranks


@pytest.mark.distributed_slow
@pytest.mark.parametrize("name", ["kto", "cached", "rankings"])
def test_two_ranks_train_what_one_trains(name, labels, rankings, stage, make_stage, tmp_path, read_metrics):
    """KTO's reference point is that of both ranks' rows, and the ranks compute the reference's numbers together."""
    changes = {
        "kto": {"loss": "kto", "data": DataConfig(train=labels, max_length=256), "beta": 0.5},
        "cached": {"reference_log_probs": "cache", "sft_coef": 0.3},
        "rankings": {"loss": "plackett_luce", "data": DataConfig(train=rankings, max_length=256)},
    }[name]
    ends, lines = [], []
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        run, config = make_stage(
            "dpo", str(stage("sft") / "model"), output, training=TrainingConfig(batch_size=7, max_steps=3),
            optim=OptimConfig(learning_rate=1e-3, eps=1e-3), **changes,
        )  # fmt: skip
        if ranks == 1:
            run(config)
        else:
            file = tmp_path / "config.yaml"
            file.write_text(yaml.safe_dump(to_dict(config)))
            run_ranks(2, "alignment", "dpo", str(file))
        ends.append(load_file(output / "model" / "model.safetensors"))
        lines.append([line["loss"] for line in read_metrics(output)])
    assert lines[0] == pytest.approx(lines[1], abs=1e-5)
    assert_close(ends[0], ends[1], atol=1e-5, rtol=0)

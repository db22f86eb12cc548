"""`alignment runs`: stage, state, metrics, base and differing settings of the runs below a folder, in 80 columns."""

import fcntl
import json
import os

import pytest
import yaml

from alignment import cli
from tests.conftest import write_lines


@pytest.fixture
def folder(tmp_path):
    """Three runs of PPO, one finished, one stopped, one that goes on, and one of SFT; an evaluation is none."""

    def write(name: str, stage: str, rows: list[dict], settings: dict, **lineage) -> None:
        run = tmp_path / name
        run.mkdir(parents=True)
        (run / "lineage.json").write_text(json.dumps({"stage": stage, "parents": {}, **lineage}))
        (run / "config.yaml").write_text(yaml.safe_dump({"output": str(run), **settings}))
        write_lines(run / "metrics.jsonl", rows)
        os.utime(run / "config.yaml", (1_000_000, 1_000_000))
        os.utime(run / "metrics.jsonl", (1_000_090, 1_000_090))

    rows = [{"step": 1, "loss": 3.0, "score": 0.5}, {"step": 2, "loss": 2.0, "score": None, "kl": 0.25}]
    base = {"policy": str(tmp_path / "mine/sft/model"), "data": {"train": "prompts.jsonl"}}
    write("mine/sft", "sft", [{"step": 7, "loss": 1.234, "tokens": 9.0}], {"policy": "some/base"}, finished=7)
    write("mine/ppo", "ppo", rows, {**base, "kl_coef": 0.1, "pretrain": None}, finished=2)
    write("mine/stopped", "ppo", rows[:1], {**base, "kl_coef": 0.2, "pretrain": {"train": "text.jsonl"}})
    write("running", "ppo", [], {**base, "kl_coef": 0.1, "pretrain": None})
    (tmp_path / "winrate").mkdir()
    (tmp_path / "winrate" / "lineage.json").write_text('{"stage": "winrate", "parents": {}}')
    with (tmp_path / "running" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield tmp_path


def test_the_table_has_state_steps_metrics_duration_and_base(folder, capsys):
    assert cli.main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    table = "\n".join(lines)
    for run, words in {
        "mine/ppo": ["ppo", "finished", " 2 ", "score nan", "kl 0.25", "after 0:01:30", " sft"],
        "mine/sft": ["sft", "finished", " 7 ", "loss 1.23", " base"],
        "mine/stopped": ["ppo", "stopped", " 1 ", "score 0.5"],
        "running": ["ppo", "running", " 0 ", "after 0:00:00"],
    }.items():
        first = next(number for number, line in enumerate(lines) if line.lstrip().startswith(f"{run} "))
        assert all(word in "\n".join(lines[first : first + 2]) for word in words), run
    assert "winrate" not in table


def test_settings_that_differ_are_listed_for_each_stage(folder, capsys):
    assert cli.main(["runs", str(folder)]) == 0
    assert capsys.readouterr().out.partition("\nppo: settings that differ\n")[2].splitlines() == [
        "  mine/ppo: kl_coef=0.1",
        '  mine/stopped: kl_coef=0.2 pretrain={"train": "text.jsonl"}',
        "  running: kl_coef=0.1",
    ]


def test_json_has_all_metrics_and_the_same_differences(folder, capsys):
    assert cli.main(["runs", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (sft,) = (run for run in shown["runs"] if run["name"] == "mine/sft")
    assert (sft["metrics"], sft["seconds"], sft["base"]) == ({"loss": 1.234, "tokens": 9.0}, 90, "some/base")
    stopped = {"kl_coef": 0.2, "pretrain": {"train": "text.jsonl"}}
    assert shown["differences"]["ppo"]["mine/stopped"] == stopped and "sft" not in shown["differences"]


def test_damaged_runs_are_named_behind_the_table_of_the_others(folder, capsys):
    (folder / "mine/sft/lineage.json").write_text('{"stage": "s')
    (folder / "mine/stopped/lineage.json").write_text("{}")
    (folder / "running/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"loss": 2.0}\n')
    assert cli.main(["runs", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "mine/ppo" in out and "mine/sft" not in out
    damaged = {"mine/sft": "lineage.json", "mine/stopped": "lineage.json", "running": "metrics.jsonl:2"}
    for run, place in damaged.items():
        assert f"{folder}/{run}/{place}" in err
        assert cli.main(["report", f"{folder}/{run}", "--output", f"{folder}/page.html"]) == 2
        assert f"{folder}/{run}/{place}" in capsys.readouterr().err
    assert cli.main(["runs", str(folder), "--json"]) == 2
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["mine/ppo"]


def test_a_diverged_run_shows_its_last_values(folder, capsys):
    lines = [{"step": step, "loss": 1.0 if step < 7 else None, "kl": 0.1} for step in range(1, 31)]
    write_lines(folder / "mine/sft/metrics.jsonl", lines)
    assert cli.main(["runs", str(folder), "--json"]) == 0
    (run,) = (run for run in json.loads(capsys.readouterr().out)["runs"] if run["name"] == "mine/sft")
    assert run["metrics"] == {"loss": None, "kl": 0.1}
    assert cli.main(["runs", str(folder)]) == 0 and "loss nan" in capsys.readouterr().out


def test_a_run_that_an_error_ended_has_failed(tmp_path, checkpoints, capsys):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "sft.yaml").write_text(
        f"policy: {checkpoints['llama']}\noutput: {tmp_path}/mine/sft\ndata: {{train: {tmp_path}/rows.jsonl}}\n"
    )
    assert cli.main(["sft", str(tmp_path / "sft.yaml"), "optim.learning_rate=1e-3"]) == 2
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["failed"]


def test_a_folder_without_runs_and_a_broken_log_are_mistakes_of_the_user(folder, tmp_path, capsys):
    assert cli.main(["runs", str(tmp_path / "winrate")]) == 2
    assert "no training run lies in it or below it" in capsys.readouterr().err
    (tmp_path / "mine/ppo/metrics.jsonl").write_text('{"step": \n')
    assert cli.main(["runs", str(folder)]) == 2
    assert "metrics.jsonl:1" in capsys.readouterr().err

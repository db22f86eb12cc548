"""Every tracker that Accelerate knows opens with a run, takes its metrics and is closed; none reaches a network.

wandb, mlflow and trackio themselves are slow tests, of the extra `trackers`; modules that take every call stand for the
packages that need a service, and for what a package does when it fails.
"""

import json
import sqlite3
import sys
import textwrap
from unittest.mock import MagicMock

import accelerate.tracking
import pytest
import yaml

from alignment.errors import UserError
from alignment.training import Run, TrainingConfig, fit
from tests.conftest import read_lines
from tests.training.toys import ToyStream, collate_by, squared_error, toy_engine

MODULES = {  # what Accelerate imports of each tracker's package
    "aim": ["aim"],
    "clearml": ["clearml"],
    "comet_ml": ["comet_ml"],
    "dvclive": ["dvclive", "dvclive.plots"],
    "mlflow": ["mlflow"],
    "swanlab": ["swanlab"],
    "trackio": ["trackio"],
    "wandb": ["wandb"],
}


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a module that takes every call in the place of a tracker's package, and calls it installed."""

    def install(name: str) -> MagicMock:
        package = MagicMock(name=name)
        package.__version__ = "99.0"
        package.utils.validation.MAX_PARAM_VAL_LENGTH = 500
        package.start = package.Experiment = MagicMock()
        for module in MODULES[name]:
            monkeypatch.setitem(sys.modules, module, package)
        names = [*accelerate.tracking.get_available_trackers(), name]
        monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: names)
        return package

    return install


TEXTS = [{"prompt": "Hi | you", "response": "a\n<b>", "score": 0.5}, {"prompt": "No", "response": "", "score": None}]


def train(output, trackers: list[str], **tracking) -> None:
    """Two updates of a toy model with texts, logged to these trackers; no process has been asked about before."""
    accelerate.PartialState._reset_state()
    config = {
        "optim": {"learning_rate": 1e-2},
        "adapter": None,
        "training": {"trackers": trackers, "tracking": tracking},
    }
    training = TrainingConfig(max_steps=2)
    with Run(output, config, stage="toy") as run:
        engine = toy_engine(steps=2, training=training)
        fit(
            engine, ToyStream(), collate_by(4), squared_error(engine.model), training=training, run=run,
            observe=lambda step: run.log_samples(step, TEXTS),
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted({*MODULES} - {"mlflow", "wandb"}))
def test_each_tracker_is_opened_gets_the_metrics_and_is_closed(tmp_path, stand_in, monkeypatch, name):
    package = stand_in(name)
    kind = accelerate.tracking.LOGGER_TYPE_TO_CLASS[name]
    logged, ended = [], []
    log, finish = kind.log, kind.finish
    monkeypatch.setattr(kind, "log", lambda self, values, step: logged.append(step) or log(self, values, step=step))
    monkeypatch.setattr(kind, "finish", lambda self: ended.append(1) or finish(self))
    train(tmp_path, [name])
    assert sorted({*logged}) == [1, 2] and ended == [1]
    assert package.mock_calls


@pytest.mark.parametrize(
    ("tracking", "variables", "expected"),
    [
        ({}, {}, {"project": "alignment", "name": "toy-run"}),
        ({}, {"WANDB_PROJECT": "theirs", "WANDB_NAME": "third"}, {"project": "theirs", "name": "third"}),
        (
            {"project": "ours", "name": "first", "group": "seeds", "tags": ["a", "b"]},
            {"WANDB_PROJECT": "theirs"},
            {"project": "ours", "name": "first", "group": "seeds", "tags": ["a", "b"]},
        ),
    ],
)
def test_wandb_files_the_run_as_the_config_says_or_as_its_variables_do(
    tmp_path, stand_in, monkeypatch, tracking, variables, expected
):
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    package = stand_in("wandb")
    train(tmp_path / "run", ["wandb"], **tracking)
    package.init.assert_called_once_with(**expected)


# The packages themselves: metrics and a table of texts, read back from where they keep them.

NAMES, VALUES = ["prompt", "response", "score"], [["Hi | you", "a\n<b>", 0.5], ["No", "", None]]


def real(name: str, install: str) -> object:
    """The package of a tracker; the test is skipped where it is not installed."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {install}")


def losses_of(run) -> dict[int, float]:
    """Losses in metrics.jsonl, by their update; the run finished without a note."""
    assert "notes" not in json.loads((run / "lineage.json").read_text())
    return {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}


@pytest.mark.slow
def test_wandb_keeps_metrics_and_texts_of_a_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    real("wandb", "-c constraints.txt -e '.[trackers]'")
    train(tmp_path / "run", ["wandb"], project="ours", name="first", group="seeds", tags=["a", "b"])
    [record] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    recorded = record.read_bytes()  # values are in it as JSON
    losses = losses_of(tmp_path / "run")
    assert sorted(losses) == [1, 2] and all(repr(loss).encode() in recorded for loss in losses.values())
    assert all(word in recorded for word in (b"ours", b"first", b"seeds"))
    [table] = record.parent.glob("files/media/table/samples_*.table.json")
    assert json.loads(table.read_text(encoding="utf-8")) == {"columns": NAMES, "data": VALUES}


@pytest.mark.slow
def test_mlflow_keeps_metrics_and_texts_of_a_run_in_sqlite(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)  # its files go to mlruns/
    real("sqlalchemy", "-c constraints.txt -e '.[trackers]'")
    mlflow = real("mlflow", "-c constraints.txt -e '.[trackers]'")
    train(tmp_path / "run", ["mlflow"], project="ours", name="first")
    client = mlflow.MlflowClient()
    [stored] = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (stored.info.run_name, stored.info.status) == ("first", "FINISHED")
    history = client.get_metric_history(stored.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == pytest.approx(losses_of(tmp_path / "run"))
    [table] = tmp_path.glob("mlruns/*/*/artifacts/samples.json")
    rows = [[*values, 2] for values in VALUES]
    assert json.loads(table.read_text(encoding="utf-8")) == {"columns": [*NAMES, "step"], "data": rows}


@pytest.mark.slow
def test_trackio_keeps_metrics_and_texts_of_a_run_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    real("trackio", "trackio (with an older pillow than constraints.txt has)")
    train(tmp_path / "run", ["trackio"], project="ours", name="first")
    with sqlite3.connect(tmp_path / "trackio/ours.db") as database:
        lines = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    assert {step: line["loss"] for step, line in lines if "loss" in line} == losses_of(tmp_path / "run")
    [(step, line)] = [(step, line) for step, line in lines if "samples" in line]
    assert step == 2 and line["samples"]["_value"] == TEXTS


# trackio needs an older pillow than the tested one, so that the test above is often skipped; its signature is that of 0.43.
def test_trackio_gets_a_table_of_the_texts_at_their_update(tmp_path, stand_in):
    package = stand_in("trackio")
    train(tmp_path, ["trackio"])
    package.Table.assert_called_once_with(NAMES, VALUES)
    package.init.return_value.log.assert_any_call({"samples": package.Table.return_value}, step=2)


def test_tensorboard_shows_the_texts_as_they_are(tmp_path):
    train(tmp_path, [])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [event] = events.Tensors("samples/text_summary")
    [text] = event.tensor_proto.string_val
    assert event.step == 2
    lines = text.decode().splitlines()
    assert all(line.startswith("    ") for line in lines if line)  # Markdown's block of code
    assert yaml.safe_load(textwrap.dedent(text.decode())) == TEXTS


@pytest.mark.parametrize("broken", ["log", "finish", "Table"])
def test_a_tracker_that_fails_is_noted_once_and_the_run_goes_on(tmp_path, stand_in, capsys, broken):
    package = stand_in("wandb")
    (package if broken == "Table" else package.init.return_value).configure_mock(
        **{f"{broken}.side_effect": ConnectionError("no route to host")}
    )
    train(tmp_path, ["wandb"])
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    lineage = json.loads((tmp_path / "lineage.json").read_text())
    assert lineage["finished"] == 2
    assert [note for note in lineage["notes"] if "wandb failed (ConnectionError: no route to host)" in note] == lineage[
        "notes"
    ]
    assert len(lineage["notes"]) == 1 and capsys.readouterr().err.count("wandb failed") == 1
    if broken == "Table":  # metrics go on
        assert {call.kwargs["step"] for call in package.init.return_value.log.call_args_list} == {1, 2}


@pytest.mark.parametrize(
    ("trackers", "tracking", "why"),
    [
        ([], {"project": "ours"}, r"tracking\.project.*wandb"),
        (["comet_ml"], {"tags": ["a"], "group": "g"}, r"(?s)tracking\.tags: comet_ml takes no tags.*tracking\.group"),
    ],
)
def test_a_key_that_no_tracker_takes_is_refused(tmp_path, stand_in, trackers, tracking, why):
    for name in trackers:
        stand_in(name)
    with pytest.raises(UserError, match=why):
        train(tmp_path, trackers, **tracking)
    stand_in("wandb")
    train(tmp_path, [*trackers, "wandb"], **tracking)  # one that takes them is enough


def test_the_tracker_that_is_installed_is_really_opened(tmp_path):
    train(tmp_path, ["tensorboard"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_a_tracker_that_does_not_start_is_named_before_anything_is_trained(tmp_path, stand_in):
    stand_in("wandb").init.side_effect = RuntimeError("api_key not configured")
    with pytest.raises(UserError, match=r"training\.trackers: wandb does not start .*api_key not configured"):
        train(tmp_path, ["wandb"])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_tracker_that_is_not_installed_is_named_with_its_package(tmp_path):
    missing = sorted(set(MODULES) - {str(name) for name in accelerate.tracking.get_available_trackers()})
    for name in missing:
        with pytest.raises(UserError, match=f"{name} is not installed: pip install {name}"):
            train(tmp_path, [name])
    with pytest.raises(UserError, match="unknown tracker 'wandbb'"):
        train(tmp_path, ["wandbb"])

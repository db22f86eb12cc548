"""Every tracker that Accelerate knows opens with a run, takes its metrics and is closed; none reaches a network."""

import sys
from unittest.mock import MagicMock

import accelerate.tracking
import pytest

from alignment.errors import UserError
from alignment.training import Run, TrainingConfig, fit
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


def train(output, trackers: list[str], **tracking) -> None:
    """Two updates of a toy model, logged to these trackers; no process has been asked about before."""
    accelerate.PartialState._reset_state()
    config = {
        "optim": {"learning_rate": 1e-2},
        "adapter": None,
        "training": {"trackers": trackers, "tracking": tracking},
    }
    training = TrainingConfig(max_steps=2)
    with Run(output, config, stage="toy") as run:
        engine = toy_engine(steps=2, training=training)
        fit(engine, ToyStream(), collate_by(4), squared_error(engine.model), training=training, run=run)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_each_tracker_is_opened_gets_the_metrics_and_is_closed(tmp_path, stand_in, monkeypatch, name):
    package = stand_in(name)
    kind = accelerate.tracking.LOGGER_TYPE_TO_CLASS[name]
    logged, ended = [], []
    log, finish = kind.log, kind.finish
    monkeypatch.setattr(kind, "log", lambda self, values, step: logged.append(step) or log(self, values, step=step))
    monkeypatch.setattr(kind, "finish", lambda self: ended.append(1) or finish(self))
    train(tmp_path, [name])
    assert logged == [1, 2] and ended == [1]
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

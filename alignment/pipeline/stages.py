"""The function that runs each stage, by its name. A stage is imported when a recipe or a command needs it."""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

from alignment.errors import UserError
from alignment.files import read_json_object
from alignment.settings import Key

STAGES = {  # name: "module:function"; the function takes the stage's config, whose class is the parameter's annotation
    "hotel_world": "alignment.hotel_world.datasets:run",
    "best_of_n": "alignment.algorithms.best_of_n:run",
    "pretrain": "alignment.algorithms.pretrain:run",
    "sft": "alignment.algorithms.sft:run",
    "reward": "alignment.algorithms.reward:run",
    "ppo": "alignment.algorithms.ppo.ppo:run",
    "dpo": "alignment.algorithms.dpo.dpo:run",
    "online_dpo": "alignment.algorithms.online_dpo:run",
    "distill": "alignment.algorithms.distill:run",
    "finetune": "alignment.algorithms.finetune.finetune:run",
    "winrate": "alignment.evaluation.win_rate_run:run",
    "ratings": "alignment.evaluation.ratings_run:run",
    "judge": "alignment.evaluation.judge_run:run",
    "reward_eval": "alignment.evaluation.reward_accuracy:run",
    "language": "alignment.evaluation.language_loss:run",
    "behavior": "alignment.evaluation.behavior:run",
    "benchmarks": "alignment.evaluation.benchmarks.run:run",
    "report": "alignment.reports.recipe_report:run",
}


def find_stage(stage: str, folder: Path = Path()) -> tuple[type, Callable[[Any], Any]]:
    """Config class and function of a stage, a key of `STAGES` or `FILE.py:FUNCTION` of a recipe; imports its module."""
    module_name, _, name = STAGES.get(stage, stage).partition(":")
    module = importlib.import_module(module_name) if stage in STAGES else load_stage_file(folder / module_name)
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{folder / module_name}: has no function {name!r}")
    (config_class,) = (hint for parameter, hint in get_type_hints(function).items() if parameter != "return")
    return config_class, function


def stage_file(stage: str, folder: Path) -> Path | None:
    """The file of a recipe's own stage; None of a key of `STAGES`."""
    return folder / stage.partition(":")[0] if ".py:" in stage else None


def load_stage_file(path: Path) -> ModuleType:
    """The module of a Python file outside every package."""
    name = str(path.resolve())  # its dataclasses look their module up by this name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def missing_data(config: object, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """The keys of a stage's config that name rows which are not there, and why; nothing is loaded."""
    if hasattr(config, "missing"):
        yield from (((*key, name), why) for name, why in cast(Any, config).missing())
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            yield from missing_data(getattr(config, field.name), (*key, field.name))


def with_micro_batch(config: Any) -> Any:
    """A stage's config with a number for `training.micro_batch_tokens: auto`; all the run's processes must call it."""
    training = getattr(config, "training", None)
    if training is None or training.micro_batch_tokens != "auto":
        return config
    return importlib.import_module("alignment.planning.plan").resolve_micro_batch(config)


def write_page(directory: Path) -> None:
    """Write a training run's `report.html` and the card of its model; nothing for a stage that logged no metrics."""
    if (directory / "metrics.jsonl").is_file():
        importlib.import_module("alignment.reports.page").write_run_report(directory)
        write_card_of(directory)


def write_card_of(directory: Path) -> None:
    """Write the card of the model in a training run's directory, where a stage of `STAGES` has written one."""
    if (directory / "model").is_dir() and read_json_object(directory / "lineage.json")["stage"] in STAGES:
        importlib.import_module("alignment.reports.model_card").write_card(directory)

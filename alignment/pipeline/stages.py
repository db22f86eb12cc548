"""The function that runs each stage, by verb. A stage is imported when a recipe or a command needs it."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_type_hints

from alignment.config.yaml_source import Key

STAGES = {  # verb: "module:function"; the function takes the stage's config, whose class is the parameter's annotation
    "hotel_world": "alignment.hotel_world.datasets:run",
    "hotel_probe": "alignment.hotel_world.probe:run",
    "hotel_comparisons": "alignment.evaluation.hotel_comparisons:run",
    "sums": "alignment.data.tools.sums:run",
    "split": "alignment.data.tools.split:run_split",
    "pairs": "alignment.data.tools.derive:run_pairs",
    "continuations": "alignment.data.tools.derive:run_continuations",
    "best_of_n": "alignment.algorithms.best_of_n:run",
    "import_llama2c": "alignment.commands.import_llama2c:run_import",
    "pretrain": "alignment.algorithms.pretrain.pretrain:run",
    "sft": "alignment.algorithms.sft:run",
    "reward": "alignment.algorithms.reward:run",
    "ppo": "alignment.algorithms.ppo.ppo:run",
    "dpo": "alignment.algorithms.dpo.dpo:run",
    "online_dpo": "alignment.algorithms.online_dpo.online_dpo:run",
    "finetune": "alignment.algorithms.finetune.finetune:run",
    "winrate": "alignment.evaluation.win_rate_run:run",
    "reward_eval": "alignment.evaluation.reward_accuracy:run",
    "answer_accuracy": "alignment.evaluation.answer_accuracy:run",
    "label_accuracy": "alignment.evaluation.label_accuracy:run",
    "probe": "alignment.evaluation.probe:run",
    "language": "alignment.evaluation.language_loss:run",
    "study": "alignment.evaluation.study:run",
    "report": "alignment.evaluation.report.recipe_report:run",
}


def find_stage(verb: str) -> tuple[type, Callable[[Any], Any]]:
    """Config class and function of a verb; imports its module."""
    module, _, name = STAGES[verb].partition(":")
    function = getattr(importlib.import_module(module), name)
    (config_class,) = (hint for parameter, hint in get_type_hints(function).items() if parameter != "return")
    return config_class, function


def missing_data(config: object, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """The keys of a stage's config that name rows which are not there, and why; nothing is loaded."""
    if hasattr(config, "missing"):
        yield from (((*key, name), why) for name, why in cast(Any, config).missing())
    elif dataclasses.is_dataclass(config):
        for each in dataclasses.fields(config):
            yield from missing_data(getattr(config, each.name), (*key, each.name))


def with_micro_batch(config: Any) -> Any:
    """A stage's config with a number for `training.micro_batch_tokens: auto`; every process of the run must call this."""
    training = getattr(config, "training", None)
    if training is None or training.micro_batch_tokens != "auto":
        return config
    return importlib.import_module("alignment.planning.resolve").resolve_micro_batch(config)


def write_page(directory: Path) -> None:
    """Write `report.html` of a training run into its directory; nothing for a stage that logged no metrics."""
    if (directory / "metrics.jsonl").is_file():
        from alignment.evaluation.report.run_report import write_run_report

        write_run_report(directory)

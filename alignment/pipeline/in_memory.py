"""Training stages called from Python on rows in memory: `sft(policy=..., rows=[...], output=...)`.

The rows are written beside the run, so that a call is the run that the command starts on the same file: checked, cached,
resumed and recorded alike.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.errors import UserError, raise_all
from alignment.evaluation.report.run_report import read_log_rows
from alignment.files import explain_full_disk, sync
from alignment.loading import load_model
from alignment.pipeline.stages import find_stage, with_micro_batch
from alignment.reward_model import load_reward_model
from alignment.rewards.functions import with_names
from alignment.training.ranks import propagate_failures

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class StageResult:
    """What a finished stage left.

    Attributes:
        path: the run's directory.
        metrics: lines of its metrics.jsonl, one per update or iteration.
    """

    path: Path
    metrics: list[dict[str, Any]]
    stage: str

    @cached_property
    def model(self) -> Any:
        """The trained model in eval mode, an adapter with its base model; loaded when it is first asked for."""
        load = load_reward_model if self.stage == "reward" else load_model
        return load(str(self.path / "model"))


def sft(
    *, policy: str, rows: Rows, output: str | Path, evaluation_rows: Rows | None = None, **settings: Any
) -> StageResult:
    """Supervised fine-tuning on demonstrations; see `run_on_rows`."""
    return run_on_rows("sft", policy, rows, output, evaluation_rows=evaluation_rows, settings=settings)


def reward(
    *, policy: str, rows: Rows, output: str | Path, evaluation_rows: Rows | None = None, **settings: Any
) -> StageResult:
    """A reward model of comparisons, rankings or steps, on the trunk of `policy`; see `run_on_rows`."""
    return run_on_rows("reward", policy, rows, output, evaluation_rows=evaluation_rows, settings=settings)


def dpo(
    *, policy: str, rows: Rows, output: str | Path, evaluation_rows: Rows | None = None, **settings: Any
) -> StageResult:
    """DPO, or another preference loss, on comparisons; see `run_on_rows`."""
    return run_on_rows("dpo", policy, rows, output, evaluation_rows=evaluation_rows, settings=settings)


def ppo(
    *, policy: str, rows: Rows, output: str | Path, evaluation_rows: Rows | None = None, **settings: Any
) -> StageResult:
    """PPO on prompts; `reward_model` or `rewards` says what is optimized; see `run_on_rows`.

    `rewards` takes Python functions f(prompts, responses, **columns): one, or a list, or entries {"function": f, ...}.
    """
    return run_on_rows("ppo", policy, rows, output, evaluation_rows=evaluation_rows, settings=settings)


def run_on_rows(
    stage: str,
    policy: str,
    rows: Rows,
    output: str | Path,
    *,
    evaluation_rows: Rows | None,
    settings: Mapping[str, object],
) -> StageResult:
    """Run a training stage on rows in memory.

    Args:
        stage: its verb.
        policy: directory or Hub name of the model to start from.
        rows: mappings with the columns that a file of such rows has, or a `datasets.Dataset`; written to `output`/rows.
        output: the run's directory; the same call again resumes an interrupted run.
        evaluation_rows: rows held out, evaluated as `training.evaluate_every_steps` says.
        settings: further keys of the stage's config, sections as mappings: `optim={"learning_rate": 1e-5}`.

    Raises:
        UserError: no rows, or rows that no JSON line holds; everything that the stage's command refuses.
    """
    given = {"train": rows} if evaluation_rows is None else {"train": rows, "evaluation": evaluation_rows}
    data = settings.get("data", {})
    if not isinstance(data, Mapping):
        raise UserError(f"data: give its settings as a mapping, such as {{'max_length': 512}}; got {data!r}")
    raise_all(f"data.{name}: rows are given too; leave one of the two out" for name in given if name in data)
    with propagate_failures():
        files = {name: write_lines(more, Path(output) / "rows", name) for name, more in given.items()}
        values = {**with_names(settings), "policy": policy, "output": str(output), "data": {**data, **files}}
        config_class, run = find_stage(stage)
        run(with_micro_batch(build(config_class, SourcedYaml(values, {(): f"{stage}(...)"}))))
    return StageResult(Path(output), read_log_rows(Path(output) / "metrics.jsonl"), stage)


def write_lines(rows: Rows, folder: Path, name: str) -> str:
    """The file of these rows, JSON lines, named by their content: a later call with other rows is another run.

    Raises:
        UserError: there are no rows, a row is no mapping, or holds what JSON has no form for.
    """
    if isinstance(rows, str | Path | Mapping):
        raise UserError(
            f"{name}: got {type(rows).__name__}; rows are a list of mappings or a datasets.Dataset, and a file is named in "
            "the config of the stage's command"
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest, problems, count = hashlib.sha256(), [], 0
    with TemporaryDirectory(dir=folder, prefix=".") as hidden:
        written = Path(hidden) / name
        with explain_full_disk(folder / name, written), written.open("wb") as file:
            for count, row in enumerate(rows, 1):
                try:
                    line = json_line(row)
                except (TypeError, ValueError) as error:
                    problems.append(f"{name}: row {count}: {error}")
                    continue
                digest.update(line)
                file.write(line)
        raise_all(problems)
        if not count:
            raise UserError(f"{name}: there are no rows")
        path = folder / f"{name}-{digest.hexdigest()[:12]}.jsonl"
        if not path.is_file():  # else an earlier call with the same rows wrote it
            sync(written)
            os.replace(written, path)
    return str(path)


def json_line(row: object) -> bytes:
    """One row as a line of JSON.

    Raises:
        TypeError, ValueError: it is no mapping, or JSON has no form for a value.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"a row is a mapping of columns, got {type(row).__name__}")
    return json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"

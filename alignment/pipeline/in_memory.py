"""Stages called from Python on rows in memory: `sft(policy=..., rows=[...], output=...)`.

The rows are written beside the run, so that a call is the run that the command starts on the same file: checked,
cached, resumed and recorded alike.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alignment.algorithms.finetune.scoring import load_finetuned
from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.data.rows.files import from_arrow, own_keys
from alignment.errors import UserError, raise_all
from alignment.files import read_json_object, write_text
from alignment.judging.inputs import refuse_other_results
from alignment.loading import load_model
from alignment.pipeline.stages import find_stage, missing_data, with_micro_batch, write_card_of
from alignment.reports.run_log import read_log_rows
from alignment.reward_model import load_reward_model
from alignment.rewards.functions import with_names
from alignment.training.distributed import launched_rank, propagate_failures
from alignment.training.run.directory import OnUpdate, update_callback

MISSING = ("nan", "<NA>", "NaT")  # in rows of pandas
Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class StageResult:
    """Result of a finished stage: directory, name, and the lines of its metrics.jsonl, one per update or iteration."""

    path: Path
    metrics: list[dict[str, Any]]
    stage: str

    @cached_property
    def model(self) -> Any:
        """The trained model in eval mode, an adapter with its base model; loaded when it is first asked for."""
        load = {"reward": load_reward_model, "finetune": load_finetuned}.get(self.stage, load_model)
        return load(str(self.path / "model"))

    @cached_property
    def results(self) -> dict[str, Any]:
        """The content of results.json, which `evaluate` and `best_of_n` write."""
        return read_json_object(self.path / "results.json")


def run_on_rows(
    stage: str,
    *,
    rows: Rows,
    output: str | Path,
    evaluation_rows: Rows | None = None,
    on_update: OnUpdate | None = None,
    **settings: Any,
) -> StageResult:
    """Run a stage on rows in memory.

    Args:
        stage: its name.
        rows: mappings with the columns that a file of such rows has, a `datasets.Dataset` or a `pandas.DataFrame`;
            written to `output`/rows. Values of numpy become Python's, and NaN becomes null, which is reported.
        output: the run's directory; the same call again resumes an interrupted run.
        evaluation_rows: rows held out, evaluated as `training.evaluate_every_steps` says.
        on_update: called after each update (iteration, of PPO and online DPO) with its line of metrics.jsonl, in the
            first process only; an exception that it raises ends the run.
        settings: further keys of the stage's config, sections as mappings: `optim={"learning_rate": 1e-5}`.
    """
    if evaluation_rows is not None and stage in ("winrate", "best_of_n"):
        raise UserError("evaluation_rows: this stage trains nothing and reads `rows` alone; leave them out")
    given = {"train": rows} | ({} if evaluation_rows is None else {"evaluation": evaluation_rows})
    data = settings.get("data", {})
    if not isinstance(data, Mapping):
        raise UserError(f"data: give its settings as a mapping, such as {{'max_length': 512}}; got {data!r}")
    raise_all(f"data.{name}: rows are given too; leave one of the two out" for name in given if name in data)
    if stage == "winrate":
        refuse_other_results(stage, Path(output))
    with propagate_failures(), update_callback(on_update):
        files = {name: write_lines(more, Path(output) / "rows", name) for name, more in given.items()}
        values = {**with_names(settings), "output": str(output), "data": {**data, **files}}
        config_class, run = find_stage(stage)
        run(with_micro_batch(build(config_class, SourcedYaml(values, {(): f"{stage}(...)"}), missing_data)))
        if launched_rank() == 0:
            write_card_of(Path(output))
    return StageResult(Path(output), read_log_rows(Path(output) / "metrics.jsonl"), stage)


def stage_function(name: str, summary: str, stage: str = "") -> Callable[..., StageResult]:
    """`run_on_rows` for one stage, named as the function where `stage` does not name another."""

    def function(
        *,
        rows: Rows,
        output: str | Path,
        evaluation_rows: Rows | None = None,
        on_update: OnUpdate | None = None,
        **settings: Any,
    ) -> StageResult:
        options = {"evaluation_rows": evaluation_rows, "on_update": on_update}
        return run_on_rows(stage or name, rows=rows, output=output, **options, **settings)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{summary}; the arguments are described at `alignment.pipeline.in_memory.run_on_rows`."
    return function


pretrain = stage_function("pretrain", "Pretraining of `policy`, or of a fresh `model`, on texts")
sft = stage_function("sft", "Supervised fine-tuning of `policy` on demonstrations")
reward = stage_function("reward", "A reward model of comparisons, rankings or steps, on the trunk of `policy`")
dpo = stage_function("dpo", "DPO of `policy`, or another preference loss, on comparisons")
online_dpo = stage_function("online_dpo", "Online DPO of `policy` on prompts; `judge` or `rewards` choose the pairs")
ppo = stage_function(
    "ppo", "PPO of `policy` on prompts; `reward_model` or `rewards`, Python functions too, says what is optimized"
)
distill = stage_function("distill", "Distillation of `teacher` into `policy`, on the responses of `policy` to prompts")
finetune = stage_function("finetune", "Fine-tuning of `policy` for the downstream `task` on labeled rows")
best_of_n = stage_function("best_of_n", "The best of n responses of `policy` to prompts, as rows; without updates")
evaluate = stage_function(
    "evaluate",
    "Win rates of `models` (name -> directory, or one for each seed) on prompts against the one named `baseline`, as "
    "`judge` has it: "
    '`evaluate(...).results["models"][name]["win_rate"]`',
    "winrate",
)


def write_lines(rows: Rows, folder: Path, name: str) -> str:
    """The file of these rows, JSON lines, named by their content: a later call with other rows is another run."""
    if isinstance(rows, str | Path | Mapping):
        raise UserError(
            f"{name}: got {type(rows).__name__}; rows are a list of mappings, a datasets.Dataset or a DataFrame, and a "
            "file is named in the config of the stage's command"
        )
    lines = []
    problems = []
    missing = Counter[str]()
    table: Any = rows
    records = table.to_dict("records") if hasattr(rows, "iterrows") else rows  # of a pandas.DataFrame
    read = from_arrow if type(rows).__module__.startswith("datasets.") else dict
    for row_number, row in enumerate(records, 1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"a row is a mapping of columns, got {type(row).__name__}")
            values = read(row)
            absent = [key for key, value in values.items() if not isinstance(value, Sized) and str(value) in MISSING]
            missing.update(absent)
            values |= dict.fromkeys(absent)
            lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False, default=_of_numpy) + "\n")
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: row {row_number}: {error}")
    raise_all(problems if lines or problems else [f"{name}: there are no rows"])
    if missing and launched_rank() == 0:
        print(f"{name}: NaN is read as null; rows with it, by column: {dict(missing)}", file=sys.stderr)
    text = "".join(lines)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():  # else an earlier call with the same rows wrote it
        write_text(path, text)
    return str(path)


def _of_numpy(value: object) -> object:
    """A scalar or an array of numpy as Python's; pandas keeps lists that it read from Parquet as arrays."""
    if (tolist := getattr(value, "tolist", None)) is None:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return own_keys(tolist())

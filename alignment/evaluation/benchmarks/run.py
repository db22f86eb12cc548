"""`alignment evaluate benchmarks`: tasks over local rows, and lm-eval's, on several models side by side."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from alignment.errors import install_advice, raise_all
from alignment.evaluation.benchmarks.figures import (
    Columns,
    Figures,
    ToxicityConfig,
    baselines,
    figures_of,
    measure,
    toxicity_classifier,
)
from alignment.evaluation.benchmarks.tasks import TEXT_METRICS, LoadedBenchmark, read_task
from alignment.files import read_json_object, write_figures
from alignment.judging.likelihood import LanguageScorer
from alignment.loading import Checkpoint, load_on_best_device, load_tokenizer
from alignment.models.weights_config import WeightsConfig
from alignment.settings import NonNegativeInt, PositiveInt, Rule, Settings

SHOWN = 20_000  # characters of a task's first prompt: a whole corpus can be one text


@dataclass(frozen=True)
class BenchmarksConfig(Settings):
    """Settings of benchmarks.

    Attributes:
        models: name -> directory or Hub name, such as those after each stage of a recipe; or, of one alone, `model`.
        output: directory of the results.
        tasks: names of packaged tasks, such as mmlu, or paths of YAML files of the same form.
        data: folder that the tasks' sources are relative to.
        baseline: name among `models` that the others are compared with; null: the first one.
        few_shot: examples of each prompt, in tasks that have some; null: as many as each task says.
        max_rows: rows of each task, drawn evenly; null: all.
        chat: prompts are messages of a user, through each model's chat template.
        toxicity: classifier of texts, for tasks of that kind.
        lm_eval: tasks of lm-eval to run on the models through its own interface.
        include_path: folder of YAML tasks for lm-eval.
        chat_template: of the models, a built-in one's name or a Jinja file; null: each tokenizer's own.
        weights: type that models are held and compute in; auto: each checkpoint's.
        model: directory or Hub name of the only model, in place of `models`.
    """

    models: dict[str, str] = field(default_factory=dict)
    output: str = ""
    tasks: list[str] = field(default_factory=list)
    data: str = "."
    baseline: str | None = None
    few_shot: NonNegativeInt | None = None
    max_rows: PositiveInt | None = None
    chat: bool = False
    toxicity: ToxicityConfig | None = None
    lm_eval: list[str] = field(default_factory=list)
    include_path: str | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    model: str | None = None

    RULES = (
        Rule("output", lambda c: not c.output, "is missing; name the directory of the results"),
        Rule("models", lambda c: bool(c.models) == bool(c.model), "name at least one, or the only one as `model`"),
        Rule(
            "tasks",
            lambda c: not c.tasks and not c.lm_eval,
            "is empty, and so is lm_eval; name a task, such as lambada",
        ),
        Rule("tasks", lambda c: len({Path(task).stem for task in c.tasks}) < len(c.tasks), "has a name twice"),
        Rule(
            "baseline",
            lambda c: c.baseline is not None and c.baseline not in c.models,
            "{self.baseline!r} is not among the models",
        ),
    )

    def missing(self) -> Iterator[tuple[str, str]]:
        """The folder of rows where tasks need it, and the extra where lm-eval's tasks do."""
        if self.tasks and not Path(self.data).is_dir():
            yield "data", f"{self.data}: no such folder; set ALIGNMENT_DATA, or name the folder of the tasks' rows"
        if self.lm_eval and not importlib.util.find_spec("lm_eval"):
            yield "lm_eval", f"lm_eval: {', '.join(self.lm_eval)}: lm-eval is not installed; {install_advice('bench')}"


def run(config: BenchmarksConfig) -> Path:
    """Figures of every task for every model and baseline, and differences between models, in `results.json`.

    Tasks, rows and models are checked before a model is loaded.
    """
    raise_all(why for _, why in config.missing())
    tasks = [
        read_task(name, Path(config.data), max_rows=config.max_rows, shots=config.few_shot) for name in config.tasks
    ]
    models = config.models or {"model": str(config.model)}
    refuse_models(config, models, tasks)
    classify = None if config.toxicity is None else toxicity_classifier(config.toxicity)
    run_tasks = None
    if config.lm_eval:
        from alignment.evaluation.benchmarks.lm_eval_model import task_runner  # of the extra

        run_tasks = task_runner(config.lm_eval, config.include_path, max_rows=config.max_rows, shots=config.few_shot)
    measured = {task.name: dict[str, Columns]() for task in tasks}
    foreign = dict[str, object]()
    for name, source in models.items():
        model = load_on_best_device(source, config.weights)
        scorer = LanguageScorer(model, load_tokenizer(source, config.chat_template), config.chat)
        for task in tasks:
            measured[task.name][name] = measure(task, scorer, classify)
        if run_tasks is not None:
            foreign[name] = run_tasks(scorer)
    results = {task.name: task_results(task, measured[task.name], config.baseline) for task in tasks}
    figures = {"models": models, "tasks": results, "lm_eval": foreign}
    return write_figures(Path(config.output) / "results.json", figures)


def refuse_models(config: BenchmarksConfig, models: Mapping[str, str], tasks: Sequence[LoadedBenchmark]) -> None:
    """Refuse models that are not there or cannot do a task, and tasks that a classifier is missing for."""
    kinds = {source: Checkpoint(source).architecture for source in models.values()}
    others = [task.name for task in tasks if task.settings.kind != "pairs"] + config.lm_eval
    whole = [task.name for task in tasks if task.settings.kind in ("pairs", "rolling")] + config.lm_eval
    unfit = {"encoder": others, "encoder-decoder": whole, "decoder": []}
    problems = [
        f"models: {source} is an {kind}, and {unfit[kind][0]} needs a decoder"
        for source, kind in kinds.items()
        if unfit[kind]
    ]
    asked = {metric for task in tasks for metric in task.settings.metrics} & TEXT_METRICS
    if asked and not (importlib.util.find_spec("rouge_score") and importlib.util.find_spec("sacrebleu")):
        advice = install_advice("text-metrics")
        problems.append(
            f"tasks: {' and '.join(sorted(asked))} take rouge-score and sacrebleu, which are not installed; {advice}"
        )
    toxic = [task.name for task in tasks if task.settings.kind == "toxicity" and config.toxicity is None]
    raise_all(problems + [f"tasks: {name} needs a classifier of toxic texts; set toxicity.model" for name in toxic])


def task_results(
    task: LoadedBenchmark, measured: Mapping[str, Columns], baseline: str | None = None
) -> dict[str, object]:
    """The entry of a task in `results.json`: first prompt, figures by model, of baselines and of subsets, differences.

    Args:
        measured: model -> values of each row.
        baseline: name of the model that the others are compared with; None: the first one.
    """
    settings = task.settings
    against = baseline or next(iter(measured))
    _, clusters = np.unique([item.cluster for item in task.items], return_inverse=True)

    def by_model(rows: slice | np.ndarray) -> dict[str, Figures]:
        return {name: figures_of(settings, clusters[rows], one[rows]) for name, one in measured.items()}

    subsets = dict[str, dict[str, dict[str, Figures]]]()
    for index, expression in enumerate(settings.subsets):
        values = np.array([item.subsets[index] for item in task.items])
        subsets[expression] = {value: by_model(values == value) for value in np.unique(values).tolist()}
    chosen = settings.kind in ("multiple_choice", "pairs")
    return {
        "kind": settings.kind,
        "figure": settings.figure,
        "rows": len(task.items),
        "clusters": int(clusters.max()) + 1,
        "first_prompt": task.items[0].prompt[:SHOWN],
        "models": by_model(slice(None)),
        "baselines": {
            name: figures_of(settings, clusters, measure(task, scorer)) for name, scorer in baselines(task).items()
        },
        "chance": fmean(len(item.right) / len(item.choices) for item in task.items) if chosen else None,
        "subsets": subsets,
        "against": against,
        "differences": {
            name: figures_of(settings, clusters, columns, measured[against])
            for name, columns in measured.items()
            if name != against
        },
    }


def _cell(figure: Mapping[str, float | None]) -> str:
    numbers = [figure[key] for key in ("value", "low", "high")]
    return "{} [{}, {}]".format(*("–" if value is None else f"{value:.3f}" for value in numbers))


def print_benchmarks(path: Path) -> None:
    """Print a row for each figure of a `results.json`, and for each task the first prompt, on standard output."""
    from alignment.reports.recipe_report import print_table  # matplotlib, which --help does not need

    rows = list[dict[str, object]]()
    results = read_json_object(path)
    for task, entry in results["tasks"].items():
        print(f"{task}: the first prompt\n{entry['first_prompt']}\n")
        sides = {**entry["models"], **entry["baselines"]}
        for figure in next(iter(entry["models"].values())):
            cells = {name: _cell(one[figure]) for name, one in sides.items()}
            chance = entry["chance"] if figure == entry["figure"] else None
            rows.append({"task": task, "figure": figure, "rows": entry["rows"], **cells, "chance": chance})
    for name, tasks in results["lm_eval"].items():
        for task, metrics in tasks.items():
            rows += [{"task": task, "figure": key, name: value} for key, value in metrics.items() if key != "alias"]
    print_table(rows)

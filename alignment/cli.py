"""Commands of the command line, each a call of one function. Heavy modules are imported when a command needs them."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand

from alignment import __version__
from alignment.errors import UserError, raise_all
from alignment.files import check_output, write_text

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter


def completion_of(kind: str) -> Callable[[typer.Context, str], list[str]]:
    """The function that completes packaged names of a kind, of configs those of the command's stage, and YAML files."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from alignment.config.load import packaged_names

        folder = ""
        if kind == "configs" and (stage := context.obj) is not None:
            folder = f"{stage}/" if stage.replace("_", "-") in TRAINING else "evaluate/"
        names = [name for name in packaged_names(kind) if name.startswith(folder) and name.startswith(incomplete)]
        return names + sorted(glob(f"{incomplete}*.yaml"))

    return complete


ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, or a packaged name such as sft/tiny; none where key=value gives all that is needed.",
        autocompletion=completion_of("configs"),
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Dotted keys, YAML values.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Start that many processes, one per GPU.")]
Launch = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Accelerate's launch file, or a packaged name such as launch/zero3.",
        autocompletion=completion_of("launch"),
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto: the checkpoint's, float32 where the CPU lacks it."),
]
Quantize = Annotated[
    Literal["nf4", "int8"] | None, typer.Option(help="Quantize the blocks, or (export) what an adapter was trained on.")
]
ModelName = Annotated[str, typer.Option(help="Model directory or Hub name.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model or adapter directory, or Hub name.")]
AdapterName = Annotated[str | None, typer.Option(help="Directory of an adapter.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="One of several adapters, which act side by side on rows of their own."),
]
NAMED_ADAPTER = "--adapters", "the adapter's name = its directory, such as polite=runs/polite/model"
ChatTemplate = Annotated[str | None, typer.Option(help="Built-in chat template or a file.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
Texts = list[str] | None
# As in data.rows.records.
Kind = Literal["text", "demonstrations", "comparisons", "prompts", "labels", "rankings", "steps"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RLHF from first principles: pretraining, SFT, reward models, PPO, DPO, and proof that it got better.",
)
evaluate = typer.Typer(no_args_is_help=True, help="Win rates, judges, reward-model accuracy, language-model loss.")
data = typer.Typer(no_args_is_help=True, help="Check data files as training reads them.")
app.add_typer(evaluate, name="evaluate")
inspect = typer.Typer(no_args_is_help=True, help="Show what a model computes.")
app.add_typer(data, name="data")
app.add_typer(inspect, name="inspect")


class ConfigCommand(TyperCommand):
    """A command that runs a stage, its context's `obj`; `--help [all | KEY]` describes the keys of its config."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Note the word after `--help`."""
        ctx.meta["topic"] = next(iter(args[args.index("--help") + 1 :]), None) if "--help" in args else None
        return super().parse_args(ctx, args)

    def format_help(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Print the usage of the command, unless one key is asked for, and the keys."""
        topic = ctx.meta["topic"]
        if topic in (None, "all"):
            super().format_help(ctx, formatter)
        from alignment.config.schema import describe_keys

        width = max(60, shutil.get_terminal_size().columns - 1)
        typer.echo(describe_keys(ctx.obj, width, topic))


def print_version(wanted: bool) -> None:
    """Print the version of the package and leave."""
    if wanted:
        print(f"alignment {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback where something goes wrong.")] = False,
) -> None:
    """Options of every command; `main` accepts them before the command and after it."""


@app.command()
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe folder, or a packaged name: quickstart.",
            autocompletion=completion_of("recipes"),
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[stage.key=value]...")] = None,
    output: Annotated[str | None, typer.Option(help="Where results go; runs/RECIPE by default.")] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Run it and those after it again.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="STAGE", help="Run this stage alone, again.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Fail if a result is outside its expected range.")] = False,
) -> None:
    """Run a recipe: its stages in order; finished ones are skipped."""
    from alignment.pipeline.run import run_recipe

    directory = Path(output) if output else Path("runs") / recipe_name(recipe)
    if not run_recipe(recipe, directory, overrides or [], start=start, only=only, check=check):
        raise typer.Exit(1)


def recipe_name(recipe: str) -> str:
    """Name of the output directory: that of the recipe's folder."""
    path = Path(recipe)
    return path.resolve().parent.name if path.name == "recipe.yaml" else path.resolve().name.removesuffix(".yaml")


# Stages

TRAINING = {
    "pretrain": "Train a language model on running text.",
    "sft": "Fine-tune on demonstrations.",
    "reward": "Train a reward model on comparisons.",
    "ppo": "Optimize a policy against a reward model by PPO.",
    "dpo": "Optimize a policy on comparisons directly.",
    "online-dpo": "Optimize a policy on pairs of its own responses, ranked by a reward model or a judge.",
    "distill": "Train a student on its own responses, by a teacher's distribution at each of their tokens.",
    "finetune": "Fine-tune for a downstream task: classification, tagging, question answering, multiple choice.",
}


def add_training_command(name: str, help_text: str) -> None:
    """Add the command that runs a training stage in this process, or in several that it starts."""

    stage = name.replace("-", "_")

    @app.command(name, help=help_text, cls=ConfigCommand, context_settings={"obj": stage})
    def train(
        context: typer.Context,
        config: ConfigName,
        overrides: Overrides = None,
        gpus: Gpus = None,
        launch: Launch = None,
        again: Annotated[bool, typer.Option("--again", help="Repeat a finished run.")] = False,
        dry: Annotated[
            bool, typer.Option("--dry-run", help="Check all, show the plan and the first rows; train nothing.")
        ] = False,
    ) -> None:
        overrides = [*(overrides or []), *(["training.again=true"] if again else [])]
        with open_stage(stage, config, overrides) as (run, checked):
            if dry:
                dry_run = import_module("alignment.commands.dry_run")
                dry_run.print_plan(stage, config, overrides, gpus=gpus, launch=launch)
                return dry_run.check_stage(stage, run, checked)
            if gpus is not None or launch is not None:
                debug = ["--debug"] if context.find_root().params["debug"] else []
                relaunch([name, config, *overrides, *debug], gpus, launch)
            from alignment.pipeline.stages import with_micro_batch

            show_result(run(with_micro_batch(checked)), checked.output)


for _verb, _help in TRAINING.items():
    add_training_command(_verb, _help)


EVALUATIONS = {  # command: (stage, help)
    "winrate": ("winrate", "How often each policy's responses are preferred to a baseline's."),
    "judge": ("judge", "How far a judge agrees with people, and win rates corrected by their labels."),
    "reward": ("reward_eval", "Accuracy of a reward model on preferences, and its card."),
    "ratings": ("ratings", "Ratings of several models, from battles of two or a tournament that a judge decides."),
    "language": ("language", "Loss of a language model on running text."),
    "behavior": ("behavior", "Behavioral tests of a classifier, a reward model or a policy: failure rates."),
    "benchmarks": ("benchmarks", "Benchmark tasks over local rows, and lm-eval's, on several models side by side."),
}


def add_evaluation(command: str, stage: str, help_text: str) -> None:
    """Add the command that runs an evaluation; it also prints a table of win rates, or what people have to do first."""

    @evaluate.command(command, help=help_text, cls=ConfigCommand, context_settings={"obj": stage})
    def run_evaluation(config: ConfigName, overrides: Overrides = None) -> None:
        from alignment.judging.inputs import refuse_other_results

        with open_stage(stage, config, overrides) as (run, checked):
            check_output(Path(checked.output) / "results.json")
            refuse_other_results(stage, Path(checked.output))
            if stage == "winrate":
                from alignment.evaluation.win_rate_run import FormWritten

                try:
                    results = run(checked)
                except FormWritten as form:
                    again = shlex.join(["alignment", "evaluate", command, config, *(overrides or [])])
                    print(f"{form}\nthen run: {again}")
                    return
            else:
                results = run(checked)
            show_result(results, checked.output)
        if stage == "winrate":
            from alignment.reports.recipe_report import print_results

            print_results(json.loads(results.read_text(encoding="utf-8")))
        if stage == "benchmarks":
            from alignment.evaluation.benchmarks.run import print_benchmarks

            print_benchmarks(results)


for _command, (_stage, _help) in EVALUATIONS.items():
    add_evaluation(_command, _stage, _help)


@contextmanager
def open_stage(stage: str, config: str, overrides: list[str] | None) -> Iterator[tuple[Callable[[Any], Path], Any]]:
    """The function of a stage and its checked config; while open, an error on one rank also stops the others."""
    from alignment.config.load import load_config
    from alignment.pipeline.stages import find_stage, missing_data
    from alignment.training.distributed import propagate_failures

    config_class, run = find_stage(stage)
    with propagate_failures():
        yield run, load_config(config_class, config, overrides or [], missing_data)


def show_result(result: Path, directory: str) -> None:
    """On the first rank, write the page of a run that logged metrics and print the path of its result."""
    from alignment.pipeline.stages import write_page
    from alignment.training.distributed import launched_rank

    if launched_rank() == 0:
        write_page(Path(directory))
        print(result)


def relaunch(arguments: Sequence[str], gpus: int | None, launch: str | None) -> None:
    """Replace this process by a launcher that starts the command in several processes; does not return.

    Without a launch file, torch's launcher starts it with the whole model on every GPU.
    """
    import torch

    from alignment.config.load import find_packaged

    if "LOCAL_RANK" in os.environ:
        raise UserError(
            "--gpus and --launch start processes themselves; leave them out under accelerate launch or torchrun"
        )
    if gpus is not None and torch.cuda.device_count() < gpus:
        file = find_packaged(launch or "launch/ddp", "launch")
        raise UserError(
            f"--gpus {gpus}: {torch.cuda.device_count()} found; for processes on the CPU use "
            f"`accelerate launch --config_file {file} --num_processes {gpus} -m alignment {arguments[0]} ...`"
        )
    if launch is None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    else:
        processes = [] if gpus is None else ["--num_processes", str(gpus)]
        file = str(find_packaged(launch, "launch"))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", file, *processes]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "alignment", *arguments])


# Using a model


@app.command()
def generate(
    model: ModelName,
    overrides: Overrides = None,
    adapter: AdapterName = None,
    adapters: Adapters = None,
    prompt: Annotated[Texts, typer.Option(help="One prompt; may be given several times.")] = None,
    prompts: Annotated[str | None, typer.Option(help="File of prompts.")] = None,
    output: Annotated[str | None, typer.Option(help="File for the JSON lines; the screen by default.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
) -> None:
    """Sample responses, or search with beams. Where the model has a chat template, a text is one user message.

    With --adapters the column `adapter` of FILE names the one that answers each row; a row without is the model's own.

    Keys: max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size seed
    num_beams length_penalty early_stopping batch_size chat_template.
    """
    if bool(prompt) == bool(prompts):
        raise UserError("generate: give either --prompt TEXT or --prompts FILE")
    if adapters and prompt:
        raise UserError(
            "generate: --adapters needs --prompts FILE, whose column `adapter` names the adapter of each row"
        )
    from alignment.commands.generate import generate_responses
    from alignment.models.weights_config import WeightsConfig

    if output is not None:
        check_output(Path(output))
    weights = WeightsConfig(dtype, quantize)
    rows = generate_responses(
        model,
        adapter,
        prompt or str(prompts),
        overrides or [],
        raw=raw,
        weights=weights,
        adapters=_named(adapters, *NAMED_ADAPTER),
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if output is None:
        print(lines, end="")
    else:
        write_text(Path(output), lines)


@app.command()
def chat(
    model: Model,
    adapter: AdapterName = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    chat_template: ChatTemplate = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability of the tokens that are kept.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same replies each time.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 512,
) -> None:
    """Talk with a model in the terminal."""
    from alignment.commands.chat import chat_in_terminal
    from alignment.generation import SamplingConfig
    from alignment.models.weights_config import WeightsConfig

    try:
        sampling = SamplingConfig(max_tokens, temperature, top_p=top_p)
    except ValueError as error:
        raise UserError(str(error)) from error
    chat_in_terminal(model, adapter, chat_template, WeightsConfig(dtype, quantize), sampling, seed=seed, system=system)


@app.command()
def label(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A form, responses.jsonl, comparisons or rankings.")],
    output: Annotated[str, typer.Option(metavar="FILE", help="Labels, appended.")] = "labels.jsonl",
    annotator: Annotated[str | None, typer.Option(metavar="NAME", help="The page asks by default.")] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the orders.")] = 0,
    repeats: Annotated[float, typer.Option(min=0, max=0.3, help="Share of pairs shown twice, sides exchanged.")] = 0.1,
    ratings: Annotated[bool, typer.Option("--ratings", help="Each response gets 1 to 7 as well.")] = False,
    flags: Annotated[str, typer.Option(help="Marks for responses, commas between; empty for none.")] = (
        "harmful,off topic,untrue"
    ),
    show_report: Annotated[bool, typer.Option("--report", help="Print pace and agreement; serve nothing.")] = False,
    comparisons: Annotated[str | None, typer.Option(metavar="FILE", help="Write rows for reward and dpo.")] = None,
    argilla: Annotated[str | None, typer.Option(metavar="FILE", help="Write records for Argilla, JSON.")] = None,
    label_studio: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write tasks for Label Studio, JSON.")
    ] = None,
) -> None:
    """Serve a page, on this machine only, on which people judge responses; or read their labels."""
    from alignment.commands.label import serve_labels, write_labels
    from alignment.judging.labels import LabelSession, agreement_lines, read_questions

    marks = [mark.strip() for mark in flags.split(",") if mark.strip()]
    items = read_questions(file)
    session = LabelSession(items, Path(output), seed=seed, repeats=repeats, ratings=ratings, flags=marks)
    if show_report or comparisons or argilla or label_studio:
        write_labels(list(session.labels.values()), comparisons, argilla, label_studio)
    else:
        serve_labels(session, annotator, port)
    print("\n".join(agreement_lines(session.labels.values())))


@app.command()
def export(
    model: ModelName,
    output: Annotated[str, typer.Option(help="Directory to write: new, empty, or an earlier export.")],
    adapter: AdapterName = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    chat_template: ChatTemplate = None,
    add_token: Annotated[Texts, typer.Option(metavar="TEXT", help="Token to add; may be given several times.")] = None,
    add_special_token: Annotated[
        Texts, typer.Option(metavar="TEXT", help="Control token to add, also several times.")
    ] = None,
) -> None:
    """Write a model, its adapter merged in, as a plain Hugging Face directory."""
    from alignment.commands.export import export_model

    tokens = {"add_tokens": add_token or (), "add_special_tokens": add_special_token or ()}
    print(export_model(model, adapter, output, dtype=dtype, quantize=quantize, chat_template=chat_template, **tokens))


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A training run's directory, or a model's.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="On the Hugging Face Hub: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="The repository is or becomes private.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch; made where it is missing.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the files; send nothing.")] = False,
) -> None:
    """Upload a model and its card to the Hugging Face Hub, as `hf auth login` or HF_TOKEN identify you."""
    from alignment.commands.push import push_model

    print(push_model(directory, repository, private=private, revision=revision, dry_run=dry_run))


@app.command()
def plan(
    config: ConfigName,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs; each holds the whole model.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Memory of one GPU, GB of 10^9 bytes.")] = None,
    launch: Launch = None,
    stage: Annotated[str | None, typer.Option(help="Of the config, where its name and keys do not tell.")] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the device's peak rate that is reached.")] = 0.4,
    tflops: Annotated[float | None, typer.Option(help="The device's peak rate, 10^12 operations per second.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a run holds on each device, how long it is, and whether it fits: 2 where it does not. Nothing runs."""
    from alignment.commands import plan as planning
    from alignment.planning.plan import require_fit

    options = {"gpus": gpus, "gpu_memory": gpu_memory, "launch": launch, "stage": stage, "tflops": tflops}
    run_plan = planning.plan_config(config, overrides or [], **options)
    if as_json:
        print(json.dumps(planning.as_json(run_plan, mfu), indent=2))
    else:
        print("\n".join(planning.plan_lines(run_plan, mfu)))
    require_fit(run_plan, config)


@app.command()
def init(
    base: Annotated[str, typer.Option(prompt="Base model, a directory or Hub name", help="Directory or Hub name.")],
    gpu_memory: Annotated[
        float,
        typer.Option(prompt="Memory of one GPU in GB, 0 for the one here or none", min=0, help="GB of 10^9 bytes."),
    ],
    output: Annotated[str, typer.Option(prompt="Folder for configs and runs", help="Folder for configs and runs.")],
    rows: Annotated[Texts, typer.Option(metavar="FILE", help="Rows of any kind; may be given several times.")] = None,
    columns: Annotated[Texts, typer.Option(metavar="OURS=THEIRS", help="Our name of a column = the files'.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA, even where every weight fits.")] = False,
) -> None:
    """Write configs that fit a base, rows and a card, asking for what is not given, and print the commands to run."""
    from alignment.commands.init import write_configs

    files = rows or typer.prompt("Files of rows, with commas between").split(",")
    paths = [file.strip() for file in files]
    print("\n".join(write_configs(base, paths, gpu_memory or None, Path(output), _named(columns), lora=lora)))


@data.command("check")
def data_check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File, directory, glob or Hub id.")],
    kind: Annotated[Kind, typer.Option(help="Kind of its rows.")],
    tokenizer: Annotated[str | None, typer.Option(help="Directory of a tokenizer: shows tokens and masks.")] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", "--template", help="In place of the tokenizer's.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens per row; longer rows are cut.")] = 1024,
    columns: Annotated[Texts, typer.Option(metavar="OURS=THEIRS", help="Our name of a column = the file's.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="Held-out rows: which prompts are in FILE too.")] = None,
) -> None:
    """Read rows as training does, and list what is wrong with them: a file, directory, glob or Hub id."""
    renamed = _named(columns)
    from alignment.data.doctor import check_file

    try:
        report = check_file(
            file,
            kind=kind,
            tokenizer=tokenizer,
            template=chat_template,
            max_length=max_length,
            evaluation=evaluation,
            columns=renamed,
        )
    except UserError as error:  # it names the keys of a stage's config
        raise UserError(str(error).replace("data.columns.", "--columns ")) from error
    print(report.render())
    if not report.ok:
        raise typer.Exit(2)


def _named(
    pairs: Texts, option: str = "--columns", form: str = "our name of the column = the file's, such as prompt=question"
) -> dict[str, str]:
    """Our names of columns -> the file's, of options such as prompt=question, or of another option."""
    names = [pair.partition("=") for pair in pairs or []]
    if wrong := [ours + equals for ours, equals, theirs in names if not (ours and theirs)]:
        raise UserError(f"{option} {wrong[0]!r}: write {form}")
    return {ours: theirs for ours, _, theirs in names}


@data.command("cache")
def data_cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete the entries listed.")] = False,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Only those unused for so long.")
    ] = None,
    directory: Annotated[str | None, typer.Option("--dir", help="ALIGNMENT_CACHE or the user's by default.")] = None,
) -> None:
    """List the prepared rows kept on disk, or delete them; a run whose rows are missing prepares them again."""
    from alignment.data.cache import cache_lines

    print("\n".join(cache_lines(directory, clear=clear, older_than=older_than)))


@inspect.command("attention")
def inspect_attention(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Input text; may be given several times.")],
    target: Annotated[Texts, typer.Option(help="Decoder inputs of an encoder-decoder; else what it generates.")] = None,
    output: Annotated[str, typer.Option(help="HTML file to write.")] = "attention.html",
    layers: Annotated[str | None, typer.Option(metavar="0,3", help="Layers to show, from 0; all by default.")] = None,
) -> None:
    """Write a page with the attention maps of every layer and head."""
    parts = None if layers is None else layers.split(",")
    if parts is not None and not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--layers {layers!r}: give numbers from 0 with commas between, such as 0,3")
    from alignment.analysis import write_attention

    numbers = None if parts is None else [int(part) for part in parts]
    print(write_attention(model, text, output, layers=numbers, targets=target or []))


@inspect.command("probe")
def inspect_probe(
    model: Model,
    data: Annotated[str, typer.Option(metavar="FILE", help="Rows with text and label, or with words and labels.")],
    evaluation: Annotated[str | None, typer.Option(help="Held-out rows; else a fifth of FILE's.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Words have labels: columns words, labels.")] = False,
    pooling: Annotated[
        Literal["first", "last", "mean"] | None,
        typer.Option(help="A text's state: of its first or last token, or the mean."),
    ] = None,
    columns: Annotated[Texts, typer.Option(metavar="OURS=THEIRS", help="Our name of a column = the file's.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=10, help="The most rows read of each file.")] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens per row; longer rows are cut.")] = 512,
    output: Annotated[
        str, typer.Option(help="HTML file to write; the results stand beside it as JSON.")
    ] = "probe.html",
) -> None:
    """Fit linear probes on every layer, with a control task, and write a page with their held-out accuracy."""
    if words and pooling is not None:
        raise UserError("--pooling is for texts, and with --words each word's own state is read; leave it out")
    from alignment.analysis import write_probe
    from alignment.data.config import DataConfig

    rows = DataConfig(
        train=data,
        evaluation=evaluation,
        evaluation_share=None if evaluation else 0.2,
        columns=_named(columns),
        max_rows=max_rows,
        max_length=max_length,
    )
    print(write_probe(model, rows, output, words=words, pooling=pooling))


@inspect.command("saliency")
def inspect_saliency(
    model: Model,
    text: Annotated[Texts, typer.Option(help="Input text; may be given several times.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Rows of prompts, texts or messages.")] = None,
    target: Annotated[
        Texts,
        typer.Option(help="Continuation, response (reward model) or class; else what the model finds most probable."),
    ] = None,
    drop: Annotated[
        Literal["word", "sentence", "turn"], typer.Option(help="Parts that are left out, one at a time.")
    ] = "word",
    baseline: Annotated[
        str, typer.Option(help="zero, or a token whose vector stands for every token, such as the padding token.")
    ] = "zero",
    output: Annotated[
        str, typer.Option(help="HTML file to write; the numbers stand beside it as JSON.")
    ] = "saliency.html",
) -> None:
    """Write a page with each token's share in a model's answer: integrated gradients, gradient x input, ablation."""
    from alignment.analysis import write_saliency
    from alignment.data.rows.read import read_rows

    rows: list[Any] = read_rows(prompts, "prompts")[0] if prompts else []
    inputs = [*(text or []), *(row.prompt for row in rows)]
    print(write_saliency(model, inputs, output, targets=target or [], baseline=baseline, unit=drop))


@inspect.command("lens")
def inspect_lens(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Input text; may be given several times.")],
    top: Annotated[int, typer.Option(min=1, help="Tokens per layer and position.")] = 5,
    output: Annotated[str, typer.Option(help="HTML file to write; the numbers stand beside it as JSON.")] = "lens.html",
) -> None:
    """Write a page with the tokens that each layer's state would predict (logit lens)."""
    from alignment.analysis import write_lens

    print(write_lens(model, text, output, top=top))


@app.command()
def schema(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="As a recipe names it: sft, reward_eval.")],
) -> None:
    """Print the JSON schema of a stage's config, for editors."""
    from alignment.config.schema import packaged_schema
    from alignment.errors import suggest
    from alignment.pipeline.stages import STAGES

    if stage not in STAGES:
        raise UserError(f"{stage}: there is no such stage; {suggest(stage, STAGES)}")
    print(json.dumps(packaged_schema(stage), indent=2))


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of runs.")] = "runs",
    as_json: Json = False,
) -> None:
    """List the training runs below a folder: state, last metrics, and the settings in which runs of a stage differ."""
    from alignment.commands import runs as listing

    summaries, problems = listing.read_runs(Path(folder))
    if as_json:
        shown = {"runs": [vars(run) for run in summaries], "differences": listing.setting_differences(summaries)}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    elif summaries:
        listing.print_runs(summaries)
    raise_all(problems)


@app.command()
def doctor(
    run: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of a run: what went wrong in it.")] = None,
    as_json: Json = False,
) -> None:
    """Versions, devices and backends; with --run the likely causes of a run's failures, and settings to try."""
    if run is None:
        from alignment.commands.doctor import examine

        if as_json:
            raise UserError("--json goes with --run DIR")
        return print("\n".join(examine()))
    from alignment.reports.diagnosis import diagnose, report_json, report_lines
    from alignment.reports.run_log import read_run_log

    log = read_run_log(run)
    if as_json:
        print(json.dumps(report_json(run, log, diagnose(log)), indent=2, ensure_ascii=False))
    else:
        width = max(60, min(120, shutil.get_terminal_size().columns - 1))
        print("\n".join(report_lines(run, log, diagnose(log), width)))


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Directories of training runs or of `evaluate winrate`.")
    ],
    output: Annotated[str, typer.Option(metavar="FILE", help="HTML file to write.")] = "report.html",
) -> None:
    """Write a page on a run, or on several side by side: the settings that differ, and which one is better."""
    from alignment.reports.comparison import write_comparison

    print(write_comparison([Path(run) for run in runs], Path(output)))


# The process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done; 2 the user's input is wrong; 130 and 143 stopped by SIGINT and SIGTERM; 1 anything else.
    """
    # No two micro-batches have one shape: without it a GPU's allocator loses a tenth of the memory between blocks.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [*(["--debug"] if debug else []), *(argument for argument in arguments if argument != "--debug")]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)
    escape_controls()
    try:
        return int(app(args=arguments, standalone_mode=False, prog_name="alignment") or 0)
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            traceback.print_exc()
        return explain(error, debug=debug)


def escape_controls() -> None:
    """Show control characters in what is printed from now on as escapes; colors and lines that are written anew stay.

    A text of a stranger (a row, a key, a template, a model's reply) could clear the screen or write the clipboard.
    """
    forced = any(map(os.environ.get, ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")))
    for stream in (sys.stdout, sys.stderr):
        kept = r"\A\r|\x1b\[K\r?|\x1b\[[\d;]*m" if stream.isatty() or forced else r"\A\r"
        if not isinstance(stream.write, partial):  # since an earlier call
            stream.write = partial(_write_shown, stream.write, re.compile(rf"({kept})|[\0-\x08\x0b-\x1f\x7f-\x9f]"))


def _write_shown(write: Callable[[str], int], control: re.Pattern[str], text: str) -> int:
    return write(control.sub(lambda match: match[1] or f"\\u{ord(match[0]):04x}", text))


def terminate(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM: leave through every `finally`; a training loop saves a checkpoint before."""
    raise SystemExit(128 + number)


def explain(error: Any, *, debug: bool) -> int:
    """Print on standard error what went wrong, of several processes once with the rank, and return the exit code."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: usage
        error.show()
        if hint := getattr(error, "ctx", None) and usage_hint(error, error.ctx):
            print(hint, file=sys.stderr)
        if (unknown := re.match(r"No such command '(.+?)'\.", str(error))) and (command := command_of(unknown[1])):
            print(f"{unknown[1]} is run by `{command}`", file=sys.stderr)
        return int(error.exit_code)
    text = str(error)
    code = 2
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        text = f"{name[:40]}...: there is no such file: a name of {len(name):,} characters is too long for one"
    elif not isinstance(error, UserError):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        code = 1
        if type(error).__name__ == "OutOfMemoryError":
            text += (
                "\nlower training.micro_batch_tokens (it changes no result), or set "
                "training.gradient_checkpointing=true"
            )
        text += "" if debug else "\nrun again with --debug for the traceback"
    rank = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from alignment.training.distributed import is_first_to_report

        if not is_first_to_report(text):
            return code
        rank = f"rank {os.environ.get('RANK', '0')}: "
    print(f"error: {rank}{text}", file=sys.stderr)
    return code


def usage_hint(error: Exception, context: typer.Context) -> str:
    """The way out of an option that is a setting, and of a config in the place of a command; '' where it is neither."""
    takes_settings = any(parameter.name == "overrides" for parameter in context.command.params)
    if takes_settings and type(error).__name__ == "NoSuchOption":
        from alignment.config.load import key_here
        from alignment.pipeline.stages import find_stage

        name = str(vars(error)["option_name"]).lstrip("-").replace("-", "_")
        hint = context.obj and key_here(find_stage(context.obj)[0], name)
        return f"settings are given as key=value, without dashes: {hint or f'write {name}=VALUE'}"
    commands = getattr(context.command, "commands", ())
    if commands and context.parent is not None:
        return f"one of these comes first: {', '.join(commands)}"
    return ""


def command_of(method: str) -> str:
    """The command that runs a method which another library has as a command of its own; empty where there is none."""
    from alignment.algorithms.ppo.config import Advantages
    from alignment.losses.preference_table import LOSSES

    if method in get_args(Advantages):
        return f"alignment ppo CONFIG advantages={method}"
    return f"alignment dpo CONFIG loss={method}" if method in LOSSES else ""

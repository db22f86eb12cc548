"""`--dry-run` of a training stage: its plan, and all that it does before its first update, whose rows it shows.

The stage itself runs, so that nothing it checks is left out: it reads its data and loads its models, in one process. It
writes to a temporary directory. What would take long or touch others before the first update is off: trackers, servers
that sample, and log-probabilities of a reference computed for all rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.pretrain import Causal, PretrainConfig, find_tokenizer
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.runs import to_dict
from alignment.algorithms.sft import SFTConfig
from alignment.commands.plan import plan_config, plan_lines
from alignment.data.batches import Example
from alignment.data.doctor import show_example
from alignment.data.pretraining.corruption import SeededRow
from alignment.data.tasks import TaskExample, add_gpt1_tokens
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import load_tokenizer
from alignment.pipeline.stages import with_micro_batch
from alignment.planning.plan import require_fit
from alignment.planning.stages import StageConfig
from alignment.settings import deferred_checks
from alignment.training.distributed import launched_size
from alignment.training.run.directory import Run, check_trackers, dry_run
from alignment.training.run.lineage import refuse_other_run, without_runtime_keys

OFF = {"servers": None, "reference_log_probs": "compute", "reference_cache": None}  # before the first update
MFU = 0.4  # as the command `plan` takes it
SHOWN = 3  # rows of the first update


def print_plan(
    stage: str, source: str, overrides: Sequence[str], *, gpus: int | None = None, launch: str | None = None
) -> None:
    """Print what the run will hold on each device and how long it is; UserError where it does not fit."""
    try:
        plan = plan_config(source, overrides, gpus=gpus, launch=launch, stage=stage)
    except UserError as error:  # a run may do what no plan is made of, and reports its own mistakes
        print(f"no plan: {error}\n")
    else:
        print("\n".join(plan_lines(plan, MFU)), end="\n\n", flush=True)
        require_fit(plan, source)


def check_stage(stage: str, run: Callable[[StageConfig], Path], config: StageConfig) -> None:
    """Run a stage up to its first update and print the rows of that update; its output is neither made nor changed."""
    if launched_size() > 1:
        raise UserError("--dry-run is for one process; give --gpus and --launch to it for the plan of several")
    check_trackers(config.training.trackers, to_dict(config.training.tracking))

    def show(opened: Run, rows: Sequence[object]) -> None:
        settings = to_dict(config)
        del settings["training"]["again"]
        identity = opened.identity | {"config": without_runtime_keys(settings)}
        if refuse_other_run(Path(config.output), stage, identity) and not config.training.again:
            print(f"{config.output}: this run is finished; give --again to repeat it\n")
        print("\n".join(describe_rows(rows, config)))

    with TemporaryDirectory() as folder, dry_run(show):
        changes = {field.name: OFF[field.name] for field in fields(config) if field.name in OFF}
        with deferred_checks():  # what is off may go with what is not
            training = replace(config.training, trackers=[], again=False)
            elsewhere = replace(config, output=folder, training=training, **changes)
        run(with_micro_batch(elsewhere))
    print(f"\ndry run: nothing was trained or written to {config.output}")


def describe_rows(rows: Sequence[object], config: StageConfig) -> Iterator[str]:
    """The first rows of an update as text, with what counts in the loss."""
    tokenizer = tokenizer_of(config)
    counts_all = isinstance(config, SFTConfig) and config.loss_on == "all"
    yield f"first update: {len(rows)} rows, of which {min(SHOWN, len(rows))} are shown; {loss_remark(config)}"
    for row in rows[:SHOWN]:
        example = row.row if isinstance(row, SeededRow) else row
        if isinstance(example, TaskExample):
            yield f"{example.row_id}, labels {example.labels}"
            yield from (f"  {tokenizer.decode(ids)!r}" for ids in example.documents)
        elif isinstance(example, Example):
            whole = [[False] + [True] * (len(ids) - 1) for ids in example.documents]
            yield show_example(replace(example, masks=whole) if counts_all else example, tokenizer)


def loss_remark(config: StageConfig) -> str:
    """A remark on what counts in the loss of a stage."""
    if isinstance(config, SamplingSettings):
        return "they are prompts: the tokens of sampled responses count"
    if isinstance(config, FinetuneConfig):
        return "their labels count"
    if isinstance(config, PretrainConfig) and not isinstance(config.objective, Causal):
        return f"the objective {config.objective.kind} draws in each epoch anew which tokens it takes from them"
    return "[counts] is trained on, the rest is context"


def tokenizer_of(config: StageConfig) -> Tokenizer:
    """The tokenizer that a stage reads its rows with."""
    if isinstance(config, PretrainConfig):
        return find_tokenizer(config)
    if isinstance(config, FinetuneConfig):
        return add_gpt1_tokens(load_tokenizer(config.tokenizer or config.policy or ""))
    new = {key: getattr(config, key, ()) for key in ("add_tokens", "add_special_tokens")}
    return load_tokenizer(config.policy, config.chat_template, **new)

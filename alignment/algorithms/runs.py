"""Frame of a training run: its directory, its rows, their order. Networks are in policies.py, the loop in training."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn

from alignment.data.batches import Example, TokenizedRow, collate_for_encoder_decoder
from alignment.data.config import NO_STREAMING, DataConfig
from alignment.data.prepare import Preparation, preparation_of, prepare_with
from alignment.data.rows.files import source_files
from alignment.data.rows.read import NO_EFFECT
from alignment.data.rows.records import Kind
from alignment.data.stream import Stream, describe_mixture, source_shares, stream_of
from alignment.data.table import Rows, check_findings, column_of, describe_cache
from alignment.data.tokenize import PLAIN_PROMPT
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, without_secrets
from alignment.files import write_json
from alignment.loading import find_directory
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import ExternalSeq2SeqModel
from alignment.models.model import Model, check_row_lengths, start_token_of
from alignment.models.quantization import require_bitsandbytes
from alignment.models.weight_bytes import describe_weights
from alignment.models.weights_config import WeightsConfig, set_up_device
from alignment.training import Collate, Engine, OptimConfig, Run, TrainingConfig
from alignment.training.distributed import (
    compare_checkpoints,
    compare_rows,
    compare_start,
    launched_kind,
    propagate_failures,
)
from alignment.training.optim import check_optimizer
from alignment.training.result import NO_EVALUATION
from alignment.training.terms import Sources

if TYPE_CHECKING:
    from alignment.data.streaming import StreamedOrder

Row = TypeVar("Row", bound=TokenizedRow)


class RunConfig(Protocol):
    """The settings that every training stage has."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def output(self) -> str: ...

    @property
    def optim(self) -> OptimConfig: ...

    @property
    def training(self) -> TrainingConfig: ...


@contextmanager
def open_run(
    config: RunConfig,
    stage: str,
    parents: Sequence[str | None],
    *,
    value_optim: OptimConfig | None = None,
    files: Mapping[str, Sequence[Path]] | None = None,
) -> Iterator[Run]:
    """The run's directory with its config and lineage, closed whatever happens; torch's generators are seeded.

    Args:
        config: the stage's settings.
        stage: the stage's name in lineage.json.
        parents: checkpoints that the run starts from; None is skipped.
        value_optim: a second optimizer, of PPO's value model.
        files: further files that the result depends on, by the dotted key of the setting that names them.

    Raises:
        UserError: optimizer or quantization cannot run here, a parent is missing, or the directory belongs to another
            run; see `Run`.
    """
    names = [name for name in parents if name]
    with propagate_failures():
        check_data(config)
        compare_start(to_dict(config))
        for optim in (config.optim, value_optim or config.optim):
            check_optimizer(optim, launched_kind())
        remark = set_up_device(config.training.precision)
        weights = getattr(config, "weights", None)
        require_bitsandbytes(weights.quantize if isinstance(weights, WeightsConfig) else None)
        if getattr(config, "cuda_graphs", False) and not torch.cuda.is_available():
            raise UserError("cuda_graphs: there is no GPU that has them; set it to false")
        compare_checkpoints({name: find_directory(name) for name in names})
        torch.manual_seed(config.training.seed)  # new weights, dropout; data order and sampling have their own seeds
        settings = to_dict(config)
        again = settings["training"].pop("again")  # of this start, and no setting of the run
        files = row_files(config) | dict(files or {})
        with Run(config.output, settings, stage=stage, parents=names, files=files, again=again) as run:
            if remark is not None:
                run.note(remark)
            yield run


def row_files(config: object) -> dict[str, list[Path]]:
    """The files of rows that a config names by directories and globs, by dotted key."""
    return {
        f"{name}.{part}.{index}": files
        for name, data in vars(config).items()
        if isinstance(data, DataConfig)
        for part in ("train", "evaluation")
        for index, source in enumerate(data.sources(part) if getattr(data, part) else [])
        if not Path(source.source).is_file() and (files := source_files(source.source, str(source.split)))
    }


def check_data(config: RunConfig) -> None:
    """Refuse a run whose result its evaluation decides without rows for that, and streamed rows for so many epochs."""
    if config.training.best_metric is not None and not config.data.evaluates:
        raise UserError(NO_EVALUATION)
    if config.data.streaming and config.training.max_steps is None:
        raise UserError(
            "training.max_steps is missing: with data.streaming the number of rows is not known, so that "
            "training.epochs gives the run no end; set training.max_steps, or data.streaming=false"
        )


def to_dict(config: object) -> dict[str, Any]:
    """A config dataclass as plain values for YAML or JSON, keys that hold secrets left out."""
    return without_secrets(dataclasses.asdict(cast(Any, config)))


def read_split(
    config: RunConfig, kind: Kind, tokenizer: Tokenizer, run: Run, *, preparation: Preparation | None = None
) -> tuple[Rows, Rows | list[Any]]:
    """Training and held-out examples; rows that were dropped or cut are noted in the run."""
    read = partial(read_examples, config.data, kind, tokenizer, run)
    read = partial(read, preparation=preparation, chat_template=getattr(config, "chat_template", None))
    return read(), read("evaluation") if config.data.evaluates else []


def collate_for(model: Model, collate: Collate) -> Collate:
    """`collate` for a policy, whose prompts an encoder-decoder reads apart from the responses."""
    start = start_token_of(model)
    return collate if start is None else partial(collate_for_encoder_decoder, collate=collate, start_token=start)


def read_examples(
    data: DataConfig,
    kind: Kind,
    tokenizer: Tokenizer,
    run: Run,
    part: Literal["train", "evaluation"] = "train",
    *,
    preparation: Preparation | None = None,
    chat_template: str | None = None,
) -> Rows:
    """Examples of one part of the data; rows that were dropped or cut are noted in the run, and where they are kept."""
    preparation = preparation or preparation_of(kind)
    if data.streaming and part == "train":
        from alignment.data.streaming import open_stream

        examples, counts = open_stream(preparation, data, tokenizer)
    else:
        examples, counts = prepare_with(preparation, data, tokenizer, part=part)
    if chat_template is not None and counts.noted.get(PLAIN_PROMPT, 0) >= counts.kept:
        raise UserError(f"data.{part}: {NO_EFFECT.format(chat_template)}")
    for line in (*counts.lines(), *describe_cache(examples), *check_findings(examples, data.check)):
        run.note(f"{part} {kind}: {line}")
    compare_rows(f"data.{part}" if kind != "text" else f"pretrain.{part}", examples)
    return examples


def check_rows(model: nn.Module, examples: Sequence[Any], max_length: int, new_tokens: int = 0) -> None:
    """Refuse examples that do not fit the model's positions, before the first update and all at once."""
    lengths = np.minimum(column_of(examples, "longest"), max_length)
    if isinstance(model, Seq2SeqModel | ExternalSeq2SeqModel) and lengths.max(initial=0) > model.spec.max_positions:
        lengths = np.array([max(longest_sides(row)) for row in examples])
    ways = f"lower data.max_length (it is {max_length})" + (" or max_new_tokens" if new_tokens else "")
    ways += ", or take a model with a longer context"
    check_row_lengths(model, lengths, lambda row: examples[row].row_id, ways, new_tokens)


def longest_sides(row: Example) -> tuple[int, int]:
    """Tokens of a row's longest prompt, and of its longest response with a start token."""
    targets = [sum(mask) for mask in row.masks]
    return max(len(ids) - count for ids, count in zip(row.documents, targets, strict=True)), max(targets) + 1


def prepare_training(
    model: nn.Module, config: RunConfig, examples: Sequence[Row], run: Run
) -> tuple[Engine, "Stream[Row] | StreamedOrder[Row]"]:
    """The engine that trains a model over the run's updates, and the examples in the run's order.

    The types and bytes of the model's weights are noted in the run. The last batch of the last epoch may be smaller.
    """
    run.note(describe_weights(model))
    training = config.training
    if config.data.streaming:
        from alignment.data.streaming import Ranks, StreamedOrder, StreamedRows

        if not isinstance(examples, StreamedRows):
            raise UserError(NO_STREAMING)
        check = partial(check_rows, model, max_length=config.data.max_length)  # each window, when it is read
        size = training.batch_size
        seed = training.seed
        engine = Engine(model, config.optim, training, total_steps=training.steps(0))
        ranks = Ranks(engine.process_group.rank, engine.process_group.size, engine.process_group.gather_objects)
        streamed = StreamedOrder(examples, batch_size=size, seed=seed, ranks=ranks, check=check, note=run.note)
        return engine, streamed
    epochs = training.epochs if training.max_steps is None else None
    stream = stream_of(config.data, examples, batch_size=training.batch_size, seed=training.seed, epochs=epochs)
    total_steps = training.steps(stream.epoch_length)
    for line in describe_mixture(config.data, stream, total_steps):
        run.note(line)
    if run.is_main and config.data.logs_sources:
        write_json(run.output / "sources.json", source_shares(config.data, stream, total_steps))
    return Engine(model, config.optim, training, total_steps=total_steps), stream


def sources_of(data: DataConfig) -> Sources:
    """The data sources that metrics tell apart, as a data config names them."""
    return Sources(tuple(data.source_names) if data.logs_sources else ())

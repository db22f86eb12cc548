"""The length of a run: rows, updates, tokens, operations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.reward import RewardConfig
from alignment.algorithms.reward_losses import OBJECTIVES
from alignment.data.config import DataConfig
from alignment.data.examples import TokenizedRow
from alignment.data.mixture import epoch_rows, mixing_shares, tables_of
from alignment.data.prepare import prepare, prepare_with
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Demonstration, Record
from alignment.data.table import totals_of
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import load_tokenizer
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.planning.networks import parameter_count
from alignment.planning.stages import StageConfig, Workload
from alignment.reward_model.model import AdapterEnsemble
from alignment.training.backends.whole_weights import computing_types, whole_bytes

CHARACTERS = 4  # of a token: usual for English text and vocabularies of 30,000 tokens and more
RESPONSES = ("text", "response", "chosen", "rejected", "steps")  # one document each


@dataclass(frozen=True)
class Data:
    """The training rows, as far as they are known.

    Attributes:
        rows: rows of one epoch; None where the data is not there.
        examples: tokenized; None where the tokenizer is not there either.
        characters: of a row, on average, its prompt once for each response; None where the data is not there.
    """

    rows: int | None = None
    examples: Sequence[Any] | None = None
    characters: float | None = None


@dataclass(frozen=True)
class RunLength:
    """Attributes: rows (None: not known), updates (None: they depend on the rows), tokens and operations of the run.

    Attributes:
        counted: the source of the tokens: those of the data, its characters where the tokenizer is not there, or the most
            that `data.max_length` allows.
        decoding_bytes: weights that one device reads to sample, at most: each token of a batch of responses reads all.
    """

    rows: int | None
    steps: int | None
    tokens: float | None
    operations: float | None
    counted: Literal["tokens", "characters", "max_length"]
    decoding_bytes: float = 0.0


def read_training_rows(config: StageConfig, stage: Workload) -> Data:
    """The training rows of a config, where files and tokenizer are on this disk.

    Raises:
        UserError: bad rows, as the stage itself would find them.
    """
    if stage.kind is None or config.data.streaming:
        return Data()
    sources = config.data.sources("train")
    if not all(Path(source.source).is_file() for source in sources):
        return Data()
    if (tokenizer := _tokenizer(config)) is None:
        read = [read_rows(x, stage.kind, max_rows=config.data.max_rows, on_bad_row="skip")[0] for x in sources]
        sizes = list(map(len, read))
        characters = _mean(config.data, sizes, [mean_characters(rows) for rows in read])
        return Data(epoch_rows(config.data, sizes), characters=characters)
    if isinstance(config, RewardConfig):
        preparation = OBJECTIVES[config.loss].preparation_for(config.policy)
        examples, _ = prepare_with(preparation, config.data, tokenizer, part="train")
    else:
        examples, _ = prepare(config.data, stage.kind, tokenizer)
    return Data(epoch_rows(config.data, list(map(len, tables_of(examples)))), examples)


def _tokenizer(config: StageConfig) -> Tokenizer | None:
    """The run's tokenizer, where it is on this disk."""
    name = getattr(config, "tokenizer", None) or config.policy
    try:
        if not name or not Path(name).is_dir():
            return None
        new = {key: getattr(config, key, ()) for key in ("add_tokens", "add_special_tokens")}
        return load_tokenizer(name, getattr(config, "chat_template", None), **new)
    except UserError:
        return None


def _mean(data: DataConfig, sizes: Sequence[int], means: Sequence[float]) -> float:
    """The mean over the rows that a run sees, from the number of rows and the mean of each source."""
    shares = [size / sum(sizes) for size in sizes] if data.mixing == "concatenate" else mixing_shares(data, sizes)
    return float(sum(share * mean for share, mean in zip(shares, means, strict=True)))


def mean_tokens(data: DataConfig, examples: Sequence[TokenizedRow]) -> float:
    """Tokens of a row, on average over the rows that a run sees."""
    totals = [totals_of(table) for table in tables_of(examples)]
    return _mean(data, list(map(len, totals)), [float(each.mean()) for each in totals])


def mean_characters(records: Sequence[Record]) -> float:
    """Characters of a record, on average; its prompt counts once for each of its responses."""
    total = 0
    for record in records:
        if isinstance(record, Demonstration) and record.messages is not None:
            total += _characters(record.messages)
            continue
        responses = [_characters(getattr(record, name)) for name in RESPONSES if hasattr(record, name)]
        responses += map(len, getattr(record, "responses", ()))
        total += sum(responses) + max(1, len(responses)) * _characters(getattr(record, "prompt", ""))
    return total / len(records)


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, values))


def run_length(
    config: StageConfig, stage: Workload, data: Data, networks: Mapping[str, nn.Module], gpus: int
) -> RunLength:
    """Rows, updates, tokens and operations of a run.

    Args:
        networks: by role, as the plan built them.
        gpus: devices that share the rows of an update.
    """
    training = config.training
    known = training.max_steps is not None or data.rows is not None
    steps = training.steps(data.rows or 0) if known else None
    counted: Literal["tokens", "characters", "max_length"] = "max_length"
    of_row = 1 if stage.responses else stage.documents  # documents that the data holds of a row
    mean: float = config.data.max_length * of_row
    if data.examples:
        mean, counted = mean_tokens(config.data, data.examples), "tokens"
    elif data.characters is not None:
        mean, counted = min(data.characters / CHARACTERS, mean), "characters"
    if stage.responses:
        mean = (mean + getattr(config, "max_new_tokens", 0)) * stage.responses
    if steps is None:
        return RunLength(data.rows, None, None, None, counted)
    length = max(1, round(mean / (stage.responses or of_row)))
    operations = 0.0
    for role, network in stage.networks.items():
        forward, (total, trained) = forward_per_token(networks[role], length), parameter_count(networks[role])
        operations += forward * (network.forwards + network.updates * (2 + trained / total))
    tokens = steps * training.batch_size * mean
    decoding = steps * _decoding_bytes(config, stage, networks, gpus) if stage.responses else 0.0
    return RunLength(data.rows, steps, tokens, tokens * operations, counted, decoding)


def _decoding_bytes(config: StageConfig, stage: Workload, networks: Mapping[str, nn.Module], gpus: int) -> float:
    """Bytes of weights that a device reads to sample one update's responses, all as long as they may be."""
    responses = math.ceil(config.training.batch_size / gpus) * stage.responses
    assert isinstance(config, OnlineDPOConfig | PPOConfig)
    passes = math.ceil(responses / config.micro_rollout_batch_size) * config.max_new_tokens
    return float(passes * whole_bytes(computing_types(networks["policy"], config.training.precision), lambda _: True))


def forward_per_token(model: nn.Module, length: int) -> float:
    """Operations of a forward per token: of matrices and attention where they can be counted, else twice the weights.

    An adapter's own matrices come on top.
    """
    if isinstance(model, AdapterEnsemble):  # each member runs the base by itself
        return sum(forward_per_token(member, length) for member in model.models)
    adapters = sum(x.numel() for name, x in model.named_parameters() if "lora_" in name)
    if isinstance(model.spec, TransformerSpec) and is_counted(model.spec):
        return forward_operations(model.spec, length) + 2 * adapters
    return 2.0 * parameter_count(model)[0]

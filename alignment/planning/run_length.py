"""The length of a run: rows, updates, tokens, operations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.reward import RewardConfig
from alignment.algorithms.reward_losses import OBJECTIVES
from alignment.data.config import DataConfig
from alignment.data.examples import TokenizedRow
from alignment.data.mixture import epoch_rows, mixing_shares, tables_of
from alignment.data.prepare import prepare, prepare_with
from alignment.data.table import totals_of
from alignment.loading import load_tokenizer
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.planning.networks import parameter_count
from alignment.planning.stages import StageConfig, Workload
from alignment.reward_model.ensemble import AdapterEnsemble
from alignment.training.backends.base import computing_types, whole_bytes


@dataclass(frozen=True)
class Data:
    """The training rows, as far as they are known.

    Attributes:
        rows: rows of one epoch; None where the data or the tokenizer is not there.
        examples: tokenized.
    """

    rows: int | None = None
    examples: Sequence[Any] | None = None


@dataclass(frozen=True)
class RunLength:
    """The length of a run; None for what depends on rows that are not known.

    Attributes:
        counted: the tokens are those of the data, not the most that `data.max_length` allows.
        decoding_bytes: weights that one device reads to sample, at most: each token of a batch of responses reads all.
    """

    rows: int | None
    steps: int | None = None
    tokens: float | None = None
    operations: float | None = None
    counted: bool = False
    decoding_bytes: float = 0.0


def read_training_rows(config: StageConfig, stage: Workload) -> Data:
    """The training rows of a config, where files and tokenizer are on this disk."""
    name = getattr(config, "tokenizer", None) or config.policy
    files = [Path(source.source) for source in config.data.sources("train")]
    here = name and Path(name).is_dir() and all(file.is_file() for file in files)
    if stage.kind is None or config.data.streaming or not here:
        return Data()
    new = {key: getattr(config, key, ()) for key in ("add_tokens", "add_special_tokens")}
    tokenizer = load_tokenizer(str(name), getattr(config, "chat_template", None), **new)
    if isinstance(config, RewardConfig):
        preparation = OBJECTIVES[config.loss].preparation_for(config.policy)
        examples, _ = prepare_with(preparation, config.data, tokenizer, part="train")
    else:
        examples, _ = prepare(config.data, stage.kind, tokenizer)
    return Data(epoch_rows(config.data, list(map(len, tables_of(examples)))), examples)


def mean_tokens(data: DataConfig, examples: Sequence[TokenizedRow]) -> float:
    """Tokens of a row, on average over the rows that a run sees."""
    totals = [totals_of(table) for table in tables_of(examples)]
    sizes = list(map(len, totals))
    shares = [size / sum(sizes) for size in sizes] if data.mixing == "concatenate" else mixing_shares(data, sizes)
    return float(sum(share * each.mean() for share, each in zip(shares, totals, strict=True)))


def run_length(
    config: StageConfig, stage: Workload, data: Data, networks: Mapping[str, nn.Module], gpus: int
) -> RunLength:
    """Rows, updates, tokens and operations of a run.

    Args:
        networks: by role, as the plan built them.
        gpus: devices that share the rows of an update.
    """
    training = config.training
    if training.max_steps is None and data.rows is None:
        return RunLength(None)
    steps = training.steps(data.rows or 0)
    of_row = 1 if stage.responses else stage.documents  # documents that the data holds of a row
    mean: float = mean_tokens(config.data, data.examples) if data.examples else config.data.max_length * of_row
    if stage.responses:
        mean = (mean + getattr(config, "max_new_tokens", 0)) * stage.responses
    length = max(1, round(mean / (stage.responses or of_row)))
    operations = 0.0
    for role, network in stage.networks.items():
        forward, (total, trained) = forward_per_token(networks[role], length), parameter_count(networks[role])
        operations += forward * (network.forwards + network.updates * (2 + trained / total))
    tokens = steps * training.batch_size * mean
    decoding = steps * _decoding_bytes(config, stage, networks, gpus) if stage.responses else 0.0
    return RunLength(data.rows, steps, tokens, tokens * operations, bool(data.examples), decoding)


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

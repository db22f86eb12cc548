"""How long a run is: rows, updates, tokens, operations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.pretrain.pretrain import PretrainConfig
from alignment.algorithms.reward import RewardConfig
from alignment.algorithms.reward_losses import OBJECTIVES
from alignment.algorithms.sft import SFTConfig
from alignment.data.config import DataConfig
from alignment.data.examples import TokenizedRow
from alignment.data.mixture import epoch_rows, mixing_shares, tables_of
from alignment.data.prepare import prepare, prepare_with
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Demonstration, Kind, Record
from alignment.data.table import totals_of
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import load_tokenizer
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.planning.batches import RANKED
from alignment.planning.quantized_layers import QuantizedStandIn
from alignment.planning.stages import StageConfig
from alignment.reward_model.ensemble import AdapterEnsemble
from alignment.training.backends.whole_weights import computing_types, whole_bytes

CHARACTERS = 4  # of a token: usual for English text and vocabularies of 30,000 tokens and more
RESPONSES = ("text", "response", "chosen", "rejected", "steps")  # one document each
KINDS: dict[type, Kind] = {
    SFTConfig: "demonstrations", PPOConfig: "prompts", OnlineDPOConfig: "prompts", PretrainConfig: "text",
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """What is known of the training rows.

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
        counted: what tells the tokens: those of the data, its characters where the tokenizer is not there, or the most
            that `data.max_length` allows.
        decoding_bytes: weights that one device reads to sample, at most: each token of a batch of responses reads all.
    """

    rows: int | None
    steps: int | None
    tokens: float | None
    operations: float | None
    counted: Literal["tokens", "characters", "max_length"]
    decoding_bytes: float = 0.0


def read_training_rows(config: StageConfig) -> Data:
    """The training rows of a config, where files and tokenizer are on this disk.

    Raises:
        UserError: bad rows, as the stage itself would find them.
    """
    if isinstance(config, FinetuneConfig) or config.data.streaming:
        return Data()
    sources = config.data.sources("train")
    if not all(Path(source.source).is_file() for source in sources):
        return Data()
    kind = kind_of(config)
    assert kind is not None
    if (own := _tokenizer(config)) is None:
        if config.data.mixing == "concatenate":
            rows, _ = read_rows(sources, kind, max_rows=config.data.max_rows, on_bad_row="skip")
            return Data(len(rows), characters=mean_characters(rows))
        read = [read_rows(source, kind, on_bad_row="skip")[0] for source in sources]
        shares = mixing_shares(config.data, list(map(len, read)))
        characters = sum(share * mean_characters(rows) for share, rows in zip(shares, read, strict=True))
        return Data(epoch_rows(config.data, list(map(len, read))), characters=characters)
    if isinstance(config, RewardConfig):
        preparation = OBJECTIVES[config.loss].preparation_for(config.policy)
        examples, _ = prepare_with(preparation, config.data, own, part="train")
    else:
        examples, _ = prepare(config.data, kind, own)
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


def kind_of(config: StageConfig) -> Kind | None:
    """The kind of rows that a stage learns from; None of fine-tuning, whose tasks have rows of their own."""
    if isinstance(config, DPOConfig):
        return config.rows
    return OBJECTIVES[config.loss].kind if isinstance(config, RewardConfig) else KINDS.get(type(config))


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
    if isinstance(value, Mapping):
        return sum(_characters(item) for item in value.values())
    return sum(_characters(item) for item in value) if isinstance(value, list | tuple) else 0


def run_length(config: StageConfig, data: Data, networks: Mapping[str, nn.Module], gpus: int = 1) -> RunLength:
    """Rows, updates, tokens and operations of a run.

    Args:
        networks: by role, as the plan built them.
        gpus: devices that share the rows of an update.
    """
    training = config.training
    known = training.max_steps is not None or data.rows is not None
    steps = training.steps(data.rows or 0) if known else None
    sampled = config.max_new_tokens if isinstance(config, PPOConfig | OnlineDPOConfig) else 0
    sides = responses_per_row(config)
    rollout = isinstance(config, OnlineDPOConfig | PPOConfig)
    counted: Literal["tokens", "characters", "max_length"] = "max_length"
    mean: float = (config.data.max_length + sampled) * sides
    if data.examples:
        mean = (mean_tokens(config.data, data.examples) + sampled) * (sides if rollout else 1)
        counted = "tokens"
    elif data.characters is not None:
        row = data.characters / CHARACTERS / (1 if rollout else sides)
        mean = (min(row, config.data.max_length) + sampled) * sides
        counted = "characters"
    if steps is None:
        return RunLength(data.rows, None, None, None, counted)
    rows_seen = steps * training.batch_size
    tokens = rows_seen * mean
    operations = tokens * _operations(config, networks, max(1, round(mean / sides)))
    return RunLength(data.rows, steps, tokens, operations, counted, steps * _decoding_bytes(config, networks, gpus))


def _decoding_bytes(config: StageConfig, networks: Mapping[str, nn.Module], gpus: int) -> float:
    """Bytes of weights that a device reads to sample one update's responses, all as long as they may be."""
    if not isinstance(config, PPOConfig | OnlineDPOConfig):
        return 0.0
    responses = updates_share(config, gpus) * config.responses_per_prompt
    passes = math.ceil(responses / config.micro_rollout_batch_size) * config.max_new_tokens
    return float(passes * whole_bytes(computing_types(networks["policy"], config.training.precision), lambda _: True))


def mean_tokens(data: DataConfig, examples: Sequence[TokenizedRow]) -> float:
    """Tokens of a row, on average over the rows that a run sees."""
    if data.mixing == "concatenate":
        return float(totals_of(examples).mean())
    tables = tables_of(examples)
    shares = mixing_shares(data, list(map(len, tables)))
    return float(sum(share * totals_of(table).mean() for share, table in zip(shares, tables, strict=True)))


def responses_per_row(config: StageConfig) -> int:
    """Documents that a row of the stage holds; of a ranking a typical number."""
    if isinstance(config, OnlineDPOConfig | PPOConfig):
        return config.responses_per_prompt
    return {"comparisons": 2, "rankings": RANKED}.get(str(kind_of(config)), 1)


def _operations(config: StageConfig, networks: Mapping[str, nn.Module], length: int) -> float:
    """Operations of the run per token of its rows."""
    forward = {role: forward_per_token(model, length) for role, model in networks.items()}
    train = {role: train_per_token(model, forward[role]) for role, model in networks.items()}
    if isinstance(config, PPOConfig):
        reference = forward.get("reference", forward["policy"])
        sampled = forward["policy"]
        judged = sum(cost for role, cost in forward.items() if role.startswith("reward model"))
        scored = forward["policy"] + reference + forward.get("value model", 0.0) + judged
        return sampled + scored + config.epochs * (train["policy"] + train.get("value model", 0.0))
    if isinstance(config, OnlineDPOConfig):
        reference = forward.get("reference", forward["policy"]) if config.holds_reference else 0.0
        paired = 2 / config.responses_per_prompt * config.epochs  # of the responses, learned from so often
        return forward["policy"] + reference + forward.get("reward model", 0.0) + paired * (train["policy"] + reference)
    if isinstance(config, DPOConfig):
        reference = forward.get("reference", forward["policy"]) if config.holds_reference else 0.0
        first = (
            forward["policy"] + reference
            if any(loss.spec.needs in ("kl", "shift", "order") for loss in config.losses)
            else 0.0
        )
        return train["policy"] + reference + first
    return train.get("policy", train.get("reward model", 0.0)) + forward.get("teacher", 0.0)


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


def train_per_token(model: nn.Module, forward: float) -> float:
    """Operations of forward and backward per token: 6 per trained weight, 4 per frozen one that gradients pass through."""
    total, trained = parameter_count(model)
    return forward * (2 + trained / total) if total else 0.0


def parameter_count(model: nn.Module) -> tuple[int, int]:
    """Weights of a model, each once, and how many of them train; a quantized matrix counts its own weights."""
    total = trained = 0
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            number = parameter.numel()
            if isinstance(module, QuantizedStandIn) and name == "weight":
                number = module.in_features * module.out_features
            total += number
            trained += number if parameter.requires_grad else 0
    return total, trained


def updates_share(config: StageConfig, gpus: int) -> int:
    """Rows of one update on one device."""
    return math.ceil(config.training.batch_size / gpus)

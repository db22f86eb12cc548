"""Reward models, decoders and encoders, one or an ensemble: loaded, measured on reference samples, and saved."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from alignment.adapters.files import member_folder, write_members
from alignment.adapters.specs import AdapterSpec, MergeableSpec
from alignment.algorithms.policies import Policy, load_value_model, save_output, save_policy, start_device
from alignment.data.batches import Example
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.errors import UserError
from alignment.loading import Checkpoint, set_special_tokens
from alignment.models.encoder_decoder import DocumentClassifier
from alignment.models.heads import score_labels
from alignment.models.model import evaluation_mode
from alignment.models.quantization import write_quantization
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model.model import (
    AdapterEnsemble,
    Calibration,
    Canaries,
    Encoded,
    RewardModel,
    canary_ids,
    fit_calibration,
    score_encoded,
    weights_precision,
)
from alignment.settings import Settings
from alignment.training import Engine, TrainingConfig
from alignment.training.distributed import launched_kind

WriteFiles = Callable[[Path], None]


@dataclass(frozen=True)
class EnsembleConfig(Settings):
    """Several reward models in one, whose mean is the score and whose deviation tells how sure it is.

    Attributes:
        members: number of them, k.
        kind: heads: k rows of one head on one trunk, which all of them train; cheap, but off the training data the
            members agree more than models of their own would. adapters: k adapters (of `adapter`'s kind), with a head
            each, over one frozen base.
        bootstrap: each member learns from rows of its own: it counts each row a Poisson(1) number of times, fixed by
            (training.seed, member, row id). Without it members differ by their initial weights alone.

    Source: Coste et al. 2023, arXiv:2310.02743; adapters: Zhai et al. 2023, arXiv:2401.00243.
    """

    members: Annotated[int, Ge(2)] = 4
    kind: Literal["heads", "adapters"] = "heads"
    bootstrap: bool = False


def load_reward_start(
    start: Checkpoint,
    adapter: AdapterSpec | None,
    tokenizer: Tokenizer,
    output: str,
    *,
    weights: WeightsConfig,
    ensemble: EnsembleConfig | None = None,
) -> Policy:
    """A reward model with a new head, from a decoder's or an encoder's checkpoint."""
    members = 1 if ensemble is None else ensemble.members
    if start.architecture != "decoder":
        if ensemble is not None and ensemble.kind == "adapters":
            raise UserError(f"{start.source}: an encoder's adapters are saved merged; take ensemble.kind=heads")
        return _encoder_start(start, adapter, tokenizer, weights, members=members)
    load = partial(load_value_model, start, adapter, tokenizer, output, head="normal", bases=SharedWeights(weights))
    if ensemble is None or ensemble.kind == "heads":
        return load(members=members)
    if launched_kind() in ("fsdp2", "deepspeed"):
        raise UserError(
            "ensemble.kind=adapters trains on one process or on replicas; launch it without sharding, or take "
            "ensemble.kind=heads"
        )
    policies = [load() for _ in range(members)]
    return replace(policies[0], model=AdapterEnsemble([policy.model for policy in policies]))


def _encoder_start(
    start: Checkpoint, adapter: AdapterSpec | None, tokenizer: Tokenizer, weights: WeightsConfig, *, members: int
) -> Policy:
    """An encoder with a new score head; an adapter's changes are merged into the weights when it is saved."""
    from alignment.algorithms.finetune.model import freeze
    from alignment.models.frozen_weights import store_frozen
    from alignment.models.huggingface.checkpoint import load_pretrained

    if start.is_adapter:
        raise UserError(f"{start.source}: an adapter; `alignment export` merges it into an encoder to start from")
    if adapter is not None and not isinstance(adapter, MergeableSpec):
        kind = adapter.kind
        raise UserError(f"{start.source}: an encoder's reward model trains with lora, dora or ia3, not with {kind}")
    model = load_pretrained(
        start.directory,
        "scalar",
        torch.float32 if adapter is None else None,
        start_device(adapter, weights),
        new_head=True,
        config=score_labels(members),
    )
    check_vocabulary(tokenizer, model.spec.vocabulary)
    if adapter is not None:
        store_frozen(model, weights)
    return Policy(freeze(model, False, adapter), tokenizer, adapter, source=start.source)


def save_reward_model(
    engine: Engine, policy: Policy, output: str | Path, max_shard_size: str, extra_files: WriteFiles
) -> Path:
    """Write `output/model` and return it; every rank must call it."""
    model = engine.backend.unwrapped
    if isinstance(model, AdapterEnsemble):
        return _save_ensemble(engine, policy, model, output, extra_files=extra_files)
    if isinstance(model, DocumentClassifier) and policy.adapter is not None:
        from alignment.algorithms.finetune.model import save_classifier

        set_special_tokens(model, policy.tokenizer)
        return save_classifier(engine, policy.tokenizer, output, max_shard_size=max_shard_size, extra_files=extra_files)
    return save_policy(engine, policy, output, max_shard_size=max_shard_size, extra_files=extra_files)


def _save_ensemble(
    engine: Engine, policy: Policy, ensemble: AdapterEnsemble, output: str | Path, *, extra_files: WriteFiles
) -> Path:
    """The members as adapters in a folder each."""
    from alignment.adapters.attach import adapter_state, save_adapter

    members: list[Any] = list(ensemble.members)
    names = {f"members.{i}.{name}": i for i, member in enumerate(members) for name in adapter_state(member)}

    def write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        states: list[dict[str, Tensor]] = [{} for _ in members]
        for name, tensor in tensors:
            index = names[name]
            states[index][name.removeprefix(f"members.{index}.")] = tensor
        for index, (member, state) in enumerate(zip(members, states, strict=True)):
            path = folder / member_folder(index)
            save_adapter(member, path, base=policy.base, revision=policy.revision, state=state)
            write_quantization(member, path)
        extra_files(folder)
        write_members(folder, len(members))

    return save_output(engine, output, policy.tokenizer, list(names), write)


@dataclass(frozen=True)
class NormalizeConfig(Settings):
    """Reference samples whose scores are to have mean 0 and deviation 1. The gain and bias are kept beside the weights.

    They are responses of the held-out rows, or of the training rows where none are held out.

    Attributes:
        samples: maximum number of reference samples.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    samples: Annotated[int, Ge(2)] = 256


def reference_texts(config: NormalizeConfig, rows: Sequence[Example]) -> list[Encoded]:
    """The reference samples as the reward model reads them.

    Not every row of a long data set is read, and those that are lie evenly over it: it may be sorted.
    """
    wanted = min(len(rows), -(-config.samples // len(rows[0].documents)))
    sampled_rows = [rows[index * len(rows) // wanted] for index in range(wanted)]
    # An encoder's segments are the masks of its texts.
    masked = [pair for row in sampled_rows for pair in zip(row.documents, row.masks, strict=True)]
    texts = [Encoded(ids, [int(second) for second in mask]) for ids, mask in masked]
    if len(texts) < 2:
        raise UserError(f"normalize: {len(texts)} reference sample(s); a deviation needs two")
    return texts[: config.samples]


def measure_reference(
    engine: Engine,
    policy: Policy,
    training: TrainingConfig,
    loss: str,
    references: list[Encoded] | None,
    *,
    theta: float | None = None,
) -> tuple[Canaries, Calibration]:
    """The canaries of the trained model in memory, and its calibration; a collective operation.

    Without references scores stay as they are; `theta` is the parameter of ties, where the loss has one.
    """
    calibration = Calibration()
    with evaluation_mode(engine.model):
        scores = scores_of(engine, canary_ids(RewardModel(policy.model, policy.tokenizer)), training)
        if references is not None:
            calibration = fit_calibration(scores_of(engine, references, training).mean(-1), "responses of the rows")
    precision = weights_precision(engine.backend.unwrapped)
    precision = "half" if precision == "float32" and training.precision == "bf16" else precision
    return Canaries(scores, precision, loss), replace(calibration, theta=theta)


def scores_of(engine: Engine, texts: Sequence[Encoded], training: TrainingConfig) -> Tensor:
    """Raw scores by the model in training, [n, k]; every rank computes all of them."""
    with torch.no_grad(), engine.backend.autocast():
        if not isinstance(engine.backend.unwrapped, DocumentClassifier):
            texts = [Encoded(text.ids, [0] * len(text.ids)) for text in texts]
        return score_encoded(engine.model, texts, training.tokens_per_forward)


def write_reference(canaries: Canaries, calibration: Calibration, directory: Path) -> None:
    """Write both beside the weights."""
    canaries.write(directory)
    calibration.write(directory)

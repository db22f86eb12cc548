"""Adapter directories in peft's format, read and written."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment.adapters.attach import KINDS, Kind, Loaded, kinds_attached, train_head
from alignment.adapters.files import BASE, CONFIG, SPEC, WEIGHTS, is_scalar_adapter, read_adapter_config
from alignment.adapters.layer_names import AnyModel
from alignment.adapters.specs import AdapterSpec
from alignment.errors import UserError, raise_all
from alignment.files import write_atomic, write_json
from alignment.models.classifiers import ScalarModel, SequenceClassifier, TokenClassifier
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import (
    ExternalClassifier,
    ExternalLanguageModel,
    ExternalScalarModel,
    ExternalSeq2SeqModel,
)
from alignment.models.language_model import LanguageModel
from alignment.models.safetensors_files import read_safetensors


def read_spec(directory: Path) -> AdapterSpec:
    """The settings of a directory's adapter.

    Raises:
        UserError: the kind or an option of the adapter is not supported.
    """
    config = read_adapter_config(directory)
    return _kind_of_file(config, directory).read_spec(config, Path(directory))


def _kind_of_file(config: Mapping[str, object], directory: Path) -> Kind:
    """The kind of adapter that a directory holds.

    Raises:
        UserError: one that is not supported.
    """
    for kind in KINDS.values():
        if kind.peft_type == config.get("peft_type"):
            return kind
    raise UserError(
        f"{directory}/{CONFIG}: peft_type {config.get('peft_type')!r} is not one of those supported: {', '.join(KINDS)}"
    )


def adapter_state(model: AnyModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's weights by our names, with the score head of a scalar model.

    Args:
        model: a model with its adapter attached.
        state: the full state dict where the model is sharded; None: the model's own.
    """
    whole: dict[str, Tensor] = model.state_dict() if state is None else state
    kinds, head = kinds_attached(model), head_name(model)
    return {name: value for name, value in whole.items() if name == head or any(kind.holds(name) for kind in kinds)}


def head_name(model: AnyModel) -> str | None:
    """The name of the score head's weight in a scalar model's state dict; None for other models."""
    if isinstance(model, ScalarModel):
        return "head.weight"
    return "inner.score.weight" if isinstance(model, ExternalScalarModel) else None


def save_adapter(
    model: AnyModel,
    directory: Path,
    *,
    base: str | None,
    revision: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write an adapter that peft's and transformers' Auto classes open by its directory, and that gives the same model.

    Args:
        model: a model with its adapter attached.
        directory: directory to write.
        base: directory or Hub name of the frozen weights. A directory is written as an absolute path, since peft reads
            it from the working directory, and relative to the adapter's in our own settings, so that both can be moved
            together.
        revision: commit of a base model on the Hub.
        state: the full state dict where the model is sharded; None: the model's own.

    Raises:
        ValueError: the model has no adapter, or several kinds of them.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    [kind] = kinds_attached(model)
    state = adapter_state(model, state)
    tensors, config = kind.to_file(model, state)
    settings = kind.own_settings(model, state)
    if base is not None and Path(base).is_dir():
        base = str(Path(base).resolve())
        settings = {**settings, BASE: Path(os.path.relpath(base, directory.resolve())).as_posix()}
    if settings:
        write_json(directory / SPEC, settings)
    if (head := head_name(model)) is not None:
        tensors[f"{kind.before_head}score.weight"] = state[head]
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config.task_type, config.base_model_name_or_path, config.revision = _task_type(model), base, revision
    config.inference_mode = True
    config.save_pretrained(str(directory))


def load_adapter(model: Loaded, directory: Path, *, with_head: bool = True) -> Loaded:
    """Attach the adapter of a directory to its base model and return the model.

    Args:
        model: the base model. A policy's adapter also fits a scalar model, which then keeps its score head.
        directory: an adapter in peft's format.
        with_head: load the score head of a reward model's adapter; False keeps that of `model`.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or the adapter does not fit the model.
    """
    directory = Path(directory)
    if not (directory / WEIGHTS).is_file():
        raise UserError(f"{directory}: no {WEIGHTS}; only safetensors adapters are read")
    spec, tensors = read_spec(directory), read_safetensors(directory / WEIGHTS)
    wanted = KINDS[spec.kind].from_file(model, spec, tensors, directory)  # pyright: ignore[reportArgumentType]
    train_head(model)
    if (head := head_name(model)) is not None and is_scalar_adapter(directory):
        score = next((name for name in tensors if name.endswith("score.weight")), "")
        weight = tensors.pop(score, None)
        wanted |= {head: weight} if with_head else {}
    _load_strictly(model, wanted, tensors, directory)
    return model


def _load_strictly(
    model: AnyModel, wanted: Mapping[str, Tensor | None], unexpected: Mapping[str, Tensor], directory: Path
) -> None:
    """Copy tensors into the model; any missing, unexpected or misshapen tensor is an error."""
    parameters = dict(model.named_parameters())
    problems = [
        f"{directory}/{WEIGHTS}: tensor for {name} is missing" for name, value in wanted.items() if value is None
    ]
    problems += [f"{directory}/{WEIGHTS}: tensor {name} belongs nowhere in this model" for name in unexpected]
    problems += [
        f"{directory}/{WEIGHTS}: {name} has shape {list(value.shape)}, the model wants {list(parameters[name].shape)}"
        for name, value in wanted.items()
        if value is not None and value.shape != parameters[name].shape
    ]
    raise_all(problems)
    with torch.no_grad():
        for name, value in wanted.items():
            assert value is not None
            parameters[name].copy_(value)


def _task_type(model: AnyModel) -> str:
    """peft's `task_type` of a model; it has none for masked language models, but this one runs them."""
    types = {
        "SEQ_2_SEQ_LM": (Seq2SeqModel, ExternalSeq2SeqModel),
        "SEQ_CLS": (ScalarModel, ExternalScalarModel, SequenceClassifier),
        "CAUSAL_LM": (LanguageModel, ExternalLanguageModel),
    }
    if isinstance(model, TokenClassifier | ExternalClassifier):
        return {"tokens": "TOKEN_CLS", "span": "QUESTION_ANS", "sequence": "SEQ_CLS"}[model.task]
    return next((name for name, classes in types.items() if isinstance(model, classes)), "FEATURE_EXTRACTION")

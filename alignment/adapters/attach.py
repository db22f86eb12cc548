"""Attach an adapter to a model, switch it off for a while, merge it into the weights, read and write its directory."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.adapters.bottleneck import BottleneckKind
from alignment.adapters.extras import InjectedKind, State, changed, check_fits_base, plain_name, replace_extras
from alignment.adapters.files import BASE, CONFIG, SPEC, WEIGHTS, is_scalar_adapter, read_adapter_config
from alignment.adapters.ia3 import IA3Kind
from alignment.adapters.layer_names import AnyModel
from alignment.adapters.lora import LoRAKind, lora_updates
from alignment.adapters.specs import AdapterSpec, LoRASpec, PrefixSpec, PromptSpec
from alignment.adapters.virtual_tokens import PrefixKind, PromptKind
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.files import write_atomic, write_json
from alignment.models.classifiers import ScalarModel, SequenceClassifier, TokenClassifier
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import (
    ExternalClassifier,
    ExternalLanguageModel,
    ExternalModel,
    ExternalScalarModel,
    ExternalSeq2SeqModel,
)
from alignment.models.heads import NO_LANGUAGE_MODEL
from alignment.models.language_model import LanguageModel
from alignment.models.native_model import NativeModel
from alignment.models.quantization import quantization_of, read_quantization
from alignment.models.safetensors_files import read_safetensors
from alignment.models.weights_config import Quantization

if TYPE_CHECKING:
    from alignment.models.row_adapters import RowAdapter

Loaded = TypeVar("Loaded", bound=NativeModel | ExternalModel)
Kind = LoRAKind | IA3Kind | PrefixKind | PromptKind | BottleneckKind
_lora = LoRAKind()
_ia3 = IA3Kind()
KINDS: dict[str, Kind] = {
    "lora": _lora,
    "dora": _lora,
    "ia3": _ia3,
    "prefix": PrefixKind(),
    "prompt": PromptKind(),
    "bottleneck": BottleneckKind(),
}
TASK_TYPES = {  # peft's; it has none for masked language models, but this one runs them
    "SEQ_2_SEQ_LM": (Seq2SeqModel, ExternalSeq2SeqModel),
    "SEQ_CLS": (ScalarModel, ExternalScalarModel, SequenceClassifier),
    "CAUSAL_LM": (LanguageModel, ExternalLanguageModel),
    "FEATURE_EXTRACTION": (nn.Module,),
}


def kinds_attached(model: AnyModel) -> list[Kind]:
    """The kinds of adapter that a model has."""
    return [kind for kind in dict.fromkeys(KINDS.values()) if kind.is_attached(model)]


def attach(model: Loaded, spec: AdapterSpec, *, tokenizer: Tokenizer | None = None) -> Loaded:
    """Freeze `model`, attach a new adapter and return the model; the score head of a scalar model stays trainable.

    A soft prompt that starts from a text needs the model's tokenizer.
    """
    kind = KINDS[spec.kind]
    options = {"tokenizer": tokenizer} if isinstance(spec, PromptSpec) else {}
    kind.attach(model, spec, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if isinstance(model, ScalarModel | ExternalScalarModel):
        model.head.requires_grad_(True)
    return model


def disabled(model: AnyModel) -> AbstractContextManager[None]:
    """Switch the model's adapter off within the block, also when the block raises."""
    return changed(change for kind in kinds_attached(model) for change in kind.changes_when_off(model))


def merge_adapter(model: Loaded) -> Loaded:
    """Merge a model's adapter into its weights and return the model."""
    if (quantize := quantization_of(model)) is not None:
        raise UserError(
            f"the adapter cannot be merged into weights in {quantize}, which would round its changes away; load the "
            "model without quantization, or merge with `alignment export`"
        )
    for kind in kinds_attached(model):
        if not isinstance(kind, LoRAKind | IA3Kind):
            raise UserError(kind.unmergeable)
        kind.merge(model)
    return model.requires_grad_(True)


def merged_state(model: nn.Module, state: State) -> State:
    """The state dict of a model with its LoRA, DoRA or (IA)^3 merged into the weights; the model stays as it is."""
    kinds = (_lora, _ia3)
    plain = {plain_name(name): value for name, value in state.items() if not any(kind.holds(name) for kind in kinds)}
    replace_extras(model, state, plain)  # first: the update of a tied head lies on the trained rows
    for kind in kinds:
        kind.put_into(model, state, plain)
    return plain


# Directories in peft's format


def read_spec(directory: Path) -> AdapterSpec:
    """The settings of a directory's adapter."""
    config = read_adapter_config(directory)
    kind = next((kind for kind in KINDS.values() if kind.peft_type == config.get("peft_type")), None)
    if kind is None:
        raise UserError(
            f"{directory}/{CONFIG}: peft_type {config.get('peft_type')!r} is not one of those supported: "
            f"{', '.join(KINDS)}"
        )
    return kind.read_spec(config, Path(directory))


def adapter_state(model: AnyModel, state: State | None = None) -> State:
    """The adapter's weights by our names, with a scalar model's score head; of a sharded model `state` is whole."""
    whole: State = model.state_dict() if state is None else state
    kinds = kinds_attached(model)
    head = _head_name(model)
    return {name: value for name, value in whole.items() if name == head or any(kind.holds(name) for kind in kinds)}


def _head_name(model: AnyModel) -> str | None:
    """The name of the score head's weight in a scalar model's state dict; None for other models."""
    if isinstance(model, ScalarModel):
        return "head.weight"
    return "inner.score.weight" if isinstance(model, ExternalScalarModel) else None


def save_adapter(
    model: AnyModel, directory: Path, *, base: str | None, revision: str | None = None, state: State | None = None
) -> None:
    """Write an adapter that peft's and transformers' Auto classes open by its directory, and that gives the same model.

    Args:
        base: directory or Hub name of the frozen weights. A directory is written as an absolute path, since peft reads
            it from the working directory, and relative to the adapter's in our own settings, so that both can be moved
            together.
        revision: commit of a base model on the Hub.
        state: the full state dict where the model is sharded; None: the model's own.
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
    if (head := _head_name(model)) is not None:
        tensors[f"{kind.before_head}score.weight"] = state[head]
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    task_type = next(name for name, classes in TASK_TYPES.items() if isinstance(model, classes))
    if isinstance(model, TokenClassifier | ExternalClassifier):
        task_type = {"tokens": "TOKEN_CLS", "span": "QUESTION_ANS", "sequence": "SEQ_CLS"}[model.task]
    config |= {"base_model_name_or_path": base, "revision": revision, "task_type": task_type, "inference_mode": True}
    sets = {key: sorted(value) for key, value in config.items() if isinstance(value, set)}
    write_json(directory / CONFIG, config | sets)


def load_adapter(
    model: Loaded, directory: Path, *, with_head: bool = True, rounded: Quantization | None = None
) -> Loaded:
    """Attach the adapter of a directory to its base model and return the model.

    A warning says where the adapter was trained on weights of another quantization than those of the model.

    Args:
        model: the base model. A policy's adapter also fits a scalar model, which then keeps its score head.
        with_head: load the score head of a reward model's adapter; False keeps that of `model`.
        rounded: the quantization whose values the model's plain weights have.
    """
    directory = Path(directory)
    if not (directory / WEIGHTS).is_file():
        raise UserError(f"{directory}: no {WEIGHTS}; only safetensors adapters are read")
    if is_scalar_adapter(directory) and hasattr(model, "new_cache"):
        raise UserError(f"{directory}: {NO_LANGUAGE_MODEL}")
    spec = read_spec(directory)
    tensors = read_safetensors(directory / WEIGHTS)
    kind = KINDS[spec.kind]
    try:
        if isinstance(kind, InjectedKind):
            check_fits_base(model, tensors, directory, kind.weights.rstrip("."))
        wanted = kind.from_file(model, spec, tensors, directory)  # pyright: ignore[reportArgumentType]
    except ValueError as error:  # a UserError, or a pattern that is none
        raise UserError(f"{directory}: {error}") from error
    if isinstance(model, ScalarModel | ExternalScalarModel):
        model.head.requires_grad_(True)
        if is_scalar_adapter(directory):
            weight = tensors.pop(next((name for name in tensors if name.endswith("score.weight")), ""), None)
            wanted |= {str(_head_name(model)): weight} if with_head else {}
    _load_strictly(model, wanted, tensors, f"{directory}/{WEIGHTS}")
    trained_on = read_quantization(directory)
    here = rounded or quantization_of(model)
    if trained_on not in (None, here):
        warnings.warn(
            f"{directory}: the adapter was trained on weights in {trained_on}, and lies on {here or 'full'} ones here: "
            f"its outputs differ a little; load it with quantize={trained_on}, or merge it with `alignment export`",
            stacklevel=2,
        )
    return model


@torch.no_grad()
def _load_strictly(
    model: AnyModel, wanted: Mapping[str, Tensor | None], unexpected: Mapping[str, Tensor], where: str
) -> None:
    """Copy tensors into the model; any missing, unexpected or misshapen tensor is an error."""
    parameters = dict(model.named_parameters())
    tensors = {name: value for name, value in wanted.items() if value is not None}
    problems = [f"{where}: tensor for {name} is missing" for name in wanted if name not in tensors]
    problems += [f"{where}: tensor {name} belongs nowhere in this model" for name in unexpected]
    problems += [
        f"{where}: {name} has shape {list(value.shape)}, the model wants {list(parameters[name].shape)}"
        for name, value in tensors.items()
        if value.shape != parameters[name].shape
    ]
    raise_all(problems)
    for name, value in tensors.items():
        parameters[name].copy_(value)


# Several adapters over one base, of which each document of a batch has its own


def load_adapters(model: Loaded, directories: Mapping[str, str | Path]) -> Loaded:
    """Load adapters by name over one base for inference and return the model, whose weights stay as they are.

    `with model.using_adapters(names):` then reads each document of a batch with its own; requests and `generate` name
    theirs. LoRAs of any ranks and layers, prefixes and soft prompts go together.

    Args:
        model: a decoder of this library without an adapter, on the device where it runs.
        directories: name -> the adapter's directory.

    Raises:
        UserError: all that cannot act on single documents, at once.
    """
    from alignment.models.row_adapters import RowAdapters

    if not isinstance(model, LanguageModel):
        raise UserError(
            f"several adapters in one batch need a decoder of this library, and {model.config.get('model_type')!r} is "
            "none; load one with load_adapter"
        )
    if model.row_adapters is not None or kinds_attached(model):
        raise UserError("the model has an adapter already; load the base, and all of its adapters in one call")
    check_adapters(directories)
    adapters = {name: _taken_off(load_adapter(model, Path(path))) for name, path in directories.items()}
    raise_all(
        f"adapters.{name}: {layer} does not read the tokens of whole documents, which its update needs here; leave the "
        "layer out of the adapter, or merge it with `alignment export`"
        for name, adapter in adapters.items()
        for layer in adapter.updates
        if not layer.startswith("trunk.") or ".experts." in layer
    )
    model.row_adapters = RowAdapters(model, adapters)
    return model


def check_adapters(directories: Mapping[str, str | Path]) -> None:
    """Refuse adapters that cannot act on single documents of a batch before the base is loaded; see `load_adapters`."""
    raise_all(problem for name, path in directories.items() for problem in _not_by_document(name, Path(path)))


def _not_by_document(name: str, directory: Path) -> Iterator[str]:
    """Reasons why an adapter cannot act on single documents of a batch."""
    spec = read_spec(directory)
    tensors = read_safetensors(directory / WEIGHTS)
    if not isinstance(spec, LoRASpec | PrefixSpec | PromptSpec):
        yield (
            f"adapters.{name}: {directory} is {spec.kind}, and only lora, prefix and prompt act on single documents of "
            "a batch; use it alone (--adapter)"
        )
    elif isinstance(spec, LoRASpec) and (
        whole := [tensor_name for tensor_name in tensors if ".lora_" not in tensor_name]
    ):
        yield (
            f"adapters.{name}: {directory} replaces {whole[0]}, of which a batch has one; serve it alone (--adapter)"
        )
    if broken := [tensor_name for tensor_name, value in tensors.items() if not value.isfinite().all()]:
        yield f"adapters.{name}: {directory}: {broken[0]} holds NaN or infinity, which other rows would read too"


@torch.no_grad()
def _taken_off(model: LanguageModel) -> "RowAdapter":
    """The weights of the model's adapter, which it has no longer."""
    from alignment.models.row_adapters import RowAdapter

    updates = lora_updates(model, model.state_dict())
    adapter = RowAdapter(
        {layer: (update.down, update.scale * update.up.T) for layer, update in updates.items()},
        model.active_prefix(),
        model.active_soft_prompt(),
    )
    _lora.detach(model)
    model.prefix = model.soft_prompt = None
    return adapter

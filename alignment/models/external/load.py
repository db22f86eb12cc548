"""Architectures without a table of ours, read and written through transformers' own classes; what they do is in
external_models.py.

Strict where it can be: safetensors in the directory only, every tensor consumed and every parameter found. Code that
travels with a checkpoint, or that it names elsewhere, is never run. Config keys are transformers' affair here: one that
it does not know passes unseen.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.models.external.models import (
    ExternalClassifier,
    ExternalLanguageModel,
    ExternalMaskedLanguageModel,
    ExternalScalarModel,
    ExternalSeq2SeqModel,
)
from alignment.models.external.padding import reads_every_token
from alignment.models.families.family import Architecture
from alignment.models.huggingface.generation_config import (
    generation_config_of,
    read_generation_config,
    write_generation_config,
)
from alignment.models.safetensors_files import CONFIG, check_sizes, read_config, read_shapes

SPECIAL_TOKENS = ("pad_token_id", "eos_token_id")  # of config.json, what a run may change
KINDS: dict[str, tuple[str, Any]] = {  # kind: transformers' door to it, and the class of ours around it
    "causal": ("AutoModelForCausalLM", ExternalLanguageModel),
    "masked": ("AutoModelForMaskedLM", ExternalMaskedLanguageModel),
    "pairs": ("AutoModelForSeq2SeqLM", ExternalSeq2SeqModel),
    "scalar": ("AutoModelForSequenceClassification", ExternalScalarModel),
    "sequence": ("AutoModelForSequenceClassification", ExternalClassifier),
    "tokens": ("AutoModelForTokenClassification", ExternalClassifier),
    "span": ("AutoModelForQuestionAnswering", ExternalClassifier),
}

REDIRECTS = {  # keys by which a config sends transformers elsewhere, and what they do
    "auto_map": "brings its own code",
    "quantization_config": "has quantized weights, which are not read",
    "gguf_file": "names another file for its weights",
}
ROOM_BESIDE = 2**26  # numbers that a model may have and its file not: tables, a new head


def load_external(
    directory: str | Path,
    task: str = "language",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    new_head: bool = False,
    config: dict[str, Any] | None = None,
) -> Any:
    """A model of any architecture that transformers has, in eval mode.

    Args:
        directory: a local Hugging Face directory.
        task: "language" (decoder, encoder or both, as the config says), "scalar", "sequence", "tokens" or "span".
        new_head: leave the file's heads aside, whichever they are, and draw a new one.
        config: changes to config.json, for example the number of labels of a new head.

    Raises:
        UserError: an architecture that transformers does not have or that wants its own code, no safetensors file, or
            tensors that are missing, unexpected or misshapen, each by name.
    """
    directory = Path(directory)
    kind, settings = _settings(directory, task, config or {})
    door, wrapper = KINDS[kind]
    _check_weights(directory, door, settings)
    inner, info = _open(directory, door, settings, dtype)
    if kind == "scalar" and not reads_every_token(inner):
        raise UserError(
            f"{directory}: {type(inner).__name__} gives no number per token, which a reward or value model has to; "
            "take a decoder"
        )
    trunk = inner.base_model_prefix if new_head else ""
    raise_all(f"{directory}: {problem}" for problem in _problems(info, trunk))
    if new_head:
        _draw_heads(inner, trunk)
    model = wrapper(inner.to(device), settings.to_dict(), task).eval()
    if hasattr(model, "new_cache"):
        model.generation_config = read_generation_config(directory)
    return model


def is_external(model: Any) -> bool:
    """Whether a model is one of transformers' classes in our shape."""
    return getattr(model, "source", None) == "transformers"


def save_external(model: Any, directory: str | Path, *, state: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors as transformers itself would, each file whole or not at all.

    Args:
        model: from `load_external`.
        state: full state dict under our names, where the live model is sharded; None: the model's own.

    Raises:
        ValueError: the state has other tensors than the model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    live = model.inner.state_dict(keep_vars=True)
    state = {f"inner.{name}": tensor.detach() for name, tensor in live.items()} if state is None else state
    if state.keys() != {f"inner.{name}" for name in live}:
        raise ValueError(f"the state does not fit: differing {sorted({f'inner.{n}' for n in live} ^ state.keys())}")
    firsts = {id(tensor): name for name, tensor in reversed(live.items())}  # a tied tensor is written once
    tensors = {name: state[f"inner.{name}"].cpu() for name in live if name in firsts.values()}
    model.inner.config.update({key: value for key, value in model.config.items() if key in SPECIAL_TOKENS})
    with tempfile.TemporaryDirectory(dir=directory) as folder, _plain_generation_config(model):
        model.inner.save_pretrained(folder, state_dict=tensors, max_shard_size="1000GB")
        written = sorted(Path(folder).iterdir(), key=lambda path: path.name == CONFIG)  # config last
        for path in written:
            os.replace(path, directory / path.name)
    write_generation_config(model, directory)


def external_architecture(directory: Path) -> Architecture:
    """Which kind of language model transformers has for a directory; of the weights only the shapes are read."""
    kind, _ = _settings(directory, "language", {})
    return "encoder" if kind == "masked" else "encoder-decoder" if kind == "pairs" else "decoder"


@contextmanager
def _plain_generation_config(model: Any) -> Iterator[None]:
    """Keep transformers from writing what travels with the model: it refuses to write some that it reads."""
    kept = getattr(model.inner, "generation_config", None)
    if generation_config_of(model) is not None:
        model.inner.generation_config = model.inner.generation_config_class()
    try:
        yield
    finally:
        model.inner.generation_config = kept


def _settings(directory: Path, task: str, changes: dict[str, Any]) -> tuple[str, Any]:
    """The kind of model, and transformers' config object."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_config(directory)
    name = config.get("model_type")
    if name not in CONFIG_MAPPING:
        raise UserError(f"{directory}: model_type {name!r} is neither in our tables nor in transformers'")
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory}: holds an adapter (adapter_config.json) beside the model; move one of them away")
    _refuse_redirects(directory, config)
    check_sizes(directory, config, read_shapes(directory))
    try:
        settings = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        settings.update(changes | ({"num_labels": 1} if task == "scalar" else {}))
    except Exception as error:  # each class checks its keys in its own way
        raise UserError(f"{directory}/{CONFIG}: transformers refuses it ({type(error).__name__}: {error})") from error
    if task == "language":
        return _language_kind(directory, config, settings), settings
    if task not in KINDS:
        raise UserError(f"{directory}: {name} runs as transformers' class, and there is no head for {task!r} then")
    return task, settings


def _refuse_redirects(directory: Path, config: dict[str, Any]) -> None:
    """Refuse a config that asks for code or weights from elsewhere, in a config inside it too."""
    for key, value in config.items():
        if key in REDIRECTS and value:
            raise UserError(
                f"{directory}: config.json {REDIRECTS[key]} ({key}), which is never followed; delete the key to use "
                f"transformers' own {config.get('model_type')!r} with the weights beside it"
            )
        if key.endswith("_implementation") and "/" in str(value):
            raise UserError(f"{directory}: config.json: {key} = {value!r} is code from elsewhere, which is never run")
        if isinstance(value, dict):
            _refuse_redirects(directory, value)


def _check_weights(directory: Path, door: str, settings: Any) -> None:
    """Refuse an architecture with far more numbers than the file holds, before memory is taken for them."""
    import transformers

    if type(settings) not in getattr(transformers, door)._model_mapping:
        raise UserError(f"{directory}: transformers has no {door.removeprefix('Auto')} for {settings.model_type!r}")
    held = sum(map(prod, read_shapes(directory).values()))
    try:
        with torch.device("meta"):
            bare = getattr(transformers, door).from_config(deepcopy(settings), trust_remote_code=False)
    except Exception as error:  # whatever the class does with sizes that cannot be
        raise UserError(
            f"{directory}/{CONFIG}: no model can be built from it ({type(error).__name__}: {error})"
        ) from error
    asked = sum(tensor.numel() for tensor in (*bare.parameters(), *bare.buffers()))
    if asked > 2 * held + ROOM_BESIDE:  # twice: a shared tensor is held once
        raise UserError(f"{directory}/{CONFIG}: asks for {asked} numbers, and the weights beside it are {held}")


def _language_kind(directory: Path, config: dict[str, Any], settings: Any) -> str:
    """causal, masked or pairs: by what saved the checkpoint, else by what transformers has."""
    from transformers.models.auto import modeling_auto as known

    if settings.is_encoder_decoder:
        return "pairs"
    names = [str(name) for name in config.get("architectures") or []]
    if any(name.endswith("ForMaskedLM") for name in names):
        return "masked"
    for kind, table in (("causal", known.MODEL_FOR_CAUSAL_LM_MAPPING), ("masked", known.MODEL_FOR_MASKED_LM_MAPPING)):
        if type(settings) in table:
            return kind
    raise UserError(f"{directory}: transformers has no language model for model_type {config['model_type']!r}")


def _open(directory: Path, door: str, settings: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """transformers' model, and what it says of the loading."""
    import transformers

    try:
        return getattr(transformers, door).from_pretrained(
            directory, config=settings, dtype=dtype, local_files_only=True, use_safetensors=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise UserError(f"{directory}: transformers could not open it ({type(error).__name__}: {error})") from error


def _problems(info: dict[str, Any], trunk: str) -> list[str]:
    """What the loading report complains of; but for heads, if `trunk` names what is none."""

    def matters(name: str) -> bool:
        return not trunk or name.startswith(f"{trunk}.")

    return [
        *(f"tensor {name} is missing" for name in sorted(info["missing_keys"]) if matters(name)),
        *(f"unexpected tensor {name}" for name in sorted(info["unexpected_keys"]) if matters(name)),
        *(
            f"tensor {name} has shape {tuple(found)}, the config asks for {tuple(expected)}"
            for name, found, expected in sorted(info["mismatched_keys"])
            if matters(name)
        ),
        *(str(message) for message in info["error_msgs"]),
    ]


@torch.no_grad()
def _draw_heads(inner: Any, trunk: str) -> None:
    """Fresh weights for all linear layers outside the trunk."""
    std = getattr(inner.config, "initializer_range", 0.02)
    for name, module in inner.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(f"{trunk}."):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

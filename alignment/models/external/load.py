"""Models without a family of ours, loaded and saved through transformers' own classes.

Only safetensors in the directory itself are read, every tensor is used and every parameter found. Code in a checkpoint,
or at an address that it names, is never run. Config keys are not checked as strictly as those of our families:
transformers ignores keys that it does not know.
"""

import os
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.models.external.models import (
    ExternalClassifier,
    ExternalLanguageModel,
    ExternalMaskedLanguageModel,
    ExternalModel,
    ExternalScalarModel,
    ExternalSeq2SeqModel,
)
from alignment.models.external.rectangles import scores_every_token
from alignment.models.families.family import Architecture
from alignment.models.heads import NO_LANGUAGE_MODEL, score_labels, score_outputs
from alignment.models.init_weights import InitSpec, initialize_layer
from alignment.models.safetensors_files import (
    CONFIG,
    HFConfig,
    check_sizes,
    max_dtype,
    read_config,
    read_generation_config,
    read_shapes,
    refuse_quantized,
    write_generation_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CHANGED_KEYS = ("pad_token_id", "eos_token_id", "task_specific_params")  # of config.json, that a run may change
AUTO_CLASSES: dict[str, tuple[str, type[ExternalModel]]] = {  # kind -> transformers' auto class and our wrapper
    "causal": ("AutoModelForCausalLM", ExternalLanguageModel),
    "masked": ("AutoModelForMaskedLM", ExternalMaskedLanguageModel),
    "encoder-decoder": ("AutoModelForSeq2SeqLM", ExternalSeq2SeqModel),
    "scalar": ("AutoModelForSequenceClassification", ExternalScalarModel),
    "sequence": ("AutoModelForSequenceClassification", ExternalClassifier),
    "tokens": ("AutoModelForTokenClassification", ExternalClassifier),
    "span": ("AutoModelForQuestionAnswering", ExternalClassifier),
}
REFUSED_KEYS = {  # config keys that ask transformers for other code or weights -> what they do
    "auto_map": "brings its own code",
    "gguf_file": "names another file for its weights",
}
EXTRA_PARAMETERS = 2**26  # numbers that a model may have beside those of its file: buffers, a new head


def load_external(
    directory: str | Path,
    task: str = "language",
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    *,
    new_head: bool = False,
    config: HFConfig | None = None,
) -> Any:
    """Load a model of any architecture of transformers in eval mode.

    Arguments and errors as for `load_pretrained`; a `dtype` of None is the widest that a tensor has in the file.
    UserError also where transformers does not have the architecture, or it needs code of its own.
    """
    directory = Path(directory)
    kind, settings = _read_settings(directory, task, config or {})
    auto_class, wrapper = AUTO_CLASSES[kind]
    _check_weights(directory, auto_class, settings)
    inner, report = _from_pretrained(directory, auto_class, settings, dtype or max_dtype(directory))
    if dtype is None:
        _compute_buffers(inner, auto_class, settings)
    if kind == "scalar" and not scores_every_token(inner):
        raise UserError(
            f"{directory}: {type(inner).__name__} gives no number per token, which a reward or value model has to; "
            "take a decoder"
        )
    trunk = inner.base_model_prefix if new_head else ""
    if not new_head and "score.weight" in report["unexpected_keys"]:
        raise UserError(f"{directory}: {NO_LANGUAGE_MODEL}")
    raise_all(f"{directory}: {problem}" for problem in _loading_problems(report, trunk))
    if new_head:
        _initialize_heads(inner, trunk)
    model = wrapper(inner.to(device), settings.to_dict(), task).eval()
    if hasattr(model, "new_cache"):
        model.generation_config = read_generation_config(directory)
    return model


def external_scalar_over(language: ExternalLanguageModel) -> ExternalScalarModel | None:
    """The scalar model with the language model's trunk (the very module, not a copy) and a new head of zeros, fp32.

    None where transformers' class for scores has another trunk than its language model, or more than a linear head.
    """
    auto = _auto_class(AUTO_CLASSES["scalar"][0])
    trunk = language.inner.base_model
    settings = deepcopy(trunk.config)
    if type(settings) not in auto._model_mapping:
        return None
    settings.update(score_settings({}))
    with torch.device("meta"):
        inner: Any = auto.from_config(settings, trust_remote_code=False)
    if type(inner.base_model) is not type(trunk) or trunk is language.inner:
        return None
    setattr(inner, inner.base_model_prefix, trunk)
    trunk.config.update(score_settings({}))
    inner.config = trunk.config
    new = [module for module in inner.modules() if any(x.is_meta for x in module.parameters(recurse=False))]
    linear = scores_every_token(inner) and new == [inner.score] and inner.score.bias is None
    if not linear or any(x.is_meta for x in inner.buffers()):
        return None
    inner.score.to_empty(device=next(trunk.parameters()).device).to(torch.float32)
    nn.init.zeros_(inner.score.weight)
    return ExternalScalarModel(inner, inner.config.to_dict(), "scalar").eval()


def save_external(
    model: ExternalModel,
    directory: str | Path,
    *,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write config.json and the weights as transformers does, each file atomically; arguments as for `save_model`.

    All weights are held at once. ValueError where the tensors are others than the model's.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model_state = model.inner.state_dict(keep_vars=True)
    state = (
        {f"inner.{name}": tensor.detach() for name, tensor in model_state.items()} if tensors is None else dict(tensors)
    )
    if state.keys() != {f"inner.{name}" for name in model_state}:
        raise ValueError(
            f"the state does not fit: differing {sorted({f'inner.{n}' for n in model_state} ^ state.keys())}"
        )
    first_names = {id(tensor): name for name, tensor in reversed(model_state.items())}  # a tied tensor is written once
    kept = {name: state[f"inner.{name}"].cpu() for name in model_state if name in first_names.values()}
    model.inner.config.update({key: value for key, value in model.config.items() if key in CHANGED_KEYS})
    generation_config = getattr(model.inner, "generation_config", None)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        try:
            if model.generation_config is not None:  # transformers refuses to write some that it reads
                model.inner.generation_config = model.inner.generation_config_class()
            model.inner.save_pretrained(folder, state_dict=kept, max_shard_size=max_shard_size)
        finally:
            model.inner.generation_config = generation_config
        written = sorted(Path(folder).iterdir(), key=lambda path: path.name == CONFIG)  # config last
        for path in directory.glob("model*.safetensors*"):  # of an earlier save in more files or fewer
            if path.name not in {new.name for new in written}:
                path.unlink()
        for path in written:
            os.replace(path, directory / path.name)
    write_generation_config(model.generation_config, directory)


def external_architecture(directory: Path) -> Architecture:
    """The kind of language model that transformers has for a directory; of the weights only the shapes are read."""
    kind, _ = _read_settings(directory, "language", {})
    return "encoder" if kind == "masked" else "encoder-decoder" if kind == "encoder-decoder" else "decoder"


def _read_settings(directory: Path, task: str, changes: HFConfig) -> tuple[str, "PreTrainedConfig"]:
    """The kind of model (a key of `AUTO_CLASSES`) and transformers' config object."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_config(directory)
    name = config.get("model_type")
    if name not in CONFIG_MAPPING:
        raise UserError(f"{directory}: model_type {name!r} is neither in our tables nor in transformers'")
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory}: holds an adapter (adapter_config.json) beside the model; move one of them away")
    _refuse_keys(directory, config)
    check_sizes(directory, config, read_shapes(directory))
    try:
        settings = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        settings.__dict__.pop("auto_map", None)  # `read_config` has looked at it
        settings.update(changes if task != "scalar" else changes | score_settings(config | changes))
    except Exception as error:  # each class checks its keys in its own way
        raise UserError(f"{directory}/{CONFIG}: transformers refuses it ({type(error).__name__}: {error})") from error
    if task == "language":
        return _language_kind(directory, config, settings), settings
    if task not in AUTO_CLASSES:
        raise UserError(f"{directory}: {name} runs as transformers' class, and there is no head for {task!r} then")
    return task, settings


def score_settings(config: HFConfig) -> HFConfig:
    """The labels of a score head, or of an ensemble's heads, as transformers' config object has them."""
    labels = score_labels(score_outputs(config))
    return labels | {"id2label": {int(label_id): name for label_id, name in labels["id2label"].items()}}


def _refuse_keys(directory: Path, config: HFConfig) -> None:
    """Refuse a config that asks for code or weights from elsewhere, also in a nested config."""
    refuse_quantized(config, directory / CONFIG)
    for key, value in config.items():
        if key in REFUSED_KEYS and value:
            raise UserError(
                f"{directory}: config.json {REFUSED_KEYS[key]} ({key}), which is never followed; delete the key to use "
                f"transformers' own {config.get('model_type')!r} with the weights beside it"
            )
        if key.endswith("_implementation") and "/" in str(value):
            raise UserError(f"{directory}: config.json: {key} = {value!r} is code from elsewhere, which is never run")
        if isinstance(value, dict):
            _refuse_keys(directory, value)


def _auto_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _check_weights(directory: Path, auto_class: str, settings: "PreTrainedConfig") -> None:
    """Refuse an architecture with far more parameters than the file has, before memory is allocated for them."""
    auto = _auto_class(auto_class)
    if type(settings) not in auto._model_mapping:
        raise UserError(
            f"{directory}: transformers has no {auto_class.removeprefix('Auto')} for {settings.model_type!r}"
        )
    held = sum(map(prod, read_shapes(directory).values()))
    try:
        with torch.device("meta"):
            empty = auto.from_config(deepcopy(settings), trust_remote_code=False)
    except Exception as error:  # any type, depending on what the class does with impossible sizes
        raise UserError(
            f"{directory}/{CONFIG}: no model can be built from it ({type(error).__name__}: {error})"
        ) from error
    asked = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    if asked > 2 * held + EXTRA_PARAMETERS:  # twice: a file has a shared tensor once
        raise UserError(f"{directory}/{CONFIG}: asks for {asked} numbers, and the weights beside it are {held}")


def _language_kind(directory: Path, config: HFConfig, settings: "PreTrainedConfig") -> str:
    """causal, masked or encoder-decoder: the class that saved the checkpoint, else the class that transformers has."""
    from transformers.models.auto import modeling_auto as auto

    if settings.is_encoder_decoder:
        return "encoder-decoder"
    names = [str(name) for name in config.get("architectures") or []]
    if any(name.endswith("ForMaskedLM") for name in names):
        return "masked"
    tables = [("masked", auto.MODEL_FOR_MASKED_LM_MAPPING), ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING)]
    decodes = getattr(settings, "is_decoder", False) or any("CausalLM" in name or "LMHead" in name for name in names)
    for kind, table in reversed(tables) if decodes else tables:  # an encoder such as RemBERT has a class of either kind
        if type(settings) in table:
            return kind
    raise UserError(f"{directory}: transformers has no language model for model_type {config['model_type']!r}")


def _from_pretrained(
    directory: Path, auto_class: str, settings: "PreTrainedConfig", dtype: torch.dtype | None
) -> tuple[Any, dict[str, Any]]:
    """transformers' model and its report of keys."""
    try:
        return _auto_class(auto_class).from_pretrained(
            directory,
            config=settings,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise UserError(f"{directory}: transformers could not open it ({type(error).__name__}: {error})") from error


@torch.no_grad()
def _compute_buffers(inner: "PreTrainedModel", auto_class: str, settings: "PreTrainedConfig") -> None:
    """Put the values that constants of the model, such as a scale of its embeddings, have in float32 in their place.

    transformers computes them in the type of the weights.
    """
    stored = inner.state_dict()
    low = [
        name
        for name, buffer in inner.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != torch.float32 and name not in stored
    ]
    if not low:
        return
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        exact = _auto_class(auto_class).from_config(deepcopy(settings), dtype=torch.float32)
    for name in low:
        owner, _, buffer_name = name.rpartition(".")
        setattr(inner.get_submodule(owner), buffer_name, exact.get_buffer(name))


def _loading_problems(report: dict[str, Any], trunk: str) -> list[str]:
    """One message per problem in the loading report, of `trunk` alone unless it is empty; its pooler is the head's."""
    if any("vision" in name for name in report["unexpected_keys"]):
        return ["its weights are those of a model for pictures and text, of which only text models are read; take one"]

    def relevant(name: str) -> bool:
        return not trunk or (name.startswith(f"{trunk}.") and not name.startswith(f"{trunk}.pooler."))

    return [
        *(f"tensor {name} is missing" for name in sorted(report["missing_keys"]) if relevant(name)),
        *(f"unexpected tensor {name}" for name in sorted(report["unexpected_keys"]) if relevant(name)),
        *(
            f"tensor {name} has shape {tuple(shape)}, the config asks for {tuple(expected)}"
            for name, shape, expected in sorted(report["mismatched_keys"])
            if relevant(name)
        ),
        *(str(message) for message in report["error_msgs"]),
    ]


def _initialize_heads(inner: "PreTrainedModel", trunk: str) -> None:
    """Initialize all linear layers outside the trunk."""
    std = getattr(inner.config, "initializer_range", 0.02)
    for name, module in inner.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(f"{trunk}."):
            initialize_layer(module, InitSpec(std, std))

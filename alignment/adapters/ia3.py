"""(IA)^3: peft's factors on the outputs and inputs of our linear layers, and their files.

Where a file holds one matrix for several of our layers, their factors are written one after another, 1 for a layer that
has none.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment.adapters.extras import (
    attach_extras,
    extras_from_file,
    extras_switched_off,
    extras_to_file,
    is_extra_weight,
    layers_switched_off,
    merge_layers,
    modules_of_config,
    wrappers,
)
from alignment.adapters.files import CONFIG, SPEC, WEIGHTS, build_spec, read_own_settings
from alignment.adapters.layer_names import (
    BEFORE,
    NO_LAYER,
    FileLayer,
    escaped,
    file_layers,
    layer_sizes,
    linear_layers,
    matching_layers,
)
from alignment.adapters.specs import IA3_INPUTS, IA3_OUTPUTS, IA3Spec
from alignment.errors import UserError, raise_all
from alignment.files import read_json_object
from alignment.models.external.models import ExternalModel
from alignment.models.huggingface.weight_map import cut_rows, fuse_rows

if TYPE_CHECKING:
    from peft import IA3Config
    from peft.tuners.ia3 import IA3Layer

DEFAULT = "default"
SUPPORTED_OPTIONS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "feedforward_modules", "fan_in_fan_out", "modules_to_save", "init_ia3_weights",
}  # fmt: skip


def attach_ia3(model: nn.Module, spec: IA3Spec) -> None:
    """Freeze the model and add a factor to each linear layer that the settings match.

    Raises:
        UserError: no layer matches, a pattern takes too long, or a file could not hold the factors.
    """
    from peft import IA3Config, inject_adapter_in_model

    outputs, inputs = _layers(model, spec)
    _refuse_what_no_file_holds(model, inputs)
    model.requires_grad_(False)
    inject_adapter_in_model(IA3Config(target_modules=[*outputs, *inputs], feedforward_modules=inputs), model)
    attach_extras(model, spec.modules_to_save)


def _layers(model: nn.Module, spec: IA3Spec) -> tuple[list[str], list[str]]:
    """Our names of the layers with factors on their outputs, and on their inputs."""
    layers, feedforward = spec.layers, spec.feedforward
    if isinstance(model, ExternalModel) and (layers, feedforward) == (IA3_OUTPUTS, IA3_INPUTS):
        layers, feedforward = _layers_of_peft(model)
    inputs = [] if feedforward in (NO_LAYER, ()) else matching_layers(model, feedforward, spec.exclude, "feedforward")
    outputs = [] if layers in (NO_LAYER, ()) else matching_layers(model, layers, spec.exclude)
    return [name for name in outputs if name not in inputs], inputs


def _layers_of_peft(model: ExternalModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """peft's own choice of layers for an architecture of transformers.

    Raises:
        UserError: it has none.
    """
    from peft.utils import constants

    kind = str(model.config["model_type"])
    targets = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(kind)
    inputs = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(kind)
    if targets is None or inputs is None:
        raise UserError(
            f"adapter: peft has no layers of its own choice for (IA)^3 on {kind!r}; name the key and value layers in "
            "`layers` and the last layer of the feed-forward in `feedforward`"
        )
    return tuple(name for name in targets if name not in inputs), tuple(inputs)


def _refuse_what_no_file_holds(model: nn.Module, inputs: list[str]) -> None:
    """Refuse factors on the inputs of a layer that a file fuses with others, and on experts."""
    for layer in file_layers(model):
        found = [name for name in layer.layers if name in inputs]
        if found and len(layer.layers) > 1:
            raise UserError(
                f"adapter.feedforward: a file holds {', '.join(layer.layers)} as one layer, {layer.file_name}, with one "
                "input; name another layer"
            )
        if any(".experts." in name for name in found):
            raise UserError(
                "adapter.feedforward: a file cannot hold factors of single experts; leave them out, or use lora"
            )


def ia3_layers(model: nn.Module) -> dict[str, "IA3Layer"]:
    """The linear layers with factors by name; empty without (IA)^3."""
    from peft.tuners.ia3 import IA3Layer

    return {name: module for name, module in model.named_modules() if isinstance(module, IA3Layer)}


def has_ia3(model: nn.Module) -> bool:
    """Whether a model has (IA)^3."""
    return bool(ia3_layers(model))


def is_ia3_weight(name: str) -> bool:
    """Whether a name of a model's state dict is a weight of (IA)^3, or of what it trains besides."""
    return ".ia3_l." in name or is_extra_weight(name)


@contextmanager
def ia3_switched_off(model: nn.Module) -> Iterator[None]:
    """Leave all factors out within the block."""
    with extras_switched_off(model), layers_switched_off(ia3_layers(model).values()):
        yield


def merge_ia3(model: nn.Module) -> None:
    """Multiply each layer's weight by its factors and remove the adapter; all parameters are trainable afterwards."""
    merge_layers(model, ia3_layers(model))


def multiply_factors(model: nn.Module, state: Mapping[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Multiply the weights in a state dict without the adapter by the factors in the one with it."""
    for name, layer in ia3_layers(model).items():
        factors, weight = state[f"{name}.ia3_l.{DEFAULT}"].cpu(), plain[f"{name}.weight"].cpu()
        plain[f"{name}.weight"] = (weight * factors).to(weight.dtype)
        if not layer.is_feedforward and f"{name}.bias" in plain:
            plain[f"{name}.bias"] = plain[f"{name}.bias"].cpu() * factors[:, 0]


def is_ia3_file(config: Mapping[str, object]) -> bool:
    """Whether an adapter_config.json is that of (IA)^3."""
    return config.get("peft_type") == "IA3"


def read_ia3_spec(config: Mapping[str, object], directory: Path) -> IA3Spec:
    """The settings of an (IA)^3 in peft's format; in a file that another program wrote, without its layers.

    Raises:
        UserError: an option is not supported.
    """
    if (settings := read_own_settings(directory)) is not None:
        return build_spec(IA3Spec, settings, str(Path(directory) / SPEC))
    where = f"{directory}/{CONFIG}"
    raise_all(
        f"{where}: {key} = {value!r} is not supported"
        for key, value in config.items()
        if value and key not in SUPPORTED_OPTIONS
    )
    return IA3Spec()


def ia3_settings(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, object]:
    """Our settings of a model's (IA)^3, with the full name of every layer."""
    layers = ia3_layers(model)
    names = {kind: [name for name, layer in layers.items() if layer.is_feedforward == kind] for kind in (False, True)}
    full = {kind: "|".join(sorted(map(escaped, found))) or NO_LAYER for kind, found in names.items()}
    return asdict(IA3Spec(layers=full[False], feedforward=full[True], modules_to_save=tuple(sorted(wrappers(model)))))


def ia3_to_file(model: nn.Module, state: dict[str, Tensor]) -> "tuple[dict[str, Tensor], IA3Config]":
    """Tensors and config of an (IA)^3 in peft's format; see `AdapterKind.to_file`."""
    from peft import IA3Config

    layers, linear, extras = ia3_layers(model), linear_layers(model), extras_to_file(model, state)
    tensors = extras.tensors
    targets, inputs, transposed = [], [], False
    for each in file_layers(model):
        if not layers.keys() & set(each.layers):
            continue
        parts = [
            state[f"{name}.ia3_l.{DEFAULT}"].cpu() if name in layers else torch.ones(layer_sizes(linear[name])[1], 1)
            for name in each.layers
        ]
        tensors[f"{BEFORE}{each.file_name}.ia3_l"] = fuse_rows(parts, each.groups)
        targets.append(each.file_name)
        inputs += [each.file_name for name in each.layers if name in layers and layers[name].is_feedforward]
        transposed |= each.transposed
    config = IA3Config(
        target_modules=sorted(targets),
        feedforward_modules=sorted(inputs),
        fan_in_fan_out=transposed,
        modules_to_save=extras.modules_to_save,
    )
    return tensors, config


def ia3_from_file(
    model: nn.Module, spec: IA3Spec, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor | None]:
    """Attach an (IA)^3 and take its tensors out of the file's; see `AdapterKind.from_file`."""
    in_file = file_layers(model)
    if not (Path(directory) / SPEC).is_file():
        modules = modules_of_config(read_json_object(Path(directory) / CONFIG), tensors)
        spec = _with_layers_of_file(replace(spec, modules_to_save=tuple(modules)), tensors, in_file, directory)
    attach_ia3(model, spec)
    adapted, linear, found = ia3_layers(model), linear_layers(model), {}
    for each in in_file:
        if adapted.keys() & set(each.layers):
            found |= _from_fused(each, adapted, tensors, [layer_sizes(linear[name])[1] for name in each.layers])
    return found | extras_from_file(model, tensors)


def _from_fused(
    layer: FileLayer, adapted: "Mapping[str, IA3Layer]", tensors: dict[str, Tensor], heights: list[int]
) -> dict[str, Tensor | None]:
    """The factors of one layer of a file by our names; they are removed from `tensors`."""
    factors = tensors.pop(f"{BEFORE}{layer.file_name}.ia3_l", None)
    if factors is None or len(layer.layers) == 1:
        return {f"{name}.ia3_l.{DEFAULT}": factors for name in layer.layers if name in adapted}
    if len(factors) != sum(heights):
        raise UserError(f"{WEIGHTS}: {layer.file_name}.ia3_l has {len(factors)} rows, the model wants {sum(heights)}")
    parts = zip(layer.layers, cut_rows(factors, heights, layer.groups), strict=True)
    return {f"{name}.ia3_l.{DEFAULT}": part for name, part in parts if name in adapted}


def _with_layers_of_file(
    spec: IA3Spec, tensors: Mapping[str, Tensor], in_file: list[FileLayer], directory: Path
) -> IA3Spec:
    """The settings with exactly the layers of a file that another program wrote.

    Raises:
        UserError: the file has no factors of a linear layer of this model.
    """
    names: dict[bool, list[str]] = {False: [], True: []}
    for each in in_file:
        factors = tensors.get(f"{BEFORE}{each.file_name}.ia3_l")
        if factors is not None:
            names[factors.ndim == 2 and factors.shape[0] == 1] += map(escaped, each.layers)
    if not any(names.values()):
        raise UserError(f"{directory}/{WEIGHTS}: has factors of none of the linear layers of its base model")
    full = {kind: "|".join(sorted(found)) or NO_LAYER for kind, found in names.items()}
    return replace(spec, layers=full[False], feedforward=full[True])

"""(IA)^3: peft's factors on the outputs and inputs of our linear layers, and their files.

Where a file holds one matrix for several of our layers, their factors are written one after another, 1 for a layer that
has none.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from alignment.adapters.extras import (
    DEFAULT,
    InjectedKind,
    State,
    attach_extras,
    extras_from_file,
    extras_to_file,
    modules_of_file,
    wrappers,
)
from alignment.adapters.files import SPEC, WEIGHTS
from alignment.adapters.layer_names import (
    BEFORE,
    NO_LAYER,
    FileLayer,
    escaped,
    file_layers,
    matching,
    matching_layers,
    names_in_file,
)
from alignment.adapters.specs import IA3_INPUTS, IA3_OUTPUTS, IA3Spec
from alignment.errors import UserError
from alignment.models.external.models import ExternalModel
from alignment.models.huggingface.weight_map import cut_rows, fuse_rows


class IA3Kind(InjectedKind):
    """(IA)^3."""

    peft_type = "IA3"
    weights = ".ia3_l."
    options = frozenset({"feedforward_modules", "init_ia3_weights"})

    def layers(self, model: nn.Module) -> dict[str, Any]:
        """The linear layers with factors by name."""
        from peft.tuners.ia3 import IA3Layer

        return {name: module for name, module in model.named_modules() if isinstance(module, IA3Layer)}

    def attach(self, model: nn.Module, spec: IA3Spec) -> None:
        from peft import IA3Config, inject_adapter_in_model

        layers = spec.layers
        feedforward = spec.feedforward
        if isinstance(model, ExternalModel) and (layers, feedforward) == (IA3_OUTPUTS, IA3_INPUTS):
            layers, feedforward = _layers_of_peft(model)
        if feedforward == IA3_INPUTS and not matching(feedforward, names_in_file(model), "feedforward"):
            feedforward = ()  # experts alone, whose inputs' factors no file holds
        none = (NO_LAYER, ())
        inputs = [] if feedforward in none else matching_layers(model, feedforward, "feedforward")
        outputs = [] if layers in none else matching_layers(model, layers)
        outputs = [name for name in outputs if name not in inputs]
        _refuse_what_no_file_holds(model, inputs)
        model.requires_grad_(False)
        inject_adapter_in_model(IA3Config(target_modules=[*outputs, *inputs], feedforward_modules=inputs), model)
        attach_extras(model, spec.modules_to_save)

    def put_into(self, model: nn.Module, state: State, plain: State) -> None:
        for name, layer in self.layers(model).items():
            factors = state[f"{name}.ia3_l.{DEFAULT}"].cpu()
            weight = plain[f"{name}.weight"].cpu()
            plain[f"{name}.weight"] = (weight * factors).to(weight.dtype)
            if not layer.is_feedforward and f"{name}.bias" in plain:
                plain[f"{name}.bias"] = plain[f"{name}.bias"].cpu() * factors[:, 0]

    def own_settings(self, model: nn.Module, state: State) -> dict[str, object]:
        kinds = {name: bool(layer.is_feedforward) for name, layer in self.layers(model).items()}
        return asdict(replace(_full_names(kinds), modules_to_save=tuple(sorted(wrappers(model)))))

    def to_file(self, model: nn.Module, state: State) -> tuple[State, dict[str, Any]]:
        from peft import IA3Config

        adapted = self.layers(model)
        tensors, options = extras_to_file(model, state)
        inputs = {name for name, layer in adapted.items() if layer.is_feedforward}
        layers = list(self.file_parts(model))
        for file_layer, heights in layers:
            parts = [
                state[f"{name}.ia3_l.{DEFAULT}"].cpu() if name in adapted else torch.ones(height, 1)
                for name, height in zip(file_layer.layers, heights, strict=True)
            ]
            tensors[f"{BEFORE}{file_layer.file_name}.ia3_l"] = fuse_rows(parts, file_layer.groups)
        return tensors, IA3Config(
            target_modules=sorted(file_layer.file_name for file_layer, _ in layers),
            feedforward_modules=sorted(
                file_layer.file_name for file_layer, _ in layers if inputs & set(file_layer.layers)
            ),
            fan_in_fan_out=any(file_layer.transposed for file_layer, _ in layers),
            **cast(Any, options),
        ).to_dict()

    def read_spec(self, config: Mapping[str, object], directory: Path) -> IA3Spec:
        return self.read_options(IA3Spec, {}, config, directory)

    def from_file(self, model: nn.Module, spec: IA3Spec, tensors: State, directory: Path) -> dict[str, Tensor | None]:
        if not (directory / SPEC).is_file():
            spec = replace(
                _layers_of_file(tensors, file_layers(model)), modules_to_save=modules_of_file(directory, tensors)
            )
        self.attach(model, spec)
        adapted = self.layers(model)
        weights = dict[str, Tensor | None]()
        for layer, heights in self.file_parts(model):
            factors = tensors.pop(f"{BEFORE}{layer.file_name}.ia3_l", None)
            parts = [factors] * len(heights)
            if factors is not None and len(heights) > 1:
                if len(factors) != sum(heights):
                    raise UserError(
                        f"{WEIGHTS}: {layer.file_name}.ia3_l has {len(factors)} rows, the model wants {sum(heights)}"
                    )
                parts = cut_rows(factors, heights, layer.groups)
            pairs = zip(layer.layers, parts, strict=True)
            weights |= {f"{name}.ia3_l.{DEFAULT}": part for name, part in pairs if name in adapted}
        return weights | extras_from_file(model, tensors)


def _layers_of_peft(model: ExternalModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """peft's own choice of layers for an architecture of transformers."""
    from peft.utils import constants

    kind = str(model.config["model_type"])
    targets = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(kind)
    inputs = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(kind)
    if targets is None or inputs is None:
        raise UserError(
            f"adapter: peft has no layers of its own choice for (IA)^3 on {kind!r}; name the key and value layers in "
            "`layers` and the last layer of the feed-forward in `feedforward` (`[]` where it is made of experts)"
        )
    return tuple(name for name in targets if name not in inputs), tuple(inputs)


def _refuse_what_no_file_holds(model: nn.Module, inputs: list[str]) -> None:
    """Refuse factors on the inputs of a layer that a file fuses with others, and on experts."""
    for layer in file_layers(model):
        scaled_layers = [name for name in layer.layers if name in inputs]
        if scaled_layers and (len(layer.layers) > 1 or ".experts." in scaled_layers[0]):
            raise UserError(
                f"adapter.feedforward: a file cannot hold factors on the inputs of {scaled_layers[0]} alone: "
                f"{layer.file_name} holds several layers or experts; name another layer, or use lora"
            )


def _full_names(kinds: Mapping[str, bool]) -> IA3Spec:
    """Settings that name each layer in full, from the name of a layer -> True for factors on its inputs."""
    full = {
        kind: "|".join(sorted(escaped(name) for name, on_inputs in kinds.items() if on_inputs == kind)) or NO_LAYER
        for kind in (False, True)
    }
    return IA3Spec(layers=full[False], feedforward=full[True])


def _layers_of_file(tensors: State, in_file: list[FileLayer]) -> IA3Spec:
    """The settings with exactly the layers of a file that another program wrote."""
    kinds: dict[str, bool] = {}
    for layer in in_file:
        factors = tensors.get(f"{BEFORE}{layer.file_name}.ia3_l")
        if factors is not None:
            kinds |= dict.fromkeys(layer.layers, factors.ndim == 2 and factors.shape[0] == 1)
    if not kinds:
        raise UserError(f"{WEIGHTS} has factors of none of the linear layers of its base model")
    return _full_names(kinds)

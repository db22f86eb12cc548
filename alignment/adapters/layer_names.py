"""The linear layers of a model by our names and by a Hugging Face file's, and which of them a config names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from alignment.adapters.specs import EVERY_LINEAR, Names
from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel, ExternalScalarModel
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.native_model import NativeModel
from alignment.settings import search_names, without_numbers

AnyModel = NativeModel[Any] | ExternalModel
INNER = "inner."  # in front of the names of a model that runs as transformers' class
BEFORE = "base_model.model."  # in front of every name in a file
NO_LAYER = "(?!)"  # matches no name


@dataclass(frozen=True)
class FileLayer:
    """A linear layer of a Hugging Face model."""

    file_name: str  # its name there
    layers: tuple[str, ...]  # names of our layers that make it up, in order
    groups: int = 1  # number of groups of output rows, each with some rows of every layer
    transposed: bool = False  # its weight is stored as [in, out]


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by our names, those with an adapter too; no score head, no router of experts."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: tuple[type, ...] = (nn.Linear,)
    if isinstance(model, ExternalModel):
        from transformers.pytorch_utils import Conv1D

        kinds = (nn.Linear, Conv1D)
    own_head = model.head if isinstance(model, ScalarModel | ExternalScalarModel) else None
    layers: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()  # names within layers that have an adapter
    for name, module in model.named_modules():
        # Llama 4's and PhiMoE's routers derive from nn.Linear and return tuples.
        router = type(module).__name__.endswith("Router")
        if router or name.startswith(inside) or module is own_head:
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inside += (f"{name}.",)
        if isinstance(module, kinds) or (isinstance(module, BaseTunerLayer) and hasattr(module, "in_features")):
            layers[name] = cast(nn.Module, module)
    return layers


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, with or without an adapter."""
    if hasattr(layer, "in_features"):
        return cast(int, layer.in_features), cast(int, layer.out_features)
    inputs, outputs = cast(Tensor, layer.weight).shape  # transformers' Conv1D
    return inputs, outputs


def file_layers(model: nn.Module) -> list[FileLayer]:
    """Every linear layer as a Hugging Face file names it; none for a model that has no such file of its own."""
    linear = linear_layers(model)
    if isinstance(model, ExternalModel):
        return [  # those that are no nn.Linear, below an adapter, are transformers' Conv1D
            FileLayer(
                name.removeprefix(INNER),
                (name,),
                transposed=not isinstance(getattr(layer, "base_layer", layer), nn.Linear),
            )
            for name, layer in linear.items()
        ]
    if not isinstance(model, NativeModel):
        return []
    by_name: dict[str, FileLayer] = {}
    for ours, location in hf_locations(model).items():
        layer, _, leaf = ours.rpartition(".")
        if leaf == "weight" and layer in linear:
            name = location.name.removesuffix(".weight")
            earlier = by_name[name].layers if name in by_name else ()
            by_name[name] = FileLayer(name, (*earlier, layer), location.groups, location.transposed)
    return list(by_name.values())


def matching_layers(model: nn.Module, wanted: Names, key: str = "layers") -> list[str]:
    """Our names of the linear layers that a config names, as in `LowRankSpec`; `key` is its key, for messages."""
    names = names_in_file(model)
    if isinstance(model, ExternalModel) and wanted in ("all-linear", EVERY_LINEAR):  # below the trunk
        prefix = model.inner.base_model_prefix
        trunk = f"{INNER}{prefix}." if hasattr(model.inner, prefix) else INNER
        layers = [name for name in names if name.startswith(trunk)]
    else:
        layers = matching(EVERY_LINEAR if wanted == "all-linear" else wanted, names, key)
    if not layers:
        there = without_numbers([*names, *filter(None, names.values())])
        raise UserError(f"adapter.{key} {wanted!r} names no linear layer; there are: {', '.join(there)}")
    return layers


def names_in_file(model: nn.Module) -> dict[str, str]:
    """Our name of each linear layer -> the name of the layer in a Hugging Face file, "" where it has none."""
    in_file = {ours: layer.file_name for layer in file_layers(model) for ours in layer.layers}
    return {name: in_file.get(name, "") for name in linear_layers(model)}


def matching(patterns: Names, names: Mapping[str, str], key: str) -> list[str]:
    """Our names that a pattern, or one of a list, matches; a pattern that matches none is tried on the file's names."""
    matches: set[str] = set()
    start = "" if isinstance(patterns, str) else r"(?:^|\.)"
    for text in (patterns,) if isinstance(patterns, str) else patterns:
        pattern = rf"{start}(?:{text})$"
        who = f"adapter.{key} {text!r}"
        ours = set(search_names(pattern, list(names), who))
        if not ours:
            in_file = set(search_names(pattern, list(filter(None, names.values())), who))
            ours = {name for name, file_name in names.items() if file_name in in_file}
        matches |= ours
    return [name for name in names if name in matches]


def escaped(name: str) -> str:
    """A full name as a regular expression."""
    return name.replace(".", r"\.")

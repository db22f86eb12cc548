"""Bottleneck adapters: small residual networks on the outputs of attention and feed-forward layers.

peft has none, so that the files are in a format of our own, written beside the same two names: every tensor has the
name of the model's parameter, and adapter_config.json has peft_type "BOTTLENECK" and our settings.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alignment.adapters.extras import AdapterKind, Change, State
from alignment.adapters.files import CONFIG, build_spec
from alignment.adapters.layer_names import AnyModel
from alignment.adapters.specs import BottleneckSpec
from alignment.errors import UserError
from alignment.models.external.models import ExternalModel
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.transformer import Transformer

CHILD = "bottleneck"  # name of the adapter in the module whose output it reads
INIT_STD = 0.02  # of the down-projection; the up-projection starts at zero
NATIVE_SITE = re.compile(r"(?P<stack>\w+)\.blocks\.\d+(\.block)?\.(?P<part>attention|feedforward)")

# Names in transformers' modules: the linear layer that ends a part, else the part itself.
ATTENTION = r"(self_attn|self_attention|attention|attn)"
FEED_FORWARD = r"(mlp|ffn|feed_forward|feedforward|block_sparse_moe)"
ATTENTION_OUTPUT = re.compile(
    rf"(?P<layer>.+\.\d+)\.{ATTENTION}(\.{ATTENTION}|\.output)?\.(o_proj|out_proj|c_proj|dense|o|wo|out_lin)"
)
FEED_FORWARD_OUTPUT = re.compile(
    rf"(?P<layer>.+\.\d+)\.({FEED_FORWARD}\.(down_proj|fc2|c_proj|fc_out|dense_4h_to_h|w2|wo|down|fc_out|lin2)"
    r"|output\.dense|fc2)"
)
FEED_FORWARD_MODULE = re.compile(rf"(?P<layer>.+\.\d+)\.{FEED_FORWARD}")


class Bottleneck(nn.Module):
    """x + up(dropout(activation(down(x)))), in fp32 unless autocast says otherwise. It starts as the identity.

    Source: Houlsby et al. 2019, arXiv:1902.00751, section 2.1.
    """

    def __init__(self, spec: BottleneckSpec, width: int):
        super().__init__()
        inner = spec.inner_width(width)
        self.down = nn.Linear(width, inner)
        self.up = nn.Linear(inner, width)
        nn.init.normal_(self.down.weight, std=INIT_STD)
        for zeros in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zeros)
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()
        self.spec = spec
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D]."""
        inner = ACTIVATIONS[self.spec.activation](self.down(x.to(self.down.weight.dtype)))
        return x + self.up(self.dropout(inner)).to(x.dtype)


def apply_bottleneck(module: nn.Module, inputs: object, output: Any) -> Any:
    """Forward hook: the output of `module`, or the first of its outputs, through the module's adapter."""
    adapter = module.get_submodule(CHILD)
    if not adapter.enabled:
        return output
    return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)


def bottleneck_sites(model: AnyModel, spec: BottleneckSpec) -> dict[str, int]:
    """The modules whose outputs get an adapter, by name, and the width of each output."""
    if isinstance(model, ExternalModel):
        sites = _external_sites(model)
    else:
        sites = {"attention": {}, "feedforward": {}}
        for name, _ in model.named_modules():
            if match := NATIVE_SITE.fullmatch(name):
                stack = model.get_submodule(match["stack"])
                assert isinstance(stack, Transformer)
                sites[match["part"]][name] = stack.spec.width
    parts = ("attention", "feedforward") if spec.placement == "houlsby" else ("feedforward",)
    return {name: width for part in parts for name, width in sites[part].items()}


def _external_sites(model: ExternalModel) -> dict[str, dict[str, int]]:
    """The sites of transformers' class: the last linear layer of each part of each layer, else the part itself."""
    names = [name for name, _ in model.named_modules()]
    attention = _by_layer(names, ATTENTION_OUTPUT)
    feed_forward = _by_layer(names, FEED_FORWARD_MODULE) | _by_layer(names, FEED_FORWARD_OUTPUT)
    if not attention or attention.keys() != feed_forward.keys():
        raise UserError(
            f"{type(model.inner).__name__}: a bottleneck adapter looks for the last linear layer of attention "
            f"(names {ATTENTION_OUTPUT.pattern!r}) and of the feed-forward layer (names "
            f"{FEED_FORWARD_OUTPUT.pattern!r}, or the layer itself, {FEED_FORWARD_MODULE.pattern!r}) in every layer, "
            f"and found {len(attention)} and {len(feed_forward)}; use LoRA instead"
        )
    return {
        "attention": dict.fromkeys(attention.values(), model.spec.width),
        "feedforward": dict.fromkeys(feed_forward.values(), model.spec.width),
    }


def _by_layer(names: list[str], pattern: re.Pattern[str]) -> dict[str, str]:
    """The module that `pattern` matches in each layer."""
    matches = (pattern.fullmatch(name) for name in names)
    return {match["layer"]: match[0] for match in matches if match}


def bottlenecks(model: nn.Module) -> dict[str, Bottleneck]:
    """The bottleneck adapters of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Bottleneck)}


# Keys of adapter_config.json that are no settings of ours; peft's configs have them too.
SHARED = ("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode")


class BottleneckKind(AdapterKind):
    """Bottleneck adapters, and their files."""

    peft_type = "BOTTLENECK"
    unmergeable = (
        "a bottleneck adapter has a non-linearity, so that it cannot be merged into weights, and peft has no such "
        "adapter and does not open its files; keep it as an adapter directory, which this library loads"
    )

    def attach(self, model: AnyModel, spec: BottleneckSpec) -> None:
        sites = bottleneck_sites(model, spec)
        model.requires_grad_(False)
        device = next(model.parameters()).device
        for name, width in sites.items():
            # A child of the module it acts on: sharding, activation checkpointing and copies of the model take it
            # along.
            module = model.get_submodule(name)
            module.add_module(CHILD, Bottleneck(spec, width).to(device))
            module.register_forward_hook(apply_bottleneck)

    def is_attached(self, model: nn.Module) -> bool:
        return bool(bottlenecks(model))

    def changes_when_off(self, model: nn.Module) -> list[Change]:
        return [(bottleneck, "enabled", False) for bottleneck in bottlenecks(model).values()]

    def holds(self, name: str) -> bool:
        return f".{CHILD}." in name

    def to_file(self, model: nn.Module, state: State) -> tuple[State, dict[str, Any]]:
        settings = asdict(next(iter(bottlenecks(model).values())).spec)
        del settings["kind"]
        return (
            {name: value for name, value in state.items() if self.holds(name)},
            {"peft_type": self.peft_type, **settings},
        )

    def read_spec(self, config: Mapping[str, object], directory: Path) -> BottleneckSpec:
        settings = {key: value for key, value in config.items() if key not in SHARED}
        return build_spec(BottleneckSpec, settings, f"{directory}/{CONFIG}")

    def from_file(
        self, model: AnyModel, spec: BottleneckSpec, tensors: State, directory: Path
    ) -> dict[str, Tensor | None]:
        self.attach(model, spec)
        return {name: tensors.pop(name, None) for name, _ in model.named_parameters() if self.holds(name)}

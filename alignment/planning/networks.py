"""The networks of a stage on the meta device: shapes and types of everything that a run holds, and no memory.

Adapters, frozen weights and sharing follow the same rules as in the stages themselves.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alignment.adapters.attach import attach
from alignment.adapters.lora import START, activate_loras, attach_lora
from alignment.adapters.specs import LoRASpec
from alignment.errors import UserError
from alignment.models.build import empty_model
from alignment.models.external.load import AUTO_CLASSES
from alignment.models.families import is_external_type
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.heads import score_outputs
from alignment.models.language_model import LanguageModel
from alignment.models.quantization import quantizable_layers
from alignment.models.safetensors_files import HFConfig
from alignment.models.shared_weights import share_weights
from alignment.models.weights_config import Quantization, WeightsConfig
from alignment.planning.stages import Network, Start, Workload, is_encoder
from alignment.reward_model.model import AdapterEnsemble

Networks = dict[str, Any]  # role -> a model of one of our classes or around one of transformers'
# weights per scale; scales per scale of the scales
BLOCK = 64
NESTED_BLOCK = 256
TABLE_BYTES = 4 * 16 + 4 * 256 + 4  # the tables of 4-bit and of 8-bit values, and the mean of the scales


def build_networks(stage: Workload, weights: WeightsConfig, *, shared: bool) -> Networks:
    """Networks of a stage by role; `weights`: how frozen ones are held; `shared`: networks over one base share it."""
    bases: dict[str, Any] = {}

    def base_of(start: Start) -> Any:
        """The frozen language model of a start, the same one for all networks that can share it."""
        base = bases.get(start.base) or _stored(start, "language", {}, weights)
        if shared:
            bases[start.base] = base
        return base

    def build(network: Network) -> Any:
        if network.updates and network.adapter is None:
            model = empty_network({**network.start.config, **network.labels}, network.task, torch.float32)
            model.requires_grad_(True)
        else:
            model = _frozen(network, weights, base_of)
        if network.adapter is not None:
            with torch.device("meta"):
                attach(model, network.adapter)
            train_in_float32(model)
        if network.trains_head:
            model.head.requires_grad_(True)
        if not network.trains_trunk:
            for name, module in model.named_children():
                module.requires_grad_(name == "head")
        return model

    networks: Networks = {}
    for role, network in stage.networks.items():
        members = [build(network) for _ in range(network.members)]
        if len(members) > 1 and not shared:
            raise UserError(
                "ensemble.kind: an ensemble of adapters holds one base, and FSDP2 and ZeRO shard each network by "
                "itself (the run itself refuses this); take ensemble.kind=heads, or another launch file"
            )
        networks[role] = members[0] if len(members) == 1 else AdapterEnsemble(members)
    return networks


def _frozen(network: Network, weights: WeightsConfig, base_of: Callable[[Start], LanguageModel]) -> Any:
    """A frozen model with the adapters of its start, over a base that others may share where that has its trunk."""
    start = network.start
    task = network.task
    labels = network.labels
    if task == "language":
        model = share_weights(base_of(start))
    elif task == "scalar" and not is_external_type(start.config) and not is_encoder(start.config):
        model = empty_network({**start.config, **labels}, "scalar", torch.float32)
        model.trunk = share_weights(base_of(start).trunk)
    else:
        model = _stored(start, task, labels, weights)
    with torch.device("meta"):
        for spec in start.adapters:
            if isinstance(spec, LoRASpec):
                attach_lora(model, spec, START)
                activate_loras(model)
                del model.peft_config
            else:
                attach(model, spec)
    return train_in_float32(model).requires_grad_(False)


def _stored(start: Start, task: str, labels: Mapping[str, object], weights: WeightsConfig) -> Any:
    """A frozen model whose weights are held as `weights` says."""
    model = empty_network({**start.config, **labels}, task, start.dtype)
    if weights.quantize is not None:
        for name, layer in list(quantizable_layers(model)):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, QuantizedPlaceholder(layer, weights.quantize))
    return store_frozen(model, replace(weights, quantize=None))


def empty_network(config: HFConfig, task: str, dtype: torch.dtype) -> Any:
    """A model of an architecture on the meta device, in a type, in eval mode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = _external(config, task) if is_external_type(config) else empty_model(dict(config), task)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _external(config: HFConfig, task: str) -> Any:
    """A model of transformers' own class from its config alone."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = config["model_type"]
    if name not in CONFIG_MAPPING:
        raise UserError(f"model_type {name!r} is neither in our tables nor in transformers'")
    settings = CONFIG_MAPPING[name](**{key: value for key, value in config.items() if key != "model_type"})
    kind = ("encoder-decoder" if settings.is_encoder_decoder else "causal") if task == "language" else task
    if task == "scalar":
        settings.update({"num_labels": score_outputs(config)})
    auto_class, wrapper = AUTO_CLASSES[kind]
    inner = getattr(transformers, auto_class).from_config(settings, trust_remote_code=False)
    return wrapper(inner, settings.to_dict(), task)


def parameter_count(model: nn.Module) -> tuple[int, int]:
    """Weights of a model, each once, and how many of them train; a quantized matrix counts its own weights."""
    packed = {
        id(x.weight): x.in_features * x.out_features for x in model.modules() if isinstance(x, QuantizedPlaceholder)
    }
    sizes = {id(x): (packed.get(id(x), x.numel()), x.requires_grad) for x in model.parameters()}
    return sum(size for size, _ in sizes.values()), sum(size for size, trains in sizes.values() if trains)


# Quantized layers: bitsandbytes' parameters are tensor subclasses, which cannot be traced


def quantized_bytes(rows: int, columns: int, kind: Quantization) -> int:
    """Bytes of one quantized matrix with all that belongs to it.

    nf4: half a byte per weight, one byte per 64 weights (its scale, quantized), 4 bytes per 256 scales, and tables.
    int8: one byte per weight, and a float32 scale per row.

    Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; Dettmers et al. 2022, arXiv:2208.07339, eq. 5.
    """
    weights = rows * columns
    if kind == "int8":
        return weights + 4 * rows
    scales = math.ceil(weights / BLOCK)
    return math.ceil(weights / 2) + scales + 4 * math.ceil(scales / NESTED_BLOCK) + TABLE_BYTES


class _Product(torch.autograd.Function):
    """x W^T for a quantized W, which is made whole for the product, forward and backward, and never kept."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return nn.functional.linear(x, packed.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad,) = grad_outputs
        return grad @ grad.new_empty(ctx.shape), None, None


class QuantizedPlaceholder(nn.Linear):
    """Frozen linear layer that holds as many bytes (uint8 [n]) as a quantized one and computes with a whole matrix."""

    def __init__(self, layer: nn.Linear, kind: Quantization):
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        held = quantized_bytes(layer.out_features, layer.in_features, kind)
        packed = torch.empty(held, dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        y: Tensor = _Product.apply(input, self.weight, (self.out_features, self.in_features))
        return y if self.bias is None else y + self.bias.to(y.dtype)

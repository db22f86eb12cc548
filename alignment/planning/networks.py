"""The networks of a stage on the meta device: shapes and types of everything that a run holds, and no memory.

Which adapters lie on which base, what trains, and what several networks share is decided as the stages decide it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.adapters.attach import attach
from alignment.adapters.lora import START, activate_loras, attach_lora
from alignment.adapters.specs import AdapterSpec, LoRASpec
from alignment.errors import UserError
from alignment.models.build import empty_model
from alignment.models.external.load import AUTO_CLASSES
from alignment.models.families import FAMILIES, is_external_type
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.heads import score_outputs
from alignment.models.language_model import LanguageModel
from alignment.models.safetensors_files import HFConfig
from alignment.models.shared_weights import share_weights
from alignment.models.weights_config import WeightsConfig
from alignment.planning.quantized_layers import replace_by_stand_ins
from alignment.planning.starts import Start
from alignment.training import OptimConfig
from alignment.training.optimizers import hidden_matrices, optimizer_bytes

SHARED = "shared base"


@dataclass
class Networks:
    """The networks of a stage by role, and what is made once for several of them.

    Attributes:
        weights: how frozen weights are held.
        shared: whether networks over the same frozen base hold it together.
        by_role: policy, value model, reward model, reference, teacher; those that the stage has.
        frozen: roles that do not train: FSDP2 and ZeRO leave these networks whole on every device.
    """

    weights: WeightsConfig
    shared: bool
    by_role: dict[str, Any] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    _bases: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        role: str,
        start: Start,
        task: str = "language",
        *,
        adapter: AdapterSpec | None = None,
        trained: bool = True,
        changes: Mapping[str, object] | None = None,
    ) -> Any:
        """Make the network of a role.

        Args:
            start: what it starts from.
            task: its head: language, scalar, sequence, tokens, span or next_sentence.
            adapter: trained on top of the frozen start.
            trained: without `adapter`: whether all its weights train; else all are frozen.
            changes: keys of config.json that differ, such as the number of labels.
        """
        if not trained:
            self.frozen.add(role)
        if adapter is None and trained:
            model = _whole(start, task, changes or {})
        else:
            model = self._over_base(start, task, changes or {})
            if adapter is not None:
                with torch.device("meta"):
                    attach(model, adapter)
                train_in_float32(model)
        self.by_role[role] = model
        return model

    def _over_base(self, start: Start, task: str, changes: Mapping[str, object]) -> Any:
        """A frozen network with the adapters of its start, over a base of its own or a shared one."""
        over_trunk = task == "scalar" and not is_external_type(start.config) and not is_encoder(start.config)
        if task == "language" or over_trunk:
            base = self._base(start)
            model = share_weights(base) if task == "language" else _scalar_over(base, changes)
        else:
            model = self._frozen(start, task, changes)
        with torch.device("meta"):
            for spec in start.adapters:
                if isinstance(spec, LoRASpec):
                    attach_lora(model, spec, START)
                    activate_loras(model)
                    del model.peft_config
                else:
                    attach(model, spec)
        return train_in_float32(model).requires_grad_(False)

    def _base(self, start: Start) -> Any:
        if not self.shared or start.base not in self._bases:
            self._bases[start.base] = self._frozen(start, "language", {})
        return self._bases[start.base]

    def _frozen(self, start: Start, task: str, changes: Mapping[str, object]) -> Any:
        """A frozen model whose weights are held as `weights` says."""
        model = empty_network({**start.config, **changes}, task, start.dtype)
        if self.weights.quantize is not None:
            replace_by_stand_ins(model, self.weights.quantize)
        return store_frozen(model, replace(self.weights, quantize=None))

    def on(self, mode: FakeTensorMode) -> None:
        """Give the networks fake tensors on the CPU; what they share stays shared."""
        new: dict[int, Tensor] = {}
        for model in self.by_role.values():
            for module in model.modules():
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None and isinstance(held[name], Tensor) and tensor.is_meta:
                            held[name] = new.setdefault(id(tensor), _fake(tensor, mode))

    def categories(self) -> list[tuple[str, list[Tensor]]]:
        """All weights and buffers, each once: weights that several networks hold as the shared base, the others by role."""
        holders: dict[int, tuple[list[str], Tensor]] = {}
        for role, model in self.by_role.items():
            for tensor in [*model.parameters(), *model.buffers()]:
                holders.setdefault(id(tensor), ([], tensor))[0].append(role)
        found: dict[str, list[Tensor]] = {}
        for roles, tensor in holders.values():
            found.setdefault(SHARED if len(set(roles)) > 1 else roles[0], []).append(tensor)
        return list(found.items())


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU like one on the meta device."""
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _whole(start: Start, task: str, changes: Mapping[str, object]) -> Any:
    """A model of which every weight trains, in float32."""
    return empty_network({**start.config, **changes}, task, torch.float32).requires_grad_(True)


def is_encoder(config: HFConfig) -> bool:
    """Whether a config is that of one of our encoders, which have a score for a text and none per token."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.architecture == "encoder" and not is_external_type(config)


def _scalar_over(base: LanguageModel, changes: Mapping[str, object]) -> Any:
    """A scalar model over the trunk of a frozen language model, with a float32 head that trains."""
    with torch.device("meta"):
        scalar = empty_model({**base.config, **changes}, "scalar")
    scalar.trunk = share_weights(base.trunk)
    return scalar


def empty_network(config: HFConfig, task: str, dtype: torch.dtype) -> Any:
    """A model of an architecture on the meta device, in a type, in eval mode.

    Raises:
        UserError: the config is that of no architecture known here or to transformers.
    """
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


def trained_bytes(models: Sequence[nn.Module]) -> int:
    """Bytes of the weights that train."""
    return sum(p.numel() * p.element_size() for model in models for p in model.parameters() if p.requires_grad)


def state_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Bytes of the state after every trained weight was updated once, without sharding."""
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters() if x.requires_grad}
    hidden = hidden_matrices(model) if config.name == "muon" else {}
    return optimizer_bytes(shapes, config, hidden=hidden)

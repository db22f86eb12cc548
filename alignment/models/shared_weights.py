"""Frozen base weights held once, for several networks that lie over them: policy, reference, value and reward model.

Each network is a module tree of its own, with its own head, adapter and mode; the frozen parameters in the trees are
the same objects, so nothing has to be switched when another network is called. Weights that train are never shared.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from alignment.models.build import empty_model
from alignment.models.classifiers import ScalarModel
from alignment.models.external.load import external_scalar_over
from alignment.models.external.models import ExternalLanguageModel, ExternalScalarModel
from alignment.models.frozen_weights import store_frozen
from alignment.models.heads import score_labels
from alignment.models.huggingface.checkpoint import draw_score_head, load_language_model, load_scalar_model
from alignment.models.init_weights import initialize_layer
from alignment.models.language_model import LanguageModel
from alignment.models.safetensors_files import read_config
from alignment.models.weight_bytes import held_tensors
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig

Network = TypeVar("Network", bound=nn.Module)
NewHead = Literal["normal", "zero"]
LANGUAGE_CLASSES = ("ForCausalLM", "LMHeadModel")  # ends of the class in config.json whose file has a language head
SCALAR_CLASS = "ForSequenceClassification"


class SharedWeights:
    """The frozen base models of a run's networks, each directory read once.

    `language_model` and `scalar_model` return a new module tree per call, all over the same frozen weights. The caller
    attaches adapters and heads to a tree and trains those. Training or merging the weights below would change every
    network: `refuse_trained` finds the first, and trees that are merged are loaded without this class.

    Attributes:
        weights: types of the weights in memory.
        shared: False: every call reads weights of its own, because FSDP2 and ZeRO shard each network by itself.
    """

    def __init__(self, weights: WeightsConfig = DEFAULT_WEIGHTS, *, shared: bool = True):
        self.weights = weights
        self.shared = shared
        self._originals: dict[Path, Any] = {}  # what the trees are copied from; never run, never changed

    def unshared(self) -> "SharedWeights":
        """The same settings, with weights of its own for every network."""
        return SharedWeights(self.weights, shared=False)

    def language_model(self, directory: Path, *, device: str = "cpu") -> Any:
        """The language model of a directory in eval mode, every weight frozen; arguments as for `load_pretrained`."""
        original = self._original(Path(directory))
        if isinstance(original, LanguageModel | ExternalLanguageModel):
            return share_weights(original)
        return store_frozen(load_language_model(directory, dtype=None, device=device), self.weights)

    def scalar_model(
        self, directory: Path, new_head: NewHead | None = None, members: int = 1, *, device: str = "cpu"
    ) -> Any:
        """The scalar model of a directory, all weights frozen, its head the caller's alone. See `load_scalar_model`."""
        original = self._original(Path(directory))
        scalar: ScalarModel | ExternalScalarModel | None = None
        if isinstance(original, ScalarModel | ExternalScalarModel):
            scalar = share_weights(original)
            scalar.head.weight = nn.Parameter(original.head.weight.detach().clone(), requires_grad=False)
        elif isinstance(original, LanguageModel) and new_head is not None:
            scalar = _scalar_over(original)
        elif isinstance(original, ExternalLanguageModel) and new_head is not None:
            scalar = external_scalar_over(share_weights(original))
        if scalar is None:
            return store_frozen(load_scalar_model(directory, None, device, new_head, members), self.weights)
        if new_head is not None:
            _draw_head(scalar, new_head, members)
        return scalar

    def _original(self, directory: Path) -> Any:
        """The model whose weights are shared, loaded at the first call; None where there is nothing to share.

        A file with a language head is loaded with it, since a policy or a reference may ask for it later.
        """
        if not self.shared:
            return None
        key = directory.resolve()
        if key not in self._originals:
            name = str((read_config(key).get("architectures") or [""])[0])
            load = load_language_model if name.endswith(LANGUAGE_CLASSES) else load_scalar_model
            if not name.endswith((*LANGUAGE_CLASSES, SCALAR_CLASS)):
                return None
            self._originals[key] = store_frozen(load(key, dtype=None), self.weights)
        return self._originals[key]


def share_weights(network: Network) -> Network:
    """A copy of the module tree whose parameters and buffers belong to `network` too and are not copied."""
    # bitsandbytes' layers have the scales of 4-bit weights in an object that their weight has too, and moves.
    states = [vars(module)["quant_state"] for module in network.modules() if "quant_state" in vars(module)]
    return deepcopy(network, {id(shared): shared for shared in (*held_tensors(network), *states)})


def refuse_trained(networks: Mapping[str, nn.Module]) -> None:
    """Refuse networks, given by name, that share a weight which one of them trains.

    Raises:
        ValueError: naming the networks and the weight.
    """
    holders: dict[nn.Parameter, tuple[str, list[str]]] = {}  # trained parameter -> its name, the networks that hold it
    for network, model in networks.items():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                holders.setdefault(parameter, (name, []))[1].append(network)
    for name, together in holders.values():
        if len(together) > 1:
            raise ValueError(
                f"{name} would be trained, and {' and '.join(together)} hold the same tensor: every one of them would "
                "change; freeze it, or load that network with weights of its own"
            )


def _scalar_over(language: LanguageModel) -> ScalarModel:
    """A scalar model over the trunk of a language model, its head of zeros in fp32."""
    with torch.device("meta"):
        scalar = empty_model(language.config, "scalar")
    scalar.trunk = share_weights(language.trunk)
    scalar.head.to_empty(device=language.trunk.embed.weight.device).to(torch.float32)
    return scalar.eval().requires_grad_(False)


@torch.no_grad()
def _draw_head(scalar: ScalarModel | ExternalScalarModel, new_head: NewHead, members: int) -> None:
    """A new score head of `members` outputs with the random numbers of `load_scalar_model`."""
    if scalar.head.out_features != members:
        old: Tensor = scalar.head.weight
        scalar.head.weight = nn.Parameter(old.new_empty(members, old.shape[1]), requires_grad=False)
        scalar.head.out_features = members
    if isinstance(scalar, ScalarModel):
        scalar.config = scalar.config | score_labels(members)
        initialize_layer(scalar.head, scalar.spec.init, "head")
    draw_score_head(scalar.head, new_head)

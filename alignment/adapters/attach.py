"""Attach an adapter to a model, switch it off for a while, merge it into the weights."""

from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor, nn

from alignment.adapters.bottleneck import BottleneckKind
from alignment.adapters.extras import changed, plain_name, replace_extras
from alignment.adapters.ia3 import IA3Kind
from alignment.adapters.layer_names import AnyModel
from alignment.adapters.lora import LoRAKind
from alignment.adapters.specs import AdapterSpec, PromptSpec
from alignment.adapters.virtual_tokens import PrefixKind, PromptKind
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel, ExternalScalarModel
from alignment.models.native_model import NativeModel
from alignment.models.quantization import quantization_of

Loaded = TypeVar("Loaded", bound=NativeModel | ExternalModel)
Kind = LoRAKind | IA3Kind | PrefixKind | PromptKind | BottleneckKind
_lora, _ia3 = LoRAKind(), IA3Kind()
KINDS: dict[str, Kind] = {
    "lora": _lora, "dora": _lora, "ia3": _ia3, "prefix": PrefixKind(), "prompt": PromptKind(), "bottleneck": BottleneckKind(),
}  # fmt: skip


def kinds_attached(model: AnyModel) -> list[Kind]:
    """The kinds of adapter that a model has."""
    return [kind for kind in dict.fromkeys(KINDS.values()) if kind.is_attached(model)]


def attach(model: Loaded, spec: AdapterSpec, *, tokenizer: Tokenizer | None = None) -> Loaded:
    """Freeze `model`, attach a new adapter and return the model; the score head of a scalar model stays trainable.

    Args:
        tokenizer: the model's, for a soft prompt that starts from a text.

    Raises:
        UserError: the adapter does not fit the model.
    """
    kind, options = KINDS[spec.kind], {"tokenizer": tokenizer} if isinstance(spec, PromptSpec) else {}
    kind.attach(model, spec, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
    train_head(model)
    return model


def train_head(model: AnyModel) -> None:
    """Let the score head of a scalar model train."""
    if isinstance(model, ScalarModel | ExternalScalarModel):
        model.head.requires_grad_(True)


def disabled(model: AnyModel) -> AbstractContextManager[None]:
    """Switch the model's adapter off within the block, also when the block raises."""
    return changed(change for kind in kinds_attached(model) for change in kind.changes_when_off(model))


def merge_adapter(model: Loaded) -> Loaded:
    """Merge a model's adapter into its weights and return the model.

    Raises:
        UserError: the adapter is no change of weights, or the weights are quantized.
    """
    if (quantize := quantization_of(model)) is not None:
        raise UserError(
            f"the adapter cannot be merged into weights in {quantize}, which would round its changes away; load the model "
            "without quantization, or merge with `alignment export`"
        )
    for kind in kinds_attached(model):
        if not isinstance(kind, LoRAKind | IA3Kind):
            raise UserError(kind.unmergeable)
        kind.merge(model)
    return model.requires_grad_(True)


def merged_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model without its LoRA, DoRA or (IA)^3, which is put into the weights; the model stays as it is.

    Args:
        model: a model with or without such an adapter.
        state: its state dict; whole tensors where the model is sharded.
    """
    kinds = (_lora, _ia3)
    plain = {plain_name(name): value for name, value in state.items() if not any(kind.holds(name) for kind in kinds)}
    for kind in kinds:
        kind.put_into(model, state, plain)
    replace_extras(model, state, plain)
    return plain

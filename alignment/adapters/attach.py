"""Attach an adapter to a model, switch it off for a while, merge it into the weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor, nn

from alignment.adapters.extras import replace_extras
from alignment.adapters.ia3 import multiply_factors
from alignment.adapters.kinds import KINDS, AnyModel, kinds_attached
from alignment.adapters.lora import lora_updates
from alignment.adapters.specs import AdapterSpec, PromptSpec
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel, ExternalScalarModel
from alignment.models.native_model import NativeModel
from alignment.models.quantization import quantization_of

Loaded = TypeVar("Loaded", bound=NativeModel | ExternalModel)


def attach(model: Loaded, spec: AdapterSpec, *, tokenizer: Tokenizer | None = None) -> Loaded:
    """Freeze `model`, attach a new adapter and return the model; the score head of a scalar model stays trainable.

    Args:
        tokenizer: the model's, for a soft prompt that starts from a text.

    Raises:
        UserError: the adapter does not fit the model.
    """
    options = {"tokenizer": tokenizer} if isinstance(spec, PromptSpec) else {}
    KINDS[spec.kind].attach(model, spec, **options)
    train_head(model)
    return model


def train_head(model: AnyModel) -> None:
    """Let the score head of a scalar model train."""
    if isinstance(model, ScalarModel | ExternalScalarModel):
        model.head.requires_grad_(True)


@contextmanager
def disabled(model: AnyModel) -> Iterator[None]:
    """Switch the model's adapter off within the block, also when the block raises."""
    with ExitStack() as stack:
        for kind in kinds_attached(model):
            stack.enter_context(kind.switched_off(model))
        yield


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
        if isinstance(kind.merge, str):
            raise UserError(kind.merge)
        kind.merge(model)
    return model.requires_grad_(True)


def merged_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model without its LoRA, DoRA or (IA)^3, which is put into the weights; the model stays as it is.

    Args:
        model: a model with or without such an adapter.
        state: its state dict; whole tensors where the model is sharded.
    """
    adapter = [kind.holds for name, kind in KINDS.items() if name in ("lora", "dora", "ia3")]
    plain = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): value
        for name, value in state.items()
        if not any(holds(name) for holds in adapter)
    }
    for name, update in lora_updates(model, state).items():
        weight = plain[f"{name}.weight"]
        plain[f"{name}.weight"] = update.applied(weight.cpu()).to(weight.dtype)
    multiply_factors(model, state, plain)
    replace_extras(model, state, plain)
    return plain

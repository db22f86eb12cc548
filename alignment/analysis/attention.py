"""Attention weights of every head, from the model's own layers; inspection.py renders them.

Attention is linear in its values. Called with unit vectors as values, the very code that training runs, with its
windows, caps, biases and kernels, returns its weights; nothing is computed here a second way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from alignment.errors import UserError
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import ExternalModel
from alignment.models.layers.attention import (
    Attention,
    AttentionContext,
    AttentionFn,
    CrossAttention,
    CrossAttentionFn,
    ProjectKeyValue,
)
from alignment.models.layers.disentangled import DisentangledAttention
from alignment.models.layers.sparse import SparseAttention
from alignment.models.model import evaluation_mode
from alignment.models.native_model import NativeModel
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged, Seq2Seq


class EncoderDecoderMaps(NamedTuple):
    """Maps of an encoder-decoder, layer by layer: source on source [H, S, S], target on target [H, T, T], target on
    source [H, T, S]."""

    encoder: list[Tensor]
    decoder: list[Tensor]
    cross: list[Tensor]


@torch.no_grad()
def attention_maps(model: NativeModel | ExternalModel, ids: Sequence[int]) -> list[Tensor]:
    """Attention weights of a decoder or an encoder, ours or transformers', on a document of T tokens, without dropout.

    One [H, T, T] per layer, fp32: row t is what token t makes of all tokens. Rows sum to 1, less what a prefix or soft
    prompt of the model's own takes; what cannot be seen is exactly 0.
    """
    if isinstance(model, ExternalModel):
        return _given(_output_of(model, input_ids=torch.tensor([list(ids)])), "attentions")
    trunk = model.get_submodule("trunk")
    assert isinstance(trunk, Transformer)
    with evaluation_mode(model), recorded(trunk) as (maps, _):
        read = model.read(trunk, Ragged.build([ids]).to(trunk.embed.weight.device), prefix=model.active_prefix())
    before = len(read.batch.tokens) - len(ids)  # of a soft prompt
    return [weights[:, before:, before:] for weights in maps]


@torch.no_grad()
def encoder_decoder_attention_maps(
    model: Seq2SeqModel | ExternalModel, source: Sequence[int], target: Sequence[int]
) -> EncoderDecoderMaps:
    """Attention weights, without dropout, of an encoder-decoder that reads `source` and has written `target`.

    `target` begins with the start token.
    """
    if isinstance(model, ExternalModel):
        output = _output_of(
            model, input_ids=torch.tensor([list(source)]), decoder_input_ids=torch.tensor([list(target)])
        )
        return EncoderDecoderMaps(*(_given(output, f"{name}_attentions") for name in ("encoder", "decoder", "cross")))
    pair = Seq2Seq(Ragged.build([source]), Ragged.build([target])).to(model.encoder.embed.weight.device)
    with evaluation_mode(model), recorded(model.encoder) as (read, _), recorded(model.decoder) as (written, on_source):
        model.states(pair)
    encoder, cross = ([weights[..., -len(source) :] for weights in part] for part in (read, on_source))
    return EncoderDecoderMaps([weights[:, -len(source) :] for weights in encoder], written, cross)


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within the block the hooks are on their modules."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


@contextmanager
def recorded(trunk: nn.Module) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield two lists, to which one document through `trunk` in the block adds the weights of each layer.

    The first holds its weights on its own tokens, the second those on an encoder's.
    """
    own_maps, cross_maps = maps = list[Tensor](), list[Tensor]()

    def before(attention: nn.Module, inputs: tuple[Tensor, AttentionContext]) -> tuple[Tensor, AttentionContext]:
        x, context = inputs
        if isinstance(attention, DisentangledAttention | SparseAttention):  # it computes its own scores
            value = attention.value(x).unflatten(-1, (attention.spec.heads, -1))
            own_maps.append(_weights(partial(_mixed, attention, x, context), value))
            return x, context
        if isinstance(attention, CrossAttention):
            assert context.cross_attend is not None
            return x, replace(context, cross_attend=partial(_record_cross, context.cross_attend, cross_maps))
        return x, replace(context, attend=_recording(context.attend, own_maps))

    kinds = (Attention, CrossAttention, DisentangledAttention, SparseAttention)
    with hooked(part.register_forward_pre_hook(before) for part in trunk.modules() if isinstance(part, kinds)):
        yield maps


def _recording(attend: AttentionFn, maps: list[Tensor]) -> AttentionFn:
    """`attend` that also leaves its weights in `maps`."""

    def attend_and_record(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        maps.append(_weights(lambda values: attend(query, key, values, 0.0), value))
        return attend(query, key, value, dropout)

    return attend_and_record


def _record_cross(
    attend: CrossAttentionFn, maps: list[Tensor], query: Tensor, project_key_value: ProjectKeyValue, dropout: float
) -> Tensor:
    """`attend` on an encoder's states; its weights are left in `maps`."""

    def project_and_record(states: Tensor) -> tuple[Tensor, Tensor]:
        key, value = project_key_value(states)
        maps.append(_weights(lambda values: attend(query, lambda _: (key, values), 0.0), value))
        return key, value

    return attend(query, project_and_record, dropout)


def _weights(mix: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """The weights w [H, T, S], fp32, behind mix(values [S, KV, K])_t = sum_s w_ts values_s + what a prefix adds.

    `value` is the layer's own, for its shape; K columns of w are found at a time.
    """
    slots, _, width = value.shape
    nothing = mix(torch.zeros_like(value))
    pieces = []
    for asked in torch.arange(slots, device=value.device).split(width):
        units = torch.zeros_like(value)
        units[asked, :, asked - asked[0]] = 1
        pieces.append(mix(units) - nothing)
    return torch.cat(pieces, -1)[..., :slots].transpose(0, 1).float()


def _mixed(
    attention: DisentangledAttention | SparseAttention, x: Tensor, context: AttentionContext, values: Tensor
) -> Tensor:
    """The layer's mix of other values than its own, [N, H, K]: caught on the way to its output layer."""
    caught: list[Tensor] = []
    layers = [layer for name, layer in attention.named_children() if name.startswith("value")]  # Longformer has two
    with (
        hooked(layer.register_forward_hook(lambda *_: values.flatten(1)) for layer in layers),
        attention.output.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0])),
    ):
        attention.forward(x, context)
    return caught[0].unflatten(-1, values.shape[1:])


def _output_of(model: ExternalModel, **inputs: Tensor) -> object:
    """The output of transformers' own class, weights included: its plain implementation is the one that keeps them."""
    inner = model.inner
    usual = inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    try:
        with evaluation_mode(model):
            return inner(
                **{name: x.to(inner.device) for name, x in inputs.items()},
                output_attentions=True,
                use_cache=False,
                return_dict=True,
            )
    finally:
        inner.set_attn_implementation(usual)


def _given(output: object, name: str) -> list[Tensor]:
    layers = [layer for layer in getattr(output, name, None) or () if layer is not None]
    if not layers:
        raise UserError(f"{type(output).__name__}: transformers' class for this model gives no attention weights")
    return [layer[0].float() for layer in layers]

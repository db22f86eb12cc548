"""States of every layer of a decoder, an encoder or an encoder-decoder's encoder, ours or transformers'.

Layers are counted as transformers counts its `hidden_states`: 0 is the input of the first block, L the output of the last
one after the final norm, where there is one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from alignment.data.text.special_tokens import EncodedText
from alignment.errors import UserError
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import ExternalModel
from alignment.models.external.rectangles import PaddedRows, forward_tokens, run_padded
from alignment.models.model import evaluation_mode
from alignment.models.native_model import NativeModel
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged, group_by_length

BATCH_TOKENS = 4096  # of one forward, whose states of all layers are held at once


@torch.no_grad()
def layer_states(model: NativeModel | ExternalModel, batch: Ragged) -> list[Tensor]:
    """States of the batch's own tokens in each layer, L + 1 times [N, D], without dropout; of an encoder-decoder the encoder's."""
    with evaluation_mode(model):
        if isinstance(model, ExternalModel):
            return _external_states(model, batch)
        trunk = model.get_submodule("encoder" if isinstance(model, Seq2SeqModel) else "trunk")
        assert isinstance(trunk, Transformer)
        prefix = None if isinstance(model, Seq2SeqModel) else model.active_prefix()  # there it is the decoder's
        with block_inputs(trunk) as states:
            read = model.read(trunk, batch, prefix=prefix)
    states.append(read.states)
    return states if read.own_tokens is None else [layer[read.own_tokens] for layer in states]


@contextmanager
def block_inputs(trunk: Transformer) -> Iterator[list[Tensor]]:
    """Within the block, documents through `trunk` leave here what each layer reads, soft prompt included."""
    states: list[Tensor] = []
    with ExitStack() as hooks:
        for block in trunk.blocks:
            hooks.enter_context(block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])))
        yield states


def _external_states(model: ExternalModel, batch: Ragged) -> list[Tensor]:
    inner, virtual = model.inner.base_model, model.active_virtual_tokens()
    if model.inner.config.is_encoder_decoder:
        inner, virtual = model.inner.get_encoder(), virtual._replace(prefix=None)

    def forward(rows: PaddedRows, columns: Tensor | None) -> Tensor:
        states = getattr(run_padded(inner, virtual, rows, output_hidden_states=True), "hidden_states", None)
        if not states:
            raise UserError(f"{type(inner).__name__}: transformers' class for this model gives no states of its layers")
        return torch.stack(states, 2)[:, virtual.prompt_size :]

    return list(forward_tokens(forward, batch, model.padding_id).unbind(1))


def document_states(model: nn.Module, texts: Sequence[EncodedText]) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
    """The number of each text and the states of its tokens in each layer, L + 1 times [T, D], fp32, from short to long."""
    assert isinstance(model, NativeModel | ExternalModel)
    device = next(model.parameters()).device
    for group in group_by_length([len(text.ids) for text in texts], BATCH_TOKENS):
        segments = torch.tensor([segment for i in group for segment in texts[i].segments])
        batch = replace(Ragged.build([texts[i].ids for i in group]), segments=segments).to(device)
        layers = [layer.float().cpu().numpy() for layer in layer_states(model, batch)]
        ends = np.cumsum(batch.lengths)[:-1]
        yield from zip(group, zip(*(np.split(layer, ends) for layer in layers), strict=True), strict=True)

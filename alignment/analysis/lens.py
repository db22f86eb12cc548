"""States of every layer, ours and transformers', and `alignment inspect lens`: the tokens that each would predict.

Layers are counted as transformers counts its `hidden_states`: 0 is the input of the first block, L the output of the
last one after the final norm, where there is one. For the lens the model computes its logits itself, with another
layer's state before that norm: scales, caps and output layers act as they always do.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alignment.analysis.attention import hooked
from alignment.analysis.inspection import encoded, shown, write_texts
from alignment.data.tokenizers.tokenizer import check_vocabulary
from alignment.errors import UserError
from alignment.loading import load_model, load_tokenizer
from alignment.models.encoder_decoder import Seq2SeqModel
from alignment.models.external.models import ExternalModel
from alignment.models.external.rectangles import PaddedRows, forward_tokens, run_padded
from alignment.models.model import Model, evaluation_mode, start_token_of
from alignment.models.native_model import NativeModel
from alignment.models.outputs import check_numbers
from alignment.ragged import Ragged
from alignment.reports.html import numbers_of


@torch.no_grad()
def layer_states(model: Model, batch: Ragged) -> list[Tensor]:
    """States of the batch's own tokens in each layer, L + 1 times [N, D], without dropout.

    Those of an encoder-decoder are its encoder's.
    """
    assert isinstance(model, NativeModel | ExternalModel)
    with evaluation_mode(model):
        return _native_states(model, batch) if isinstance(model, NativeModel) else _external_states(model, batch)


def _native_states(model: NativeModel, batch: Ragged) -> list[Tensor]:
    has_encoder = isinstance(model, Seq2SeqModel)
    trunk: Any = model.get_submodule("encoder" if has_encoder else "trunk")
    inputs: list[Tensor] = []
    prefix = None if has_encoder else model.active_prefix()  # there it is the decoder's
    with hooked(block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in trunk.blocks):
        read = model.read(trunk, batch, prefix=prefix)
    return [read._replace(states=states).own_states() for states in [*inputs, read.states]]


def _external_states(model: ExternalModel, batch: Ragged) -> list[Tensor]:
    inner = model.inner.base_model
    virtual = model.active_virtual_tokens()
    if model.inner.config.is_encoder_decoder:
        inner = model.inner.get_encoder()
        virtual = virtual._replace(prefix=None)

    def forward(rows: PaddedRows, columns: Tensor | None) -> Tensor:
        states = getattr(run_padded(inner, virtual, rows, output_hidden_states=True), "hidden_states", None)
        if not states:
            raise UserError(f"{type(inner).__name__}: transformers' class for this model gives no states of its layers")
        return torch.stack(states, 2)[:, virtual.prompt_size :]

    return list(forward_tokens(forward, batch, model.padding_id).unbind(1))


# The lens


class Lens(NamedTuple):
    """The most probable tokens by each layer's state at each of T tokens, the most probable first."""

    tokens: Tensor  # ids, [L + 1, T, k]
    probabilities: Tensor  # [L + 1, T, k]
    kl: Tensor  # KL(last layer || layer), nats, [L + 1, T]


@torch.no_grad()
def logit_lens(model: Model, ids: Sequence[int], top: int = 5) -> Lens:
    """The `top` tokens that each layer's state gives through the final norm and the head, of a document of T tokens.

    KL(p || q) = sum_v p_v (log p_v - log q_v), p the model's own distribution, that of the last layer

    Raises:
        UserError: the model has no final norm that is found, or it is no language model of one side.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; KL: Belrose et al. 2023, arXiv:2303.08112, section
    3.
    """
    with evaluation_mode(model):
        layers = [logits.float().log_softmax(-1).cpu() for logits in lens_logits(model, ids)]
    best = [layer.topk(min(top, layer.shape[-1])) for layer in layers]
    kl = torch.stack([(layers[-1].exp() * (layers[-1] - layer)).sum(-1) for layer in layers])
    check_numbers(kl.T, "token {}, from 0,".format, "the KL from the last layer to another one")
    return Lens(torch.stack([topk.indices for topk in best]), torch.stack([topk.values.exp() for topk in best]), kl)


def lens_logits(model: Model, ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits [T, V] of each layer's state, from the input of the first block to the model's own."""
    if model.task != "language" or start_token_of(model) is not None:
        raise UserError(
            "the logit lens needs a language model of one side, no encoder-decoder, classifier or reward model"
        )
    inputs = torch.tensor([list(ids)], device=next(model.parameters()).device)
    outputs: list[tuple[nn.Module, object]] = []  # of what stands outside the layers, the inner ones first
    outside = [part for name, part in model.named_modules() if not any(place.isdigit() for place in name.split("."))]
    with hooked(part.register_forward_hook(lambda part, _, output: outputs.append((part, output))) for part in outside):
        *states, last = layer_states(model, Ragged.build([ids]).to(inputs.device))
    check_numbers(last, "token {}, from 0,".format, "the state of the last layer")
    norms = [
        part
        for part, output in outputs
        if isinstance(output, Tensor) and torch.equal(output.squeeze(0)[-len(ids) :], last)
    ]
    if not norms:
        raise UserError(
            f"{type(getattr(model, 'inner', model)).__name__}: no norm between the last layer and the head is found in "
            "transformers' class for this model, so the logit lens cannot read its layers; take a decoder with a final "
            "norm"
        )
    for state in states:

        def give(_: nn.Module, given: tuple[Tensor, ...], state: Tensor = state) -> Tensor:
            before = given[0][..., : -len(ids), :]  # tokens of a soft prompt
            return torch.cat([before, state.expand(*before.shape[:-2], -1, -1)], -2)

        with norms[0].register_forward_pre_hook(give):
            yield model(inputs).logits[0]
    yield model(inputs).logits[0]


def write_lens(model: str, texts: Sequence[str], output: str | Path, *, top: int = 5) -> Path:
    """Write a page with the logit lens of each text, and its numbers beside it as JSON; return the page's path.

    Args:
        model: directory or Hub name of a language model, or of an adapter.
        texts: what it reads, with the special tokens its tokenizer puts around a text.
        top: tokens shown per layer and position.
    """
    numbers_of(Path(output))
    loaded = load_model(model)
    tokenizer = load_tokenizer(model)
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    lenses = []
    for text, ids in zip(texts, encoded(tokenizer, texts, "--text"), strict=True):
        lens = logit_lens(loaded, ids, top)
        lenses.append(
            {
                "text": text,
                "tokens": shown(tokenizer, ids),
                "best": [[shown(tokenizer, best) for best in layer] for layer in lens.tokens.tolist()],
                "probabilities": lens.probabilities.tolist(),
                "kl": lens.kl.tolist(),
            }
        )
    return write_texts(output, "lens.html.jinja", model, lenses)

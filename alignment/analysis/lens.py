"""`alignment inspect lens`: the tokens that each layer's state would predict, were the layers after it left out.

The model computes its logits itself, with another layer's state before its final norm: scales, caps and output layers act
as they always do. A page with a table for each text and a JSON file beside it are written.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.analysis.inspection import TEMPLATES, encoded, shown
from alignment.analysis.states import block_inputs
from alignment.data.tokenizers.tokenizer import check_vocabulary
from alignment.errors import UserError
from alignment.evaluation.report.html import render_page
from alignment.files import write_json
from alignment.loading import load_model, load_tokenizer
from alignment.models.external.models import ExternalModel
from alignment.models.external.rectangles import pad_rows, run_padded
from alignment.models.language_model import LanguageModel, MaskedLanguageModel
from alignment.models.model import evaluation_mode
from alignment.ragged import Ragged


class Lens(NamedTuple):
    """The most probable tokens by each layer's state at each of T tokens, the most probable first."""

    tokens: Tensor  # ids, [L + 1, T, k]
    probabilities: Tensor  # [L + 1, T, k]
    kl: Tensor  # KL(last layer || layer), nats, [L + 1, T]


@torch.no_grad()
def logit_lens(model: nn.Module, ids: Sequence[int], top: int = 5) -> Lens:
    """The `top` tokens that each layer's state gives through the final norm and the head, of a document of T tokens.

    KL(p || q) = sum_v p_v (log p_v - log q_v), p the model's own distribution, that of the last layer

    Raises:
        UserError: the model has no final norm that is found, or it is no language model of one side.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; KL: Belrose et al. 2023, arXiv:2303.08112, section 3.
    """
    with evaluation_mode(model):
        layers = [logits.float().log_softmax(-1).cpu() for logits in lens_logits(model, ids)]
    best = [layer.topk(min(top, layer.shape[-1])) for layer in layers]
    kl = torch.stack([(layers[-1].exp() * (layers[-1] - layer)).sum(-1) for layer in layers])
    return Lens(torch.stack([each.indices for each in best]), torch.stack([each.values.exp() for each in best]), kl)


def lens_logits(model: nn.Module, ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits [T, V] of each layer's state, from the input of the first block to the model's own."""
    inputs = torch.tensor([list(ids)], device=next(model.parameters()).device)
    if isinstance(model, LanguageModel | MaskedLanguageModel):
        norm = model.trunk.norm
        with block_inputs(model.trunk) as states:
            own = model(inputs).logits[0]
    elif isinstance(model, ExternalModel) and model.task == "language" and not model.inner.config.is_encoder_decoder:
        norm, states = _final_norm(model, Ragged.build([ids]).to(inputs.device))
        own = model(inputs).logits[0]
    else:
        raise UserError(
            "the logit lens needs a language model of one side, no encoder-decoder, classifier or reward model"
        )
    for state in states:
        with norm.register_forward_pre_hook(lambda _, inputs, state=state: (state, *inputs[1:])):
            yield model(inputs).logits[0]
    yield own


def _final_norm(model: ExternalModel, batch: Ragged) -> tuple[nn.Module, list[Tensor]]:
    """The norm outside the layers whose output is the last layer's state, and what could stand before it: the other states."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    with ExitStack() as hooks:
        for name, part in model.inner.named_modules():
            if "norm" in type(part).__name__.lower() and not any(place.isdigit() for place in name.split(".")):
                hooks.enter_context(
                    part.register_forward_hook(lambda norm, inputs, output: outputs.append((norm, output)))
                )
        rows = pad_rows(batch, model.padding_id)
        output = run_padded(model.inner, model.active_virtual_tokens(), rows, output_hidden_states=True)
    states: list[Tensor] = list(getattr(output, "hidden_states", None) or ())
    found = [norm for norm, output in outputs if states and torch.equal(output.view_as(states[-1]), states[-1])]
    if not found:
        raise UserError(
            f"{type(model.inner).__name__}: no norm between the last layer and the head is found in transformers' class for "
            "this model, so the logit lens cannot read its layers; take a decoder with a final norm"
        )
    return found[-1], states[:-1]


def write_lens(model: str, texts: Sequence[str], output: str | Path, *, top: int = 5) -> Path:
    """Write a page with the logit lens of each text, and its numbers beside it as JSON; return the page's path.

    Args:
        model: directory or Hub name of a language model, or of an adapter.
        texts: what it reads, with the special tokens its tokenizer puts around a text.
        top: tokens told per layer and position.
    """
    loaded, tokenizer = load_model(model), load_tokenizer(model)
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    found = []
    for text, ids in zip(texts, encoded(tokenizer, texts, "--text"), strict=True):
        lens = logit_lens(loaded, ids, top)
        best = [[shown(tokenizer, place) for place in layer] for layer in lens.tokens.tolist()]
        numbers = {"probabilities": lens.probabilities.tolist(), "kl": lens.kl.tolist()}
        found.append({"text": text, "tokens": shown(tokenizer, ids), "best": best, **numbers})
    write_json(Path(output).with_suffix(".json"), {"model": str(model), "texts": found})
    return render_page(Path(output), TEMPLATES / "lens.html.jinja", title=str(model), texts=found)

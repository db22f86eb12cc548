"""A decoder's vocabulary made larger: rows of the embedding and of the head for new tokens."""

import dataclasses

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.huggingface.weight_map import read_parameters
from alignment.models.language_model import LanguageModel

OWN_FAMILIES_ONLY = (
    "tokens can be added to language models of this library's own decoder families only; add them with transformers"
)


@torch.no_grad()
def grow_vocabulary(model: nn.Module, known: int, total: int) -> None:
    """Give a decoder rows for token ids up to `total`; those from `known` on become the mean of the rows before them.

    The mean keeps the new tokens' logits near the average token's, so that they do not take the probability mass of
    others before they are trained. Ties between embedding and head stay.

    Args:
        model: a decoder of this library; embedding and head are read whole where they are unread.
        known: ids that the model was trained on, 0 to `known` - 1; rows above them are padding of its vocabulary.
        total: number of ids afterwards.

    Raises:
        UserError: a model of another kind.

    Source: Hewitt 2021, "Initializing new word embeddings for pretrained language models".
    """
    if not isinstance(model, LanguageModel):
        raise UserError(OWN_FAMILIES_ONLY)
    embed, head = model.trunk.embed, model.head
    tied = head.weight is embed.weight
    read_parameters(embed)
    read_parameters(head)
    embed.weight = nn.Parameter(_grown(embed.weight, known, total))
    head.weight = embed.weight if tied else nn.Parameter(_grown(head.weight, known, total))
    if isinstance(bias := getattr(head, "bias", None), Tensor):
        head.bias = nn.Parameter(_grown(bias, known, total))
    if isinstance(offset := getattr(head, "offset", None), Tensor):
        head.offset = _grown(offset[0], known, total)[None]
    embed.num_embeddings = head.out_features = len(embed.weight)
    model.spec = model.trunk.spec = dataclasses.replace(model.spec, vocabulary=len(embed.weight))


def _grown(rows: Tensor, known: int, total: int) -> Tensor:
    """The rows with those from `known` on set to the mean of the ones before; [max(total, rows), ...]."""
    mean = rows[:known].float().mean(dim=0).to(rows.dtype)
    new = torch.cat([rows, mean.expand(max(0, total - len(rows)), *rows.shape[1:])])
    new[known:total] = mean
    return new.contiguous()

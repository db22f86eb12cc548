"""Prefill: run the prompts through the model and fill its cache."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from alignment.generation.logits_processors import TokenHistory
from alignment.models.protocols import DecodingCache, GenerativeModel
from alignment.ragged import Ragged, Seq2Seq


class Prefilled(NamedTuple):
    """Prompts after their forward pass.

    Attributes:
        cache: what `model.decode` continues from, one row per prompt.
        logits: of each response's first token, [B, V].
        history: tokens before that one.
    """

    cache: DecodingCache
    logits: Tensor
    history: TokenHistory


def prefill(
    model: GenerativeModel, prompts: Sequence[Sequence[int]], steps: int, stops: Tensor, start_token: int | None
) -> Prefilled:
    """Run the prompts through the model.

    Args:
        prompts: token ids, none empty.
        steps: most tokens that will follow.
        stops: tokens that end a response, [S], on the model's device.
        start_token: begins each response of an encoder-decoder model, whose encoder reads the prompts; None: a decoder,
            whose responses continue its prompts.
    """
    continued = prompts if start_token is None else [[start_token]] * len(prompts)
    read = Ragged.build(prompts)
    batch = read if start_token is None else Seq2Seq(read, Ragged.build(continued))
    cache = model.new_cache(len(prompts), max(len(document) for document in continued) + steps)
    return Prefilled(cache, model.prefill(batch.to(stops.device), cache), TokenHistory(continued, steps, stops))

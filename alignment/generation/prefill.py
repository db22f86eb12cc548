"""How decoding begins with each kind of model; from there on a step is a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from alignment.generation.logits_processors import TokenHistory
from alignment.ragged import Ragged, Seq2Seq


class Prefilled(NamedTuple):
    """Prompts that a model has read.

    Attributes:
        cache: what `model.decode` goes on from, one row per prompt.
        logits: of each response's first token, [B, V].
        past: what stands before that token.
    """

    cache: Any
    logits: Tensor
    past: TokenHistory


def begin(
    model: Any, prompts: Sequence[Sequence[int]], steps: int, stops: Tensor, start_token: int | None
) -> Prefilled:
    """Let a model read its prompts.

    Args:
        model: has `new_cache` and `prefill`.
        prompts: token ids, none empty.
        steps: tokens that will follow at most.
        stops: tokens that end a response, [S], on the model's device.
        start_token: begins each response of an encoder-decoder model, which reads the prompts with its encoder; None:
            a decoder, whose responses continue its prompts.
    """
    written = prompts if start_token is None else [[start_token]] * len(prompts)
    read = Ragged.build(prompts)
    batch = read if start_token is None else Seq2Seq(read, Ragged.build(written))
    cache = model.new_cache(len(prompts), max(len(document) for document in written) + steps)
    return Prefilled(cache, model.prefill(batch.to(stops.device), cache), TokenHistory(written, steps, stops))

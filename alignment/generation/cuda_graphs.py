"""Decoding steps as CUDA graphs: the kernels of a step are started by one call, not one after another.

A graph holds for one number of rows and one width of the cache, which `decoding_width` lets grow in steps; the first
step of each runs as usual, the second is captured, the others are replayed. Sampling stays outside.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.models.language_model import LanguageModel
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.layer_contexts import decoding_width
from alignment.models.layers.rotary import DynamicScaling, LongScaling
from alignment.models.model import Model


@dataclass
class Captured:
    """One step as a graph: its inputs and outputs lie where they lay when it was captured."""

    tokens: Tensor
    lengths: Tensor
    replay: Callable[[], None]
    logits: Tensor
    next_lengths: Tensor
    held: list[object]  # the first layer's keys, so that no other cache comes to lie at their address; tables of angles


class GraphedDecoder:
    """`LanguageModel.decode` by graphs; for one run of an engine, while weights and settings stay."""

    def __init__(self, model: Model):
        """UserError where a step of the model cannot be captured."""
        if (why := _refusal(model)) is not None:
            raise UserError(f"cuda_graphs: {why}; set it to false")
        assert isinstance(model, LanguageModel)
        self._model = model
        self._steps = dict[tuple[int, int, int], Captured | None]()
        self._pool: tuple[int, int] | None = None  # of memory, which all graphs share: none is read after its step

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        key = len(tokens), decoding_width(cache), cache.keys[0].data_ptr()
        if key not in self._steps:
            self._steps[key] = None
            return self._model.decode(tokens, cache)
        step = self._steps[key] or self._capture(tokens, cache)
        self._steps[key] = step
        step.tokens.copy_(tokens)
        step.lengths.copy_(cache.lengths)
        step.replay()
        cache.lengths = step.next_lengths.clone()
        cache.longest = cache.longest + 1
        return step.logits.clone()

    def _capture(self, tokens: Tensor, cache: Cache) -> Captured:
        lengths = cache.lengths.clone()
        longest = cache.longest
        saved_lengths = cache.lengths
        inputs = tokens.clone()
        made = list[Tensor]()

        def step() -> None:
            cache.lengths = lengths
            made[:] = self._model.decode(inputs, cache), cache.lengths

        replay, self._pool = capture(step, self._pool)
        cache.lengths = saved_lengths
        cache.longest = longest
        tables = [rotary.table for rotary in self._model.trunk.position_modules.rotaries.values()]  # longer ones follow
        return Captured(inputs, lengths, replay, *made, held=[cache.keys[0], *tables])


def capture(
    step: Callable[[], None], pool: tuple[int, int] | None
) -> tuple[Callable[[], None], tuple[int, int] | None]:
    """Capture what a step starts on the GPU; what starts it all again, and the pool of its memory (None: a new one)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        step()
    return graph.replay, graph.pool()


def _refusal(model: Model) -> str | None:
    """The reason why no step can be captured; None: it can."""
    if not next(model.parameters()).is_cuda:
        return "there is no GPU"
    if not isinstance(model, LanguageModel):
        return "only decoders that run as our class can be captured"
    if model.row_adapters is not None or model.trunk.compiled:
        return "an adapter for each row, and compiled blocks, cannot be captured"
    if any(getattr(module, "data_dependent_shapes", False) for module in model.modules()):
        return "the shapes of this model's layers depend on its data (a mixture of experts)"
    scalings = {getattr(getattr(layer.attention, "rotary", None), "scaling", None) for layer in model.spec.layers}
    if any(isinstance(scaling, DynamicScaling | LongScaling) for scaling in scalings):
        return "the angles of its positions depend on a document's length"
    return None

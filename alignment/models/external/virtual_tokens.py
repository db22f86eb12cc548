"""Trained vectors in front of every document of a transformers model: the input that its forward takes for them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache


class VirtualTokens(NamedTuple):
    """A soft prompt, a prefix, or neither.

    Attributes:
        prompt: vectors read as the first tokens of every document (an encoder-decoder's source), [P, E].
        prefix: keys and values before every document (an encoder-decoder's target), [layers, 2, P, K, head_dim].
    """

    prompt: Tensor | None = None
    prefix: Tensor | None = None

    @property
    def prompt_size(self) -> int:
        """Tokens of the soft prompt."""
        return 0 if self.prompt is None else len(self.prompt)

    @property
    def prefix_size(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else self.prefix.shape[2]

    def inputs(self, inner: "PreTrainedModel", ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments of the forward of `inner` that reads a rectangle, padded on the right, behind these tokens.

        Args:
            ids, mask: [B, T].
        """
        if self.prompt is not None:
            vectors = inner.get_input_embeddings()(ids)
            prompt = self.prompt.to(vectors.dtype).expand(len(ids), *self.prompt.shape)
            return {
                "inputs_embeds": torch.cat([prompt, vectors], dim=1),
                "attention_mask": F.pad(mask, (self.prompt_size, 0), value=1),
            }
        if self.prefix is not None:
            return {
                "input_ids": ids,
                "attention_mask": F.pad(mask, (self.prefix_size, 0), value=1),
                "past_key_values": self.decoder_cache(inner, len(ids)),
            }
        return {"input_ids": ids, "attention_mask": mask}

    def segments(self, segments: Tensor) -> Tensor:
        """Token types of a rectangle, with zeros for the prompt in front."""
        return F.pad(segments, (self.prompt_size, 0))

    def decoder_cache(self, inner: "PreTrainedModel", rows: int) -> "DynamicCache":
        """A cache that holds the prefix, for a decoder to go on from; gradients go through it."""
        from transformers.cache_utils import DynamicCache

        assert self.prefix is not None
        embedding: Any = inner.get_input_embeddings()
        dtype = getattr(embedding, "compute_dtype", embedding.weight.dtype)  # frozen weights may be of a lower type
        prefix = self.prefix.to(dtype)
        layers = prefix.transpose(2, 3)[:, :, None].expand(-1, -1, rows, -1, -1, -1)  # [layers, 2, B, K, P, head_dim]
        return DynamicCache([(keys, values) for keys, values in layers])

    def target_cache(self, inner: "PreTrainedModel", rows: int) -> "EncoderDecoderCache":
        """The same for the decoder of an encoder-decoder, whose cross-attention has nothing before the source."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(self.decoder_cache(inner, rows), DynamicCache())


NO_VIRTUAL_TOKENS = VirtualTokens()

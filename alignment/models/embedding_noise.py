"""NEFTune: uniform noise on the token vectors of a language model while it trains, by hooks."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from alignment.models.external.models import ExternalModel
from alignment.models.external.rectangles import groups_with_little_padding
from alignment.models.native_model import NativeModel
from alignment.ragged import Ragged, Seq2Seq


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """From now on, add noise in training mode to the token vectors of a decoder or of an encoder-decoder's encoder.

    vector_t += u_t,   u_t uniform in [-1, 1] * alpha / sqrt(L * E)

    L is the number of tokens of the vector's own document, whatever the batch holds beside it, and E the width of the
    token table. The numbers come from torch's generator of the device. Vectors of a soft prompt get no noise.

    An `alpha` of 5 to 15 is usual; the model is called on ragged batches.

    Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1.
    """
    if isinstance(model, ExternalModel):
        noise = _EmbeddingNoise(alpha, grouped=True)
        embedding = model.inner.get_input_embeddings()
    else:
        assert isinstance(model, NativeModel)
        trunk: Any = getattr(model, "encoder", None) or model.trunk
        # The trunk multiplies by its scale what the table gives; the noise is meant for the product.
        noise = _EmbeddingNoise(alpha / trunk.spec.embedding_scale)
        embedding = trunk.embed
    model.register_forward_pre_hook(noise.read_lengths, with_kwargs=True)
    embedding.register_forward_hook(noise.add)


class _EmbeddingNoise:
    """The two hooks: one reads the documents of a forward, the other changes their token vectors."""

    def __init__(self, alpha: float, grouped: bool = False):
        self.alpha = alpha
        self.grouped = grouped
        self._lengths: deque[list[int]] = deque()  # of the documents in each coming call of the embedding

    def read_lengths(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Note the documents' lengths, in the order in which their vectors are looked up."""
        self._lengths.clear()
        given = kwargs.get("batch")
        batch = given.encoder if isinstance(given, Seq2Seq) else given
        if model.training and isinstance(batch, Ragged):
            in_groups = self.grouped and batch is given  # all sources of a batch are one rectangle
            groups = groups_with_little_padding(batch.lengths) if in_groups else [range(len(batch.lengths))]
            self._lengths.extend([batch.lengths[row] for row in rows] for rows in groups)

    def add(self, embedding: nn.Module, args: tuple[object, ...], vectors: Tensor) -> Tensor:
        """The vectors with noise: [N, E] of documents end to end, or [B, T, E] of a padded rectangle."""
        if not embedding.training or not self._lengths:
            return vectors
        lengths = self._lengths.popleft()
        sizes = torch.tensor(lengths, device=vectors.device)
        scale = self.alpha / (sizes * vectors.shape[-1]).sqrt()  # [B]
        if vectors.ndim == 2:
            virtual = (len(vectors) - sum(lengths)) // len(lengths)  # tokens of a soft prompt in front of each document
            scale = torch.repeat_interleave(scale, sizes + virtual, output_size=len(vectors))
        scale = scale.reshape(-1, *[1] * (vectors.ndim - 1))
        return vectors + torch.empty_like(vectors).uniform_(-1.0, 1.0) * scale.to(vectors.dtype)

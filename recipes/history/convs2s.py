"""ConvS2S: gated convolutions over symbols and positions on both sides, and attention in every layer of the decoder.

Left out: weight normalization, the scaled gradients of the encoder, and projections between two widths.

Source: Gehring et al. 2017, arXiv:1705.03122, sections 3.1 to 3.4.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.pipeline.stages import load_stage_file

translation: Any = load_stage_file(Path(__file__).parent / "translation.py")

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two


class Embedding(nn.Module):
    """Embedding of each symbol plus that of its absolute position (section 3.1)."""

    def __init__(self, vocabulary: int, positions: int, width: int):
        super().__init__()
        self.symbol, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        for table in (self.symbol, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] -> [B, T, D]."""
        return self.symbol(tokens) + self.position.weight[: tokens.shape[1]]


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where a and b are the halves of a convolution's output (section 3.2).

    `causal`: a position sees itself and those before it.
    """

    def __init__(self, width: int, kernel: int, *, causal: bool):
        super().__init__()
        self.convolution = nn.Conv1d(width, 2 * width, kernel)
        nn.init.normal_(self.convolution.weight, std=math.sqrt(4 / (kernel * width)))  # section 3.5
        self.padding = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D] -> [B, T, D]."""
        return F.glu(self.convolution(F.pad(x.transpose(1, 2), self.padding)), dim=1).transpose(1, 2)


class Attention(nn.Module):
    """One step of the attention: d = W h + b + g asks, the encoder's outputs z are compared, z + e is read (section 3.3)."""

    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, h: Tensor, g: Tensor, z: Tensor, e: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, T, D] and weights [B, T, S] of decoder states h and target embeddings g [B, T, D]; z, e: [B, S, D]."""
        scores = (self.query(h) + g) * HALF @ z.transpose(1, 2)
        weights = scores.masked_fill(~source_mask[:, None], -torch.inf).softmax(-1)
        size = source_mask.sum(1)[:, None, None].sqrt()  # m sqrt(1 / m): section 3.4
        return weights @ ((z + e) * HALF) * size, weights


class ConvS2S(nn.Module):
    """Encoder and decoder of `layers` gated convolutions each."""

    def __init__(self, vocabulary: int, width: int, *, layers: int = 3, kernel: int = 3, positions: int = 64):
        super().__init__()
        self.embed_source, self.embed_target = (Embedding(vocabulary, positions, width) for _ in range(2))
        self.encoder = nn.ModuleList(GatedConvolution(width, kernel, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(GatedConvolution(width, kernel, causal=True) for _ in range(layers))
        self.attentions = nn.ModuleList(Attention(width) for _ in range(layers))
        self.output = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of the symbols after `before` [B, T], and the mean alignment of all layers [B, T, S]; 0 is padding."""
        source_mask = source != 0
        e = self.embed_source(source) * source_mask[..., None]
        z = e
        for layer in self.encoder:
            z = (layer(z) + z) * HALF * source_mask[..., None]  # padding stays the zeros that a convolution pads with
        g = h = self.embed_target(before)
        alignment = []
        for layer, attention in zip(self.decoder, self.attentions, strict=True):
            out = layer(h)
            context, weights = attention(out, g, z, e, source_mask)
            h = ((out + context) * HALF + h) * HALF
            alignment.append(weights)
        return self.output(h), torch.stack(alignment).mean(0)


def run(config: translation.TranslationConfig) -> Path:
    """Train and judge this system on every task."""
    return translation.run(config, ConvS2S)

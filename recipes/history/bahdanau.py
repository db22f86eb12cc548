"""RNNsearch: a bidirectional GRU reads, a GRU writes, and before each symbol it looks for where in the source to read.

Left out: the original's own place of the reset gate (torch's GRU applies it after the recurrent product) and beam search.

Source: Bahdanau, Cho and Bengio 2014, arXiv:1409.0473, sections 3.1 and 3.2, appendix A.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from alignment.pipeline.stages import load_stage_file

translation: Any = load_stage_file(Path(__file__).parent / "translation.py")


class AdditiveAttention(nn.Module):
    """Alignment model: e_j = v . tanh(W s + U h_j), weights softmax(e), context the weighted sum of the h_j.

    Source: eq. 5 and 6 and appendix A.1.2.
    """

    def __init__(self, state_width: int, annotation_width: int, width: int):
        super().__init__()
        self.of_state = nn.Linear(state_width, width, bias=False)  # W_a
        self.of_annotation = nn.Linear(annotation_width, width, bias=False)  # U_a
        self.score = nn.Linear(width, 1, bias=False)  # v_a

    def forward(self, state: Tensor, annotations: Tensor, keys: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, H] and weights [B, S] for one state of the decoder.

        Args:
            state: [B, D].
            annotations: h, [B, S, H].
            keys: `of_annotation(annotations)`, which stays the same for all states, [B, S, A].
            source_mask: True where the source has a symbol, [B, S].
        """
        energy = self.score(torch.tanh(self.of_state(state)[:, None] + keys)).squeeze(-1)
        weights = energy.masked_fill(~source_mask, -torch.inf).softmax(-1)
        return (weights[..., None] * annotations).sum(1), weights


class Bahdanau(nn.Module):
    """Encoder, attention, decoder and readout, all of one width."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embed_source, self.embed_target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(width, width)  # W_s
        self.attention = AdditiveAttention(width, 2 * width, width)
        self.decoder = nn.GRUCell(3 * width, width)
        self.readout = nn.Linear(4 * width, 2 * width)  # U_o, V_o and C_o side by side
        self.output = nn.Linear(width, vocabulary)  # W_o

    def forward(self, source: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of the symbols after `before` [B, T], and the alignment [B, T, S]; 0 is padding."""
        source_mask = source != 0
        lengths = source_mask.sum(1)
        packed = pack_padded_sequence(self.embed_source(source), lengths, batch_first=True, enforce_sorted=False)
        annotations = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)[0]  # [B, S, 2 D]
        keys = self.attention.of_annotation(annotations)
        backward_first = annotations[:, 0].chunk(2, -1)[1]  # it has read the whole source
        state = torch.tanh(self.first_state(backward_first))
        embedded = self.embed_target(before)
        read, alignment = [], []
        for previous in embedded.unbind(1):
            context, weights = self.attention(state, annotations, keys, source_mask)
            state = self.decoder(torch.cat([previous, context], -1), state)
            read.append(torch.cat([state, previous, context], -1))
            alignment.append(weights)
        maxout = self.readout(torch.stack(read, 1)).unflatten(-1, (-1, 2)).amax(-1)  # the larger of each two, [B, T, D]
        return self.output(maxout), torch.stack(alignment, 1)


def run(config: translation.TranslationConfig) -> Path:
    """Train and judge this system on every task."""
    return translation.run(config, Bahdanau)

"""ELMo: a forward and a backward LSTM language model, whose layers a task mixes with weights of its own.

Left out: the convolutions over letters that embed a word in the original; here a word has a vector.

Source: Peters et al. 2018, arXiv:1802.05365, section 3.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.pipeline.stages import load_stage_file

classification: Any = load_stage_file(Path(__file__).parent / "classification.py")


def reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """Rows of [B, T, ...] back to front, each up to its length; padding stays on the right."""
    places = torch.arange(x.shape[1])
    index = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)  # [B, T]
    return x[torch.arange(len(x))[:, None], index]


class BiLM(nn.Module):
    """Two language models, one in each direction, that share the word vectors and the softmax (section 3.1).

    The second layer of each direction reads the first one's output and adds it to its own.
    """

    def __init__(self, vocabulary: int, width: int, *, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.forward_layers, self.backward_layers = (
            nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers)) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """h_0 to h_L of every token: [x; x], then [forward; backward] of each layer, each [B, T, 2 D]; 0 is padding."""
        lengths = (tokens != 0).sum(1)
        x = self.embed(tokens)
        ahead = self._run(self.forward_layers, x)
        back = self._run(self.backward_layers, reverse(x, lengths))
        return [torch.cat([x, x], -1)] + [
            torch.cat([one, reverse(other, lengths)], -1) for one, other in zip(ahead, back, strict=True)
        ]

    @staticmethod
    def _run(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
        states = []
        for number, layer in enumerate(layers):
            out, _ = layer(x)
            x = out + x if number else out
            states.append(x)
        return states

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean of both directions' cross-entropy, nats per word: the word to the right, and the word to the left."""
        ahead, back = self(tokens)[-1].chunk(2, -1)
        to_the_left = tokens[:, :-1].masked_fill(tokens[:, 1:] == 0, 0)  # nothing stands right of a text's last word
        losses = [
            F.cross_entropy(
                F.linear(states, self.embed.weight, self.bias).flatten(0, 1), words.flatten(), ignore_index=0
            )
            for states, words in ((ahead[:, :-1], tokens[:, 1:]), (back[:, 1:], to_the_left))
        ]
        return (losses[0] + losses[1]) / 2


class ScalarMix(nn.Module):
    """gamma * sum_j softmax(w)_j h_j: the task's own mixture of the layers (eq. 1)."""

    def __init__(self, layers: int):
        super().__init__()
        self.weights, self.gamma = nn.Parameter(torch.zeros(layers)), nn.Parameter(torch.ones(()))

    def forward(self, layers: list[Tensor]) -> Tensor:
        """layers: each [B, T, H] -> [B, T, H]."""
        shares = self.weights.softmax(0)
        return self.gamma * sum(share * layer for share, layer in zip(shares, layers, strict=True))


class ElmoClassifier(nn.Module):
    """A biLSTM over [x; ELMo], the largest value of each of its outputs, and a linear layer (section 3.3).

    `language_model` is frozen; None: a word has its own vector x and nothing else.
    """

    def __init__(self, vocabulary: int, classes: int, width: int, language_model: BiLM | None):
        super().__init__()
        self.language_model = language_model
        self.embed = nn.Embedding(vocabulary, width)
        inner = 0 if language_model is None else 2 * language_model.embed.embedding_dim
        if language_model is not None:
            language_model.requires_grad_(False)
            self.mix = ScalarMix(1 + len(language_model.forward_layers))
        self.dropout = nn.Dropout(0.5)
        self.reader = nn.LSTM(width + inner, width, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each text, [B, C]."""
        x = self.embed(tokens)
        if self.language_model is not None:
            x = torch.cat([x, self.mix(self.language_model(tokens))], -1)
        states, _ = self.reader(self.dropout(x))
        return self.output(states.masked_fill((tokens == 0)[..., None], -torch.inf).amax(1))


def learn(corpus: Any, config: Any) -> dict[str, Any]:
    """The task model with words alone, then over the frozen features of a biLM; what the task mixes them with."""
    plain = classification.fit(ElmoClassifier(corpus.vocabulary, 2, config.width, None), corpus, config)
    language_model = BiLM(corpus.vocabulary, config.width)
    loss = classification.read(language_model, corpus, config)
    elmo = classification.fit(ElmoClassifier(corpus.vocabulary, 2, config.width, language_model), corpus, config)
    mix = {"weights": elmo.mix.weights.softmax(0).tolist(), "gamma": elmo.mix.gamma.item()}
    return {"variants": {"words": plain, "ELMo": elmo}, "language_loss": loss, "mix": mix}


def run(config: classification.ClassificationConfig) -> Path:
    """Train and judge this system."""
    return classification.run(config, learn)

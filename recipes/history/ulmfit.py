"""ULMFiT: an LSTM language model read on general text, then on the task's, then a classifier unfrozen from the top.

Left out: the AWD-LSTM's averaged optimizer and its dropout. Dropout before the pooling raises the largest values, and with
so small a network the head's batch norm, whose averages have seen them, would be wrong without it.

Source: Howard and Ruder 2018, arXiv:1801.06146, section 3.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.pipeline.stages import load_stage_file

classification: Any = load_stage_file(Path(__file__).parent / "classification.py")


class LSTMLanguageModel(nn.Module):
    """LSTM layers (three in the original) between a word table and itself as the softmax."""

    def __init__(self, vocabulary: int, width: int, *, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """States of the last layer, [B, T, D]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return x

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of the next word, nats; 0 is padding."""
        logits = F.linear(self(tokens[:, :-1]), self.embed.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)

    def groups(self) -> list[nn.Module]:
        """What is unfrozen together, from the bottom to the top."""
        return [self.embed, *self.layers]


class PoolingClassifier(nn.Module):
    """[last state; largest; mean] of the language model's states, then two layers (section 3.3, concat pooling)."""

    def __init__(self, language_model: LSTMLanguageModel, classes: int, inner: int = 50):
        super().__init__()
        width = language_model.embed.embedding_dim
        self.language_model = language_model
        self.head = nn.Sequential(
            nn.BatchNorm1d(3 * width), nn.Dropout(0.2), nn.Linear(3 * width, inner), nn.ReLU(),
            nn.BatchNorm1d(inner), nn.Dropout(0.1), nn.Linear(inner, classes),
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each text, [B, C]."""
        return self.head(concat_pooling(self.language_model(tokens), tokens != 0))

    def groups(self) -> list[nn.Module]:
        """What is unfrozen together, from the bottom to the top."""
        return [*self.language_model.groups(), self.head]


def concat_pooling(states: Tensor, mask: Tensor) -> Tensor:
    """[h_T; maxpool(H); meanpool(H)] over each text's own words, states [B, T, D] -> [B, 3 D]."""
    lengths = mask.sum(1)
    last = states[torch.arange(len(states)), lengths - 1]
    largest = states.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return torch.cat([last, largest, (states * mask[..., None]).sum(1) / lengths[:, None]], -1)


def slanted_triangular(done: float, *, cut: float = 0.1, ratio: float = 32) -> float:
    """Share of the highest rate after a share `done` of the steps: up for `cut` of them, then slowly down (eq. 3)."""
    p = done / cut if done < cut else 1 - (done - cut) / (1 - cut)
    return (1 + p * (ratio - 1)) / ratio


def discriminative_rates(groups: list[nn.Module], highest: float, factor: float = 2.6) -> list[dict]:
    """Parameter groups for torch.optim: each layer's learning rate is that of the layer above divided by `factor` (section 3.2)."""
    top = len(groups) - 1
    return [{"params": [*each.parameters()], "lr": highest / factor ** (top - n)} for n, each in enumerate(groups)]


def unfreeze_to(groups: list[nn.Module], epoch: int) -> None:
    """Gradual unfreezing (section 3.3): in epoch 0 the top group is trained, in each later one a group more."""
    for number, each in enumerate(groups):
        each.requires_grad_(number >= len(groups) - 1 - epoch)


def learn(corpus: Any, config: Any) -> dict[str, Any]:
    """The classifier from fresh weights; from a language model, all at once; and as the paper says."""
    fresh = PoolingClassifier(LSTMLanguageModel(corpus.vocabulary, config.width), 2)
    language_model = LSTMLanguageModel(corpus.vocabulary, config.width)
    loss = classification.read(
        language_model, corpus, config, schedule=slanted_triangular,
        groups=discriminative_rates(language_model.groups(), config.reading_rate),
    )  # fmt: skip
    at_once = PoolingClassifier(language_model, 2)
    gradual = copy.deepcopy(at_once)
    groups = gradual.groups()
    epoch = config.steps // (2 * len(groups))  # all groups are trained in the second half
    ulmfit = classification.fit(
        gradual, corpus, config, lambda step: unfreeze_to(groups, step // epoch),
        groups=discriminative_rates(groups, 2.6 * config.learning_rate), schedule=slanted_triangular,
    )  # fmt: skip
    usual = partial(classification.fit, corpus=corpus, config=config)
    return {"variants": {"fresh": usual(fresh), "all at once": usual(at_once), "ULMFiT": ulmfit}, "language_loss": loss}


def run(config: classification.ClassificationConfig) -> Path:
    """Train and judge this system."""
    return classification.run(config, learn)

"""Heads over the vocabulary and heads over classes. language_model.py, classifiers.py and encoder_decoder.py use them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.spec import LanguageHeadSpec


class Transform(nn.Module):
    """norm(activation(dense(x)))."""

    def __init__(self, dense: nn.Module, activation, norm: nn.Module):
        super().__init__()
        self.dense, self.activation, self.norm = dense, activation, norm

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D']."""
        return self.norm(self.activation(self.dense(x)))


class LanguageHead(nn.Module):
    """One logit per token: softcap(predict(scale * transform(x)) + offset). Plain decoders have a linear layer instead.

    Source: the transform is BERT's, Devlin et al. 2018; the scale T5's; the cap Gemma 2's, arXiv:2408.00118.
    """

    def __init__(self, spec: LanguageHeadSpec, width: int, vocabulary: int, transform: Transform | None):
        super().__init__()
        self.transform = transform
        self.weight: Tensor = nn.Parameter(torch.empty(vocabulary, spec.transform.width if spec.transform else width))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if spec.bias else None
        self.offset: Tensor | None
        self.register_buffer("offset", torch.zeros(1, vocabulary) if spec.offset else None)
        self.spec, self.out_features = spec, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., V]."""
        x = x if self.transform is None else self.transform(x)
        x = x if self.spec.scale == 1.0 else x * self.spec.scale
        logits = F.linear(x, self.weight, self.bias)
        logits = logits if self.offset is None else logits + self.offset
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


VocabularyHead = nn.Linear | LanguageHead  # what predicts tokens: a plain linear layer in most decoders


class ClassificationHead(nn.Module):
    """output(transform(x)): a few numbers, of a document or of a token. Dropout before and after the transform."""

    def __init__(
        self, transform: Transform | None, output: nn.Linear, dropout: float = 0.0, input_dropout: float = 0.0
    ):
        super().__init__()
        self.transform, self.output = transform, output
        self.input_dropout = nn.Dropout(input_dropout) if input_dropout else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., C], fp32: scores are compared, and bfloat16's 8 bits would make ties of close ones."""
        x = self.input_dropout(x)
        x = self.dropout(x if self.transform is None else self.transform(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.output(x.to(self.output.weight.dtype)).float()

"""Heads over the vocabulary and over classes. language_model.py, classifiers.py and encoder_decoder.py use them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.frozen_weights import frozen_linear
from alignment.models.layers.feedforward import ACTIVATIONS, FeedForwardSpec
from alignment.models.layers.norms import NoNormSpec, NormSpec
from alignment.models.safetensors_files import HFConfig

NO_LANGUAGE_MODEL = (
    "a reward model: it has a score head and no language head; name it as reward_model, and give a language model here"
)
Pooling = Literal["first", "last", "mean"]  # which of a document's vectors a classifier reads


def score_labels(members: int = 1) -> HFConfig:
    """The keys of config.json that describe the outputs of a score head: one, or one per member of an ensemble."""
    names = ["score"] if members == 1 else [f"score_{index}" for index in range(members)]
    return {
        "num_labels": members,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def score_outputs(config: HFConfig) -> int:
    """Outputs of the score head in a config: the number of labels where they are named like an ensemble's, else 1."""
    labels = config.get("id2label")
    if not isinstance(labels, dict) or set(labels.values()) != set(score_labels(len(labels))["label2id"]):
        return 1
    return max(1, len(labels))


def check_score_labels(config: HFConfig, directory: Path) -> None:
    """UserError where the config of a reward model names other labels than its score or its ensemble's scores."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels") or 1
    if count != score_outputs(config):
        raise UserError(
            f"{directory}/config.json names {count} labels (id2label, num_labels), and a reward model has one score; "
            'give a reward model, or name its one label: num_labels 1, id2label {"0": "score"}, label2id {"score": 0}'
        )


@dataclass(frozen=True)
class TransformSpec:
    """norm(activation(dense(x))), applied by some heads before they predict."""

    width: int
    activation: str
    bias: bool
    norm: NormSpec = field(default_factory=NoNormSpec)

    def build(self, width: int) -> nn.Module:
        """x [..., width] -> [..., self.width]."""
        return Transform(self, width)


@dataclass(frozen=True)
class FeedForwardTransformSpec:
    """norm(x + dropout(feedforward(dropout(x)))), as in a post-norm layer without attention."""

    width: int
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float

    def build(self, width: int) -> nn.Module:
        """x [..., width] -> the same shape."""
        return FeedForwardTransform(self)


@dataclass(frozen=True)
class LanguageHeadSpec:
    """From hidden states to one logit per token: softcap(scale * predict(transform(x)))."""

    transform: TransformSpec | None = None
    bias: bool = False
    offset: bool = False  # untrained constants, saved with the weights, are added to the logits (BART)
    scale: float = 1.0
    softcap: float | None = None

    def build(self, width: int, vocabulary: int) -> "VocabularyHead":
        """x [..., width] -> logits [..., vocabulary]."""
        plain = self == LanguageHeadSpec()
        return nn.Linear(width, vocabulary, bias=False) if plain else LanguageHead(self, width, vocabulary)


@dataclass(frozen=True)
class ClassificationHeadSpec:
    """From hidden states to `outputs` logits, of a document (read as `pooling` says) or of every token.

    With a `separator` the tokens of a question, which ends with it, are never the answer, but for the first (BigBird).
    """

    outputs: int
    transform: TransformSpec | FeedForwardTransformSpec | None = None
    bias: bool = True
    dropout: float = 0.0
    pooling: Pooling | None = None
    input_dropout: float = 0.0
    separator: int | None = None

    def build(self, width: int) -> "ClassificationHead":
        """x [..., width] -> logits [..., outputs]."""
        return ClassificationHead(self, width)


class Transform(nn.Module):
    """norm(activation(dense(x)))."""

    def __init__(self, spec: TransformSpec, width: int):
        super().__init__()
        self.dense = nn.Linear(width, spec.width, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.norm = spec.norm.build(spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D']."""
        return self.norm(self.activation(self.dense(x)))


class FeedForwardTransform(nn.Module):
    """norm(x + dropout(feedforward(dropout(x))))."""

    def __init__(self, spec: FeedForwardTransformSpec):
        super().__init__()
        self.feedforward = spec.feedforward.build(spec.width)
        self.norm = spec.norm.build(spec.width)
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D]."""
        return self.norm(x + self.dropout(self.feedforward(self.dropout(x))))


class LanguageHead(nn.Module):
    """One logit per token: softcap(predict(scale * transform(x)) + offset). Plain decoders have a linear layer instead.

    Source: the transform is BERT's, Devlin et al. 2018; the scale T5's; the cap Gemma 2's, arXiv:2408.00118.
    """

    casts_weight = True  # a frozen one may have a lower type; see frozen_weights.py

    def __init__(self, spec: LanguageHeadSpec, width: int, vocabulary: int):
        super().__init__()
        self.transform = None if spec.transform is None else spec.transform.build(width)
        self.weight: Tensor = nn.Parameter(torch.empty(vocabulary, spec.transform.width if spec.transform else width))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if spec.bias else None
        self.offset: Tensor | None
        self.register_buffer("offset", torch.zeros(1, vocabulary) if spec.offset else None)
        self.spec = spec
        self.out_features = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., V]."""
        x = x if self.transform is None else self.transform(x)
        x = x if self.spec.scale == 1.0 else x * self.spec.scale
        logits = frozen_linear(x, self.weight, self.bias)
        logits = logits if self.offset is None else logits + self.offset
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class SpanBoundaryHead(nn.Module):
    """SpanBERT's second guess at a masked token: from the states beside its span, and its place in the span.

    y = transform(transform([x_before; x_after; p_place])), and its logits are W y + b with the W of the language head.
    The transforms are like the head's own, which are BERT's: norm(activation(dense(x))). Places beyond the last share
    it.

    Source: Joshi et al. 2020, arXiv:1907.10529, section 3.2.
    """

    PLACES = 20

    def __init__(self, head: LanguageHead, width: int):
        super().__init__()
        assert head.spec.transform is not None
        wide = replace(head.spec.transform, width=width)
        self.place = nn.Embedding(self.PLACES, width)
        self.mix = Transform(wide, 3 * width)
        self.predict = LanguageHead(LanguageHeadSpec(head.spec.transform, bias=True), width, head.out_features)
        self.predict.weight = head.weight

    def forward(self, states: Tensor, boundaries: Tensor) -> Tensor:
        """Inputs of `predict` for M targets, [M, D]; states [N, D], boundaries as in `span_boundaries`."""
        before, after, place = boundaries.unbind(1)
        place = self.place(place.clamp(max=self.PLACES - 1))
        return self.mix(torch.cat([states[before], states[after], place.to(states.dtype)], 1))


VocabularyHead = nn.Linear | LanguageHead  # what predicts tokens: a plain linear layer in most decoders


class ClassificationHead(nn.Module):
    """output(transform(x)): a few numbers, of a document or of a token. Dropout before and after the transform."""

    float32_only = True  # see frozen_weights.py

    def __init__(self, spec: ClassificationHeadSpec, width: int):
        super().__init__()
        output = nn.Linear(spec.transform.width if spec.transform else width, spec.outputs, bias=spec.bias)
        self.transform = None if spec.transform is None else spec.transform.build(width)
        self.output = output
        self.input_dropout = nn.Dropout(spec.input_dropout) if spec.input_dropout else nn.Identity()
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()
        self.separator = spec.separator

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., C], fp32."""
        x = self.input_dropout(x)
        return float32_logits(self.output, self.dropout(x if self.transform is None else self.transform(x)))


def float32_logits(output: nn.Linear, x: Tensor) -> Tensor:
    """output(x) in fp32, also under autocast: scores are compared, and bfloat16's 8 bits would tie close ones."""
    with torch.autocast(x.device.type, enabled=False):
        return output(x.to(output.weight.dtype)).float()

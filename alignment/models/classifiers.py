"""Trunk and a head of few outputs: scalar models (reward, value), sequence and token classifiers, answer spans."""

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from alignment.models.heads import ClassificationHead, Pooling, float32_logits, score_outputs
from alignment.models.layers.layer_contexts import up_to_first
from alignment.models.layers.padded_layout import select_rows
from alignment.models.model import Model
from alignment.models.native_model import NativeModel
from alignment.models.outputs import ClassifierOutput, Padded, ValueOutput, padded_values, value_output
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer, TransformerSpec
from alignment.ragged import Ragged


class ScalarModel(NativeModel[TransformerSpec]):
    """Trunk and one number per token: a reward model's score is the last token's, a value model uses every one.

    An ensemble has several heads on one trunk, the rows of `head.weight`, and the number is their mean.
    """

    def __init__(self, trunk: Transformer, config: HFConfig):
        super().__init__(trunk.spec, config, "scalar")
        self.trunk = trunk
        self.head = nn.Linear(trunk.spec.output_width or trunk.spec.width, score_outputs(config), bias=False)

    def outputs(self, batch: Ragged, *, tokens: Tensor | None = None) -> ValueOutput:
        """Values of every token, [N], or of `tokens`, indices without repetition, [M]; `members` of an ensemble."""
        return value_output(self._scores(batch, tokens))

    def padded_outputs(self, padded: Padded) -> ValueOutput:
        """Values of padded rows, [B, T]; `logits` [B, k] are the values of each row's last real token."""
        return padded_values(padded, self._scores(padded.batch))

    def _scores(self, batch: Ragged, tokens: Tensor | None = None) -> Tensor:
        select = None if tokens is None else partial(select_rows, index=tokens)
        return float32_logits(self.head, self.hidden_states(self.trunk, batch, select=select))  # [N, k]


def values_before_targets(model: Model, batch: Ragged) -> Tensor:
    """A value model's estimate before each target token, [M]; the last layer computes no others where it can.

    Args:
        model: one number per token.
        batch: its targets may have shared prompts, whose last tokens then stand before several targets.
    """
    if batch.shared is None:
        return model(batch=batch, tokens=batch.before).values
    distinct, of_each = batch.before.unique(return_inverse=True)
    return model(batch=batch, tokens=distinct).values[of_each]


class SequenceClassifier(NativeModel[TransformerSpec]):
    """One logit per class for each document, from its first token, its last, or the mean of all its tokens."""

    def __init__(self, trunk: Transformer, head: ClassificationHead, config: HFConfig, pooling: Pooling):
        super().__init__(trunk.spec, config, "sequence")
        self.trunk = trunk
        self.head = head
        self.pooling: Pooling = pooling

    def outputs(self, batch: Ragged) -> ClassifierOutput:
        """Class logits of each document, [B, C]."""
        read = self.read(self.trunk, batch, prefix=self.active_prefix())
        return ClassifierOutput(self.head(pooled(read.states, read.batch, self.pooling)))


class TokenClassifier(NativeModel[TransformerSpec]):
    """Logits for each token: its class (`task` "tokens"), or that an answer starts and that it ends there ("span")."""

    def __init__(self, trunk: Transformer, head: ClassificationHead, config: HFConfig, task: Literal["tokens", "span"]):
        super().__init__(trunk.spec, config, task)
        self.trunk = trunk
        self.head = head

    def outputs(self, batch: Ragged) -> ClassifierOutput:
        """Class logits of each token, [N, C]."""
        if self.head.separator is None:
            return ClassifierOutput(self.head(self.hidden_states(self.trunk, batch)))
        question = up_to_first(batch, self.head.separator)
        if batch.segments is None:
            batch = replace(batch, segments=(~question).long())
        logits = self.head(self.hidden_states(self.trunk, batch))
        asked = question & (batch.positions > 0)
        return ClassifierOutput(logits - 1e6 * asked[:, None])  # as transformers lowers them


def pooled(hidden: Tensor, batch: Ragged, pooling: Pooling) -> Tensor:
    """One vector per document, [N, D] -> [B, D]."""
    if pooling != "mean":
        return hidden[batch.firsts if pooling == "first" else batch.last]
    sizes = batch.sizes
    rows = torch.repeat_interleave(sizes, output_size=len(hidden))
    return hidden.new_zeros(len(sizes), hidden.shape[-1]).index_add(0, rows, hidden) / sizes[:, None]

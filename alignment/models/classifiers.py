"""Trunk and a head of few outputs: scalar models (reward, value), sequence and token classifiers, answer spans."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from alignment.models.heads import ClassificationHead, Pooling, score_outputs
from alignment.models.layers.padded_layout import select_rows
from alignment.models.native_model import NativeModel
from alignment.models.outputs import ClassifierOutput, ValueOutput, value_output
from alignment.models.padded_inputs import from_padded
from alignment.models.protocols import ScoringModel
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        tokens: Tensor | None = None,
    ) -> ValueOutput:
        """Values of every token.

        Args:
            input_ids, attention_mask, batch: as for `LanguageModel.forward`.
            tokens: for the batch call: indices of the tokens whose values are wanted, none twice, [M]; None: all.

        Returns:
            Batch call: `values` [N], or [M] of `tokens`. Padded call: `values` [B, T], zeros at padding, and `logits`
            [B, 1], the value at each row's last real token as the mask has it, wherever the padding sits. Of an ensemble of
            k heads both calls have `members`, and `logits` are [B, k].
        """
        if batch is not None:
            return value_output(self._outputs(batch, tokens))
        padded = from_padded(input_ids, attention_mask)
        return padded.value_output(self._outputs(padded.batch))

    def _outputs(self, batch: Ragged, tokens: Tensor | None = None) -> Tensor:
        select = None if tokens is None else partial(select_rows, index=tokens)
        hidden = self.hidden_states(self.trunk, batch, select=select)
        # Scores are compared with each other: bfloat16's 8 bits would make ties of close ones.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).float()  # [N, k]


def values_before_targets(model: ScoringModel, batch: Ragged) -> Tensor:
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
        self.trunk, self.head = trunk, head
        self.pooling: Pooling = pooling

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
    ) -> ClassifierOutput:
        """Class logits of each document, [B, C].

        Args:
            input_ids, attention_mask, token_type_ids: [B, T], padded on either side.
            batch: documents end to end, instead.
        """
        if batch is None:
            batch = from_padded(input_ids, attention_mask, token_type_ids).batch
        read = self.read(self.trunk, batch, prefix=self.active_prefix())
        return ClassifierOutput(self.head(pooled(read.states, read.batch, self.pooling)))


class TokenClassifier(NativeModel[TransformerSpec]):
    """Logits for each token: its class (`task` "tokens"), or whether an answer starts and ends there ("span")."""

    def __init__(self, trunk: Transformer, head: ClassificationHead, config: HFConfig, task: Literal["tokens", "span"]):
        super().__init__(trunk.spec, config, task)
        self.trunk, self.head = trunk, head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
    ) -> ClassifierOutput:
        """Class logits of each token: [N, C] of a batch, [B, T, C] of a padded rectangle with zeros at padding.

        Args:
            input_ids, attention_mask, token_type_ids: [B, T], padded on either side.
            batch: documents end to end, instead.
        """
        if batch is not None:
            return ClassifierOutput(self.head(self.hidden_states(self.trunk, batch)))
        padded = from_padded(input_ids, attention_mask, token_type_ids)
        return ClassifierOutput(padded.restore(self.head(self.hidden_states(self.trunk, padded.batch))))


def pooled(hidden: Tensor, batch: Ragged, pooling: Pooling) -> Tensor:
    """One vector per document, [N, D] -> [B, D]."""
    if pooling == "first":
        return hidden[batch.firsts]
    if pooling == "last":
        return hidden[batch.last]
    sizes = batch.sizes
    rows = torch.repeat_interleave(sizes, output_size=len(hidden))
    return hidden.new_zeros(len(sizes), hidden.shape[-1]).index_add(0, rows, hidden) / sizes[:, None]

"""Models that read and give a few numbers: scalar (reward, value), sequence and token classifiers, answer spans."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.models.heads import ClassificationHead
from alignment.models.language_model import LanguageModel, active_prefix
from alignment.models.outputs import ClassifierOutput, ValueOutput
from alignment.models.padded import from_padded, given, to_padded
from alignment.models.spec import Pooling
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged


class ScalarModel(nn.Module):
    """Trunk and one number per token: a reward model reads it at the last token, a value model at every one."""

    source = "native"
    task = "scalar"

    def __init__(self, trunk: Transformer, config: dict[str, Any]):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.spec.output_width or trunk.spec.width, 1, bias=False)
        self.config = config
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    spec = LanguageModel.spec
    checkpoint_activations = LanguageModel.checkpoint_activations

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *, batch: Ragged | None = None
    ) -> ValueOutput:
        """Values of every token.

        Args:
            input_ids, attention_mask, batch: as for `LanguageModel.forward`.

        Returns:
            Batch call: `values` [N]. Padded call: `values` [B, T], zeros at padding, and `logits` [B, 1], the value at
            each row's last real token as the mask has it, wherever the padding sits.
        """
        if batch is not None:
            return ValueOutput(self._values(batch))
        shape = given(input_ids).shape
        batch, places = from_padded(given(input_ids), attention_mask)
        values = self._values(batch)
        return ValueOutput(to_padded(values, places, shape), values[batch.last, None])

    def _values(self, batch: Ragged) -> Tensor:
        hidden = self.trunk(batch, prefix=active_prefix(self))
        # Scores are compared with each other: bfloat16's 8 bits would make ties of close ones.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()


class SequenceClassifier(nn.Module):
    """One logit per class for each document, read at its first token, at its last, or from the mean of all."""

    source = "native"
    task = "sequence"

    def __init__(self, trunk: Transformer, head: ClassificationHead, config: dict[str, Any], pooling: Pooling):
        super().__init__()
        self.trunk, self.head, self.config = trunk, head, config
        self.pooling: Pooling = pooling
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    spec = LanguageModel.spec
    checkpoint_activations = LanguageModel.checkpoint_activations

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
            batch, _ = from_padded(given(input_ids), attention_mask, token_type_ids)
        return ClassifierOutput(self.head(pooled(self.trunk(batch, prefix=active_prefix(self)), batch, self.pooling)))


class TokenClassifier(nn.Module):
    """Logits for each token: its class (`task` "tokens"), or whether an answer starts and ends there ("span")."""

    source = "native"

    def __init__(
        self, trunk: Transformer, head: ClassificationHead, config: dict[str, Any], task: Literal["tokens", "span"]
    ):
        super().__init__()
        self.trunk, self.head, self.config, self.task = trunk, head, config, task
        self.prefix: nn.Module | None = None
        self.prefix_enabled = True

    spec = LanguageModel.spec
    checkpoint_activations = LanguageModel.checkpoint_activations

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
            return ClassifierOutput(self.head(self.trunk(batch, prefix=active_prefix(self))))
        batch, places = from_padded(given(input_ids), attention_mask, token_type_ids)
        logits = self.head(self.trunk(batch, prefix=active_prefix(self)))
        return ClassifierOutput(to_padded(logits, places, given(input_ids).shape))


def pooled(hidden: Tensor, batch: Ragged, pooling: Pooling) -> Tensor:
    """One vector per document, [N, D] -> [B, D]."""
    if pooling == "first":
        return hidden[batch.firsts]
    if pooling == "last":
        return hidden[batch.last]
    sizes = batch.sizes
    rows = torch.repeat_interleave(sizes, output_size=len(hidden))
    return hidden.new_zeros(len(sizes), hidden.shape[-1]).index_add(0, rows, hidden) / sizes[:, None]

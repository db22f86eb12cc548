"""transformers' own classes in the shape of our models. Reading and writing them: external.py; no caches here.

Documents go through right-padded rectangles (external_layout.py), so a document's result is the same alone or not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.losses import entropy, token_log_probs
from alignment.models.activation_checkpointing import recompute_calls
from alignment.models.external.cache import PairCache, RereadCache, SharedCache, check_capacity, shares_well
from alignment.models.external.padding import (
    per_document,
    per_token,
    reader,
    reads_every_token,
    rectangle,
    score_reader,
)
from alignment.models.outputs import ClassifierOutput, LanguageOutput, LogitsOutput, ValueOutput
from alignment.models.padded import from_padded, given, to_padded
from alignment.ragged import Ragged, Seq2Seq

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # names for the longest document, by class


@dataclass(frozen=True)
class ExternalSpec:
    """What can be said of any architecture.

    Attributes:
        vocabulary: rows of the embedding.
        width: of the hidden states.
        max_positions: longest document; very large where the class knows no limit.
    """

    vocabulary: int
    width: int
    max_positions: int


def _hold(self: Any, inner: Any, config: dict[str, Any], task: str) -> None:
    """How all of them begin: `inner` is transformers' model, `config` its config.json."""
    nn.Module.__init__(self)
    self.inner, self.config, self.task = inner, config, task
    self.prefix, self.prefix_enabled = None, False  # these cannot have one


class ExternalLanguageModel(nn.Module):
    """A decoder of transformers; attributes and calls as `language.LanguageModel`."""

    source = "transformers"
    inner: Any

    __init__ = _hold

    @property
    def spec(self) -> ExternalSpec:
        """Sizes."""
        config, embedding = self.inner.config, self.inner.get_input_embeddings().weight
        limits = [getattr(config, name) for name in POSITIONS if getattr(config, name, None)]
        return ExternalSpec(
            embedding.shape[0], getattr(config, "hidden_size", embedding.shape[1]), min([*limits, 2**31])
        )

    def checkpoint_activations(self, enabled: bool = True, keep: str = "nothing") -> None:
        """Recompute layers in the backward pass (non-reentrant) instead of keeping their activations.

        Raises:
            UserError: the class cannot, or is asked to keep some.
        """
        if keep != "nothing":
            raise UserError(f"training.keep_activations: {keep!r} needs a model of ours; transformers' keep nothing")
        from transformers.modeling_layers import GradientCheckpointingLayer

        # transformers' own switch does nothing in eval mode, in which DPO and PPO train.
        layers = [layer for layer in self.inner.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not (layers and self.inner.supports_gradient_checkpointing):
            raise UserError(f"training.gradient_checkpointing: {type(self.inner).__name__} does not support it")
        for layer in layers:
            recompute_calls(layer, enabled)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Logits [B, T, V] of a padded rectangle, zeros at padding; or what a ragged batch's targets are given.

        Args:
            input_ids, attention_mask, batch, temperature, entropy: as for `language.LanguageModel.forward`.
            return_logits: `logits` [M, V] of the targets instead of their log-probabilities.
        """
        read = reader(self.inner, "logits")
        if batch is None:
            ragged, places = from_padded(given(input_ids), attention_mask)
            return LogitsOutput(to_padded(per_token(read, ragged, _filler(self)), places, given(input_ids).shape))
        logits = per_token(read, batch, _filler(self), batch.target_index - 1)
        return _target_output(logits, batch, temperature, entropy, return_logits)

    def new_cache(self, rows: int, capacity: int) -> SharedCache | RereadCache:
        """An empty cache for `rows` documents of up to `capacity` tokens each."""
        check_capacity(capacity, self.spec.max_positions)
        return SharedCache(rows, capacity) if shares_well(self.inner) else RereadCache(rows, capacity)

    @torch.no_grad()
    def prefill(self, batch: Ragged, cache: SharedCache | RereadCache) -> Tensor:
        """Logits [B, V] after each document's last token; the documents now fill the cache."""
        return cache.fill(self.inner, batch)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: SharedCache | RereadCache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]."""
        return cache.step(self.inner, tokens)


class ExternalMaskedLanguageModel(nn.Module):
    """An encoder of transformers with its masked-language head; calls as `language.MaskedLanguageModel`."""

    inner: Any
    __init__ = _hold
    source, spec = ExternalLanguageModel.source, ExternalLanguageModel.spec
    checkpoint_activations = ExternalLanguageModel.checkpoint_activations

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Logits [B, T, V] of a padded rectangle, zeros at padding; or what a ragged batch's labels are given."""
        read = reader(self.inner, "logits")
        if batch is None:
            ragged, places = from_padded(given(input_ids), attention_mask, token_type_ids)
            return LogitsOutput(to_padded(per_token(read, ragged, _filler(self)), places, given(input_ids).shape))
        logits = per_token(read, batch, _filler(self), batch.target_index)
        return _target_output(logits, batch, temperature, entropy, return_logits)


class ExternalSeq2SeqModel(nn.Module):
    """An encoder-decoder of transformers; calls as `encoder_decoder.Seq2SeqModel`. All pairs lie in one rectangle each side."""

    inner: Any
    __init__ = _hold
    source, spec = ExternalLanguageModel.source, ExternalLanguageModel.spec
    checkpoint_activations = ExternalLanguageModel.checkpoint_activations

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        batch: Seq2Seq | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Logits [B, T, V] of padded targets, zeros at padding; or what a batch's targets are given."""
        if batch is None:
            target, places = from_padded(given(decoder_input_ids), decoder_attention_mask)
            logits = self._read(Seq2Seq(from_padded(given(input_ids), attention_mask)[0], target))
            return LogitsOutput(to_padded(logits, places, given(decoder_input_ids).shape))
        logits = self._read(batch)[batch.decoder.target_index - 1]
        return _target_output(logits, batch.decoder, temperature, entropy, return_logits)

    def new_cache(self, rows: int, capacity: int) -> PairCache:
        """An empty cache for `rows` targets of up to `capacity` tokens each."""
        check_capacity(capacity, self.spec.max_positions)
        return PairCache(rows, capacity)

    @torch.no_grad()
    def prefill(self, batch: Seq2Seq, cache: PairCache) -> Tensor:
        """Logits [B, V] after each target's last token; sources are read once, targets must be of one length."""
        return cache.fill(self.inner, batch)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: PairCache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]."""
        return cache.step(self.inner, tokens)

    def _read(self, batch: Seq2Seq) -> Tensor:
        """Logits of every target token, [N, V]."""
        source, target = rectangle(batch.encoder, _filler(self)), rectangle(batch.decoder, _filler(self))
        logits = self.inner(
            input_ids=source.ids, attention_mask=source.mask, decoder_input_ids=target.ids,
            decoder_attention_mask=target.mask, use_cache=False,
        ).logits  # fmt: skip
        return logits[target.mask.bool()]  # row by row, left to right: the order of the batch


class ExternalScalarModel(nn.Module):
    """A decoder of transformers with one number per token; calls as `readers.ScalarModel`."""

    inner: Any
    __init__ = _hold
    source, spec = ExternalLanguageModel.source, ExternalLanguageModel.spec
    checkpoint_activations = ExternalLanguageModel.checkpoint_activations

    @property
    def head(self) -> nn.Linear:
        """The score head."""
        return self.inner.score

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *, batch: Ragged | None = None
    ) -> ValueOutput:
        """`values` [N]; or [B, T] with zeros at padding, and `logits` [B, 1] at each row's last real token."""
        if batch is not None:
            return ValueOutput(self._values(batch))
        ragged, places = from_padded(given(input_ids), attention_mask)
        values = self._values(ragged)
        return ValueOutput(to_padded(values, places, given(input_ids).shape), values[ragged.last, None])

    def _values(self, batch: Ragged) -> Tensor:
        return per_token(score_reader(self.inner), batch, _filler(self)).squeeze(-1).float()


class ExternalClassifier(nn.Module):
    """Class logits of documents [B, C] (task "sequence"), of tokens [N, C] ("tokens") or of span ends [N, 2] ("span")."""

    inner: Any
    task: str

    __init__ = _hold
    source, spec = ExternalLanguageModel.source, ExternalLanguageModel.spec
    checkpoint_activations = ExternalLanguageModel.checkpoint_activations

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
    ) -> ClassifierOutput:
        """Class logits; those of tokens in a padded call are [B, T, C], zeros at padding."""
        if batch is not None:
            return ClassifierOutput(self._logits(batch).float())
        ragged, places = from_padded(given(input_ids), attention_mask, token_type_ids)
        logits = self._logits(ragged)
        if self.task != "sequence":
            logits = to_padded(logits, places, given(input_ids).shape)
        return ClassifierOutput(logits.float())

    def _logits(self, batch: Ragged) -> Tensor:
        if self.task == "tokens":
            return per_token(reader(self.inner, "logits"), batch, _filler(self))
        if self.task == "span":
            return per_token(reader(self.inner, "start_logits", "end_logits"), batch, _filler(self))
        if reads_every_token(self.inner):
            return per_token(score_reader(self.inner), batch, _filler(self), batch.last)
        return per_document(reader(self.inner, "logits"), batch, _filler(self))


def _target_output(
    logits: Tensor, batch: Ragged, temperature: float, entropies: bool, return_logits: bool
) -> LanguageOutput | LogitsOutput:
    """Of targets' logits [M, V]: the logits, or the targets' log-probabilities (and entropies) in fp32."""
    if return_logits:
        return LogitsOutput(logits)
    labels = batch.tokens[batch.target_index] if batch.labels is None else batch.labels
    logits = logits.float() / temperature
    return LanguageOutput(token_log_probs(logits, labels), entropy(logits.detach()) if entropies else None)


def _filler(model: Any) -> int:
    """What stands at padding: the class's own choice, since a few look for it."""
    return getattr(model.inner.config, "pad_token_id", None) or 0

"""transformers' own classes behind the interface of our models.

Documents are read in right-padded rectangles, so that the result of a document does not depend on the batch around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.losses.language import (
    TeacherLoss,
    TokenLoss,
    known_logits,
    smoothed_token_loss,
    token_log_probs,
    token_log_probs_and_entropy,
)
from alignment.models.activation_checkpointing import checkpoint_calls
from alignment.models.external.rectangles import (
    ExternalCache,
    PaddedRows,
    RereadCache,
    Seq2SeqCache,
    SharedCache,
    VirtualTokens,
    accepts,
    can_share_cache,
    forward_documents,
    forward_tokens,
    pad_rows,
    run_padded,
    scores_every_token,
)
from alignment.models.heads import float32_logits
from alignment.models.model import Model, check_capacity
from alignment.models.outputs import (
    ClassifierOutput,
    LanguageOutput,
    LogitsOutput,
    Padded,
    ValueOutput,
    from_padded,
    padded_values,
    value_output,
)
from alignment.models.safetensors_files import HFConfig
from alignment.ragged import Ragged, Seq2Seq

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # config keys for the longest document


@dataclass(frozen=True)
class ExternalSpec:
    """Sizes of any architecture: token table rows, hidden states' width, longest document (2 ** 31: no limit)."""

    vocabulary: int
    width: int
    max_positions: int


class ExternalModel(Model):
    """Base of the wrappers around transformers' models, `inner`."""

    source = "transformers"
    inner: Any

    def __init__(self, inner: nn.Module, config: HFConfig, task: str):
        super().__init__(config, task)
        self.inner = inner
        padding = [
            module.padding_idx
            for name, module in inner.named_modules()
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        ]
        self._first_position = max((index + 1 for index in padding if index is not None), default=0)  # 2 in MPNet

    @property
    def spec(self) -> ExternalSpec:
        """Sizes of the model."""
        config = self.inner.config
        embedding = self.inner.get_input_embeddings().weight
        limits = [getattr(config, name) - self._first_position for name in POSITIONS if getattr(config, name, None)]
        return ExternalSpec(
            embedding.shape[0], getattr(config, "hidden_size", embedding.shape[1]), min([*limits, 2**31])
        )

    def active_virtual_tokens(self) -> VirtualTokens:
        """The soft prompt or prefix that acts."""
        return VirtualTokens(self.active_soft_prompt(), self.active_prefix())

    @property
    def padding_id(self) -> int | None:
        """Token id at padding: the config's own, since some classes look for it; 0 where there is none.

        None for an encoder without a mask, such as FNet, whose tokens are mixed with any padding.
        """
        if not (isinstance(self, ExternalDecoder) or accepts(self.inner, "attention_mask")):
            return None
        return getattr(self.inner.config, "pad_token_id", None) or 0

    def token_logits(self, batch: Ragged, tokens: Tensor | None = None, fields: Sequence[str] = ("logits",)) -> Tensor:
        """Logits of all tokens, [N, ...], or of some, [M, ...]; several fields of the class's output are stacked."""
        virtual = self.active_virtual_tokens()

        def forward(rows: PaddedRows, columns: Tensor | None) -> Tensor:
            options = {}
            if columns is not None and accepts(self.inner, "logits_to_keep"):
                options["logits_to_keep"] = columns + virtual.prompt_size
            output = run_padded(self.inner, virtual, rows, **options)
            values = [getattr(output, field) for field in fields]
            if columns is None or values[0].shape[1] != len(columns):
                values = [value[:, virtual.prompt_size :] for value in values]
            return values[0] if len(values) == 1 else torch.stack(values, dim=-1)

        return forward_tokens(forward, batch, self.padding_id, tokens)

    def token_scores(self, batch: Ragged, tokens: Tensor | None = None) -> Tensor:
        """Scores of all tokens, or of some, from a class that `scores_every_token`, fp32, [N, k].

        The class itself would return those of one token, the last one that is no padding token by its id.
        """
        inner = self.inner
        virtual = self.active_virtual_tokens()

        def forward(rows: PaddedRows, columns: Tensor | None) -> Tensor:
            hidden = inner.base_model(**virtual.inputs(inner, rows.ids, rows.mask), use_cache=False).last_hidden_state
            return float32_logits(inner.score, hidden[:, virtual.prompt_size :])

        return forward_tokens(forward, batch, self.padding_id, tokens)

    def _layers(self) -> list[nn.Module]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [layer for layer in self.inner.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def padded_outputs(self, padded: Padded) -> Any:
        """As of `Model`; of language models logits [B, T, V], zeros at padding."""
        if self.task != "language":
            return super().padded_outputs(padded)
        return LogitsOutput(padded.restore(self.token_logits(padded.batch)))

    def checkpoint_activations(self, enabled: bool = True, keep: str = "nothing") -> None:
        """Recompute layers in the backward pass; UserError where the class, `keep` or a prefix does not allow it."""
        if enabled and self.prefix is not None:
            raise UserError(
                "training.gradient_checkpointing: a prefix stands in the cache of transformers' class, which a layer "
                "that is computed twice would fill twice; leave it off, or take another adapter kind, such as lora"
            )
        if keep != "nothing":
            raise UserError(f"training.keep_activations: {keep!r} needs a model of ours; transformers' keep nothing")
        layers = self._layers()
        if not (layers and self.inner.supports_gradient_checkpointing):
            raise UserError(f"training.gradient_checkpointing: {type(self.inner).__name__} does not support it")
        for layer in layers:  # transformers' own switch has no effect in eval mode, in which DPO and PPO train
            checkpoint_calls(layer, enabled)

    def compile_blocks(self) -> None:
        """Run the layers through torch.compile from now on; UserError where the class has no separate ones."""
        from alignment.models.compilation import compile_blocks

        layers = self._layers()
        if not layers:
            raise UserError(f"training.compile: {type(self.inner).__name__} has no layers to compile; set it to false")
        compile_blocks(layers, self.inner.get_input_embeddings().weight.device)


class ExternalDecoder(ExternalModel):
    """A language model that can be continued token by token."""

    @torch.no_grad()
    def prefill(self, batch: Ragged | Seq2Seq, cache: ExternalCache) -> Tensor:
        """Fill the cache with the documents and return logits [B, V] after each document's (target's) last token."""
        return cache.fill(self.inner, batch)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: ExternalCache) -> Tensor:
        """Append one token per cache row, tokens [B], and return the logits [B, V] after it."""
        return cache.step(self.inner, tokens)


class ExternalLanguageModel(ExternalDecoder):
    """A decoder of transformers, with the interface of `LanguageModel`."""

    def outputs(
        self,
        batch: Ragged,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
        token_loss: TokenLoss | TeacherLoss | None = None,
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of a batch's targets, or their `logits` [M, V]; arguments as in `LanguageModel.outputs`."""
        logits = known_logits(self.token_logits(batch, batch.before), self.known_tokens)
        return _target_output(logits, batch, temperature, entropy, return_logits, token_loss=token_loss)

    def teacher_loss(self, batch: Ragged, likeliest: int | None = None) -> TeacherLoss:
        """As of `LanguageModel`, with all logits in memory."""
        return TeacherLoss(nn.Identity(), self.token_logits(batch, batch.before), likeliest)

    def new_cache(self, rows: int, capacity: int) -> ExternalCache:
        """An empty cache for `rows` documents of up to `capacity` tokens each."""
        virtual = self.active_virtual_tokens()
        capacity = capacity + self.virtual_tokens()
        check_capacity(capacity, self.spec.max_positions)
        return (SharedCache if can_share_cache(self.inner, virtual) else RereadCache)(rows, capacity, virtual)


class ExternalMaskedLanguageModel(ExternalModel):
    """An encoder of transformers with its masked-language head, with the interface of `MaskedLanguageModel`."""

    def outputs(
        self, batch: Ragged, *, temperature: float = 1.0, entropy: bool = False, return_logits: bool = False
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of the labels at the batch's targets, or their logits."""
        return _target_output(self.token_logits(batch, batch.target_index), batch, temperature, entropy, return_logits)


class ExternalSeq2SeqModel(ExternalDecoder):
    """An encoder-decoder of transformers, with the interface of `Seq2SeqModel`.

    All sources of a batch are one rectangle, and all targets another.
    """

    def outputs(
        self,
        batch: Seq2Seq,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
        token_loss: TokenLoss | None = None,
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of the target tokens, or their logits; arguments as in `LanguageModel.outputs`."""
        before = self._decoder_logits(batch)[batch.decoder.before]
        return _target_output(before, batch.decoder, temperature, entropy, return_logits, token_loss=token_loss)

    def padded_outputs(
        self, padded: Padded, decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None
    ) -> LogitsOutput:
        """Logits [B, T, V] of padded targets, zeros at padding; `padded` are the sources."""
        target = from_padded(decoder_input_ids, decoder_attention_mask)
        return LogitsOutput(target.restore(self._decoder_logits(Seq2Seq(padded.batch, target.batch))))

    def new_cache(self, rows: int, capacity: int) -> ExternalCache:
        """An empty cache for `rows` targets of up to `capacity` tokens each."""
        virtual = self.active_virtual_tokens()
        check_capacity(capacity + virtual.prefix_size, self.spec.max_positions)
        return Seq2SeqCache(rows, capacity + virtual.prefix_size, virtual)

    def _decoder_logits(self, batch: Seq2Seq) -> Tensor:
        """Logits at every target token, [N, V]."""
        source = pad_rows(batch.encoder, self.padding_id)
        target = pad_rows(batch.decoder, self.padding_id)
        virtual = self.active_virtual_tokens()
        target_mask = target.mask
        past = {}
        if virtual.prefix is not None:
            past = {"past_key_values": virtual.target_cache(self.inner, len(target.ids))}
            target_mask = F.pad(target_mask, (virtual.prefix_size, 0), value=1)
        logits = self.inner(
            **virtual._replace(prefix=None).inputs(self.inner, source.ids, source.mask),
            decoder_input_ids=target.ids,
            decoder_attention_mask=target_mask,
            use_cache=False,
            **past,
        ).logits
        return logits[target.mask.bool()]  # row by row, left to right: the order of the batch


class ExternalScalarModel(ExternalModel):
    """A decoder of transformers with one number per token, with the interface of `ScalarModel`."""

    @property
    def head(self) -> nn.Linear:
        """The score head."""
        return self.inner.score

    def outputs(self, batch: Ragged, *, tokens: Tensor | None = None) -> ValueOutput:
        """Values of every token, [N], or of `tokens`, [M]."""
        scores = self.token_scores(batch)
        return value_output(scores if tokens is None else scores[tokens])

    def padded_outputs(self, padded: Padded) -> ValueOutput:
        """Values [B, T] with zeros at padding, and `logits` [B, 1]; see `ScalarModel`."""
        return padded_values(padded, self.token_scores(padded.batch))


class ExternalClassifier(ExternalModel):
    """Class logits of documents [B, C] (task "sequence"), of tokens [N, C] ("tokens") or span ends [N, 2] ("span")."""

    def outputs(self, batch: Ragged) -> ClassifierOutput:
        """Class logits, fp32."""
        if self.task == "tokens":
            logits = self.token_logits(batch)
        elif self.task == "span":
            logits = self.token_logits(batch, fields=("start_logits", "end_logits"))
        elif scores_every_token(self.inner):
            logits = self.token_scores(batch, batch.last)
        else:
            virtual = self.active_virtual_tokens()
            logits = forward_documents(
                lambda rows: run_padded(self.inner, virtual, rows).logits, batch, self.padding_id
            )
        return ClassifierOutput(logits.float())


def _target_output(
    logits: Tensor,
    batch: Ragged,
    temperature: float,
    entropies: bool,
    return_logits: bool,
    *,
    token_loss: TokenLoss | TeacherLoss | None = None,
) -> LanguageOutput | LogitsOutput:
    """The logits [M, V] of the targets, or the targets' log-probabilities (and entropies, and losses) in fp32."""
    if return_logits:
        return LogitsOutput(logits)
    if isinstance(token_loss, TeacherLoss):
        losses = token_loss.of_logits(logits.float() / temperature, temperature)
    else:
        losses = token_loss and smoothed_token_loss(logits / temperature, batch.target_labels, token_loss)
    logits = logits.float() / temperature
    if entropies:
        return LanguageOutput(*token_log_probs_and_entropy(logits, batch.target_labels), losses=losses)
    return LanguageOutput(token_log_probs(logits, batch.target_labels), losses=losses)

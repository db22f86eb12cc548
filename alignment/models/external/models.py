"""transformers' own classes behind the interface of our models.

Documents are read in right-padded rectangles, so that the result of a document does not depend on the batch around it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.losses.language import (
    TokenLoss,
    regularized_token_loss,
    token_log_probs,
    token_log_probs_and_entropy,
)
from alignment.models.activation_checkpointing import checkpoint_calls
from alignment.models.external.cache import (
    EncoderDecoderCache,
    RereadCache,
    SharedCache,
    can_share_cache,
    check_capacity,
)
from alignment.models.external.padding import (
    document_logits,
    forward_documents,
    forward_tokens,
    output_fields,
    pad_rows,
    scores_every_token,
    token_scores,
)
from alignment.models.external.virtual_tokens import VirtualTokens
from alignment.models.outputs import ClassifierOutput, LanguageOutput, LogitsOutput, ValueOutput, value_output
from alignment.models.padded_inputs import from_padded
from alignment.models.safetensors_files import HFConfig
from alignment.ragged import Ragged, Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # config keys for the longest document


@dataclass(frozen=True)
class ExternalSpec:
    """The sizes that are known of any architecture.

    Attributes:
        vocabulary: rows of the token table.
        width: width of the hidden states.
        max_positions: longest document; 2 ** 31 where the class has no limit.
    """

    vocabulary: int
    width: int
    max_positions: int


class ExternalModel(nn.Module):
    """Base of the wrappers around transformers' models.

    Attributes:
        inner: transformers' model.
        config: its config.json.
        task: as in `load_external`.
        source: "transformers"; our own models have "native".
        generation_config: content of generation_config.json, if the model generates and the file is there.
        prefix, prefix_enabled, soft_prompt, soft_prompt_enabled: as in `NativeModel`.
    """

    source = "transformers"
    generation_config: dict[str, Any] | None = None
    inner: Any

    def __init__(self, inner: "PreTrainedModel", config: HFConfig, task: str):
        super().__init__()
        self.inner, self.config, self.task = inner, config, task
        self.prefix: nn.Module | None = None
        self.soft_prompt: nn.Module | None = None
        self.prefix_enabled = self.soft_prompt_enabled = True
        tables = [module for name, module in inner.named_modules() if name.endswith("position_embeddings")]
        padding = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
        self._first_position = max((index + 1 for index in padding if index is not None), default=0)  # 2 in Longformer

    @property
    def spec(self) -> ExternalSpec:
        """Sizes of the model."""
        config, embedding = self.inner.config, self.inner.get_input_embeddings().weight
        limits = [getattr(config, name) - self._first_position for name in POSITIONS if getattr(config, name, None)]
        return ExternalSpec(
            embedding.shape[0], getattr(config, "hidden_size", embedding.shape[1]), min([*limits, 2**31])
        )

    def active_virtual_tokens(self) -> VirtualTokens:
        """The soft prompt or prefix that acts; neither where there is none, or it is disabled."""
        prompt = self.soft_prompt() if self.soft_prompt is not None and self.soft_prompt_enabled else None
        return VirtualTokens(prompt, self.prefix() if self.prefix is not None and self.prefix_enabled else None)

    def virtual_tokens(self) -> int:
        """Positions that a prefix or soft prompt takes in front of every document."""
        virtual = self.active_virtual_tokens()
        return virtual.prompt_size + virtual.prefix_size

    @property
    def padding_id(self) -> int:
        """Token id at padding: the config's own, since some classes look for it; 0 where there is none."""
        return getattr(self.inner.config, "pad_token_id", None) or 0

    def checkpoint_activations(self, enabled: bool = True, keep: str = "nothing") -> None:
        """Recompute layers in the backward pass (non-reentrant) instead of keeping their activations.

        Raises:
            UserError: the class does not support it, `keep` is not "nothing", or the model has a prefix.
        """
        if enabled and self.prefix is not None:
            raise UserError(
                "training.gradient_checkpointing: a prefix stands in the cache of transformers' class, which a layer "
                "that is computed twice would fill twice; leave it off, or take another adapter kind, such as lora"
            )
        if keep != "nothing":
            raise UserError(f"training.keep_activations: {keep!r} needs a model of ours; transformers' keep nothing")
        from transformers.modeling_layers import GradientCheckpointingLayer

        # transformers' own switch has no effect in eval mode, in which DPO and PPO train.
        layers = [layer for layer in self.inner.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not (layers and self.inner.supports_gradient_checkpointing):
            raise UserError(f"training.gradient_checkpointing: {type(self.inner).__name__} does not support it")
        for layer in layers:
            checkpoint_calls(layer, enabled)

    def compile_blocks(self) -> None:
        """Run the layers through torch.compile from now on.

        Raises:
            UserError: the class has no layers that can be told apart.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        from alignment.models.compilation import compile_blocks

        layers = [layer for layer in self.inner.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(f"training.compile: {type(self.inner).__name__} has no layers to compile; set it to false")
        compile_blocks(layers, self.inner.get_input_embeddings().weight.device)


class ExternalLanguageModel(ExternalModel):
    """A decoder of transformers, with the interface of `LanguageModel`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
        token_loss: TokenLoss | None = None,
    ) -> LanguageOutput | LogitsOutput:
        """Logits [B, T, V] of a padded call, zeros at padding; or log-probabilities of a ragged batch's targets.

        Args:
            input_ids, attention_mask, batch, temperature, entropy, token_loss: as in `LanguageModel.forward`.
            return_logits: return the `logits` [M, V] of the targets instead of their log-probabilities.
        """
        forward = output_fields(self.inner, "logits", virtual=self.active_virtual_tokens())
        if batch is None:
            padded = from_padded(input_ids, attention_mask)
            return LogitsOutput(padded.restore(forward_tokens(forward, padded.batch, self.padding_id)))
        logits = forward_tokens(forward, batch, self.padding_id, batch.before)
        output = _target_output(logits, batch, temperature, entropy, return_logits)
        if token_loss is None or isinstance(output, LogitsOutput):
            return output
        tokens = batch.tokens[batch.target_index]
        return output._replace(losses=regularized_token_loss(logits / temperature, tokens, token_loss))

    def new_cache(self, rows: int, capacity: int) -> SharedCache | RereadCache:
        """An empty cache for `rows` documents of up to `capacity` tokens each."""
        virtual = self.active_virtual_tokens()
        capacity += virtual.prompt_size + virtual.prefix_size
        check_capacity(capacity, self.spec.max_positions)
        kind = SharedCache if can_share_cache(self.inner, virtual) else RereadCache
        return kind(rows, capacity, virtual)

    @torch.no_grad()
    def prefill(self, batch: Ragged, cache: SharedCache | RereadCache) -> Tensor:
        """Fill the cache with the documents and return the logits [B, V] after each document's last token."""
        return cache.fill(self.inner, batch)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: SharedCache | RereadCache) -> Tensor:
        """Append one token per cache row, tokens [B], and return the logits [B, V] after it."""
        return cache.step(self.inner, tokens)


class ExternalMaskedLanguageModel(ExternalModel):
    """An encoder of transformers with its masked-language head, with the interface of `MaskedLanguageModel`."""

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
        """Logits [B, T, V] of a padded call, zeros at padding; or log-probabilities of a ragged batch's labels."""
        forward = output_fields(self.inner, "logits", virtual=self.active_virtual_tokens())
        if batch is None:
            padded = from_padded(input_ids, attention_mask, token_type_ids)
            return LogitsOutput(padded.restore(forward_tokens(forward, padded.batch, self.padding_id)))
        logits = forward_tokens(forward, batch, self.padding_id, batch.target_index)
        return _target_output(logits, batch, temperature, entropy, return_logits)


class ExternalSeq2SeqModel(ExternalModel):
    """An encoder-decoder of transformers, with the interface of `Seq2SeqModel`.

    All sources of a batch are one rectangle, and all targets another.
    """

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
        """Logits [B, T, V] of padded targets, zeros at padding; or log-probabilities of a batch's targets."""
        if batch is None:
            source = from_padded(input_ids, attention_mask).batch
            padded = from_padded(decoder_input_ids, decoder_attention_mask)
            return LogitsOutput(padded.restore(self._decoder_logits(Seq2Seq(source, padded.batch))))
        logits = self._decoder_logits(batch)[batch.decoder.before]
        return _target_output(logits, batch.decoder, temperature, entropy, return_logits)

    def new_cache(self, rows: int, capacity: int) -> EncoderDecoderCache:
        """An empty cache for `rows` targets of up to `capacity` tokens each."""
        virtual = self.active_virtual_tokens()
        check_capacity(capacity + virtual.prefix_size, self.spec.max_positions)
        return EncoderDecoderCache(rows, capacity + virtual.prefix_size, virtual)

    @torch.no_grad()
    def prefill(self, batch: Seq2Seq, cache: EncoderDecoderCache) -> Tensor:
        """Fill the cache with sources and targets (of one length) and return the logits [B, V] after each target."""
        return cache.fill(self.inner, batch)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: EncoderDecoderCache) -> Tensor:
        """Append one token per cache row, tokens [B], and return the logits [B, V] after it."""
        return cache.step(self.inner, tokens)

    def _decoder_logits(self, batch: Seq2Seq) -> Tensor:
        """Logits at every target token, [N, V]."""
        source, target = pad_rows(batch.encoder, self.padding_id), pad_rows(batch.decoder, self.padding_id)
        virtual, target_mask, past = self.active_virtual_tokens(), target.mask, {}
        if virtual.prefix is not None:
            past = {"past_key_values": virtual.target_cache(self.inner, len(target.ids))}
            target_mask = F.pad(target_mask, (virtual.prefix_size, 0), value=1)
        logits = self.inner(
            **virtual._replace(prefix=None).inputs(self.inner, source.ids, source.mask),
            decoder_input_ids=target.ids, decoder_attention_mask=target_mask, use_cache=False, **past,
        ).logits  # fmt: skip
        return logits[target.mask.bool()]  # row by row, left to right: the order of the batch


class ExternalScalarModel(ExternalModel):
    """A decoder of transformers with one number per token, with the interface of `ScalarModel`."""

    @property
    def head(self) -> nn.Linear:
        """The score head."""
        return self.inner.score

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        batch: Ragged | None = None,
        tokens: Tensor | None = None,
    ) -> ValueOutput:
        """`values` [N], or [M] of `tokens`; or [B, T] with zeros at padding, and `logits` [B, 1]; see `ScalarModel`."""
        if batch is not None:
            outputs = self._outputs(batch)
            return value_output(outputs if tokens is None else outputs[tokens])
        padded = from_padded(input_ids, attention_mask)
        return padded.value_output(self._outputs(padded.batch))

    def _outputs(self, batch: Ragged) -> Tensor:
        forward = token_scores(self.inner, self.active_virtual_tokens())
        return forward_tokens(forward, batch, self.padding_id).float()  # [N, k]


class ExternalClassifier(ExternalModel):
    """Class logits of documents [B, C] (task "sequence"), of tokens [N, C] ("tokens") or of span ends [N, 2] ("span")."""

    task: str

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        batch: Ragged | None = None,
    ) -> ClassifierOutput:
        """Class logits; logits of tokens in a padded call are [B, T, C], zeros at padding."""
        if batch is not None:
            return ClassifierOutput(self._logits(batch).float())
        padded = from_padded(input_ids, attention_mask, token_type_ids)
        logits = self._logits(padded.batch)
        return ClassifierOutput((logits if self.task == "sequence" else padded.restore(logits)).float())

    def _logits(self, batch: Ragged) -> Tensor:
        virtual = self.active_virtual_tokens()
        if self.task == "tokens":
            return forward_tokens(output_fields(self.inner, "logits", virtual=virtual), batch, self.padding_id)
        if self.task == "span":
            fields = output_fields(self.inner, "start_logits", "end_logits", virtual=virtual)
            return forward_tokens(fields, batch, self.padding_id)
        if scores_every_token(self.inner):
            return forward_tokens(token_scores(self.inner, virtual), batch, self.padding_id, batch.last)
        return forward_documents(document_logits(self.inner, virtual), batch, self.padding_id)


def _target_output(
    logits: Tensor, batch: Ragged, temperature: float, entropies: bool, return_logits: bool
) -> LanguageOutput | LogitsOutput:
    """The logits [M, V] of the targets, or the targets' log-probabilities (and entropies) in fp32."""
    if return_logits:
        return LogitsOutput(logits)
    labels = batch.tokens[batch.target_index] if batch.labels is None else batch.labels
    logits = logits.float() / temperature
    if entropies:
        return LanguageOutput(*token_log_probs_and_entropy(logits, labels))
    return LanguageOutput(token_log_probs(logits, labels))

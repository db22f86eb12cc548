"""Trunk and language head: decoders and masked language models. Reward models and classifiers are in classifiers.py."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from alignment.losses.language import TeacherLoss, TokenLoss, chunked_token_log_probs, head_logits, known_logits
from alignment.models.heads import ClassificationHead, SpanBoundaryHead, VocabularyHead, float32_logits
from alignment.models.layers import ExpertsSpec
from alignment.models.layers.feedforward import balance_loss, recorded_router_logits
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import select_rows, states_before_targets
from alignment.models.native_model import DocumentStates, NativeModel, empty_cache
from alignment.models.outputs import LanguageOutput, LogitsOutput, Padded
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer, TransformerSpec
from alignment.ragged import Ragged


class LanguageModel(NativeModel[TransformerSpec]):
    """A decoder with a language head.

    Attributes:
        value_head: gives one number per token in training, see `attach_value_head`; not saved with the model.
        prefix_mask: prompts are read in both directions when responses are decoded (prefix LM).
    """

    def __init__(self, trunk: Transformer, head: VocabularyHead, config: HFConfig):
        super().__init__(trunk.spec, config, "language")
        self.trunk = trunk
        self.head = head
        self.value_head: nn.Linear | None = None
        self.prefix_mask = False
        if trunk.spec.tied_head:
            self.head.weight = trunk.embed.weight

    def outputs(
        self,
        batch: Ragged,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
        token_loss: TokenLoss | TeacherLoss | None = None,
        values: bool = False,
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of the batch's targets; the head runs on the M rows before these only.

        log_probs_t = log_softmax(logits_{t-1} / temperature)[token_t], in fp32

        Args:
            temperature: > 0.
            entropy: also give the entropy of each predicting distribution.
            return_logits: return the logits behind every target, and the states they came from, instead.
            token_loss: also give each target's loss with label smoothing or z-loss, or from a teacher.
            values: also give the value head's number before each target.
        """
        experts = self.spec.blocks[0].feedforward
        balanced = isinstance(experts, ExpertsSpec) and experts.balance_coef > 0 and torch.is_grad_enabled()
        with recorded_router_logits(self.trunk) if balanced else nullcontext([]) as router_logits:
            select = partial(states_before_targets, batch=batch)
            read = self.read(self.trunk, batch, prefix=self.active_prefix(), select=select)
        before = read.states
        if return_logits:
            return LogitsOutput(known_logits(head_logits(self.head, before), self.known_tokens), before)
        token_outputs = chunked_token_log_probs(
            self.head,
            before,
            batch.target_labels,
            temperature=temperature,
            entropy=entropy,
            loss=token_loss,
            known=self.known_tokens,
        )
        if values and self.value_head is None:
            raise ValueError("the model has no value head: see attach_value_head")
        valued = float32_logits(self.value_head, before).squeeze(-1) if values and self.value_head is not None else None
        return LanguageOutput(
            token_outputs.log_probs,
            token_outputs.entropy,
            self._balance(router_logits, read.batch) if router_logits else None,
            losses=token_outputs.losses,
            values=valued,
        )

    def teacher_loss(self, batch: Ragged, likeliest: int | None = None) -> TeacherLoss:
        """The `token_loss` of a student that learns this model's distributions at the batch's targets."""
        select = partial(states_before_targets, batch=batch)
        return TeacherLoss(self.head, self.hidden_states(self.trunk, batch, select=select), likeliest)

    def padded_outputs(self, padded: Padded) -> LogitsOutput:
        """Logits of padded rows, [B, T, V], zeros at padding."""
        return LogitsOutput(padded.restore(head_logits(self.head, self.hidden_states(self.trunk, padded.batch))))

    def _balance(self, router_logits: list[Tensor], batch: Ragged) -> Tensor:
        """The load-balancing loss of router logits [N, E] of each layer times its coefficient.

        The tokens of a shared prompt count once for each of its documents.
        """
        experts = self.spec.blocks[0].feedforward
        assert isinstance(experts, ExpertsSpec)
        if batch.shared is not None:
            router_logits = [logits.index_select(0, batch.shared.documents) for logits in router_logits]
        return experts.balance_coef * balance_loss(router_logits, experts.experts_per_token)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` documents of up to `capacity` tokens, plus room for a prefix or soft prompt."""
        return empty_cache(self.trunk, rows, capacity + self.virtual_tokens())

    @torch.no_grad()
    def prefill(self, batch: Ragged, cache: Cache, rows: Tensor | None = None) -> Tensor:
        """Logits [B, V] after each document's last token; the documents now fill cache `rows` [B] (None: 0, 1, ...)."""
        if self.prefix_mask:
            batch = replace(batch, prefix_lengths=batch.sizes)
        last = partial(select_rows, index=batch.last)
        return head_logits(self.head, self.hidden_states(self.trunk, batch, cache=cache, rows=rows, select=last))

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        return head_logits(self.head, self.trunk.step(tokens, cache))


class MaskedLanguageModel(NativeModel[TransformerSpec]):
    """An encoder with a language head that predicts masked tokens, and perhaps a next-sentence head on the first token.

    Attributes:
        span_boundary: predicts masked tokens from beside their span, see `attach_span_boundary`; not saved with the
            model.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """

    def __init__(
        self,
        trunk: Transformer,
        head: VocabularyHead,
        config: HFConfig,
        next_sentence: ClassificationHead | None = None,
    ):
        super().__init__(trunk.spec, config, "language" if next_sentence is None else "next_sentence")
        self.trunk = trunk
        self.head = head
        self.next_sentence = next_sentence
        self.span_boundary: SpanBoundaryHead | None = None
        if trunk.spec.tied_head:
            self.head.weight = trunk.embed.weight

    def outputs(
        self, batch: Ragged, *, return_logits: bool = False, boundaries: Tensor | None = None
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of the batch's `labels` at its `target_index`, or the logits there and the states behind.

        With `boundaries`, as of `span_boundaries` in the batch, [M, 3], also those of the span-boundary head.
        """
        read = self.read(self.trunk, batch, prefix=self.active_prefix())
        masked = select_rows(read.states, read.batch.target_index)
        if return_logits:
            return LogitsOutput(self.head(masked), masked, self._next_sentence_logits(read))
        log_probs = chunked_token_log_probs(self.head, masked, batch.target_labels).log_probs
        beside = None
        if boundaries is not None and self.span_boundary is not None:
            mixed = self.span_boundary(read.own_states(), boundaries)
            beside = chunked_token_log_probs(self.span_boundary.predict, mixed, batch.target_labels).log_probs
        return LanguageOutput(
            log_probs, next_sentence_logits=self._next_sentence_logits(read), boundary_log_probs=beside
        )

    def padded_outputs(self, padded: Padded) -> LogitsOutput:
        """Logits of padded rows, [B, T, V], zeros at padding."""
        read = self.read(self.trunk, padded.batch, prefix=self.active_prefix())
        logits = padded.restore(self.head(read.own_states()))
        return LogitsOutput(logits, next_sentence_logits=self._next_sentence_logits(read))

    def _next_sentence_logits(self, read: DocumentStates) -> Tensor | None:
        return None if self.next_sentence is None else self.next_sentence(read.states[read.batch.firsts])

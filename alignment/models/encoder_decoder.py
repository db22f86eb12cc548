"""Encoder-decoders: language models (T5, BART), and classifiers whose documents both stacks read."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.losses.language import TokenLoss, chunked_token_log_probs, head_logits
from alignment.models.classifiers import SequenceClassifier
from alignment.models.heads import ClassificationHead, VocabularyHead
from alignment.models.init_weights import FanInInitSpec, InitSpec
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import select_rows
from alignment.models.layers.sdpa import Source
from alignment.models.native_model import NativeModel, empty_cache
from alignment.models.outputs import ClassifierOutput, LanguageOutput, LogitsOutput, Padded, from_padded
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import Transformer, TransformerSpec
from alignment.ragged import Ragged, Seq2Seq


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """An encoder and a decoder with cross-attention; they share the token embedding, in some families with the head."""

    encoder: TransformerSpec
    decoder: TransformerSpec
    start_token: int  # begins every target
    end_token: int | None  # a sequence classifier reads the last one of each document; None: not known

    @property
    def vocabulary(self) -> int:
        """Tokens that can be read and written."""
        return self.decoder.vocabulary

    @property
    def max_positions(self) -> int:
        """Longest target document."""
        return self.decoder.max_positions

    @property
    def init(self) -> InitSpec | FanInInitSpec:
        """Distributions of the fresh weights of both stacks."""
        return self.decoder.init


class Seq2SeqModel(NativeModel[EncoderDecoderSpec]):
    """A decoder with a language head and cross-attention on an encoder's states.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def __init__(
        self,
        encoder: Transformer,
        decoder: Transformer,
        head: VocabularyHead,
        config: HFConfig,
        spec: EncoderDecoderSpec,
    ):
        super().__init__(spec, config, "language")
        self.encoder = encoder
        self.decoder = decoder
        self.head = head
        self.decoder.embed.weight = self.encoder.embed.weight
        if spec.decoder.tied_head:
            self.head.weight = self.encoder.embed.weight

    def outputs(
        self,
        batch: Seq2Seq,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        return_logits: bool = False,
        token_loss: TokenLoss | None = None,
    ) -> LanguageOutput | LogitsOutput:
        """Log-probabilities of the target tokens, or their logits; arguments as for `LanguageModel.outputs`."""
        before = select_rows(self.states(batch), batch.decoder.before)
        if return_logits:
            return LogitsOutput(head_logits(self.head, before), before)
        token_outputs = chunked_token_log_probs(
            self.head, before, batch.decoder.target_labels, temperature=temperature, entropy=entropy, loss=token_loss
        )
        return LanguageOutput(token_outputs.log_probs, token_outputs.entropy, losses=token_outputs.losses)

    def padded_outputs(
        self, padded: Padded, decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None
    ) -> LogitsOutput:
        """Logits [B, T, V] of padded targets, which begin with the start token; `padded` are the sources."""
        target = from_padded(decoder_input_ids, decoder_attention_mask)
        states = self.states(Seq2Seq(padded.batch, target.batch))
        return LogitsOutput(target.restore(head_logits(self.head, states)))

    def states(self, batch: Seq2Seq, cache: Cache | None = None) -> Tensor:
        """Hidden states of the target's tokens, [N, D]; `cache` is filled for decoding to go on from."""
        read = self.read(self.encoder, batch.encoder)
        return self.decoder(
            batch.decoder, prefix=self.active_prefix(), source=Source(read.states, read.batch), cache=cache
        )

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` targets of up to `capacity` tokens with the start token, plus room for a prefix."""
        prefix = self.active_prefix()
        return empty_cache(self.decoder, rows, capacity + (0 if prefix is None else prefix.shape[2]))

    @torch.no_grad()
    def prefill(self, batch: Seq2Seq, cache: Cache) -> Tensor:
        """Logits [B, V] after each target's last token; all rows of the cache are filled at once."""
        return head_logits(self.head, self.states(batch, cache)[batch.decoder.last])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        return head_logits(self.head, self.decoder.step(tokens, cache))


class Seq2SeqClassifier(NativeModel[EncoderDecoderSpec]):
    """Class logits from a decoder that reads the same document as its encoder, one token later.

    At the document's last end token for its class (`task` "sequence"); at every token that an answer starts and that it
    ends there ("span").

    Source: Lewis et al. 2019, arXiv:1910.13461, sections 3.1 and 3.2.
    """

    def __init__(
        self,
        encoder: Transformer,
        decoder: Transformer,
        head: ClassificationHead,
        config: HFConfig,
        spec: EncoderDecoderSpec,
        *,
        task: Literal["sequence", "span"],
    ):
        super().__init__(spec, config, task)
        self.encoder = encoder
        self.decoder = decoder
        self.head = head
        self.decoder.embed.weight = self.encoder.embed.weight

    def outputs(self, batch: Ragged) -> ClassifierOutput:
        """Logits: [B, C] for sequences, [N, 2] for spans; UserError for a sequence without an end token."""
        read = self.read(self.encoder, batch)
        hidden = self.decoder(
            shifted(batch, self.spec.start_token),
            prefix=self.active_prefix(),
            source=Source(read.states, read.batch),
        )
        if self.task == "sequence":
            hidden = hidden[last_positions(batch, self.spec.end_token)]
        return ClassifierOutput(self.head(hidden))


DocumentClassifier = SequenceClassifier | Seq2SeqClassifier  # one row of logits for each document


def shifted(batch: Ragged, start_token: int) -> Ragged:
    """The documents shifted right by one: the start token in front, the last token dropped."""
    tokens = batch.tokens.roll(1)
    tokens[batch.firsts] = start_token
    return replace(batch, tokens=tokens)


def last_positions(batch: Ragged, token: int | None) -> Tensor:
    """Index of the last `token` of each document, [B]; UserError where one has none."""
    positions = torch.arange(len(batch.tokens), device=batch.tokens.device)
    rows = torch.repeat_interleave(batch.sizes, output_size=len(positions))
    token_positions = torch.where(batch.tokens == -1 if token is None else batch.tokens == token, positions, -1)
    last = token_positions.new_full((len(batch.lengths),), -1).scatter_reduce(0, rows, token_positions, "amax")
    missing = (last < 0).nonzero().flatten().tolist()
    if missing:
        names = [batch.row_ids[row] if batch.row_ids else str(row) for row in missing[:5]]
        raise UserError(
            f"{len(missing)} documents have no end token (eos_token_id {token}), where this model reads a document's "
            f"class or score: rows {', '.join(names)}; take a tokenizer that ends texts with it by itself, as T5's and "
            "BART's do (the post_processor of tokenizer.json)"
        )
    return last

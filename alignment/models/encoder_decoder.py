"""Encoder, decoder and language head: text in, text out (T5, BART). Documents come as pairs, see `ragged.Seq2Seq`."""

from typing import Any

import torch
from torch import Tensor, nn

from alignment.models.cache import Cache
from alignment.models.cross import Source
from alignment.models.heads import Output, token_scores
from alignment.models.language import new_cache
from alignment.models.masks import take
from alignment.models.padded import from_padded, given, to_padded
from alignment.models.recompute import Keep
from alignment.models.spec import EncoderDecoderSpec
from alignment.models.transformer import Transformer
from alignment.ragged import Seq2Seq


class Seq2SeqModel(nn.Module):
    """The decoder writes while looking at what the encoder read.

    Attributes:
        spec: what both are.
        config: the Hugging Face config.json it was made from and is saved with.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    source = "native"
    task = "language"
    prefix = None

    def __init__(
        self,
        encoder: Transformer,
        decoder: Transformer,
        head: nn.Module,
        config: dict[str, Any],
        spec: EncoderDecoderSpec,
    ):
        super().__init__()
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.decoder.embed.weight = self.encoder.embed.weight
        if spec.decoder.tied_head:
            self.head.weight = self.encoder.embed.weight
        self.config, self.spec = config, spec

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass instead of keeping their activations; see `recompute.recomputed`."""
        self.encoder.recompute = self.decoder.recompute = keep if enabled else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        batch: Seq2Seq | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        distributions: bool = False,
    ) -> Output:
        """Logits of padded targets, or log-probabilities of a batch's target tokens.

        Args:
            input_ids, attention_mask: source, [B, S], padded on either side.
            decoder_input_ids, decoder_attention_mask: target with the start token in front, [B, T].
            batch: pairs of documents, instead.
            temperature, entropy, distributions: as for `LanguageModel.forward`.

        Returns:
            Output with `logits` [B, T, V], or with `log_probs` [M] of the target's target tokens.
        """
        if batch is None:
            source, _ = from_padded(given(input_ids), attention_mask)
            target, places = from_padded(given(decoder_input_ids), decoder_attention_mask)
            logits = self.head(self.states(Seq2Seq(source, target)))
            return Output(logits=to_padded(logits, places, given(decoder_input_ids).shape))
        hidden, target = self.states(batch), batch.target
        before = take(hidden, target.targets - 1)
        if distributions:
            return Output(logits=self.head(before), hidden=hidden)
        return token_scores(self.head, before, target.tokens[target.targets], temperature, entropy)

    def states(self, batch: Seq2Seq, cache: Cache | None = None) -> Tensor:
        """Hidden states of the target's tokens, [N, D]; `cache` is filled for decoding to go on from."""
        source = Source(self.encoder(batch.source), batch.source)
        return self.decoder(batch.target, source=source, cache=cache)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` targets of up to `capacity` tokens each, the start token included."""
        return new_cache(self.decoder, rows, capacity)

    @torch.no_grad()
    def prefill(self, batch: Seq2Seq, cache: Cache) -> Tensor:
        """Logits [B, V] after each target's last token; all rows of the cache are filled at once."""
        return self.head(self.states(batch, cache)[batch.target.last])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token for every cache row, tokens [B]; advances `cache.lengths`."""
        return self.head(self.decoder.step(tokens, cache))

"""An encoder-decoder with our decoding methods around transformers' T5: nothing but sources and targets is kept."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alignment.ragged import Ragged, Seq2Seq


class Spec(NamedTuple):
    """What `generate` asks of a spec."""

    vocabulary: int


class PairsCache:
    """The encoder's states and the targets so far; counts what was encoded."""

    def __init__(self, rows: int, capacity: int):
        self.lengths, self.capacity = torch.zeros(rows, dtype=torch.long), capacity
        self.states, self.mask, self.targets = (torch.empty(0) for _ in range(3))

    def reorder(self, rows: Tensor) -> None:
        self.states, self.mask, self.targets = self.states[rows], self.mask[rows], self.targets[rows]

    def keep(self, rows: Tensor) -> None:
        self.reorder(rows)


class StandIn(nn.Module):
    """Decoding as the loops expect it of a model."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner, self.config, self.spec = inner, inner.config.to_dict(), Spec(inner.config.vocab_size)
        self.encoded = 0

    def new_cache(self, rows: int, capacity: int) -> PairsCache:
        return PairsCache(rows, capacity)

    @torch.no_grad()
    def prefill(self, batch: Seq2Seq, cache: PairsCache) -> Tensor:
        ids, cache.mask = rectangle(batch.encoder)
        cache.states = self.inner.get_encoder()(input_ids=ids, attention_mask=cache.mask).last_hidden_state
        self.encoded += len(ids)
        cache.targets = torch.empty(len(ids), 0, dtype=torch.long)
        return self.decode(rectangle(batch.decoder)[0].squeeze(1), cache)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: PairsCache) -> Tensor:
        cache.targets = torch.cat([cache.targets, tokens[:, None]], dim=1)
        assert cache.targets.shape[1] <= cache.capacity
        answer = self.inner(
            encoder_outputs=(cache.states,), attention_mask=cache.mask, decoder_input_ids=cache.targets, use_cache=False
        )
        return answer.logits[:, -1]


def rectangle(batch: Ragged) -> tuple[Tensor, Tensor]:
    """Documents padded on the right, and 1 where a token is real, [B, T]."""
    rows = batch.tokens.split(list(batch.lengths))
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return ids, nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)

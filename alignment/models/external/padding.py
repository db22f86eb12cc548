"""Ragged batches in the padded rectangles that transformers' classes read, and their outputs without the padding.

Padding is always on the right: under causal attention, and in any recurrence, it cannot change a token before it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.ragged import Ragged, refuse_shared

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

CHEAP_PADDING = 2048  # positions of padding that cost less than one more forward


class VirtualTokens(NamedTuple):
    """A soft prompt, a prefix, or neither.

    Attributes:
        prompt: vectors read as the first tokens of every document (an encoder-decoder's source), [P, E].
        prefix: keys and values before every document (an encoder-decoder's target), [layers, 2, P, K, head_dim].
    """

    prompt: Tensor | None = None
    prefix: Tensor | None = None

    @property
    def prompt_size(self) -> int:
        """Tokens of the soft prompt."""
        return 0 if self.prompt is None else len(self.prompt)

    @property
    def prefix_size(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else self.prefix.shape[2]

    def inputs(self, inner: "PreTrainedModel", ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments of the forward of `inner` that reads a rectangle, padded on the right, behind these tokens.

        Args:
            ids, mask: [B, T].
        """
        if self.prompt is not None:
            vectors = inner.get_input_embeddings()(ids)
            prompt = self.prompt.to(vectors.dtype).expand(len(ids), *self.prompt.shape)
            mask = F.pad(mask, (self.prompt_size, 0), value=1)
            return {"inputs_embeds": torch.cat([prompt, vectors], dim=1), "attention_mask": mask}
        if self.prefix is not None:
            mask, past = F.pad(mask, (self.prefix_size, 0), value=1), self.decoder_cache(inner, len(ids))
            return {"input_ids": ids, "attention_mask": mask, "past_key_values": past}
        return {"input_ids": ids, "attention_mask": mask}

    def decoder_cache(self, inner: "PreTrainedModel", rows: int) -> "DynamicCache":
        """A cache that holds the prefix, for a decoder to go on from; gradients go through it."""
        from transformers.cache_utils import DynamicCache

        assert self.prefix is not None
        embedding: Any = inner.get_input_embeddings()
        dtype = getattr(embedding, "compute_dtype", embedding.weight.dtype)  # frozen weights may be of a lower type
        prefix = self.prefix.to(dtype)
        layers = prefix.transpose(2, 3)[:, :, None].expand(-1, -1, rows, -1, -1, -1)  # [layers, 2, B, K, P, head_dim]
        return DynamicCache([(keys, values) for keys, values in layers])

    def target_cache(self, inner: "PreTrainedModel", rows: int) -> "EncoderDecoderCache":
        """The same for the decoder of an encoder-decoder, whose cross-attention has nothing before the source."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(self.decoder_cache(inner, rows), DynamicCache())


NO_VIRTUAL_TOKENS = VirtualTokens()


class PaddedRows(NamedTuple):
    """Some documents of a ragged batch as one rectangle, padded on the right.

    Attributes:
        ids: token ids, the padding token elsewhere, [b, T].
        mask: 1 at tokens, 0 at padding, [b, T].
        segments: as `Ragged.segments`, 0 at padding, [b, T]; or None.
        token_index: index in the ragged batch of each token, row by row, [n].
    """

    ids: Tensor
    mask: Tensor
    segments: Tensor | None
    token_index: Tensor


def pad_rows(batch: Ragged, padding_id: int, rows: Sequence[int] | None = None) -> PaddedRows:
    """Documents `rows` (None: all) of a ragged batch as one rectangle."""
    refuse_shared(batch, "a model that runs as transformers' class")
    rows = range(len(batch.lengths)) if rows is None else rows
    device = batch.tokens.device
    lengths = torch.tensor([batch.lengths[row] for row in rows], device=device)
    columns = torch.arange(int(lengths.max()), device=device)
    index = batch.starts.long()[torch.tensor(list(rows), device=device)][:, None] + columns
    real = columns < lengths[:, None]
    index = index.clamp(max=len(batch.tokens) - 1)
    segments = None if batch.segments is None else batch.segments[index] * real
    return PaddedRows(torch.where(real, batch.tokens[index], padding_id), real.long(), segments, index[real])


def groups_with_little_padding(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers in groups, longest first; at most a fifth of a group's rectangle, or 2048 positions, is padding."""
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens += lengths[row]
        padding = lengths[groups[-1][0]] * (len(groups[-1]) + 1) - tokens if groups else 0
        if not groups or padding > max(CHEAP_PADDING, tokens // 4):
            groups.append([])
            tokens = lengths[row]
        groups[-1].append(row)
    return groups


def forward_tokens(
    forward: Callable[[PaddedRows, Tensor | None], Tensor],
    batch: Ragged,
    padding_id: int,
    token_index: Tensor | None = None,
) -> Tensor:
    """The outputs of `forward` at some tokens of a ragged batch, [n, ...].

    Args:
        forward: (rectangle of b rows, columns wanted [c] or None: all) -> [b, T or c, ...].
        batch: the documents.
        padding_id: token id at padding.
        token_index: indices of the tokens in the batch, in any order, [n]; None: all tokens.
    """
    wanted = torch.ones_like(batch.tokens, dtype=torch.bool)
    if token_index is not None:
        wanted = torch.zeros_like(wanted).index_fill(0, token_index, True)
    outputs, indices = [], []
    for rows in groups_with_little_padding(batch.lengths):
        padded = pad_rows(batch, padding_id, rows)
        mask, index = padded.mask, padded.token_index
        here = wanted[index]
        cells = torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask.bool(), here)  # row by row, like `index`
        columns = None if token_index is None else cells.any(0).nonzero().squeeze(1)
        output = forward(padded, columns)
        outputs.append(output[cells if columns is None or output.shape[1] != len(columns) else cells[:, columns]])
        indices.append(index[here])
    in_order = torch.cat(outputs)[torch.cat(indices).argsort()]
    return in_order if token_index is None else in_order[(wanted.cumsum(0) - 1)[token_index]]


def forward_documents(forward: Callable[[PaddedRows], Tensor], batch: Ragged, padding_id: int) -> Tensor:
    """The output of `forward` for each document of a ragged batch, [B, ...]."""
    outputs, order = [], []
    for rows in groups_with_little_padding(batch.lengths):
        outputs.append(forward(pad_rows(batch, padding_id, rows)))
        order += rows
    return torch.cat(outputs)[torch.tensor(order, device=batch.tokens.device).argsort()]


def accepts(inner: "PreTrainedModel", argument: str) -> bool:
    """True where the forward of a transformers model has an argument of this name."""
    return argument in inspect.signature(inner.forward).parameters


def scores_every_token(inner: "PreTrainedModel") -> bool:
    """True for sequence classifiers that apply one linear layer to each token's hidden state, and read it at the last one."""
    return isinstance(getattr(inner, "score", None), nn.Linear)


def run_padded(inner: "PreTrainedModel", virtual: VirtualTokens, rows: PaddedRows, **options: object) -> Any:
    """The output of `inner` on a rectangle behind the virtual tokens."""
    ids, mask, segments, _ = rows
    if accepts(inner, "use_cache"):
        options["use_cache"] = False
    if segments is not None and accepts(inner, "token_type_ids") and getattr(inner.config, "type_vocab_size", 2) > 1:
        options["token_type_ids"] = F.pad(segments, (virtual.prompt_size, 0))  # type 0 for the prompt
    if hasattr(inner.base_model, "set_attention_type"):  # a short rectangle leaves BigBird without its sparse attention
        cast(Any, inner.base_model).set_attention_type(inner.config.attention_type)
    return inner(**virtual.inputs(inner, ids, mask), **options)

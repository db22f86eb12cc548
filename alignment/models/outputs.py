"""Outputs of the models, and the padded rectangles that a call may come in.

Outputs are named tuples, so that wrappers (DDP, FSDP2, DeepSpeed) find the tensors in them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.errors import raise_all
from alignment.ragged import Ragged


def check_numbers(values: Tensor, name: Callable[[int], str], what: str) -> None:
    """Refuse a model's numbers of n rows, [n, ...], that are not finite: comparisons and maxima pass them in silence.

    Args:
        name: number of a row -> its name, for people.
        what: the numbers, for people.

    Raises:
        UserError: names the rows.
    """
    finite = values[..., None].flatten(1).isfinite().all(1).tolist()
    broken = dict.fromkeys(name(i) for i, is_finite in enumerate(finite) if not is_finite)
    raise_all(
        f"{row}: {what} is not finite, so nothing follows from it; check the model's weights, or compute in float32"
        for row in broken
    )


class LanguageOutput(NamedTuple):
    """Log-probabilities of the targets by a language model called with `batch`; nats, fp32; the rest on request."""

    log_probs: Tensor  # of each target token, [M]
    entropy: Tensor | None = None  # of the distribution behind each target, [M]; has a gradient where no loss was
    balance: Tensor | None = None  # load-balancing loss of the experts times its coefficient
    next_sentence_logits: Tensor | None = None  # not next, next, [B, 2]; of encoders with a next-sentence head
    losses: Tensor | None = None  # of each target with label smoothing or z-loss, [M]
    values: Tensor | None = None  # of a value head before each target, [M]
    boundary_log_probs: Tensor | None = None  # of each target, from the states beside its span, [M]


# A language model, or a reference: (batch=, temperature=, token_loss=) -> log-probabilities of the batch's targets.
LogProbModel = Callable[..., LanguageOutput]


class LogitsOutput(NamedTuple):
    """Logits over the vocabulary, from a language model called with `input_ids` or with `return_logits`."""

    logits: Tensor  # [B, T, V] of a padded call, zeros at padding; [M, V] of a batch's targets
    hidden: Tensor | None = None  # with `return_logits`, the states that the logits were computed from, [M, D]
    next_sentence_logits: Tensor | None = None  # not next, next, [B, 2]; of encoders with a next-sentence head


class ValueOutput(NamedTuple):
    """One number per token, from a scalar model (reward or value); of an ensemble of k the mean of its members."""

    values: Tensor  # fp32, [N] of a batch; [B, T] of a padded call, zeros at padding
    logits: Tensor | None = None  # padded call: the values at each row's last real token, [B, 1], of an ensemble [B, k]
    members: Tensor | None = None  # the number of each member of an ensemble, with one axis of k more than `values`


def value_output(outputs: Tensor) -> ValueOutput:
    """The output of a scalar model: the one number of each token, or the mean of its k numbers; outputs: [N, k]."""
    if outputs.shape[-1] == 1:
        return ValueOutput(outputs.squeeze(-1))
    return ValueOutput(outputs.mean(-1), members=outputs)


class ClassifierOutput(NamedTuple):
    """Class logits, fp32."""

    logits: Tensor  # per document [B, C]; per token [N, C] of a batch, [B, T, C] of a padded call with zeros at padding


class DoubleHeadsOutput(NamedTuple):
    """Class logits of each document and log-probabilities of its tokens."""

    logits: Tensor  # [B, C]
    log_probs: Tensor  # of all tokens but first ones, nats, fp32, [M]


# Padded rectangles


class Padded(NamedTuple):
    """Documents that lay in a padded rectangle [B, T]; their tokens' indices in it, flat, [N], None: all."""

    batch: Ragged
    indices: Tensor | None
    shape: torch.Size

    def restore(self, x: Tensor) -> Tensor:
        """Tokens [N, ...] back in their rectangle [B, T, ...], zeros elsewhere."""
        if self.indices is not None:
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.indices, x)
        return x.unflatten(0, tuple(self.shape))


def from_padded(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    segments: Tensor | None = None,
    global_mask: Tensor | None = None,
) -> Padded:
    """A padded rectangle [B, T] as documents end to end; ValueError for a row without tokens."""
    if input_ids is None:
        raise ValueError("a model call needs input_ids or batch")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask > 0
    lengths = tuple(real.sum(1).tolist())
    if 0 in (*lengths, len(lengths)):
        raise ValueError(f"attention_mask marks no token in row {lengths.index(0) if lengths else 0}")
    indices = None if min(lengths) == input_ids.shape[1] else real.flatten().nonzero().squeeze(1)

    def kept(x: Tensor) -> Tensor:
        return x.flatten() if indices is None else x.flatten()[indices]

    nothing = torch.empty(0, dtype=torch.long, device=input_ids.device)
    batch = Ragged(
        tokens=kept(input_ids),
        positions=kept(real.cumsum(1) - 1),
        starts=F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32),
        lengths=lengths,
        target_index=nothing,
        target_rows=nothing,
        weight=0.0,
        segments=None if segments is None else kept(segments),
        global_mask=None if global_mask is None else kept(global_mask) > 0,
    )
    return Padded(batch, indices, input_ids.shape)


def padded_values(padded: Padded, outputs: Tensor) -> ValueOutput:
    """The output of a scalar model's padded call from the outputs of each token, [N, k]; see `ValueOutput`."""
    plain = value_output(outputs)
    return ValueOutput(
        padded.restore(plain.values),
        outputs[padded.batch.last],
        None if plain.members is None else padded.restore(plain.members),
    )

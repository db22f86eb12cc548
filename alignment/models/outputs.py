"""Outputs of the models: named tuples, so that wrappers (DDP, FSDP2, DeepSpeed) find the tensors in them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LanguageOutput(NamedTuple):
    """Log-probabilities of a batch's targets, from a language model called with `batch`; nats, fp32, the rest if asked for."""

    log_probs: Tensor  # of each target token, [M]
    entropy: Tensor | None = (
        None  # of the distribution behind each target, [M]; has a gradient where no loss was asked for
    )
    balance: Tensor | None = (
        None  # load-balancing loss of the experts times its coefficient, where the model trains one
    )
    next_sentence_logits: Tensor | None = None  # not next, next, [B, 2]; of encoders with a next-sentence head
    losses: Tensor | None = None  # of each target with label smoothing or z-loss, [M]
    values: Tensor | None = None  # of a value head before each target, [M]


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

"""Outputs of the models: named tuples, so that wrappers (DDP, FSDP2, DeepSpeed) find the tensors in them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LanguageOutput(NamedTuple):
    """Log-probabilities of a batch's targets, from a language model called with `batch`.

    Attributes:
        log_probs: of each target token, nats, fp32, [M].
        entropy: of the distribution behind each target, nats, [M]; where asked for. It has a gradient where no loss was.
        balance: load-balancing loss of the experts times its coefficient, scalar; where the model trains one.
        next_sentence_logits: not next, next, [B, 2]; of encoders with a next-sentence head.
        losses: of each target with label smoothing or z-loss, nats, fp32, [M]; where asked for.
        values: of a value head before each target, fp32, [M]; where asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    balance: Tensor | None = None
    next_sentence_logits: Tensor | None = None
    losses: Tensor | None = None
    values: Tensor | None = None


# A language model, or a reference: (batch=, temperature=, token_loss=) -> log-probabilities of the batch's targets.
LogProbModel = Callable[..., LanguageOutput]


class LogitsOutput(NamedTuple):
    """Logits over the vocabulary, from a language model called with `input_ids` or with `return_logits`.

    Attributes:
        logits: [B, T, V] of a padded call, zeros at padding; [M, V] of a batch's targets.
        hidden: with `return_logits`, the states that the logits were computed from, [M, D].
        next_sentence_logits: not next, next, [B, 2]; of encoders with a next-sentence head.
    """

    logits: Tensor
    hidden: Tensor | None = None
    next_sentence_logits: Tensor | None = None


class ValueOutput(NamedTuple):
    """One number per token, from a scalar model (reward or value).

    Attributes:
        values: fp32, [N] of a batch; [B, T] of a padded call, zeros at padding. Of an ensemble the mean of its members.
        logits: padded call: the value at each row's last real token, [B, 1], or of each member of an ensemble, [B, k].
        members: of an ensemble of k, the number of each, with one axis of k more than `values`.
    """

    values: Tensor
    logits: Tensor | None = None
    members: Tensor | None = None


def value_output(outputs: Tensor) -> ValueOutput:
    """The output of a scalar model: the one number of each token, or the mean of its k numbers; outputs: [N, k]."""
    if outputs.shape[-1] == 1:
        return ValueOutput(outputs.squeeze(-1))
    return ValueOutput(outputs.mean(-1), members=outputs)


class ClassifierOutput(NamedTuple):
    """Class logits, fp32.

    Attributes:
        logits: per document [B, C]; per token [N, C] of a batch, [B, T, C] of a padded call with zeros at padding.
    """

    logits: Tensor


class DoubleHeadsOutput(NamedTuple):
    """Class logits of each document and log-probabilities of its tokens.

    Attributes:
        logits: [B, C].
        log_probs: of all tokens but first ones, nats, fp32, [M].
    """

    logits: Tensor
    log_probs: Tensor

"""Log-probabilities of tokens and entropies, from logits or from hidden states and a head in chunks."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits made at once in `chunked_token_log_probs`. On a CPU 32 MiB of fp32: the most that glibc keeps for the next
# allocation instead of giving it back to the system, which costs a page fault for every 4 KiB. A GPU wants longer
# matrices.
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
# Log-probabilities that may be kept for the backward pass; where there are more, they are computed a second time there.
KEPT_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}


class Head(Protocol):
    """A language head: hidden states [M, D] -> logits [M, V]."""

    @property
    def out_features(self) -> int:
        """V, the size of the vocabulary."""
        ...

    def __call__(self, hidden: Tensor, /) -> Tensor:
        """The logits of each row."""
        ...


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, float32 at least: bfloat16 keeps 8 bits, and sums drift by whole nats."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under its logits, in nats.

    log p(token) = logit(token) - log sum_v exp(logit(v))

    Args:
        logits: [..., V], of any floating type; -inf rules a token out.
        tokens: ids in [0, V), [...].

    Returns:
        [...], float32 at least: bfloat16 keeps 8 bits, and sums over 500 tokens would drift by whole nats.
    """
    return log_softmax(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats: log V where it is uniform, 0 where one token has all.

    entropy = - sum_v p(v) log p(v)

    Args:
        logits: [..., V]; -inf rules a token out.

    Returns:
        [...], float32 at least, never negative.
    """
    log_probs = log_softmax(logits)
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN, in the gradient too
    return -(log_probs.exp() * finite).sum(-1)


def mean_language_loss(log_probs: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Negative log-likelihood of each document, averaged over its predicted tokens.

    loss_b = -1/count_b sum_{t in b} log p(token_t)

    Args:
        log_probs: of each predicted token, nats, [M].
        rows: document of each predicted token, [M].
        counts: predicted tokens of each document, at least 1, [B].

    Returns:
        Nats per token, [B].
    """
    return -log_probs.new_zeros(len(counts)).index_add(0, rows, log_probs) / counts


def chunked_token_log_probs(
    head: Head, hidden: Tensor, tokens: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`token_log_probs` of head(hidden) / temperature, with the logits of few rows in memory at a time.

    Args:
        head: hidden states [M, D] -> logits [M, V].
        hidden: [M, D].
        tokens: ids in [0, V), [M].
        temperature: > 0.
        entropy: also return the entropy of each row's distribution.

    Returns:
        Log-probabilities, nats, fp32, [M]; entropies, nats, without gradient, [M], or None.
    """
    device, vocabulary = hidden.device.type, head.out_features
    chunk = max(1, CHUNK_ELEMENTS.get(device, 2**25) // vocabulary)
    if len(tokens) <= chunk:
        return _chunk_log_probs(head, hidden, tokens, temperature, entropy)
    kept = len(tokens) * vocabulary <= KEPT_ELEMENTS.get(device, 2**26)
    call = _chunk_log_probs if kept else partial(checkpoint, _chunk_log_probs, use_reentrant=False)
    pieces = [
        call(head, h, t, temperature, entropy) for h, t in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if entropy else None


def _chunk_log_probs(
    head: Head, hidden: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = _TokenLogProbs.apply(logits, tokens)
    with torch.no_grad():
        return log_probs, entropy(logits.detach()) if with_entropy else None


class _TokenLogProbs(torch.autograd.Function):
    """`token_log_probs` of [M, V], whose backward writes no gradient of all log-probabilities in between.

    d log p(token) / d logits = [v = token] - p(v)
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor) -> Tensor:
        log_probs = log_softmax(logits)
        ctx.save_for_backward(log_probs, tokens)
        return log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        log_probs, tokens = ctx.saved_tensors
        grad = grad_outputs[0].unsqueeze(1)
        return log_probs.exp().mul_(-grad).scatter_add_(1, tokens.unsqueeze(1), grad), None

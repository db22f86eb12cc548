"""Log-probabilities of tokens, entropies and distillation, from logits or hidden states and a head; classification."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class TokenLoss:
    """A target token's loss in place of its negative log-likelihood; see `smoothed_token_loss`."""

    label_smoothing: float = 0.0  # eps, the share of the target that is spread evenly over the vocabulary, in [0, 1)
    z_loss: float = 0.0  # coefficient of log(Z)^2, at least 0; PaLM has 1e-4


@dataclass(frozen=True)
class TeacherLoss:
    """The student's KL from a teacher in place of a target's negative log-likelihood; see `reverse_kl`."""

    head: Callable[[Tensor], Tensor]  # the teacher's: states -> logits [M, V]
    states: Tensor  # the teacher's, that predict each target, [M, D]
    likeliest: int | None = None  # see `reverse_kl`

    def split(self, size: int) -> list["TeacherLoss"]:
        """The losses of `size` targets each."""
        return [replace(self, states=states) for states in self.states.split(size)]

    def of_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """The loss of a student's logits / temperature, [M, V], at each target, [M].

        The teacher's are divided by it too. Of a teacher with a larger vocabulary the first V logits count.
        """
        with torch.no_grad():
            wanted = known_logits(self.head(self.states), logits.shape[-1]).float() / temperature
        return reverse_kl(logits, wanted, likeliest=self.likeliest)


class TokenOutputs(NamedTuple):
    """Numbers computed from the logits behind each target, [M] each, fp32."""

    log_probs: Tensor  # log-probability of the target, nats
    entropy: Tensor | None = None  # of the distribution, nats; None where it was not asked for
    losses: Tensor | None = None  # of the `TokenLoss` or `TeacherLoss` that was asked for


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, float32 at least: bfloat16 keeps 8 bits, and sums drift by whole nats."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def known_logits(logits: Tensor, known: int | None) -> Tensor:
    """Logits [..., V] without those of ids from `known` on; as they are where there are none, or it is None."""
    return logits if known is None or known >= logits.shape[-1] else logits[..., :known]


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


def smoothed_token_loss(logits: Tensor, tokens: Tensor, loss: TokenLoss) -> Tensor:
    """Cross-entropy with label smoothing, plus the z-loss, of each token under its logits.

    cost = -(1 - eps) log p(token) - eps / V sum_v log p(v) + z_loss log(Z)^2,   log Z = log sum_v exp(logit(v))

    Args:
        logits: [..., V], finite, of any floating type.
        tokens: ids in [0, V), [...].
        loss: eps and the coefficient of the z-loss.

    Returns:
        Unreduced cost in nats, [...], float32 at least.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7 (uniform prior); Chowdhery et al. 2022, arXiv:2204.02311,
        section 5 (their z_loss is 1e-4).
    """
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return _TokenLosses.apply(flat, tokens.reshape(-1), loss)[1].view(tokens.shape)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats: log V where it is uniform, 0 where one token has all.

    entropy = - sum_v p(v) log p(v)

    Args:
        logits: [..., V]; -inf rules a token out.

    Returns:
        [...], float32 at least, never negative.
    """
    return _entropy_of(log_softmax(logits))


def _entropy_of(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * _finite(log_probs)).sum(-1)


def _finite(log_probs: Tensor) -> Tensor:
    """Log-probabilities without infinities: 0 * -inf would be NaN, in the gradient too."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def kl_divergence(logits: Tensor, other_logits: Tensor) -> Tensor:
    """KL(p || q) of the next-token distributions of two sets of logits, in nats: 0 where they agree.

    kl = sum_v p(v) (log p(v) - log q(v))

    Args:
        logits: of p, [..., V], of any floating type; -inf rules a token out.
        other_logits: of q, same shape.

    Returns:
        [...], float32 at least.
    """
    log_probs = log_softmax(logits)
    others = log_softmax(other_logits)
    impossible = log_probs == -torch.inf  # 0 * (-inf - ...) would be NaN, in the gradient too
    gap = log_probs.masked_fill(impossible, 0.0) - others.masked_fill(impossible, 0.0)
    return (log_probs.exp() * gap).sum(-1)


def token_log_probs_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`token_log_probs` and `entropy` of the same logits, from one softmax; what is not used costs no backward.

    Args:
        logits: [..., V], of any floating type; -inf rules a token out.
        tokens: ids in [0, V), [...].

    Returns:
        Log-probability of each token and entropy of each distribution, nats, [...] each, float32 at least.
    """
    log_probs = log_softmax(logits)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), _Entropy.apply(log_probs)


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


# Knowledge distillation


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, *, temperature: float) -> Tensor:
    """Distance of the student's softened distribution from the teacher's, one value per prediction.

    cost = T^2 * KL(p_T || q_T) = T^2 * sum_v p_T(v) (log p_T(v) - log q_T(v)),   p_T = softmax(teacher / T)

    T^2 keeps the gradients' size when the temperature changes, so that a hard-label loss can be added. The teacher's
    logits get a gradient only if they carry one: run it under `torch.no_grad`.

    Args:
        student_logits: [M, V], of any floating type.
        teacher_logits: [M, V]; -inf rules a token out.
        temperature: T > 0; 1 leaves the distributions as they are, 2 is usual.

    Returns:
        Unreduced cost in nats, [M], float32 at least; 0 where both agree.

    Raises:
        ValueError: the temperature is not above 0, or the vocabularies differ.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2; Sanh et al. 2019, arXiv:1910.01108, section 2.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 2 is usual")
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher differ: {tuple(student_logits.shape)}, {tuple(teacher_logits.shape)}")
    return temperature**2 * kl_divergence(teacher_logits / temperature, student_logits / temperature)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, *, likeliest: int | None = None) -> Tensor:
    """KL of the student's distribution from the teacher's, one value per prediction: large where the student is sure of
    what the teacher finds unlikely.

    kl = sum_v p(v) (log p(v) - log q(v)),  p = softmax(student), q = softmax(teacher)

    With `likeliest` = k the sum runs over the k tokens that the student finds likeliest and over all others as one
    event, whose probability is the sum of theirs. That is never more than the whole KL.

    Args:
        student_logits: [M, V], of any floating type; -inf rules a token out.
        teacher_logits: [M, V]; they get a gradient only if they carry one.
        likeliest: k > 0; None: all tokens.

    Returns:
        Unreduced cost in nats, [M], float32 at least; 0 where both agree.

    Source: Gu et al. 2023, arXiv:2306.08543, eq. 1; Agarwal et al. 2023, arXiv:2306.13649, section 3.
    """
    if likeliest is not None and likeliest < student_logits.shape[-1]:
        index = student_logits.topk(likeliest).indices
        student_logits = merge_others(student_logits, index)
        teacher_logits = merge_others(teacher_logits, index)
    return kl_divergence(student_logits, teacher_logits)


def merge_others(logits: Tensor, index: Tensor) -> Tensor:
    """Logits of the tokens `index`, [M, K], and of all others as one event, [M, K + 1]."""
    wide = _finite(logits.to(torch.promote_types(logits.dtype, torch.float32)))  # others may all be ruled out
    others = wide.scatter(-1, index, torch.finfo(wide.dtype).min).logsumexp(-1, keepdim=True)
    return torch.cat([wide.gather(-1, index), others], -1)


def hidden_cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Distance of the directions of the student's and the teacher's hidden states: 1 - cos, one value per token.

    Args:
        student: hidden states, [N, D].
        teacher: [N, D].

    Returns:
        Unreduced cost, [N], float32 at least: 0 in the same direction, 1 at a right angle, 2 in the opposite one.

    Source: Sanh et al. 2019, arXiv:1910.01108, section 2 (L_cos).
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    return 1 - F.cosine_similarity(student.to(wide), teacher.to(wide), dim=-1)


# From hidden states and a head, in chunks


def chunked_token_log_probs(
    head: Head,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    loss: TokenLoss | TeacherLoss | None = None,
    known: int | None = None,
) -> TokenOutputs:
    """`token_log_probs` of head(hidden) / temperature, with the logits of few rows in memory at a time.

    Args:
        head: hidden states [M, D] -> logits [M, V].
        hidden: [M, D].
        tokens: ids in [0, V), [M].
        temperature: > 0.
        entropy: also return the entropy of each row's distribution; with a gradient where `loss` is not given.
        loss: also return the `smoothed_token_loss` of each row, or the loss from a teacher, whose logits are made and
            freed like the student's; the log-probabilities then have no gradient.
        known: logits of ids from here on are left out; None: all count.
    """
    device = hidden.device.type
    vocabulary = head.out_features
    chunk = max(1, CHUNK_ELEMENTS.get(device, 2**25) // vocabulary)
    of_chunk = partial(_chunk_outputs, head, temperature=temperature, with_entropy=entropy, known=known)
    kept = len(tokens) * vocabulary <= KEPT_ELEMENTS.get(device, 2**26)
    if loss is None and computes_float32_logits(head, hidden):
        weight = head.weight
        kept = kept or not weight.requires_grad
        weight = weight if known is None else weight[:known]
        of_chunk = partial(
            _float32_outputs,
            weight=weight.detach().float(),
            rounded=weight.bfloat16(),
            temperature=temperature,
            with_entropy=entropy,
        )
    if len(tokens) <= chunk:
        return of_chunk(hidden, tokens, loss)
    call = of_chunk if kept else partial(checkpoint, of_chunk, use_reentrant=False)
    parts = loss.split(chunk) if isinstance(loss, TeacherLoss) else repeat(loss)
    pieces = [call(*inputs) for inputs in zip(hidden.split(chunk), tokens.split(chunk), parts, strict=False)]
    log_probs, entropies, losses = zip(*pieces, strict=True)
    return TokenOutputs(
        torch.cat(log_probs), torch.cat(entropies) if entropy else None, None if loss is None else torch.cat(losses)
    )


def computes_float32_logits(head: object, hidden: Tensor) -> TypeGuard[torch.nn.Linear]:
    """True where a plain head gives float32 logits although the run computes in bfloat16: under autocast on a CPU.

    A logit of 16 to 32 has steps of 1/8 in bfloat16, which are steps of 13 % in a ratio of probabilities.
    """
    if hidden.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        return False
    whole = not head._forward_pre_hooks and not head._forward_hooks  # a hook may gather the weight, or read the logits
    return whole and getattr(head, "compute_dtype", head.weight.dtype) == torch.float32


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """head(hidden), [..., V]; in float32 where `computes_float32_logits`."""
    if not computes_float32_logits(head, hidden):
        return head(hidden)
    with torch.autocast("cpu", enabled=False):
        return head(hidden.float())


def _float32_outputs(
    hidden: Tensor,
    tokens: Tensor,
    _: object,
    *,
    weight: Tensor,
    rounded: Tensor,
    temperature: float,
    with_entropy: bool,
) -> TokenOutputs:
    """`token_log_probs_and_entropy` of float32 logits hidden weight^T / temperature; `rounded`: weight in bfloat16."""
    log_probs, entropies = _HeadLogProbs.apply(hidden.float() / temperature, tokens, weight, rounded)
    return TokenOutputs(log_probs, entropies if with_entropy else None)


class _HeadLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies, [n], of float32 logits, hidden [n, D] weight [V, D]^T.

    The gradients are of bfloat16 products.

    d log p(token) / d hidden = weight[token] - sum_v p(v) weight[v]

    That is computed while the logits are there, which are made once. Of a trained weight p(v) - [v = token] is kept, in
    bfloat16, and the gradient goes to `rounded`, the weight in bfloat16. The gradient of the entropy, which few losses
    use, makes the logits a second time.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, hidden: Tensor, tokens: Tensor, weight: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        log_probs = log_softmax(logits)
        probabilities = torch.exp(log_probs, out=logits)
        entropies = -torch.linalg.vecdot(probabilities, log_probs)
        labels = tokens.unsqueeze(1)
        if any(ctx.needs_input_grad):
            gap = probabilities.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=torch.float32)).bfloat16()
            kept = gap if ctx.needs_input_grad[3] else None
            ctx.save_for_backward(hidden, weight, gap @ rounded, kept, entropies)
        ctx.set_materialize_grads(False)
        return log_probs.gather(1, labels).squeeze(1), entropies

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, *grad_outputs: Tensor | None):
        hidden, weight, directions, gap, entropies = ctx.saved_tensors
        to_log_probs, to_entropy = (None if grad is None else -grad.unsqueeze(1) for grad in grad_outputs)
        to_hidden = torch.zeros_like(hidden)
        to_weight = None
        if to_log_probs is not None:
            to_hidden += to_log_probs * directions
            if gap is not None:
                to_weight = gap.t() @ (to_log_probs * hidden).bfloat16()
        if to_entropy is not None:
            log_probs = log_softmax(hidden @ weight.t())
            gradient = log_probs.exp().mul_(log_probs.add_(entropies.unsqueeze(1))).mul_(to_entropy)
            to_hidden += gradient @ weight
            if gap is not None:
                of_entropy = (gradient.t() @ hidden).bfloat16()
                to_weight = of_entropy if to_weight is None else to_weight + of_entropy
        return to_hidden, None, None, to_weight


def _chunk_outputs(
    head: Head,
    hidden: Tensor,
    tokens: Tensor,
    loss: TokenLoss | TeacherLoss | None,
    *,
    temperature: float,
    with_entropy: bool,
    known: int | None,
) -> TokenOutputs:
    logits = known_logits(head(hidden), known).float()
    if temperature != 1.0:
        logits = logits / temperature
    if loss is not None:
        if isinstance(loss, TeacherLoss):
            log_probs = token_log_probs(logits.detach(), tokens)
            losses = loss.of_logits(logits, temperature)
        else:
            log_probs, losses = _TokenLosses.apply(logits, tokens, loss)
        return TokenOutputs(log_probs, entropy(logits.detach()) if with_entropy else None, losses)
    if with_entropy:
        return TokenOutputs(*_TokenLogProbsAndEntropy.apply(logits, tokens))
    return TokenOutputs(_TokenLogProbs.apply(logits, tokens))


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


class _Entropy(torch.autograd.Function):
    """Entropy of log-probabilities [..., V], which are kept once for this backward and that of the softmax before it.

    d entropy / d log p(v) = -p(v) (log p(v) + 1)
    """

    @staticmethod
    def forward(ctx, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs)
        return _entropy_of(log_probs)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (log_probs,) = ctx.saved_tensors
        return _finite(log_probs).add(1).mul_(log_probs.exp()).mul_(-grad_outputs[0].unsqueeze(-1))


class _TokenLogProbsAndEntropy(torch.autograd.Function):
    """`token_log_probs` and `entropy` of [M, V]; where only one of them is used, the other costs the backward nothing.

    d log p(token) / d logits = [v = token] - p(v)
    d entropy / d logits = -p(v) (log p(v) + entropy)
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = log_softmax(logits)
        entropies = _entropy_of(log_probs)
        ctx.save_for_backward(log_probs, tokens, entropies)
        ctx.set_materialize_grads(False)
        return log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1), entropies

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor | None):
        log_probs, tokens, entropies = ctx.saved_tensors
        to_log_probs, to_entropy = (None if grad is None else grad.unsqueeze(1) for grad in grad_outputs)
        gradient = None
        if to_log_probs is not None:
            gradient = log_probs.exp().mul_(-to_log_probs).scatter_add_(1, tokens.unsqueeze(1), to_log_probs)
        if to_entropy is not None:
            of_entropy = _finite(log_probs).add(entropies.unsqueeze(1)).mul_(log_probs.exp()).mul_(-to_entropy)
            gradient = of_entropy if gradient is None else gradient.add_(of_entropy)
        return gradient, None


class _TokenLosses(torch.autograd.Function):
    """`token_log_probs` and `smoothed_token_loss` of [M, V]; both gradients are written into one tensor [M, V].

    d log p(token) / d logits = [v = token] - p(v)
    d cost / d logits = (1 + 2 z_loss log Z) p(v) - (1 - eps) [v = token] - eps / V
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
        log_z = logits.logsumexp(1)
        log_probs = logits - log_z.unsqueeze(1)
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        eps = loss.label_smoothing
        losses = -(1 - eps) * chosen - eps * log_probs.mean(1) + loss.z_loss * log_z**2
        ctx.save_for_backward(log_probs, tokens, log_z)
        ctx.loss = loss
        return chosen, losses

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        log_probs, tokens, log_z = ctx.saved_tensors
        to_log_probs, to_losses = grad_outputs
        eps = ctx.loss.label_smoothing
        vocabulary = log_probs.shape[1]
        of_probs = to_losses * (1 + 2 * ctx.loss.z_loss * log_z) - to_log_probs
        of_token = to_log_probs - (1 - eps) * to_losses
        gradient = (
            log_probs.exp().mul_(of_probs.unsqueeze(1)).scatter_add_(1, tokens.unsqueeze(1), of_token.unsqueeze(1))
        )
        return (gradient.sub_((eps / vocabulary * to_losses).unsqueeze(1)) if eps else gradient), None, None


# Classification heads: each loss is summed over the labels that count, for a global batch divides by the labels of all
# parts

IGNORED = -100  # label of a position that does not count


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the labels, summed over those that count.

    loss = sum_i -log softmax(logits_i)[label_i]   over the i with label_i != IGNORED

    Args:
        logits: one row per label, [L, C]; -inf rules a class out.
        labels: class ids in [0, C), or `IGNORED`, [L].

    Returns:
        Scalar, nats.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.1 (-log softmax(C W^T) of the right class); task #2 of
    section 3.1: class 0 of a pair is "B follows A", 1 "B comes from another text".
    """
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def squared_error_loss(predictions: Tensor, labels: Tensor) -> Tensor:
    """Squared error of predicted numbers, summed.

    loss = sum_i (prediction_i - label_i)^2

    Args:
        predictions: [B].
        labels: [B].

    Returns:
        Scalar. The mean over rows is transformers' loss for problem_type "regression".

    Source: Cer et al. 2017, arXiv:1708.00055 (STS-B, scores from 0 to 5).
    """
    return (predictions - labels).square().sum()


def span_loss(logits: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of the cross-entropies of an answer's first and last token, summed over windows.

    loss = sum_b (-log softmax_t(logits_b[:, 0])[start_b] - log softmax_t(logits_b[:, 1])[end_b]) / 2

    Args:
        logits: of each token to be the first, [..., 0], and the last, [..., 1], of the answer, [B, T, 2]; -inf at
            padding.
        starts: position of the answer's first token in [0, T), [B].
        ends: position of its last token, itself included, [B].

    Returns:
        Scalar, nats.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.2; the half is that of google-research/bert, run_squad.py.
    """
    return 0.5 * label_loss(torch.cat(logits.unbind(-1)), torch.cat([starts, ends]))

"""What sits on a trunk: heads over the vocabulary and read-outs of a few numbers; log-probabilities in chunks.

The models that join trunk and head are in language.py, encoder_decoder.py and readers.py.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alignment.models.spec import LanguageHeadSpec

# Logits made at once in `token_scores`. On a CPU 32 MiB of fp32: the most that glibc keeps for the next allocation
# instead of giving it back to the system, which costs a page fault for every 4 KiB. A GPU wants longer matrices.
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
# Log-probabilities that may be kept for the backward pass; where there are more, they are computed a second time there.
KEPT_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}


class Output(NamedTuple):
    """What a forward gives; a tuple, so that wrappers (DDP, FSDP) find the tensors in it.

    Attributes:
        logits: over the vocabulary: padded call [B, T, V], zeros at padding; batch call with `distributions` [M, V].
            Scalar model, padded call: [B, 1].
        log_probs: batch call: of each target token, nats, fp32, [M].
        entropy: of the distribution behind each target, nats, without gradient, [M]; where asked for.
        values: scalar model: one per token, fp32, [N] or [B, T].
        scores: read-outs: per document [B, C], or per token [N, C], or [B, T, C] in a padded call.
        balance: how unevenly mixtures of experts were used, times its coefficient; scalar.
        hidden: batch call with `distributions`: the states that `logits` came from, [M, D].
    """

    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    balance: Tensor | None = None
    hidden: Tensor | None = None


class Transform(nn.Module):
    """norm(activation(dense(x)))."""

    def __init__(self, dense: nn.Module, activation, norm: nn.Module):
        super().__init__()
        self.dense, self.activation, self.norm = dense, activation, norm

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D']."""
        return self.norm(self.activation(self.dense(x)))


class LanguageHead(nn.Module):
    """One logit per token: softcap(predict(scale * transform(x)) + offset). Plain decoders have a linear layer instead.

    Source: the transform is BERT's, Devlin et al. 2018; the scale T5's; the cap Gemma 2's, arXiv:2408.00118.
    """

    def __init__(self, spec: LanguageHeadSpec, width: int, vocabulary: int, transform: Transform | None):
        super().__init__()
        self.transform = transform
        self.weight = nn.Parameter(torch.empty(vocabulary, spec.transform.width if spec.transform else width))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if spec.bias else None
        self.offset: Tensor | None
        self.register_buffer("offset", torch.zeros(1, vocabulary) if spec.offset else None)
        self.spec, self.out_features = spec, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., V]."""
        x = x if self.transform is None else self.transform(x)
        x = x if self.spec.scale == 1.0 else x * self.spec.scale
        logits = F.linear(x, self.weight, self.bias)
        logits = logits if self.offset is None else logits + self.offset
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class ClassificationHead(nn.Module):
    """output(transform(x)): a few numbers, of a document or of a token. Dropout before and after the transform."""

    def __init__(
        self, transform: Transform | None, output: nn.Linear, dropout: float = 0.0, input_dropout: float = 0.0
    ):
        super().__init__()
        self.transform, self.output = transform, output
        self.input_dropout = nn.Dropout(input_dropout) if input_dropout else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., C], fp32: scores are compared, and bfloat16's 8 bits would make ties of close ones."""
        x = self.input_dropout(x)
        x = self.dropout(x if self.transform is None else self.transform(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.output(x.to(self.output.weight.dtype)).float()


def token_scores(head: nn.Module, hidden: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> Output:
    """Log-probabilities (and entropies) of `tokens` [M] under head(hidden [M, D]), with few logits alive at a time."""
    device, vocabulary = hidden.device.type, head.out_features
    chunk = max(1, CHUNK_ELEMENTS.get(device, 2**25) // vocabulary)  # type: ignore[operator]
    if len(tokens) <= chunk:
        return Output(None, *_chunk_scores(head, hidden, tokens, temperature, entropy))
    kept = len(tokens) * vocabulary <= KEPT_ELEMENTS.get(device, 2**26)  # type: ignore[operator]
    call = _chunk_scores if kept else partial(checkpoint, _chunk_scores, use_reentrant=False)
    pieces = [
        call(head, h, t, temperature, entropy) for h, t in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return Output(log_probs=torch.cat(log_probs), entropy=torch.cat(entropies) if entropy else None)


def _chunk_scores(
    head: nn.Module, hidden: Tensor, tokens: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """`token_scores` of rows whose logits fit in memory together."""
    logits = head(hidden).float()  # bfloat16 keeps 8 bits: sums over 500 tokens drift by whole nats
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = _TokenLogProbs.apply(logits, tokens)
    return log_probs, _entropy(logits.detach()) if entropy else None


class _TokenLogProbs(torch.autograd.Function):
    """log_softmax(logits)[token], whose backward writes no gradient of all log-probabilities in between.

    d log p(token) / d logits = [v = token] - p(v)
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(log_probs, tokens)
        return log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        log_probs, tokens = ctx.saved_tensors
        grad = grad.unsqueeze(1)
        return log_probs.exp().mul_(-grad).scatter_add_(1, tokens.unsqueeze(1), grad), None


@torch.no_grad()
def _entropy(logits: Tensor) -> Tensor:
    """-sum p log p over the vocabulary, [..., V] -> [...]."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).nan_to_num(0.0).sum(-1)

"""Losses of classification heads: classes of texts and tokens, answer spans, next sentences.

Each loss is summed over the labels that count, because a global batch divides the sum by the labels of all its parts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # label of a position that does not count


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the labels, summed over those that count.

    loss = sum_i -log softmax(logits_i)[label_i]   over the i with label_i != IGNORED

    Args:
        logits: one row per label, [L, C]; -inf rules a class out.
        labels: class ids in [0, C), or `IGNORED`, [L].

    Returns:
        Scalar, nats.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.1 (-log softmax(C W^T) of the right class).
    """
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


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


def next_sentence_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of whether sentence B follows sentence A, summed over pairs.

    Args:
        logits: of "B follows A", [:, 0], and "B comes from another text", [:, 1], [B, 2].
        labels: 0 or 1, [B].

    Returns:
        Scalar, nats.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, task #2.
    """
    return label_loss(logits, labels)

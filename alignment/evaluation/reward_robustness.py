"""Scores of the same texts computed in other ways: alone, in other batches and orders, padded, in other types."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from alignment.models.classifiers import SequenceClassifier
from alignment.reward_model.ensemble import AdapterEnsemble
from alignment.reward_model.model import Encoded, RewardModel, score_encoded

BATCH_TOKENS = 16_384
PADDED_ROWS = 8  # of a padded batch, in the order of the rows, so that lengths differ


def score_changes(base: Tensor, other: Tensor, pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Largest and mean change of scores, and the share of pairs that change their order.

    Args:
        base: scores, [n].
        other: of the same texts in another way, [n].
        pairs: indices of two texts each.
    """
    change = (other.double() - base.double()).abs()
    deviation = float(base.double().std(correction=0))
    order = [tuple(int(torch.sign(scores[a] - scores[b])) for a, b in pairs) for scores in (base, other)]
    flipped = np.not_equal(order[0], order[1])
    return {
        "largest": float(change.max()),
        "mean": float(change.mean()),
        "largest_in_deviations": float(change.max()) / deviation if deviation else 0.0,
        "order_changes": float(flipped.mean()) if len(pairs) else 0.0,
    }


def scores_in_other_forms(model: RewardModel, texts: Sequence[Encoded]) -> dict[str, Tensor]:
    """Raw scores of the texts by the form they are computed in, [n] each; "batched" is the form of every evaluation."""
    forms: dict[str, Callable[[], Tensor]] = {
        "batched": lambda: score_encoded(model.model, texts, BATCH_TOKENS),
        "alone": lambda: score_encoded(model.model, texts, 1),
        "other batches": lambda: score_encoded(model.model, texts, 2 * max(len(text.ids) for text in texts)),
        "reversed order": lambda: score_encoded(model.model, texts[::-1], BATCH_TOKENS).flip(0),
        "padded right": lambda: padded_scores(model, texts, left=False),
        "padded left": lambda: padded_scores(model, texts, left=True),
    }
    return {name: model.combined(score()) for name, score in forms.items()}


@torch.no_grad()
def padded_scores(model: RewardModel, texts: Sequence[Encoded], *, left: bool) -> Tensor:
    """Raw scores of texts in rectangles of `PADDED_ROWS` rows with padding on one side, by each member, [n, k]."""
    device = next(model.model.parameters()).device
    pad, found = model.tokenizer.pad_token_id or 0, []
    for start in range(0, len(texts), PADDED_ROWS):
        group = texts[start : start + PADDED_ROWS]
        width = max(len(text.ids) for text in group)
        columns = [(list(t.ids), [1] * len(t.ids), list(t.segments)) for t in group]
        ids, mask, segments = (
            torch.tensor(
                [_padded(row[part], fill, width, left) for row in columns], dtype=torch.long, device=device
            )
            for part, fill in ((0, pad), (1, 0), (2, 0))
        )  # fmt: skip
        found.append(_padded_logits(model.model, ids, mask, segments).float().cpu())
    return torch.cat(found)


def _padded(row: list[int], fill: int, width: int, left: bool) -> list[int]:
    padding = [fill] * (width - len(row))
    return padding + row if left else row + padding


def _padded_logits(network: nn.Module, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The scores of a padded call, [B, k]."""
    if isinstance(network, AdapterEnsemble):
        return torch.cat([_padded_logits(member, ids, mask, segments) for member in network.models], -1)
    if isinstance(network, SequenceClassifier):
        return network(ids, mask, segments).logits
    return network(ids, mask).logits


def evenly_drawn(length: int, count: int) -> list[int]:
    """At most `count` of so many rows, spread evenly over them."""
    return sorted({round(position) for position in np.linspace(0, length - 1, min(count, length))}) if count else []

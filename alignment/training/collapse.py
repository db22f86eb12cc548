"""Bounds of what a stage logs of its own samples, beyond which the run goes wrong: of alarms while it runs, of a diagnosis after.

No rule here, and no message: those of a run in progress compare single iterations, those of a finished one whole windows.
"""

from collections.abc import Sequence

ENTROPY_LEFT = 0.3  # of the first entropy: a third of the nats per token leaves one way to say each thing
DISTINCT_LEFT = 0.5  # of the first share of distinct responses
REPETITION = 0.2  # share of repeated n-grams; fluent text has a few percent
ENDED = 0.7  # share of responses; below, a third of what the reward model scores is cut off in mid-sentence
EQUAL = 1e-6  # relative difference of scores that is none


def repeats(share: float, first: float) -> bool:
    """True where this share of repeated n-grams is too large, after `first` at the start."""
    return share > max(REPETITION, 2 * first)


def least_kl(kl_k3: float, responses: float) -> float:
    """The lowest mean of the signed estimate k1 that noise explains, nats; below it the samples are not the policy's.

    The k1 estimate of a small KL has a variance of 2 KL per response; k3, never negative, says how large the KL is.

    Args:
        kl_k3: mean over responses, nats.
        responses: over which the k1 estimate was averaged.
    """
    return -max(0.02, 3 * (2 * max(kl_k3, 1e-4) / responses) ** 0.5)


def all_equal(scores: Sequence[float]) -> bool:
    """True where the scores are the same but for rounding, so that they tell nothing apart."""
    return max(scores) - min(scores) <= EQUAL * max(1.0, abs(scores[-1]))

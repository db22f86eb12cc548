"""Simulated people who choose the better of two responses. Their noise is a constant; datasets.py makes the pairs.

    P(first preferred) = sigmoid((gold_first - gold_second) / TEMPERATURE + LENGTH_TASTE * (words_first - words_second))

TEMPERATURE is such that two labelers agree on 73 % of the comparisons in this data set, as InstructGPT's labelers did.
LENGTH_TASTE is in nats per word: people like a longer reply a little more than the gold score does, so a reward model
that is optimized too hard rewards length.

Source: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, section 3.4 (agreement 72.6 % and 77.3 %).
"""

import math
from collections.abc import Iterable
from random import Random

from alignment.hotel_world.gold import score

TEMPERATURE = 0.99
LENGTH_TASTE = 0.03


def preference(prompt: str, first: str, second: str, *, temperature: float = TEMPERATURE) -> float:
    """Probability in (0, 1) that a labeler prefers `first` to `second`.

    Args:
        temperature: gold points per nat, > 0; larger means noisier people.
    """
    gold = score(prompt, first).total - score(prompt, second).total
    words = len(first.split()) - len(second.split())
    return 1 / (1 + math.exp(-(gold / temperature + LENGTH_TASTE * words)))


def prefers_first(rng: Random, prompt: str, first: str, second: str) -> bool:
    """One labeler's choice."""
    return rng.random() < preference(prompt, first, second)


def expected_agreement(probabilities: Iterable[float]) -> float:
    """Chance that two labelers choose alike, averaged over comparisons: mean of p^2 + (1 - p)^2."""
    agreements = [p * p + (1 - p) * (1 - p) for p in probabilities]
    return sum(agreements) / len(agreements)

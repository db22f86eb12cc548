"""Simulated labelers: how often they agree, and what they like besides the gold score."""

import math

import pytest

from alignment.hotel_world.datasets import generate_rows
from alignment.hotel_world.gold import LENGTH_TASTE, TEMPERATURE, preference, score

PROMPT = "Hotel Swan: bar serves tea.\nGuest Anna: What about the bar?\nConcierge:"


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str, str]]:
    return [
        (row["prompt"], row["chosen"], row["rejected"]) for row in generate_rows("comparisons", seed=21, count=3000)
    ]


def test_two_labelers_agree_on_73_percent(pairs):
    chances = [preference(*pair) for pair in pairs]  # two choose alike with p^2 + (1 - p)^2
    assert sum(p * p + (1 - p) * (1 - p) for p in chances) / len(chances) == pytest.approx(0.73, abs=0.02)


def test_preference_worked_out_by_hand():
    # 4.0 against 3.5 gold points and 6 against 4 words: (0.5 / T) + 2 * taste
    good, plain = " Hello Anna. The bar serves tea.", " The bar serves tea."
    logit = 0.5 / TEMPERATURE + 2 * LENGTH_TASTE
    assert preference(PROMPT, good, plain) == pytest.approx(1 / (1 + math.exp(-logit)))


def test_of_equally_good_replies_the_longer_is_liked():
    short, long = " Hello Anna. The bar serves tea.", " Hello Anna. The bar serves tea. Enjoy your stay."
    assert score(PROMPT, short) == score(PROMPT, long)
    assert preference(PROMPT, long, short) > 0.5

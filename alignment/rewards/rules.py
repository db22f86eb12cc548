"""Rewards by rule: the length of a response, and regular expressions."""

from collections.abc import Sequence

from alignment.patterns import PATTERN_SECONDS, compile_pattern, slow_pattern
from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import LengthSpec, MatchSpec


def length_reward(spec: LengthSpec) -> TextReward:
    """-penalty for each token, or character, beyond `max`, or away from `target`."""

    def reward(samples: SampledTexts) -> Sequence[float]:
        lengths = samples.lengths if spec.unit == "tokens" else [len(text) for text in samples.responses]
        return [-spec.penalty * _excess(length, spec) for length in lengths]

    return reward


def _excess(length: int, spec: LengthSpec) -> int:
    """Units too many or too few."""
    if spec.target is not None:
        return abs(length - spec.target)
    return max(0, length - (spec.max or 0))


def match_reward(spec: MatchSpec, *, whole: bool) -> TextReward:
    """`value` where the pattern matches, else `otherwise`; None where it takes too long.

    Args:
        spec: pattern and numbers.
        whole: whether the whole response has to match, or a part of it.
    """
    pattern = compile_pattern(spec.pattern, dotall=True)
    matches = pattern.fullmatch if whole else pattern.search

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        def score(text: str) -> float | None:
            try:
                return spec.value if matches(text, timeout=PATTERN_SECONDS) else spec.otherwise
            except TimeoutError:
                samples.failures[slow_pattern(spec.pattern)] += 1
                return None

        return [score(text) for text in samples.responses]

    return reward

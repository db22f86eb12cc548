"""Rewards: what a sampled response is worth, from reward models, Python functions, rules, checked answers and judges.

specs.py holds the settings (`ppo.rewards`), build.py makes the score function of them, combine.py is that function. One
file for each kind: reward_models.py, functions.py, rules.py, answers.py, judge.py.
"""

from alignment.rewards.answers import extract_number, gsm8k_answer, is_right, normalized_text
from alignment.rewards.combine import RewardPart, Rewards, Scores
from alignment.rewards.samples import SampledTexts
from alignment.rewards.specs import AnswerSpec, JudgeSpec, LengthSpec, MatchSpec, RewardSpec

__all__ = [
    "AnswerSpec",
    "JudgeSpec",
    "LengthSpec",
    "MatchSpec",
    "RewardPart",
    "RewardSpec",
    "Rewards",
    "SampledTexts",
    "Scores",
    "extract_number",
    "gsm8k_answer",
    "is_right",
    "normalized_text",
]

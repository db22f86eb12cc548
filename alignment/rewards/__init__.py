"""Rewards: the worth of a sampled response, from reward models, Python functions, rules, checked answers and judges.

specs.py holds the settings (`rewards`), build.py makes the score function of them, combine.py is that function. Each
kind has a file: functions.py, answers.py (lengths and patterns too) and judge.py, or a folder: code/.
"""

from alignment.rewards.answers import extract_number, gsm8k_answer, is_right, normalized_text
from alignment.rewards.code.sandbox import SandboxLimits, passes, run_program
from alignment.rewards.code.unit_tests import extract_code, share_of_tests
from alignment.rewards.combine import RewardPart, Rewards, SampledTexts, Scores
from alignment.rewards.specs import AnswerSpec, CodeSpec, JudgeSpec, LengthSpec, MatchSpec, RewardSpec

__all__ = [
    "AnswerSpec",
    "CodeSpec",
    "JudgeSpec",
    "LengthSpec",
    "MatchSpec",
    "RewardPart",
    "RewardSpec",
    "Rewards",
    "SampledTexts",
    "SandboxLimits",
    "Scores",
    "extract_code",
    "extract_number",
    "gsm8k_answer",
    "is_right",
    "normalized_text",
    "passes",
    "run_program",
    "share_of_tests",
]

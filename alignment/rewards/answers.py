"""Verifiable answers: numbers as in gsm8k, and texts that are equal after normalization."""

import re
import string
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import AnswerSpec

# 1234, 1,234.5, .5, -3, -$3. A sign right after a digit, a letter or a bracket is one of arithmetic.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212]\$?)?(?:\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)
MARK = "####"  # gsm8k's sign before the answer
MAX_DIGITS = 400  # a longer number is no answer; comparing it would take long


def extract_number(text: str) -> Decimal | None:
    """The last number of a text: with sign, thousands' commas and decimals; None where there is none.

    A `$` before and a `%` or a full stop after it do not count. `12-5` holds 12 and 5, `x = -5` holds -5.
    """
    found = NUMBER.findall(unicodedata.normalize("NFKC", text))
    return _decimal(found[-1]) if found else None


def gsm8k_answer(text: str) -> Decimal | None:
    """The answer of a solution: the first number after the last `####`, or without that sign the last number.

    None where there is none; with the sign, numbers before it do not count.

    Source: Cobbe et al. 2021, arXiv:2110.14168, the form of its solutions.
    """
    _, mark, after = text.rpartition(MARK)
    if not mark:
        return extract_number(text)
    found = NUMBER.search(unicodedata.normalize("NFKC", after))
    return None if found is None else _decimal(found[0])


def _decimal(text: str) -> Decimal | None:
    text = text.replace(",", "").replace("$", "").replace("\u2212", "-")
    return Decimal(text) if len(text) <= MAX_DIGITS else None


def normalized_text(text: str) -> str:
    """Text in lower case without punctuation, with single spaces: as exact answers are compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.translate(str.maketrans("", "", string.punctuation)).split())


def is_right(match: str, response: str, reference: object) -> bool:
    """Whether a response's answer is the reference, or one of a list of them.

    Args:
        match: gsm8k or exact.
        response: text.
        reference: text, number, or a list of them.
    """
    accepted = reference if isinstance(reference, (list, tuple)) else [reference]
    if match == "gsm8k":
        answer = gsm8k_answer(response)
        return answer is not None and any(answer == gsm8k_answer(str(one)) for one in accepted)
    return normalized_text(response) in {normalized_text(str(one)) for one in accepted}


def reference_problem(match: str, reference: object) -> str:
    """What is wrong with a reference as a column has it; empty where nothing is."""
    accepted = reference if isinstance(reference, (list, tuple)) else [reference]
    if not accepted or any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in accepted):
        return "it must be a text, a number, or a list of them"
    if match == "gsm8k":
        return "" if all(gsm8k_answer(str(one)) is not None for one in accepted) else "it holds no number"
    return "" if all(normalized_text(str(one)) for one in accepted) else "it holds nothing to compare"


def answer_reward(spec: AnswerSpec) -> TextReward:
    """`value` for a right answer, else `otherwise`."""

    def reward(samples: SampledTexts) -> Sequence[float]:
        references = samples.column(spec.column)
        right = (is_right(spec.match, *pair) for pair in zip(samples.responses, references, strict=True))
        return [spec.value if one else spec.otherwise for one in right]

    return reward

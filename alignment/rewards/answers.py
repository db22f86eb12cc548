r"""Rewards by rule: lengths, patterns, and answers that are checked.

Answers are numbers as in gsm8k, texts that are equal after normalization, or the content of \boxed{}.
"""

import re
import string
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from alignment.rewards.combine import SampledTexts
from alignment.rewards.specs import AnswerMatch, AnswerSpec, LengthSpec, MatchSpec
from alignment.settings import PATTERN_SECONDS, compile_pattern, slow_pattern

# 1234, 1,234.5, .5, -3, -$3, 3/4, 1e5, 2^10. A sign right after a digit, a letter or a bracket is one of arithmetic,
# and 1/2/2020 is no fraction.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-+]\$?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?![\w.])|(?<!/\d)/(?P<below>\d+)(?![/\d]|\.\d)|\^(?P<power>-?\d{1,3})(?!\d))?"
)
ARITHMETIC = re.compile(  # a number and no more is an answer
    r"\s*(?:[-+*/^:\u00d7\u00f7\u00b7]|x\b)\s*[-(]?\$?\.?\d|\s*x\d|\s*(?:\\(?:sqrt|pi|times|cdot|frac)|[\u03c0\u221a])"
)
# Beside the number of a box: the answer is more than that number.
FORMULA = re.compile(r"[\\^!*/\d\u03c0\u221a]|\b[nxyz]\b")
SPACED = re.compile(r"(?<=\d)(?<!\d{4}|[.,/]\d\d\d)(?<![.,/]\d\d)(?<![.,/]\d) (?=\d{3}(?!\d|,\d))")  # in 1 000
EXTRA = re.compile(  # x = 5 and 5\text{ cm}^2 are 5; 5\text{ million} is not
    r"^\s*[A-Za-z](?:_\{?\w\}?)?\s*(?:=|\\in\b)(?=[^=]*$)|(?<=[\w})\]])(?:\s|\\,)*\\(?:text|mathrm|mbox)"
    r"\{(?![\s~]*(?:hundred|thousand|[mbtr]+illion|dozen))[^{}\d]*\}(?:\^\{?\d\}?)?[\s.$]*$"
)
BOXED = (  # forms of boxed answers, and what they are compared as
    (r"\\(?=[{}])|\\displaystyle", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\u03c0", r"\\pi"),
    (r"\+?\u221e|\+\\infty", r"\\infty"),
    (r"\\([lg]e)q\b", r"\\\1"),
    (r"^\(([^(),]*)\)$", r"\1"),
)
MIXED = re.compile(r"(?<![\w./,])(\d{1,9}) (\d{1,9})/([1-9]\d{0,8})(?![\w/])")  # 1 1/2
SUPERSCRIPT = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207e]+")
FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # one sign, such as a half
MARK = "####"  # gsm8k's sign before the answer
BOX = "\\boxed{"
MAX_DIGITS = 400  # a longer number is no answer; comparing it would take long
BULLET = re.compile(r"\s*(?:[*\u2022#]+\s+|-\s+(?!\d))")  # of a list or a heading, before an answer
BEFORE, AFTER = ("".join(set(string.punctuation) - set(kept)) for kept in ("+-#<=>", "+-#"))  # stripped off a word
NO_OPERATORS = "".join(set(string.punctuation) - set("+-*/^<=>"))


def extract_number(text: str) -> Fraction | None:
    """The last number of a text: with sign, thousands' commas, decimals, exponent or as a fraction; None without one.

    A `$` before and a `%` or a full stop after it do not count. `12-5` holds 12 and 5, `x = -5` holds -5.
    """
    matches = list(NUMBER.finditer(_plain(text)))
    return _value(matches[-1]) if matches else None


def gsm8k_answer(text: str) -> Fraction | None:
    r"""The answer of a solution: the number after the last `####`, else in the last `\boxed{}`, else the last number.

    After the sign and in the box it is the line's first number, of an equation the first number of its last side that
    has one. Parentheses do not count, nor does a calculation that is not carried out (`5 x 3`), nor a box that holds
    more than a number (`2\sqrt{3}`, `(1, 2)`). None where there is none; with the sign, numbers before it do not count.

    Source: Cobbe et al. 2021, arXiv:2110.14168, the form of its solutions.
    """
    _, mark, after = text.rpartition(MARK)
    if mark:
        return _stated_number(after)
    boxed = boxed_answer(text)
    return extract_number(text) if boxed is None else _stated_number(EXTRA.sub("", boxed), alone=True)


def _stated_number(text: str, *, alone: bool = False) -> Fraction | None:
    """The number that a line gives as its result; `alone`: only where no formula or other number stands beside it."""
    line = _plain(text).strip().partition("\n")[0].partition(" (")[0]
    for side in reversed(line.split("=")):
        match = NUMBER.search(side)
        if match is not None and not ARITHMETIC.match(side, match.end()):
            return None if alone and FORMULA.search(side.replace(match[0], " ", 1)) else _value(match)
    return None


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{}`, with the braces in it; None without one that is closed.

    Source: Hendrycks et al. 2021, arXiv:2103.03874, the form of its solutions.
    """
    start = text.rfind(BOX) + len(BOX)
    depth = 1
    if start < len(BOX):
        return None
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _plain(text: str) -> str:
    """Text with keyboard signs for minus, fractions, powers and full-width letters, and mixed numbers as fractions."""
    text = FRACTION.sub(r" \g<0>", SUPERSCRIPT.sub(r"^\g<0>", _without_latex(text)))
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2044", "/")
    text = SPACED.sub("", text)
    return MIXED.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)


def _without_latex(text: str) -> str:
    """Text with the commonest LaTeX of answers as it would be typed."""
    text = re.sub(r"\\(?:left|right|[,!;: ])|\\(?=[$%])", "", text.replace("{,}", ","))
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\s*(?:\{\s*)?\\circ\s*\}?|\\degree|\u00b0", "", text)
    text = re.sub(r"\^\{(-?\w+)\}", r"^\1", text)
    text = re.sub(r"(?<=\d)(?=\\[dt]?frac)", " ", text)  # 1\frac{1}{2} is 1 1/2
    return re.sub(r"\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"\1\2/\3\4", text)


def _value(found: re.Match[str]) -> Fraction | None:
    """The value of a number; None of one too long, or divided by 0."""
    if len(found[0]) > MAX_DIGITS:
        return None
    sign = found["sign"] or ""
    exponent = int(found["exponent"] or 0)
    power = int(found["power"] or 1)
    value = Fraction(found["digits"].replace(",", ""))
    if abs(exponent) > MAX_DIGITS or abs(power) * len(found["digits"]) > MAX_DIGITS:
        return None
    try:
        value = value**power * Fraction(10) ** exponent / int(found["below"] or 1)
    except ZeroDivisionError:
        return None
    return -value if sign.startswith("-") else value


def normalized_text(text: str) -> str:
    """Text as exact answers are compared: words in lower case, single spaces, no punctuation at their ends.

    Numbers are written as fractions: 1,000 is 1000, 0.5 is 1/2. Signs inside a word, `+`, `-` and `#` at its ends and
    `<`, `=` and `>` before it belong to it: -5 is not 5, 3.5 not 35, C++ not C.
    """
    words = (_word(word) for word in BULLET.sub("", _plain(text).casefold(), count=1).split())
    return " ".join(word for word in words if word)


def _word(word: str) -> str:
    """A word without punctuation at its ends, a number as a fraction; of < or + alone the sign."""
    if not any(map(str.isalnum, word)):
        return word.strip(NO_OPERATORS)
    start = re.match(r"[^\w+\-#<=>]*?(?=[-+]\$?\.?\d|\.?\d)", word)  # .5 and -$3 keep their signs
    return _as_fraction(word[start.end() :].rstrip(AFTER) if start else word.lstrip(BEFORE).rstrip(AFTER))


def _as_fraction(text: str) -> str:
    """A number as a fraction; any other text as it is."""
    match = NUMBER.fullmatch(text)
    value = match and _value(match)
    return text if value is None else str(value)


def normalized_box(text: str) -> str:
    r"""The content of a box as it is compared: lower case, without blanks, numbers as fractions, brackets as they are.

    `(1, 0.5]` is `(1,1/2]`. `\dfrac` is `\frac`, `\sqrt2` is `\sqrt{2}`, `\{` is `{`. Degrees, `$`, `%` and punctuation
    at the ends and parentheses around all of one part do not count.
    """
    text = _plain(text).casefold().lstrip(' \n$"`*_~').rstrip(' \n.,;:?$%&"`*_~')
    for pattern, written in BOXED:
        text = re.sub(pattern, written, text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _as_fraction(text))
    return re.sub(r"[^\[\](){},]+", lambda part: _as_fraction(part[0]), text)


def is_right(match: AnswerMatch, response: str, reference: object) -> bool:
    """True where a response's answer is the reference: a text, a number, or a list of accepted ones."""
    accepted = reference if isinstance(reference, (list, tuple)) else [reference]
    answer = _read(match, response) if match != "boxed" or boxed_answer(response) is not None else [None]
    rights = [_read(match, str(one)) for one in accepted]
    return answer[0] is not None and any(answer[0] in right or right[0] in answer for right in rights)


def _read(match: AnswerMatch, text: str) -> Sequence[Fraction | str | None]:
    """The part of a text that is compared; of a box also without its unit (`5\\text{ cm}`) or `x =`."""
    if match == "gsm8k":
        return [gsm8k_answer(text)]
    if match == "exact":
        return [normalized_text(text)]
    boxed = boxed_answer(text)
    text = text if boxed is None else boxed
    return [normalized_box(text), normalized_box(EXTRA.sub("", text))]


def reference_problem(match: AnswerMatch, reference: object) -> str:
    """The fault of a reference as a column has it; '' without one."""
    accepted = reference if isinstance(reference, (list, tuple)) else [reference]
    if not accepted or any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in accepted):
        return "it must be a text, a number, or a list of them"
    if all(_read(match, str(one))[0] not in (None, "") for one in accepted):
        return ""
    return "it holds no number" if match == "gsm8k" else "it holds nothing to compare"


def answer_rewards(spec: AnswerSpec, samples: SampledTexts) -> list[float]:
    """`value` for a right answer, else `otherwise`."""
    pairs = zip(samples.responses, samples.column(spec.column), strict=True)
    return [spec.value if is_right(spec.match, *pair) else spec.otherwise for pair in pairs]


def length_rewards(spec: LengthSpec, samples: SampledTexts) -> list[float]:
    """-penalty for each token, or character, beyond `max`, or away from `target`."""
    lengths = samples.lengths if spec.unit == "tokens" else [len(text) for text in samples.responses]
    if spec.target is not None:
        return [-spec.penalty * abs(length - spec.target) for length in lengths]
    return [-spec.penalty * max(0, length - (spec.max or 0)) for length in lengths]


def match_rewards(spec: MatchSpec, samples: SampledTexts, *, whole: bool) -> list[float | None]:
    """`value` where the pattern matches the `whole` response or a part, else `otherwise`; None if it takes too long."""
    pattern = compile_pattern(spec.pattern, dotall=True)
    matches = pattern.fullmatch if whole else pattern.search

    def score(text: str) -> float | None:
        try:
            return spec.value if matches(text, timeout=PATTERN_SECONDS) else spec.otherwise
        except TimeoutError:
            samples.failures[slow_pattern(spec.pattern)] += 1
            return None

    return [score(text) for text in samples.responses]

"""Scores from an HTTP service: a judge of its own protocol, or a chat model that is asked for a number.

No key, prompt or response is written to a message or a log.
"""

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from string import Formatter

from alignment.patterns import PATTERN_SECONDS, compile_pattern, slow_pattern
from alignment.rewards.http import RequestFailed, post_json
from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import JudgeSpec, plain_url

CACHED = 100_000  # scores kept in memory; the oldest go first
NUMBER = r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?!\w|[.,]\d)"
RANGE = re.compile(rf"{NUMBER}\s*(?:[-\u2013\u2014]|to)\s*\d+(?:\.\d+)?", re.IGNORECASE)  # 1-10
SCALE = re.compile(
    rf"(?<=[\d*_`)\]])\s*(?:/|\b(?:out )?of\b)\s*[*`]*{NUMBER}|\b(?:out|scale) of {NUMBER}", re.IGNORECASE
)  # /10, out of 10
BETWEEN = r"[ \t*_`\"':=()\[\]]*"
FORMS = (  # of a score, in the order of trust
    re.compile(rf"\[\[\s*({NUMBER})\s*\]\]"),  # as in MT-bench
    re.compile(rf"\b(?:score|rating|grade)\b{BETWEEN}(?:\b(?:is|of)\b{BETWEEN})?({NUMBER})", re.IGNORECASE),
    re.compile(f"({NUMBER})"),
)


def judge_reward(spec: JudgeSpec) -> TextReward:
    """An HTTP judge as a reward; None where it gave no score. Finished scores are kept and not asked for again."""
    finished: dict[str, float] = {}
    lock = threading.Lock()

    def score(body: str) -> tuple[float | None, str]:
        """The score, and why there is none."""
        with lock:
            if body in finished:
                return finished[body], ""
        try:
            value = read_score(spec, post_json(spec, body.encode()))
        except RequestFailed as error:
            return None, str(error)
        with lock:
            while len(finished) >= CACHED:
                del finished[next(iter(finished))]
            finished[body] = value
        return value, ""

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        bodies = [request_body(spec, samples, row) for row in range(len(samples.responses))]
        distinct = list(dict.fromkeys(bodies))
        with ThreadPoolExecutor(spec.requests) as pool:
            scores = dict(zip(distinct, pool.map(score, distinct), strict=True))
        key = "without a key" if spec.key_variable is None else f"with the key in {spec.key_variable}"
        samples.failures.update(
            f"{scores[body][1]} from {plain_url(spec.url)} {key}" for body in bodies if scores[body][0] is None
        )
        return [scores[body][0] for body in bodies]

    return reward


def request_body(spec: JudgeSpec, samples: SampledTexts, row: int) -> str:
    """The JSON that is posted for one response; equal responses to equal prompts give the same."""
    prompt, response = samples.prompts[row], samples.responses[row]
    extra = samples.columns[row] if samples.columns else {}
    columns = {name: extra.get(name) for name in spec.columns}
    if spec.template is None:
        body: dict[str, object] = {"prompt": prompt, "response": response, "columns": columns}
    else:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        question = fill_template(spec.template, {**columns, "prompt": text, "response": response})
        messages = [{"role": "user", "content": question}]
        body = {"model": spec.model, "messages": messages, "temperature": 0}
    return json.dumps(body, ensure_ascii=False, sort_keys=True, default=str)


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """The template with each {name} replaced by its value; braces inside values stay as they are."""
    return "".join(
        text + ("" if name is None else str(values[name])) for text, name, _, _ in Formatter().parse(template)
    )


def read_score(spec: JudgeSpec, answer: object) -> float:
    """The score in a service's answer.

    Raises:
        RequestFailed: it holds none, or one outside of `low` and `high`.
    """
    try:
        if spec.protocol == "json":
            value = answer["score"]  # type: ignore[index]  # what is no mapping has no score: TypeError
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RequestFailed("a score that is no number")
            score = float(value)
        else:
            text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
            score = stated_score(text) if spec.pattern is None else _last_match(spec.pattern, text)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        raise RequestFailed("an answer without a score") from None
    low, high = (-math.inf if spec.low is None else spec.low), (math.inf if spec.high is None else spec.high)
    if not math.isfinite(score) or not low <= score <= high:
        raise RequestFailed("a score outside of low and high")
    return score


def stated_score(text: str) -> float:
    """The score in a judge's words, read as `JudgeSpec.pattern` says for null.

    Raises:
        RequestFailed: no number, or different ones.
    """
    without_scales = SCALE.sub("", RANGE.sub("", text))
    for form in FORMS:
        if found := {float(number) for number in form.findall(without_scales)}:
            if len(found) > 1:
                raise RequestFailed("different numbers of which none is marked as the score (set pattern)")
            return found.pop()
    raise RequestFailed("an answer without a score")


def _last_match(pattern: str, text: str) -> float:
    """The number in the first group of a pattern's last match.

    Raises:
        IndexError, TypeError, ValueError: there is none.
        RequestFailed: the pattern takes too long.
    """
    try:
        return float([found[1] for found in compile_pattern(pattern).finditer(text, timeout=PATTERN_SECONDS)][-1])
    except TimeoutError:
        raise RequestFailed(slow_pattern(pattern)) from None

"""Scores from an HTTP service: a judge of its own protocol, or a chat model that is asked for a number.

No key, prompt or response is written to a message or a log.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from string import Formatter

from alignment.rewards.http import Endpoint, RequestFailed, post_json
from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import JudgeSpec

CACHED = 100_000  # scores kept in memory; the oldest go first


def judge_reward(spec: JudgeSpec) -> TextReward:
    """An HTTP judge as a reward; None where it gave no score. Finished scores are kept and not asked for again.

    Args:
        spec: its settings.
    """
    endpoint = Endpoint(
        spec.url, spec.key_variable, spec.timeout_seconds,
        retries=spec.retries, backoff_seconds=spec.backoff_seconds, max_backoff_seconds=spec.max_backoff_seconds,
    )  # fmt: skip
    finished: dict[str, float] = {}
    lock = threading.Lock()

    def score(body: str) -> float | None:
        with lock:
            if body in finished:
                return finished[body]
        try:
            value = read_score(spec, post_json(endpoint, body.encode()))
        except RequestFailed:
            return None
        if value is not None:
            with lock:
                while len(finished) >= CACHED:
                    del finished[next(iter(finished))]
                finished[body] = value
        return value

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        bodies = [request_body(spec, samples, row) for row in range(len(samples.responses))]
        distinct = list(dict.fromkeys(bodies))
        with ThreadPoolExecutor(spec.requests) as pool:
            scores = dict(zip(distinct, pool.map(score, distinct), strict=True))
        return [scores[body] for body in bodies]

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


def read_score(spec: JudgeSpec, answer: object) -> float | None:
    """The score in a service's answer; None where it holds none, or one outside of `low` and `high`."""
    try:
        if spec.protocol == "json":
            value = answer["score"]  # type: ignore[index]  # what is no mapping has no score: TypeError
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return None
            score = float(value)
        else:
            text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
            found = list(re.finditer(spec.pattern, text))
            score = float(found[-1][1])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    inside = abs(score) < float("inf") and (spec.low is None or score >= spec.low)
    return score if inside and (spec.high is None or score <= spec.high) else None

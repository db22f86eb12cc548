"""HTTP judges against a server that is slow, busy, broken or wrong."""

import json
import time
from contextlib import ExitStack

import pytest
import torch

from alignment.errors import UserError
from alignment.rewards import JudgeSpec, RewardSpec, SampledTexts
from alignment.rewards.build import build_rewards, prepare_rewards
from alignment.rewards.combine import RewardPart, Rewards
from alignment.rewards.judge import judge_reward
from tests.examples import prompt_example
from tests.stub_server import good, serving

QUICK = {"timeout_seconds": 0.5, "retries": 3, "backoff_seconds": 0.01, "max_backoff_seconds": 0.5}


@pytest.fixture
def serve():
    with ExitStack() as servers:
        yield lambda answer: servers.enter_context(serving(answer))


def samples(*responses, **columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return SampledTexts(["Say so."] * len(responses), responses, rows)


def test_a_score_for_each_response_in_order_with_its_columns(serve):
    server = serve(lambda body, count: good(len(body["response"]) + body["columns"]["bonus"]))
    judge = judge_reward(JudgeSpec(server.url, columns=("bonus",), **QUICK))
    assert judge(samples("a", "bbb", "cc", bonus=[10, 20, 30], other=[1, 2, 3])) == [11, 23, 32]
    assert sorted(body["response"] for body, _ in server.requests) == ["a", "bbb", "cc"]
    assert server.requests[0][0].keys() == {"prompt", "response", "columns"}
    assert server.requests[0][0]["columns"].keys() == {"bonus"}


@pytest.mark.parametrize(
    ("answer", "requests", "score"),
    [
        (lambda body, count: (429, {"Retry-After": "0"}, "busy") if count < 3 else good(0.5), 3, 0.5),
        (lambda body, count: (500, {}, "broken"), 4, None),
        (lambda body, count: (401, {}, "no"), 1, None),
        (lambda body, count: (200, {}, "x" * (3 << 20)), 1, None),  # an answer without end is cut off
        (lambda body, count: (200, {}, "no json"), 4, None),
        (lambda body, count: (200, {}, "[" * 100_000), 4, None),
        *((lambda body, count, text=text: (200, {}, text), 1, None) for text in (
            "3", "null", "{}", '{"score": "3"}', '{"score": true}', '{"score": NaN}', '{"score": 11}',
        )),
    ],
)  # fmt: skip
def test_what_may_succeed_is_tried_again_and_what_is_no_score_is_none(serve, answer, requests, score):
    server = serve(answer)
    assert judge_reward(JudgeSpec(server.url, low=0, high=10, **QUICK))(samples("a")) == [score]
    assert len(server.requests) == requests
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) < 3 or gaps[2] >= 0.02  # 0.01 * 2^2 * [0.5, 1]


def test_a_server_that_hangs_or_sends_a_byte_now_and_then_is_given_up(serve):
    hang = serve(lambda body, count: time.sleep(3) or good(1))
    slow = serve(lambda body, count: (200, {}, list('{"score": 1}')))
    headers = serve(lambda body, count: list('HTTP/1.0 200 OK\r\nServer: stub\r\n\r\n{"score": 1}'))
    for url, longest in ((hang.url, 2), (slow.url, 2), (headers.url, 2), ("http://127.0.0.1:9/score", 1)):
        began = time.monotonic()
        assert judge_reward(JudgeSpec(url, **QUICK | {"retries": 1}))(samples("a")) == [None]
        assert time.monotonic() - began < longest
    assert len(hang.requests) == 2


def test_a_retry_after_header_is_waited_for_and_a_long_one_is_a_failure(serve):
    server = serve(lambda body, count: (503, {"Retry-After": "1"}, "") if count == 1 else good(1))
    settings = QUICK | {"max_backoff_seconds": 2.0}
    assert judge_reward(JudgeSpec(server.url, **settings))(samples("a")) == [1]
    assert server.times[1] - server.times[0] >= 1
    server = serve(lambda body, count: (503, {"Retry-After": "3600"}, ""))
    began = time.monotonic()
    assert judge_reward(JudgeSpec(server.url, **settings))(samples("a")) == [None]
    assert len(server.requests) == 1 and time.monotonic() - began < 1


def test_finished_scores_are_kept_and_failed_ones_asked_for_again(serve):
    server = serve(lambda body, count: (400, {}, "") if body["response"] == "b" and count < 4 else good(1))
    judge = judge_reward(JudgeSpec(server.url, **QUICK | {"requests": 1}))
    assert judge(samples("a", "b", "a")) == [1, None, 1]
    assert len(server.requests) == 2  # the two equal responses are one request
    assert judge(samples("a", "b")) == [1, None] and len(server.requests) == 3
    assert judge(samples("b", "a")) == [1, 1] and len(server.requests) == 4


def test_a_chat_model_is_asked_by_the_template(serve, monkeypatch):
    def answer(body, count):
        text = f"Out of 10 I say: {len(body['messages'][0]['content'])}."
        return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})

    server = serve(answer)
    monkeypatch.setenv("STUB_KEY", "sesame")
    spec = JudgeSpec(
        server.url, protocol="openai", model="m", template="{{1}} {prompt} | {response} | {topic}", columns=("topic",),
        key_variable="STUB_KEY", **QUICK,
    )  # fmt: skip
    content = "{1} Say so. | {x} {prompt} | birds"
    assert judge_reward(spec)(samples("{x} {prompt}", topic=["birds"])) == [len(content)]
    body, headers = server.requests[0]
    assert body == {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0}
    assert headers["Authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("text", "score"),
    [  # None: nothing says which is the score
        ("8/10", 8), ("I rate this 7 out of 10.", 7), ("Score 2 of 10", 2), ("[[8]]", 8), ("-0.5", -0.5),
        ("Rating: [[5]], since 3 facts are wrong", 5), ("**Score:** **8**/10", 8),
        ("On a scale of 1 to 10 it is a 6.", 6), ("Score (1-10): 7. Of 4 claims 3 hold.", 7),
        ("Accuracy 7, style 9", None), ("Style score: 7\nOverall score: 8", None), ("Score: 7-8", None), ("8,5", None),
        ("good", None),
    ],
)  # fmt: skip
def test_the_score_is_read_and_not_its_scale(serve, text, score):
    server = serve(lambda body, count: (200, {}, json.dumps({"choices": [{"message": {"content": text}}]})))
    spec = JudgeSpec(server.url, protocol="openai", model="m", template="{response}", low=-1, high=10, **QUICK)
    assert judge_reward(spec)(samples("a")) == [score]


@pytest.mark.parametrize(
    ("content", "pattern", "score"),
    [("Style: 3. Total: 5. Total: 6", r"Total: (\d+)", 6), ("a" * 34 + "!", "(a|aa)+$", None)],
)
def test_a_pattern_of_ones_own_reads_its_last_match_in_a_second(serve, content, pattern, score):
    server = serve(lambda body, count: (200, {}, json.dumps({"choices": [{"message": {"content": content}}]})))
    chat = {"protocol": "openai", "model": "m", "template": "{response}"}
    asked = samples("a")
    assert judge_reward(JudgeSpec(server.url, pattern=pattern, **chat, **QUICK))(asked) == [score]
    assert score is not None or pattern in next(iter(asked.failures))


def example(row, **extra):
    return prompt_example([1], "Say so.", extra, f"rows:{row}")


def test_more_failures_than_allowed_stop_the_run_and_fewer_have_no_score():
    rows, sums = [example(i) for i in range(4)], []

    def part(failing):
        numbers = torch.tensor([float("nan") if i in failing else 2.0 for i in range(4)])
        return RewardPart("judge", lambda *a: numbers, max_failed_share=0.25)

    scores = Rewards([part({1})], lambda x: sums.append(x) or x)(rows, [[1]] * 4, [True] * 4)
    for given in (scores.shaped, scores.total):
        assert given.isnan().tolist() == [False, True, False, False] and given[[0, 2, 3]].tolist() == [2, 2, 2]
    assert sums
    with pytest.raises(UserError, match="judge gave no score for 2 of 4 responses; at most 25%"):
        Rewards([part({1, 2})], lambda x: x)(rows, [[1]] * 4, [True] * 4)


def test_the_key_must_be_in_the_environment_and_is_in_no_message(monkeypatch):
    monkeypatch.delenv("STUB_KEY", raising=False)
    spec = RewardSpec(judge=JudgeSpec("http://h/s", key_variable="STUB_KEY"))
    with pytest.raises(UserError, match="judge: the environment has no STUB_KEY"):
        prepare_rewards([spec], [example(1)])
    with pytest.raises(ValueError, match="holds a password") as error:
        JudgeSpec("http://user:sesame@host/score")
    assert "sesame" not in str(error.value)
    with pytest.raises(ValueError, match="not the key itself") as error:
        JudgeSpec("http://host/score", key_variable="sk-sesame")
    assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host/score?key=sesame", "key_variable"),
        ("http://host/score?model=m&api-key=sesame", "key_variable"),
        ("http://host/score?access_token=sesame", "key_variable"),
        ("http://sesame@host/score", "key_variable"),
        *((url, "must be a URL") for url in ("http://sesame@host:port/score", "host/score", "ftp://host", "http://")),
    ],
)
def test_a_key_in_the_url_is_refused_and_not_shown(url, why):
    with pytest.raises(ValueError, match=f"judge .*{why}") as error:
        RewardSpec(judge=url)
    assert "sesame" not in str(error.value)
    JudgeSpec("http://host/score?model=m")


def test_a_key_is_stripped_and_one_that_cannot_be_sent_is_refused_unseen(serve, monkeypatch):
    server = serve(lambda body, count: good(1))
    spec = JudgeSpec(server.url, key_variable="STUB_KEY", **QUICK)
    monkeypatch.setenv("STUB_KEY", "sesame\n")  # as a mounted file ends
    assert judge_reward(spec)(samples("a")) == [1]
    assert server.requests[0][1]["Authorization"] == "Bearer sesame"
    for key in ("sesame\nX-Header: 1", "sesame\x1b", "s\u00e9same", "\n"):
        monkeypatch.setenv("STUB_KEY", key)
        with pytest.raises(UserError, match="STUB_KEY") as error:
            prepare_rewards([RewardSpec(judge=spec)], [example(1)])
        assert "same" not in str(error.value)
    monkeypatch.setenv("STUB_KEY", "sesame\nX-Header: 1")  # changed since: no header, no error that shows it
    asked = samples("b")
    assert judge_reward(spec)(asked) == [None] and "sesame" not in str(asked.failures)


def test_failures_are_named_with_their_number_service_and_key(serve, tokenizer, monkeypatch):
    """Three of four are refused with 401, one answer has no score."""
    server = serve(lambda body, count: (401, {}, "no") if count < 4 else (200, {}, "{}"))
    monkeypatch.setenv("STUB_KEY", "sesame")
    url = server.url + "?user=me"
    spec = RewardSpec(judge=JudgeSpec(url, key_variable="STUB_KEY", **QUICK | {"requests": 1}))
    rows = [example(i) for i in range(4)]
    parts = {"texts": prepare_rewards([spec], rows), "models": {}, "tokenizer": tokenizer}
    rewards = build_rewards([spec], **parts, reduce=lambda x: x)
    with pytest.raises(UserError, match="no score for 4 of 4") as error:
        rewards(rows, [[i + 5] for i in range(4)], [False] * 4)
    text = str(error.value)
    assert f"3 x status 401 from {server.url} with the key in STUB_KEY" in text and "1 x an answer without" in text
    assert "sesame" not in text and "user=me" not in text


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{response} {topc}", "neither prompt, response nor one of columns"),
        ("{prompt}", "does not show"),
        ("{response", "is not of the form"),
        ("{response.__class__}", "does not show"),
    ],
)
def test_a_template_must_show_what_there_is(template, why):
    with pytest.raises(ValueError, match=why):
        JudgeSpec("http://h", protocol="openai", model="m", template=template, columns=("topic",))
    with pytest.raises(ValueError, match="go with protocol: openai"):
        JudgeSpec("http://h", pattern=r"(\d+)")

"""Rewards one by one, and how they are shaped and summed; numbers are worked out by hand."""

import asyncio
import math
import sys
import threading
from decimal import Decimal

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.config.load import build, load_config
from alignment.config.yaml_source import parse_yaml
from alignment.errors import UserError
from alignment.rewards import (
    AnswerSpec,
    CodeSpec,
    LengthSpec,
    MatchSpec,
    RewardPart,
    Rewards,
    RewardSpec,
    SampledTexts,
    extract_number,
    gsm8k_answer,
    is_right,
    normalized_text,
)
from alignment.rewards.answers import boxed_answer, length_rewards, match_rewards
from alignment.rewards.build import build_rewards, prepare_rewards
from alignment.rewards.code.unit_tests import code_rewards
from alignment.rewards.combine import PartNormalizer, part_metrics
from alignment.rewards.specs import names_of
from tests.examples import prompt_example

# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [  # a minus of arithmetic, no group of thousands, full-width digits
        ("She has 5 apples.", "5"), ("12 - 5 = 7", "7"), ("12-5", "5"), ("x = -5", "-5"), ("(-3)", "-3"),
        ("\u22124 degrees", "-4"), ("$1,234,567.50.", "1234567.5"), ("-$3", "-3"), ("3.", "3"), (".5", "0.5"),
        ("0.50%", "0.5"), ("1, 2, 3", "3"), ("1,2", "2"), ("12,345", "12345"), ("\uff11\uff12", "12"), ("none", None),
        ("", None), ("9" * 1000, None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert extract_number(text) == (None if number is None else Decimal(number))


def test_the_answer_of_gsm8k_stands_after_its_mark():
    assert gsm8k_answer("He sells 48/2 = <<48/2=24>>24.\n#### 1,072") == 1072
    assert gsm8k_answer("#### 3\nNo, wait.\n#### 4 apples of 9") == 4
    assert gsm8k_answer("so 3 and 4") == 4
    assert gsm8k_answer("it is 5 ####") is None  # numbers before the mark do not count


@pytest.mark.parametrize(
    ("answer", "number"),
    [  # 5 x 3 is not carried out
        ("5 x 3 = 15", "15"), ("15 (5 x 3 = 15)", "15"), ("12 = 3 x 4", "12"), ("5 x 3", None), ("10-12", None),
        ("12:30", None), ("3/4", "0.75"), ("1 1/2 cups", "1.5"), ("1\u00bd", "1.5"), (r"\frac{3}{4}", "0.75"),
        ("1e5", "100000"), ("2^10", "1024"), ("5\u00b2", "25"), ("9^999", None), ("1/0", None),
    ],
)  # fmt: skip
def test_the_number_after_the_mark_is_the_result_of_its_line(answer, number):
    wanted = None if number is None else Decimal(number)
    assert gsm8k_answer(f"so 7\n#### {answer}\n8 = 8") == wanted
    assert number is None or is_right("gsm8k", f"#### {answer}", number)


def test_a_box_is_read_with_its_braces():
    assert gsm8k_answer(r"\boxed{42} in 3 steps") == 42
    assert gsm8k_answer(r"\boxed{42}. #### 43") == 43 and gsm8k_answer(r"\boxed{none} of 3") is None
    assert boxed_answer(r"\boxed{1} so \boxed{x_{1} + {2}}, see {3}") == "x_{1} + {2}"
    assert boxed_answer(r"\boxed{1} so \boxed{2") is None and boxed_answer("boxed{1}") is None
    assert is_right("boxed", r"so $\boxed{\dfrac{3}{4}}$ in 3 steps", [r"\boxed{0.75}"])
    assert is_right("boxed", r"\boxed{1\frac{1}{2}}", 1.5) and is_right("boxed", r"\boxed{\text{(C)}}", "c")
    assert is_right("boxed", r"\boxed{1{,}000}", "1000") and not is_right("boxed", r"\boxed{-5}", 5)
    assert not is_right("boxed", "42", "42") and not is_right("boxed", r"\boxed{}", "42")


BOXED = [
    ("(1,2)", "(1, 2)"), ("( 1 , 2 )", "(1,2)"), ("1,2", "1, 2"), (r"(-\infty, 3]", r"(-\infty,3]"), ("(-\u221e,3]", r"(-\infty,3]"),
    (r"\{1,2\}", r"\{1, 2\}"), (r"\left[0.5, 1\right)", r"[\frac12,1)"), ("x^2 + 1", "x^2+1"), (r"\frac12", "1/2"),
    (r"\frac1{72}", "1/72"), (r"\frac{-1}{2}", r"-\frac12"), (r"\dfrac{a}{b}", r"\frac{a}{b}"), (r"\sqrt{2}", r"\sqrt2"),
    (r"2 \sqrt 3", r"2\sqrt{3}"), (r"90^\circ", "90"), (r"90^{\circ}", "90\u00b0"), (r"5\text{ cm}", "5"), ("5", r"5\,\mathrm{cm}^2"),
    (r"5\text{ cm}", "5 cm"), ("x=5", "5"), (r"x \in [1,2]", "[1,2]"), (r"50\%", "50"), (r"2\pi", "2 \u03c0"), ("1 000", "1,000"),
    (r"x \leq 5", r"x\le 5"), ("New  York.", "new york"), (r"\text{(C)}", "c"), ("$7$", "7.0"), (".5", "1/2"),
]  # fmt: skip
NOT_BOXED = [
    ("[1,2]", "(1,2)"), ("(1,2]", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("(2,1)", "(1,2)"), ("1,2", "12"), ("1, 234", "1234"), ("[3]", "3"),
    (r"2\sqrt{3}", "2"), (r"5\pi", "5"), ("5x", "5"), ("5!", "5"), ("x=5", "y=5"), ("x<5", "5"), (r"5\text{ km}", r"5\text{ m}"),
    (r"5\text{ million}", "5"), ("1 2", "12"), ("(1,2", "(1,2)"), (r"\frac{1}{2x}", r"\frac{1}{2}x"), ("2^{10}", "210"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "right"), [(*pair, pair in BOXED) for pair in BOXED + NOT_BOXED])
def test_boxed_answers_that_are_no_plain_number(one, other, right):
    """[C6] Brackets and order count; blanks and the usual ways to write the same do not."""
    assert is_right("boxed", rf"so $\boxed{{{one}}}$.", other) is right
    assert is_right("boxed", rf"\boxed{{{other}}}", one) is right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{2\sqrt{3}}", None), (r"\boxed{\sqrt{3}}", None), (r"\boxed{5\pi}", None), (r"\boxed{\pi/2}", None),
        (r"\boxed{5x}", None), (r"\boxed{(1, 2)}", None), (r"\boxed{x^2+1}", None), (r"\boxed{2 \times 10^3}", None),
        (r"#### 2\sqrt{3}", None), (r"\boxed{\$18}", 18), (r"\boxed{18 \text{ dollars}}", 18), (r"\boxed{5\text{ cm}^2}", 5),
        (r"\boxed{x = 5}", 5), (r"\boxed{90^\circ}", 90), ("it is 1 000", 1000), (r"\boxed{12 345 678}", 12345678),
        ("in 2020 100", 100), ("0.5 100", 100), ("10 000/5", 2000),
    ],
)  # fmt: skip
def test_a_number_beside_a_formula_is_no_answer(text, number):
    """[A7] A box that holds more than a number has none; blanks may part thousands."""
    assert gsm8k_answer(text) == number


def test_answers_are_right_where_they_are_equal():
    assert is_right("gsm8k", "... #### 1000", "1,000.00")
    assert is_right("gsm8k", "The answer is 7.", 7) and is_right("gsm8k", "7", [6, 7.0])
    assert not is_right("gsm8k", "The answer is 7.5", 7) and not is_right("gsm8k", "none", 0)
    assert is_right("exact", "  The ANSWER: Paris! ", "the answer paris")
    assert not is_right("exact", "It is Paris", "Paris") and is_right("exact", "b", ["A", "B"])
    assert normalized_text(" A\u00a0 b,c. ") == "a b,c"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-5", "5"), ("3.5", "35"), ("1/2", "12"), ("C++", "C"), ("C#", "C"), ("A-", "A"), ("x>0", "x0"), ("<5", "5"),
        ("x < 5", "x > 5"), ("x + y", "x - y"), ("5\u00b2", "52"), ("- 5", "5"), ("\u22125", "5"), ("-$5", "$5"),
        ("b,c", "bc"), ("2^10", "210"),
    ],
)  # fmt: skip
def test_what_differs_is_not_equal_as_an_exact_answer(one, other):
    assert not is_right("exact", one, other) and not is_right("exact", other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/2", "0.5"), ("1,000", "1000"), ("1e3", "1000.0"), (".5", "0.5"), ("\u22125", "-5"), ("-$3.", "-3"),
        ("$1,072", "1072"), ("50%", "50"), ("(-3)", "-3"), ("1 1/2 cups", "1.5 cups"), ("**Paris**.", "paris"),
        ('"Paris"', "Paris"), ("- Paris", "Paris"), ("...C++!", "c++"), ("5 apples", "5.0 Apples."), ("#### 5", "5"),
    ],
)  # fmt: skip
def test_equal_numbers_and_words_are_equal_as_exact_answers(one, other):
    assert is_right("exact", one, other) and is_right("exact", other, one)


# --- rules ----------------------------------------------------------------------------------------------------------


def texts(*responses, lengths=()):
    return SampledTexts([""] * len(responses), responses, lengths=lengths)


def test_a_length_beyond_the_longest_loses_for_each_token():
    spec = LengthSpec(max=10, penalty=0.1)
    assert length_rewards(spec, texts("", "", "", lengths=[3, 10, 14])) == pytest.approx([0, 0, -0.4])
    spec = LengthSpec(target=10, penalty=0.5, unit="characters")
    assert length_rewards(spec, texts("x" * 8, "x" * 10, "x" * 13)) == pytest.approx([-1, 0, -1.5])


def test_an_expression_matches_anywhere_and_a_format_the_whole_response():
    assert match_rewards(MatchSpec("b+", value=2, otherwise=-1), texts("abba", "aca"), whole=False) == [2, -1]
    spec = RewardSpec(format="think_answer")
    good, late = "<think>a\nb</think>\n<answer>1</answer>", "<think>a</think> so <answer>1</answer>"
    twice = "<think>a</think><think>a</think><answer>1</answer>"
    assert match_rewards(spec.section, texts(good, late, twice, ""), whole=True) == [1, 0, 0, 0]
    spec = RewardSpec(format=MatchSpec("gsm8k", value=0.5))
    assert match_rewards(spec.section, texts("so\n#### -1,200.5\n", "#### x", "#### 5 apples"), whole=True) == [
        0.5,
        0,
        0,
    ]


@pytest.mark.parametrize("kind", ["regex", "format"])
def test_a_pattern_that_backtracks_is_a_bounded_failure(kind, tokenizer):
    """(a|aa)+$ tries all 9,227,465 ways to cut 34 letters before it fails at the last sign."""
    spec = RewardSpec(**{kind: "(a|aa)+$"})
    samples = texts("a" * 34 + "!", "aa")
    assert match_rewards(spec.section, samples, whole=kind == "format") == [None, 1]
    assert list(samples.failures.values()) == [1] and "(a|aa)+$" in next(iter(samples.failures))
    part = build_rewards([spec], {kind: None}, {}, tokenizer=tokenizer, reduce=lambda x: x).parts[0]
    assert part.max_failed_share == 0.1


def test_code_is_paid_by_the_tests_that_it_passes():
    tests = ["assert f(2) == 4", "assert f(3) == 9", {"input": "7\n", "output": "14"}]
    rows = [{"tests": tests}] * 4
    square = "def f(x): return x * x\n"
    program = "if __name__ == '__main__': print(2 * int(input()))\n"
    samples = SampledTexts([""] * 4, [square, square + program, "def f(x): return x + 2", "  "], rows)
    assert code_rewards(CodeSpec(reward="share"), samples) == pytest.approx([2 / 3, 1, 1 / 3, 0])
    assert code_rewards(CodeSpec(reward="all"), samples) == [0, 1, 0, 0]


def test_rows_whose_own_solution_fails_are_counted_and_named():
    tests = ["assert f(2) == 4", {"input": "3", "output": "9"}]
    program = "\nif __name__ == '__main__': print(f(int(input())))"
    right, wrong = "```python\ndef f(x): return x * x" + program + "\n```", "def f(x): return x + 2" + program
    rows = [{"tests": tests, "solution": right}, {"tests": tests, "solution": wrong}, {"tests": tests}]
    spec = RewardSpec(code=CodeSpec(solution="solution"))
    assert prepare_rewards([spec], rows_of(rows[0]))
    with pytest.raises(UserError, match=r"'solution'.* in 2 of 3 prompts \(rows.jsonl:2, rows.jsonl:3\)"):
        prepare_rewards([spec], rows_of(*rows))


# --- functions and columns ------------------------------------------------------------------------------------------


def with_topic(prompts, responses, topic, **columns):
    assert columns.keys() == {"answer"}
    return [float(word in text) if word else None for word, text in zip(topic, responses, strict=True)]


def with_default(prompts, responses, topic="birds"):
    return [len(topic)] * len(responses)


def only_texts(texts):
    return [0.0] * len(texts)


def rows_of(*extras):
    return [prompt_example([1], "p", extra, f"rows.jsonl:{i + 1}") for i, extra in enumerate(extras)]


HERE = "tests.rewards.test_rewards"


def test_a_function_gets_prompts_responses_and_columns():
    rows = rows_of({"topic": "sky", "answer": 1}, {"topic": "", "answer": 2})
    reward = prepare_rewards([RewardSpec(function=f"{HERE}:with_topic")], rows)["with_topic"]
    assert reward(SampledTexts(["p", "p"], ["blue sky", "x"], [row.extra for row in rows])) == [1.0, None]
    reward = prepare_rewards([RewardSpec(function=f"{HERE}:with_default")], rows_of({}))["with_default"]
    assert reward(SampledTexts(["p"], ["x"], [{"other": 1}])) == [5]


def as_trl(completions, topic, **kwargs):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    assert kwargs.keys() == {"prompts"} and "responses" not in kwargs
    return [float(word in text) for word, text in zip(topic, texts, strict=True)]


def only_responses(responses):
    return [float(len(text)) for text in responses]


def broken(prompts, responses):
    return [{}["answr"] for _ in responses]


def test_a_function_written_for_trl_is_called_as_trl_calls_it():
    rows = rows_of({"topic": "sky"}, {"topic": "sea"})
    reward = prepare_rewards([RewardSpec(function=f"{HERE}:as_trl")], rows)["as_trl"]
    dialogue = [{"role": "user", "content": "p"}]
    assert reward(SampledTexts(["p", dialogue], ["blue sky", "sky"], [row.extra for row in rows])) == [1, 0]
    reward = prepare_rewards([RewardSpec(function=f"{HERE}:only_responses")], rows)["only_responses"]
    assert reward(SampledTexts([dialogue], ["four"], [{}])) == [4]


async def awaited(responses, **columns):
    await asyncio.sleep(0)
    return [float(len(text)) for text in responses]


class Awaited:
    async def __call__(self, responses, **columns):
        return await awaited(responses)


awaited_object = Awaited()


@pytest.mark.parametrize("name", ["awaited", "awaited_object"])
def test_an_async_function_is_awaited_inside_a_running_loop_too(name):
    """[C20] As trl awaits them; a notebook's thread has a loop that runs already."""
    [reward] = prepare_rewards([RewardSpec(function=f"{HERE}:{name}")], rows_of({})).values()
    samples = SampledTexts(["p"], ["four"], [{}])

    async def in_a_loop():
        return reward(samples)

    assert reward(samples) == asyncio.run(in_a_loop()) == [4.0]


async def awaited_broken(responses):
    return [{}["answr"] for _ in responses]


@pytest.mark.parametrize("name", ["broken", "awaited_broken"])
def test_an_error_in_a_function_names_it(name):
    reward = prepare_rewards([RewardSpec(function=f"{HERE}:{name}")], rows_of({}))[name]
    with pytest.raises(UserError, match=rf"{HERE}:{name}.*KeyError.*answr.*test_rewards\.py:\d+"):
        reward(SampledTexts(["p"], ["x"], [{}]))


def test_functions_lie_beside_the_config_or_in_the_working_directory(tmp_path, monkeypatch):
    """A module of one name in both folders is taken from beside the config."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "own_reward_both.py").write_text(f"def f(responses):\n    return [{float(folder is beside)}]\n")
    (here / "own_reward_here.py").write_text("def f(responses):\n    from own_reward_both import f\n    return f([])\n")
    (beside / "own_reward_wrong.py").write_text("def f(responses:\n")
    (beside / "grpo.yaml").write_text(
        "policy: p\nvalue_model: policy\noutput: o\ndata: {train: x}\nrewards: [{answer: gsm8k}]\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(here))])
    for module in ("own_reward_both", "own_reward_here"):
        override = f"rewards=[{{function: '{module}:f'}}]"
        config = load_config(PPOConfig, str(beside / "grpo.yaml"), [override])
        assert prepare_rewards(config.rewards, rows_of({}))["f"](texts("x")) == [1]
    with pytest.raises(UserError, match="own_reward_none") as error:
        prepare_rewards([RewardSpec(function="own_reward_none:f")], rows_of({}))
    assert f"{beside} or {here}" in str(error.value)
    with pytest.raises(UserError, match=r"own_reward_wrong.*SyntaxError"):
        prepare_rewards([RewardSpec(function="own_reward_wrong:f")], rows_of({}))


@pytest.mark.parametrize(
    ("spec", "rows", "why"),
    [
        (RewardSpec(function="nowhere:f"), [{}], r"'nowhere:f' was not found \(No module named 'nowhere'\)"),
        (RewardSpec(function=f"{HERE}:nothing"), [{}], "was not found"),
        (RewardSpec(function=f"{HERE}:HERE"), [{}], "is a str and cannot be called"),
        (RewardSpec(function=f"{HERE}:only_texts"), [{}], r"must be of the form f\(prompts, responses, \*\*columns\)"),
        (
            RewardSpec(function=f"{HERE}:with_topic"),
            [{"topic": 1}, {}],
            r"needs the column 'topic': it is missing in 1 of 2 prompts \(rows.jsonl:2\)",
        ),
        (
            RewardSpec(answer="gsm8k"),
            [{"answer": "5"}, {"answer": "x"}],
            r"it holds no number in 1 of 2 prompts \(rows.jsonl:2\)",
        ),
        (RewardSpec(answer="exact"), [{"answer": None}], "it must be a text, a number, or a list"),
        (RewardSpec(answer=AnswerSpec("exact", column="gold")), [{"answer": "5"}], "needs the column 'gold'"),
        (RewardSpec(code=CodeSpec()), [{"tests": []}], "it holds no test"),
        (RewardSpec(code=CodeSpec()), [{"tests": ["f(1) =="]}], "no Python"),
        (RewardSpec(code=CodeSpec()), [{"tests": ["f(1) == 2"]}], "a test without assert passes for any code"),
        (RewardSpec(code=CodeSpec()), [{"tests": [{"input": "1"}]}], "has the texts input and output"),
    ],
)
def test_what_cannot_be_scored_is_said_before_any_network_is_loaded(spec, rows, why):
    with pytest.raises(UserError, match=why):
        prepare_rewards([spec], rows_of(*rows))


# --- shaping --------------------------------------------------------------------------------------------------------


def score(*parts, sources=None, count=None):
    """Scores of responses by parts that give the same numbers every time."""
    rewards = Rewards(parts, lambda x: x)
    count = count or len(parts[0].score([], [], []))
    rows = [prompt_example([1], "p", {}, f"r{i}", source=source) for i, source in enumerate(sources or [0] * count)]
    return rewards(rows, [[1]] * count, [True] * count)


def gives(*numbers):
    values = torch.tensor([math.nan if number is None else number for number in numbers])
    return lambda prompts, responses, ended: values


def test_the_score_is_the_sum_of_weight_times_clip_of_the_normalized_part():
    """Parts 1, 3, 8 have mean 4 and deviation sqrt(26/3); 0, 1, none count 0, 1, 0 with weight -2."""
    deviation = math.sqrt(26 / 3)
    one = RewardPart("one", gives(1.0, 3.0, 8.0), 0.5, (-0.5, 1.0), PartNormalizer("first"))
    two = RewardPart("two", gives(0.0, 1.0, None), -2.0)
    given = score(one, two)
    assert_close(given.total, torch.tensor([0.5, -0.5, 4.0]))  # 0.5 * part - 2 * part, as it was given
    wanted = [0.5 * -0.5, 0.5 * (-1 / deviation) - 2, 0.5 * 1.0]
    assert -3 / deviation < -0.5 and 4 / deviation > 1
    assert_close(given.shaped, torch.tensor(wanted))
    assert given.parts["one"].tolist() == [1, 3, 8] and given.parts["two"].isnan().tolist() == [False, False, True]
    metrics = part_metrics(given.parts, lambda x: x)
    assert metrics == pytest.approx(
        {"score/one": 4, "unscored_share/one": 0, "score/two": 0.5, "unscored_share/two": 1 / 3}
    )


def scored(*parts, prompts):
    """Scores of responses to prompts that are named by letters, side by side."""
    return Rewards(parts, lambda x: x)([prompt_example([1], "p", {}, name) for name in prompts], [], [])


def test_what_has_no_score_is_no_number_whatever_bounds_it_has():
    """Clipped to [1, 2] a failure is not the worst score, and out of the statistics: 1 and 3 have mean 2, deviation 1."""
    clipped = scored(RewardPart("one", gives(1.0, None, 5.0), clip=(1.0, 2.0)), prompts="aaa")
    assert_close(clipped.shaped, torch.tensor([1.0, math.nan, 2.0]), equal_nan=True)
    normalized = RewardPart("one", gives(1.0, None, 3.0), normalizer=PartNormalizer("first"))
    assert_close(scored(normalized, prompts="aaa").shaped, torch.tensor([-1.0, math.nan, 1.0]), equal_nan=True)


def test_a_reward_that_fails_beside_another_one_gives_no_score():
    """Raw numbers of -2 would make 0 the best; a reward that applies to no response to b, or is centered, adds 0."""
    length = RewardPart("length", gives(-0.5, -0.25, -0.5, -1.0))
    raw = scored(RewardPart("raw", gives(-2.0, None, None, None)), length, prompts="aabb")
    assert_close(raw.shaped, torch.tensor([-2.5, math.nan, -0.5, -1.0]), equal_nan=True)
    centered = RewardPart("centered", gives(-2.0, None, -4.0, None), normalizer=PartNormalizer("first"))
    assert_close(scored(centered, length, prompts="aabb").shaped, torch.tensor([0.5, -0.25, -1.5, -1.0]))


def test_no_reward_may_leave_most_responses_without_a_score():
    """Two of four may be without, as far as no judge allows more; three end the run, scored and judged alike."""
    half, most = gives(1.0, None, None, 2.0), gives(1.0, None, None, None)
    assert scored(RewardPart("rule", half), prompts="abcd").total.isnan().sum() == 2
    for score in ("__call__", "judge"):
        rewards = Rewards([RewardPart("rule", most)], lambda x: x)
        with pytest.raises(UserError, match=r"3 of 4 responses have no score.*rule 3 times.*at most 50%"):
            getattr(rewards, score)(rows_of({}, {}, {}, {}), [], [])
    assert scored(RewardPart("judge", most, max_failed_share=0.75), prompts="abcd").total.isnan().sum() == 3


def test_first_is_the_score_normalizer_to_the_last_bit_and_stays():
    first, later = torch.randn(13), torch.randn(13) * 5
    normalizer, wanted = PartNormalizer("first"), ScoreNormalizer().fit(first, lambda x: x)
    for values in (first, later):
        normalizer.take_in(values, lambda x: x)
        assert torch.equal(normalizer(values), wanted.scale * values + wanted.shift)


def test_running_is_the_mean_and_deviation_of_everything_so_far():
    normalizer, seen = PartNormalizer("running"), []
    for size in (3, 1, 7):
        values = torch.randn(size, dtype=torch.float64) * 3 + 1
        normalizer.take_in(values, lambda x: x)
        seen.append(values)
        everything = torch.cat(seen)
        assert_close(normalizer(values), (values - everything.mean()) / everything.std(correction=0))
    rewards, again = (
        Rewards([RewardPart("r", gives(1.0), normalizer=each)], lambda x: x)
        for each in (normalizer, PartNormalizer("running"))
    )
    again.load(rewards.state())
    assert again.state() == rewards.state() == {"r": [11.0, normalizer.mean, normalizer.squares]}


def test_equal_numbers_cannot_be_normalized():
    with pytest.raises(UserError, match="the same number for all of"):
        score(RewardPart("one", gives(2.0, 2.0), normalizer=PartNormalizer("first")))


def test_two_ranks_have_the_statistics_of_one():
    """Each of two threads holds half of the samples and adds its sums to the other's."""
    values, whole = torch.randn(3, 8, dtype=torch.float64), PartNormalizer("running")
    barrier, slots, halves = threading.Barrier(2), [None, None], [PartNormalizer("running") for _ in range(2)]

    def work(rank):
        def reduce(x):
            slots[rank] = x
            barrier.wait(10)
            total = slots[0] + slots[1]
            barrier.wait(10)
            return total

        for row in values:
            halves[rank].take_in(row[rank::2], reduce)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    for row in values:
        whole.take_in(row, lambda x: x)
    [thread.join() for thread in threads]
    for half in halves:
        assert (half.count, half.mean, half.squares) == pytest.approx(
            (whole.count, whole.mean, whole.squares), rel=1e-12
        )


def test_judging_changes_no_statistics():
    part = RewardPart("one", gives(1.0, 3.0), normalizer=PartNormalizer("running"))
    rewards, rows = Rewards([part], lambda x: x), rows_of({}, {})
    rewards(rows, [[1], [1]], [True, True])
    before = rewards.state()
    assert rewards.judge(rows, [[1], [1]], [True, True]).shaped.tolist() == [-1, 1]
    assert rewards.state() == before and rewards(rows, [[1], [1]], [True, True]) and rewards.state() != before


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "one of reward_model, function, .* found none"),
        ({"reward_model": "r", "function": "m:f"}, "found reward_model and function"),
        ({"function": "f"}, "function must be module:name"),
        ({"regex": "("}, r"pattern '\(' is no regular expression"),
        ({"answer": "exact", "weight": 0.0}, "weight must not be 0"),
        ({"answer": "exact", "clip": (1.0, 1.0)}, "low below high"),
        ({"answer": "exact", "reward_combine": "min"}, "go with reward_model"),
        ({"answer": "exact", "name": "a b"}, "name may have"),
    ],
)
def test_an_entry_says_what_is_wrong(settings, why):
    with pytest.raises(ValueError, match=why):
        RewardSpec(**settings)


def test_names_are_made_of_the_kind_and_differ():
    specs = [RewardSpec("a"), RewardSpec("b"), RewardSpec(function="m:f"), RewardSpec("c", name="reward_model_3")]
    assert names_of(specs) == ["reward_model", "reward_model_2", "f", "reward_model_3"]
    with pytest.raises(ValueError, match="two entries are named 'x'"):
        names_of([RewardSpec("a", name="x"), RewardSpec("b", name="x")])


YAML = """policy: p
data: {train: t}
output: o
value_model: policy
rewards:
  - {reward_model: r, reward_combine: min, normalize: running}
  - {function: "m:f", weight: 0.5, clip: [-1, 1]}
  - length: {max: 5}
  - format: gsm8k
  - {regex: {pattern: a+, otherwise: -1}, name: only_a}
  - answer: gsm8k
  - {answer: {match: exact, column: gold}}
  - code: {}
  - judge: https://host/score
  - judge: {url: https://host/v1, protocol: openai, model: m, template: "{response}", columns: []}
"""


def test_a_file_of_rewards():
    config = build(PPOConfig, parse_yaml(YAML, "ppo.yaml"))
    assert names_of(config.rewards)[3:] == [
        "format", "only_a", "answer", "answer_2", "code", "judge", "judge_2",
    ]  # fmt: skip
    assert config.rewards[1].clip == (-1, 1) and config.rewards[7].code == CodeSpec() and config.reward_models == ["r"]


def test_a_wrong_entry_is_named_with_its_line():
    with pytest.raises(UserError, match=r"ppo.yaml:8: rewards\[2\].length.target: or max must be given"):
        build(PPOConfig, parse_yaml(YAML.replace("{max: 5}", "{}"), "ppo.yaml"))
    with pytest.raises(UserError, match=r"ppo.yaml:6: rewards\[0\].*found reward_model and regex"):
        build(PPOConfig, parse_yaml(YAML.replace("{reward_model: r,", "{reward_model: r, regex: a,"), "ppo.yaml"))


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ("reward_model: r", "reward_model"),
        ("rewards: [{reward_model: r}, {answer: gsm8k}]", "reward_model"),
        ("rewards: [{answer: gsm8k}]", "policy"),
        ("rewards: [{answer: gsm8k}]\nvalue_model: shared", "shared"),
        ("reward_model: r\nvalue_model: policy", "policy"),
        (
            "rewards: [{answer: gsm8k}]\nadvantages: rloo\nresponses_per_prompt: 2",
            "reward_model",
        ),  # none, as it was written
    ],
)
def test_the_critic_starts_from_the_reward_model_where_there_is_one(settings, start):
    assert (
        build(PPOConfig, parse_yaml(f"policy: p\noutput: o\ndata: {{train: t}}\n{settings}\n", "a")).value_model
        == start
    )


@pytest.mark.parametrize(("settings", "key"), [("", "rewards"), ("value_model: reward_model", "rewards")])
def test_ppo_without_rewards_gives_one_error(settings, key):
    with pytest.raises(UserError) as error:
        build(PPOConfig, parse_yaml(f"policy: p\noutput: o\ndata: {{train: t}}\n{settings}\n", "ppo.yaml"))
    (line,) = str(error.value).splitlines()
    assert f" {key}: say what is rewarded" in line


def test_a_misspelled_kind_of_reward_is_named():
    with pytest.raises(UserError, match="functoin: unknown key; did you mean 'function'"):
        build(PPOConfig, parse_yaml(YAML.replace("- code: {}", "- functoin: a"), "ppo.yaml"))

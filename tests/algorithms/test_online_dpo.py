"""Online DPO: which responses become pairs, worked by hand; judges; what the first update says; runs that learn."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model, load_tokenizer
from alignment.adapters import LoRASpec
from alignment.algorithms.online_dpo import (
    OnlineDPOConfig,
    build_online_state,
    make_pairs,
    max_and_min,
    pair_scorer,
    sample_and_update,
)
from alignment.algorithms.rollouts.metrics import sample_metrics
from alignment.algorithms.rollouts.rollout import Rollout, collect
from alignment.algorithms.rollouts.setup import read_rollout_data
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.rewards.functions import load_own
from alignment.training import Run
from tests.conftest import read_lines
from tests.examples import prompt_example
from tests.ppo_states import exact_kl, move

ALONE = SimpleNamespace(rank=0, size=1, sum=lambda total: total, gather_objects=lambda value: [value])
NAN = float("nan")


def config_of(**settings):
    return OnlineDPOConfig("policy", DataConfig(train="prompts"), "output", **{"judge": "gold", **settings})


# Pairs by hand


def test_best_and_worst_by_hand():
    scores = torch.tensor([[1.0, 3.0, -2.0], [0.5, 0.5, 0.5], [2.0, 2.0, 1.75], [NAN, NAN, 2.0], [NAN, -1.0, -5.0]])
    best, worst, tied, unjudged = max_and_min(scores, tie_margin=0.25)
    assert best.tolist()[:3] == [1, 0, 0] and worst.tolist()[:3] == [2, 0, 2]
    assert (int(best[4]), int(worst[4])) == (1, 2)
    assert tied.tolist() == [False, True, True, False, False]
    assert unjudged.tolist() == [False, False, False, True, False]
    assert max_and_min(scores)[2].tolist() == [False, True, False, False, False]


def samples_of(raw, ended, responses):
    count = len(responses) // 4
    rows = [prompt_example([7, 8, 9][: i % 2 + 1], "", {}, f"row {i}") for i in range(4) for _ in range(count)]
    zeros = torch.zeros(len(rows), 2)
    return Rollout(
        [row.ids for row in rows], responses, list(range(40, 40 + len(rows))), zeros > -1, zeros, zeros, None, None,
        scores=torch.tensor(raw), ended=torch.tensor(ended), rows=rows,
    )  # fmt: skip


def test_pairs_by_hand():
    """Four prompts, two responses each: a pair, a tie, a pair that the missing end decides, one not judged."""
    samples = samples_of(
        [1.0, 2.5, 3.0, 3.0, 4.0, 3.5, NAN, 1.0],
        [True, True, True, True, False, True, True, True],
        [[1], [2, 3], [4], [5], [6, 6], [1], [2], [3]],
    )
    pairs, metrics = make_pairs(samples, config_of(), ALONE)
    first, second = pairs
    assert (first.documents[0], first.documents[1]) == ([7, 2, 3], [7, 1])
    assert (first.masks[0], first.masks[1]) == ([False, True, True], [False, True])
    assert (first.values.get("margin"), first.row_id) == (1.5, "row 0")
    assert (second.documents[0], second.documents[1]) == ([7, 1], [7, 6, 6])  # 3.5 against 4 - 1
    assert (second.values.get("margin"), second.row_id) == (0.5, "row 2")
    assert metrics == {
        "pairs": 2, "score_ties": 0.25, "unjudged": 0.25, "chosen_score": 3.0, "rejected_score": 2.5, "score_margin": 0.5,
    }  # fmt: skip


def test_pairs_are_those_without_the_responses_that_have_no_score():
    """Four responses to each prompt, of which the second, third, first and last has no score: first, in between, last."""
    scores = [3.0, NAN, 1.0, 2.0, -1.0, -3.0, NAN, -2.0, NAN, 0.5, 0.25, 0.75, 5.0, 9.0, 7.0, NAN]
    whole = samples_of(scores, [True] * 16, [[i] for i in range(16)])
    kept = [i for i, score in enumerate(scores) if score == score]
    fewer = samples_of([scores[i] for i in kept], [True] * 12, [[i] for i in kept])
    pairs, metrics = make_pairs(whole, config_of(responses_per_prompt=4), ALONE)
    assert (pairs, metrics) == make_pairs(fewer, config_of(responses_per_prompt=3), ALONE)
    assert [pair.documents[0][-1] for pair in pairs] == [0, 4, 11, 13] and metrics["unjudged"] == 0
    assert [pair.documents[1][-1] for pair in pairs] == [2, 5, 10, 12]


def test_equal_responses_make_no_pair():
    samples = samples_of([1.0, 1.0 + 1e-6] * 4, [True] * 8, [[1, 2]] * 8)
    assert make_pairs(samples, config_of(), ALONE) == ([], {"pairs": 0, "score_ties": 1.0, "unjudged": 0.0})


def test_a_judge_that_judges_nothing_ends_the_run():
    samples = samples_of([NAN] * 8, [True] * 8, [[1], [2]] * 4)
    with pytest.raises(UserError, match="gold could not judge the responses to 4 of 4 prompts"):
        make_pairs(samples, config_of(), ALONE)


def test_a_judge_of_pairs_may_leave_half_of_the_prompts_and_no_more():
    """Rewards have bounds of their own, for single responses."""
    config = config_of(judge="module:function")
    for missing, raises in (
        (2, nullcontext()),
        (3, pytest.raises(UserError, match=r"module:function .* 3 of 4 prompts")),
    ):
        raw = [NAN] * 2 * missing + [1.0, 2.0] * (4 - missing)
        samples = samples_of(raw, [True] * 8, [[i] for i in range(8)])
        with raises:
            assert len(make_pairs(samples, config, ALONE)[0]) == 2


# Judges of pairs


def prefers_first(prompts, first, second):
    """A judge with nothing but position bias."""
    return [1.0] * len(first)


def most_a(prompts, first, second):
    """Prefers the text with more letters a; None where a text holds a question mark."""
    return [
        None if "?" in a + b else (a.count("a") > b.count("a")) + (a.count("a") == b.count("a")) / 2
        for a, b in zip(first, second, strict=True)
    ]


def shares(judge, tokenizer, texts, count):
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompts = [prompt_example([1], f"prompt {i}", {"key": i}, f"row {i}") for i in range(len(texts) // count)]
    rows = [prompt for prompt in prompts for _ in range(count)]
    return pair_scorer(judge, tokenizer, count)(rows, ids, [False] * len(ids)).tolist()


def test_shares_of_comparisons_won_by_hand(tokenizer):
    # Of the first three aaa beats both, and a beats b; c, d and e tie.
    assert shares(most_a, tokenizer, ["a", "aaa", "b", "c", "d", "e"], 3) == [0.5, 1.0, 0.0, 0.5, 0.5, 0.5]


def test_position_bias_cancels_and_failures_leave_prompts_unjudged(tokenizer):
    assert shares(prefers_first, tokenizer, ["a", "b", "c", "d"], 2) == [0.5] * 4
    found = shares(most_a, tokenizer, ["a?", "b", "aa", "a"], 2)
    assert math.isnan(found[0]) and math.isnan(found[1]) and found[2:] == [1.0, 0.0]


def test_a_judge_sees_records_and_both_orders_and_never_equal_texts(tokenizer):
    seen = []

    def judge(prompts, first, second):
        seen.extend(
            (prompt.prompt, prompt.extra["key"], a, b) for prompt, a, b in zip(prompts, first, second, strict=True)
        )
        return [0.5] * len(first)

    shares(judge, tokenizer, ["x", "y", "z", "z"], 2)
    assert seen == [("prompt 0", 0, "x", "y"), ("prompt 0", 0, "y", "x")]


@pytest.mark.parametrize(
    ("judge", "problem"),
    [(lambda p, a, b: [1.0], "1 verdicts on 2 comparisons"), (lambda p, a, b: [1.0, 7], "the verdict 7")],
)
def test_a_judge_that_breaks_its_word_is_named(tokenizer, judge, problem):
    with pytest.raises(UserError, match=problem):
        shares(judge, tokenizer, ["x", "y"], 2)


def test_a_judge_that_is_not_there_is_named_and_packaged_judges_serve():
    with pytest.raises(UserError, match="judge: 'nowhere:judge' was not found"):
        load_own("nowhere:judge", "judge:")
    assert load_own("alignment.judging.judges:longer_judge", "judge:")([None], ["long"], ["s"]) == [1.0]


# Runs


@pytest.fixture
def built(stage, make_stage, tmp_path):
    """`built(**config changes)` -> config, data and state of a run from the SFT policy, judged by the gold reward."""

    def build(**changes):
        _, config = make_stage(
            "online_dpo", str(stage("sft") / "model"), tmp_path / "run", **{"judge": "gold", **changes}
        )
        with Run(config.output, {}, stage="online_dpo") as directory:
            data = read_rollout_data(config, directory)
            return config, data, build_online_state(config, data, directory)

    return build


def sum_of_ids(prompts, responses, ended):
    """A score under which few responses tie."""
    return torch.tensor([float(sum(response)) for response in responses])


def test_kl_of_filtered_samples_is_that_of_the_policy(built):
    """The sampler's log-probabilities of cut distributions are larger by log(1 / mass) a token."""
    config, data, state = built(max_new_tokens=6, top_p=0.7, temperature=0.8)
    policy = state.policy.backend.unwrapped
    move(policy)
    samples = collect(state, config, data.prompts.rows_at(0), 0)
    values = exact_kl(policy, load_model(config.policy), samples.prompts, samples.responses, 0.8)
    metrics = sample_metrics(samples, state)
    assert metrics["kl"] == pytest.approx(sum(values) / len(values), rel=1e-3) and "kl_k3" not in metrics


@pytest.mark.parametrize("changes", [{}, {"adapter": LoRASpec(rank=2)}], ids=["full", "lora"])
def test_the_first_loss_is_log_2_and_everything_is_logged(stage, ran, tmp_path, read_metrics, changes):
    reward_model = str(stage("reward") / "model")
    ran(
        "online_dpo", str(stage("sft") / "model"), tmp_path, reward_model=reward_model, epochs=1, minibatches=1,
        responses_per_prompt=3, metrics=["hotel_gold"], **changes,
    )  # fmt: skip
    first, second = read_metrics(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and second["loss"] != pytest.approx(
        math.log(2), abs=1e-5
    )
    assert first["chosen_score"] > first["score"] > first["rejected_score"] and first["pairs"] == 8
    assert {"kl", "kl_k3", "margin", "accuracy", "score_ties", "ended_share", "seconds_sampling", "seconds_scoring",
            "seconds_update", "response_tokens", "gold_score"} <= {*first}  # fmt: skip
    lines = read_lines(tmp_path / "samples.jsonl")
    assert [line["step"] for line in lines] == [1, 1, 1, 2, 2, 2] and len({line["prompt"] for line in lines[:3]}) == 1
    notes = json.loads((tmp_path / "lineage.json").read_text())["notes"]
    assert not any("value model" in note for note in notes) and any("memory: reference" in note for note in notes)
    load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("loss", ["ipo", "hinge", "odpo", "bco", "aot", "simpo", {"sigmoid": 0.7, "cpo": 0.3}], ids=str)
def test_every_kind_of_pair_loss_learns_from_the_pairs(built, loss):
    """One with margins, those that look at the whole batch, one without a reference, and two at once with an SFT part."""
    config, data, state = built(loss=loss, max_new_tokens=4, epochs=2, minibatches=2)
    state.score = sum_of_ids
    metrics, _ = sample_and_update(state, config, data.prompts.rows_at(0), 0)
    assert state.policy.step == 4 and math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert ("kl" in metrics) == (loss != "simpo") and ("sft_loss" in metrics) == isinstance(loss, dict)


def test_an_iteration_of_ties_learns_nothing_and_says_so(built):
    config, data, state = built(max_new_tokens=3, tie_margin=100.0)
    before = [parameter.clone() for parameter in state.policy.model.parameters()]
    metrics, _ = sample_and_update(state, config, data.prompts.rows_at(0), 0)
    assert metrics["score_ties"] == 1 and metrics["pairs"] == 0 and "loss" not in metrics
    for old, new in zip(before, state.policy.model.parameters(), strict=True):
        assert_close(old, new, rtol=0, atol=0)


def test_gold_refuses_other_prompts(built, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What is two plus two?"}\n')
    with pytest.raises(UserError, match="judge=gold judges only prompts of the generated hotel world, and 1 of 1"):
        built(data=DataConfig(train=str(file), max_length=64))

"""Best of n: rows that SFT and DPO read, the same ones every time, scores as PPO gives them, and expert iteration that learns."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model, load_reward_model, load_tokenizer
from alignment.algorithms import best_of_n
from alignment.algorithms.best_of_n import (
    BestOfNConfig,
    Choice,
    ScoredResponses,
    choose_responses,
    kept_columns,
    load_rewards,
    results_of,
    run,
    sample_and_score,
    written_rows,
)
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows.read import read_rows
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenize import tokenize_prompts
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses, response_text
from alignment.rewards import AnswerSpec, LengthSpec, RewardPart, Rewards, RewardSpec
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import read_lines, write_lines
from tests.examples import prompt_example


def vowels(prompts, responses, **columns):
    """Share of vowels in a response."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]


def asked_for_eight(prompts, responses, **columns):
    """The length of the response, for prompts with an eight in them only."""
    return [float(len(text)) if "eight" in prompt else None for prompt, text in zip(prompts, responses, strict=True)]


VOWELS = RewardSpec(function=f"{__name__}:vowels")


@pytest.fixture
def settings(stage, world, tmp_path):
    """`settings(**changes)` -> config of the stage, small; responses need no end."""

    def make(name="best", **changes):
        values = {
            "policy": str(stage("sft") / "model"), "data": DataConfig(train=world["prompts"], max_length=128),
            "output": str(tmp_path / name), "responses_per_prompt": 4, "max_new_tokens": 8, "require_end": False,
        }  # fmt: skip
        if "reward_model" not in changes:
            values["rewards"] = [VOWELS]
        return BestOfNConfig(**(values | changes))

    return make


def samples_of(texts, scores, ended=None):
    ended = ended or [True] * len(texts)
    scores = torch.tensor(scores)
    return ScoredResponses(texts, [3] * len(texts), ended, {"reward": scores}, scores)


# --- choosing and writing, by hand ----------------------------------------------------------------------------------


def test_choices_and_figures_by_hand(settings):
    """Three prompts with two responses each; the second prompt's better one has no end, the third's have no text."""
    samples = samples_of(
        ["a", "b", "c", "d", " ", ""], [0.0, 1.0, 4.0, 2.0, 5.0, 0.0], [True, True, False, True, True, True]
    )
    config = settings(responses_per_prompt=2, require_end=True)
    choices = choose_responses(config, samples)
    assert choices == [Choice([1], (1, 0)), Choice([1], None), Choice([], None)]
    assert choose_responses(replace(config, require_end=False), samples)[1] == Choice([0], (0, 1))
    assert choose_responses(replace(config, threshold=1.5), samples) == [
        Choice([], None),
        Choice([1], None),
        Choice([], None),
    ]
    results = results_of(config, samples, choices)
    assert results["score"] == pytest.approx(12 / 6) and results["kept_score"] == pytest.approx(1.5)
    assert (results["demonstrations"], results["comparisons"], results["prompts_without_demonstration"]) == (2, 1, 1)
    best = [
        {"n": 1, "kl_bound": 0.0, "score": 2.0},
        {"n": 2, "kl_bound": pytest.approx(0.693147 - 0.5), "score": 10 / 3},
    ]
    assert results["best_of"] == [pytest.approx(point) for point in best]
    assert results["ended_share"] == pytest.approx(5 / 6) and results["empty_share"] == pytest.approx(1 / 3)
    assert results["distinct_share"] == 1 and results["unscored_share"] == 0 and results["response_tokens"] == 3


def test_a_response_that_a_judge_failed_on_is_neither_kept_nor_compared(settings):
    """Judged 7, 8, 6 and not at all, less a tenth of the length: the pair is second against third, by 8 - 5.8."""
    judge = RewardPart("judge", lambda *_: torch.tensor([7.0, 8.0, 6.0, math.nan]), max_failed_share=0.25)
    length = RewardPart("length", lambda *_: torch.tensor([-0.1, 0.0, -0.2, 0.0]))
    scores = Rewards([judge, length], lambda sums: sums)(PROMPTS[:1] * 4, [[1]] * 4, [True] * 4).shaped
    samples = samples_of(["a", "b", "c", "d"], scores.tolist())
    [choice] = choose_responses(settings(keep=None), samples)
    assert choice == Choice([1, 0, 2], (1, 2))
    rows = written_rows(PROMPTS[:1], samples, [choice])
    assert [pair["margin"] for pair in rows["comparisons"]] == [pytest.approx(8 - 5.8)]


def test_a_threshold_is_reached_by_the_same_number_in_single_precision(settings):
    samples = samples_of(["a", "b"], [0.7, 0.6])
    assert choose_responses(settings(responses_per_prompt=2, threshold=0.7), samples)[0].kept == [0]


DIALOGUE = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PROMPTS = [  # every one with columns that a reader would take for another row, or refuse
    prompt_example([1], "Hello?", {"answer": "1", "messages": [], "system": "Be brief.", "label": False}, "r1"),
    prompt_example([1], DIALOGUE, {"answer": "2", "chosen": "x", "system": "Be brief.", "tools": [TOOL]}, "r2"),
    prompt_example([1], "Hello?", {"answer": "3", "instruction": "x", "history": [["a", "b"]], "response": "y"}, "r3"),
]


@pytest.mark.parametrize("prompts", [PROMPTS[::2], PROMPTS[1:2]], ids=["texts", "messages"])
def test_rows_are_read_as_what_they_are(tmp_path, prompts):
    samples = samples_of([" yes", "no"] * len(prompts), [1.0, 0.0] * len(prompts))
    rows = written_rows(prompts, samples, [Choice([0, 1], (0, 1))] * len(prompts))
    for kind, written in rows.items():
        write_lines(tmp_path / f"{kind}.jsonl", written)
    demonstrations = read_rows(str(tmp_path / "demonstrations.jsonl"), "demonstrations")[0]
    assert [record.response for record in demonstrations] == [" yes", "no"] * len(prompts)
    assert [record.prompt for record in demonstrations[::2]] == [prompt.prompt for prompt in prompts]
    pairs = read_rows(str(tmp_path / "comparisons.jsonl"), "comparisons")[0]
    assert [(pair.chosen, pair.rejected, pair.margin) for pair in pairs] == [(" yes", "no", 1.0)] * len(prompts)
    assert [pair.prompt for pair in pairs] == [prompt.prompt for prompt in prompts]
    again = read_rows(str(tmp_path / "demonstrations.jsonl"), "prompts")[0]
    assert [record.extra["answer"] for record in again[::2]] == [prompt.extra["answer"] for prompt in prompts]
    for record in (*demonstrations, *pairs):
        assert record.tools == (None if isinstance(record.prompt, str) else [TOOL]) and record.messages is None


def test_what_a_prompt_says_of_another_response_is_not_kept():
    assert kept_columns(PROMPTS[0], "demonstrations") == {"prompt": "Hello?", "answer": "1"}
    assert kept_columns(PROMPTS[1], "comparisons").keys() == {"prompt", "answer", "system", "tools"}


# --- runs -----------------------------------------------------------------------------------------------------------


def test_samples_are_of_their_row_numbers_and_the_best_is_written(settings, stage, world):
    """Response k to prompt i has the draws of row i * n + k, in parts of one batch or all at once."""
    model = str(stage("reward") / "model")
    config = settings(reward_model=model, write=["demonstrations", "comparisons"])
    output = run(config)
    policy, tokenizer = load_model(config.policy), load_tokenizer(config.policy)
    records = read_rows(world["prompts"], "prompts")[0]
    ids = [row.ids for row in tokenize_prompts(records, tokenizer, 128)[0] for _ in range(4)]
    drawn = decode_responses(policy, ids, SamplingConfig(8, seed=0), sorted(stop_token_ids(tokenizer)))
    scores = load_reward_model(model).score_ids([[*a, *b] for a, b in zip(ids, drawn.token_ids, strict=True)])
    written = {row["prompt"]: row for row in read_lines(output / "demonstrations.jsonl")}
    pairs = {row["prompt"]: row for row in read_lines(output / "comparisons.jsonl")}
    for i, record in enumerate(records):
        group = range(4 * i, 4 * i + 4)
        texts = [response_text(tokenizer, drawn.token_ids[row], drawn.ended[row]) for row in group]
        able = [k for k in range(4) if texts[k].strip()]
        best, worst = (pick(able, key=lambda k: float(scores[4 * i + k])) for pick in (max, min))
        assert written[record.prompt]["completion"] == pairs[record.prompt]["chosen"] == texts[best]
        assert written[record.prompt]["score"] == pytest.approx(float(scores[4 * i + best]), abs=1e-5)
        assert pairs[record.prompt]["rejected"] == texts[worst]
        lead = float(scores[4 * i + best] - scores[4 * i + worst])
        assert pairs[record.prompt]["margin"] == pytest.approx(lead, abs=1e-5)
    results = json.loads((output / "results.json").read_text())
    assert results["score"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert results["best_of"][-1]["score"] == pytest.approx(float(scores.view(-1, 4).amax(1).mean()), abs=1e-5)


def test_a_run_is_the_same_in_small_parts_and_differs_by_seed(settings, monkeypatch):
    whole = run(settings("whole", keep=None))
    monkeypatch.setattr(best_of_n, "BATCHES", 1)
    parts = run(settings("parts", keep=None, batch_size=5))
    other = run(settings("other", keep=None, seed=1))
    texts = [(output / "demonstrations.jsonl").read_text() for output in (whole, parts, other)]
    assert texts[0] == texts[1] != texts[2]
    assert (whole / "results.json").read_text() == (parts / "results.json").read_text()


def test_several_rewards_are_shaped_as_in_ppo(settings, stage):
    """A reward model is normalized over all samples, a length is clipped; what applies to few counts 0 elsewhere."""
    rewards = [
        RewardSpec(str(stage("reward") / "model")),
        RewardSpec(length=LengthSpec(max=4, penalty=0.25), clip=(-0.5, 0.0), weight=2.0),
        RewardSpec(function=f"{__name__}:asked_for_eight", weight=0.0625),
    ]
    config = settings(rewards=rewards, max_new_tokens=6, min_p=0.001)
    policy, tokenizer = load_model(config.policy), load_tokenizer(config.policy)
    prompts = prepare(config.data, "prompts", tokenizer)[0]
    found = sample_and_score(config, policy, tokenizer, prompts, load_rewards(config, prompts, tokenizer))
    raw = found.parts["reward_model"].double()
    length = torch.tensor([max(-0.5, -0.25 * max(0, count - 4)) for count in found.lengths])
    assert set(length.tolist()) >= {-0.5, 0.0}
    wanted = (
        (raw - raw.mean()) / raw.std(unbiased=False) + 2 * length + 0.0625 * found.parts["asked_for_eight"].nan_to_num()
    )
    assert_close(found.scores.double(), wanted.double(), atol=1e-5, rtol=0)


def test_responses_that_no_reward_applies_to_are_counted_and_not_kept(settings):
    output = run(settings(rewards=[RewardSpec(function=f"{__name__}:asked_for_eight")]))
    rows, results = read_lines(output / "demonstrations.jsonl"), json.loads((output / "results.json").read_text())
    assert 0 < len(rows) < 16 and all("eight" in row["prompt"] for row in rows)
    assert results["unscored_share"] == pytest.approx(1 - len(rows) / 16)
    assert results["prompts_without_demonstration"] == 16 - len(rows)


def test_expert_iteration_learns_what_a_function_pays_for(settings, make_stage, tmp_path):
    """Two rounds of the best 4 of 16 and SFT on them raise the share of vowels of a sample by more than half."""
    policy, scores = settings().policy, []
    for number in range(3):
        config = settings(f"round{number}", policy=policy, responses_per_prompt=16, keep=4, seed=number)
        output = run(config)
        scores.append(json.loads((output / "results.json").read_text())["score"])
        optim = OptimConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0)
        data = DataConfig(train=str(output / "demonstrations.jsonl"), max_length=128, check="warn")
        train, sft = make_stage(
            "sft", policy, tmp_path / f"sft{number}", data=data, optim=optim,
            training=TrainingConfig(epochs=4, batch_size=16),
        )  # fmt: skip
        if number < 2:
            policy = str(train(sft))
    assert scores[1] > 1.15 * scores[0] and scores[2] > 1.5 * scores[0], scores


# --- refusals -------------------------------------------------------------------------------------------------------


def test_impossible_rewards_are_refused_before_a_network_is_loaded(settings, monkeypatch):
    monkeypatch.setattr(best_of_n, "load_model", None)
    answer = RewardSpec(answer=AnswerSpec("exact", column="gold"))
    with pytest.raises(UserError, match="needs the column 'gold'"):
        run(settings(rewards=[answer]))
    with pytest.raises(UserError, match="nowhere: no such directory"):
        run(settings(rewards=[VOWELS, RewardSpec("nowhere")]))


def test_nothing_to_keep_is_an_error_with_the_way_out(settings, tmp_path):
    with pytest.raises(UserError, match=r"nothing is left for demonstrations.jsonl: .* lower threshold"):
        run(settings("high", threshold=2.0))
    assert json.loads((tmp_path / "high" / "results.json").read_text())["demonstrations"] == 0
    with pytest.raises(UserError, match="nothing is left for comparisons"):
        run(settings("ties", rewards=[RewardSpec(regex="zzzz")], write=["comparisons"]))

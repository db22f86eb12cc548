"""Online DPO on several rewards: pairs worked by hand, the short form to the last bit, judges that fail, runs that learn."""

import pytest
import torch

from alignment.algorithms.online_dpo import build_online_state, make_pairs, sample_and_update
from alignment.algorithms.rollouts import rollout
from alignment.algorithms.rollouts.metrics import sample_metrics
from alignment.algorithms.rollouts.rollout import collect, draw_samples
from alignment.algorithms.rollouts.setup import read_rollout_data
from alignment.algorithms.rollouts.state import SampledResponses
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import Generation, response_text
from alignment.rewards import AnswerSpec, JudgeSpec, LengthSpec, RewardPart, Rewards, RewardSpec
from alignment.training import OptimConfig, Run, TrainingConfig
from tests.conftest import write_lines
from tests.examples import prompt_example
from tests.stub_server import good, serving

NAN = float("nan")


@pytest.fixture
def settings(stage, make_stage, tmp_path):
    """`settings(output, **changes)` -> run function and config of online DPO from the SFT policy."""

    def make(output="run", **changes):
        return make_stage("online_dpo", str(stage("sft") / "model"), tmp_path / output, **changes)

    return make


def built(config):
    """State and first prompts of a config, built as a run builds them."""
    with Run(config.output, {}, stage="online_dpo") as directory:
        data = read_rollout_data(config, directory)
        return build_online_state(config, data, directory), data.prompts.rows_at(0)


# Pairs by hand


@pytest.fixture
def sums(tmp_path):
    """Four prompts whose answer is 7."""
    path = tmp_path / "sums.jsonl"
    write_lines(path, ({"prompt": f"Sum {i}?", "answer": "7"} for i in range(4)))
    return DataConfig(train=str(path), max_length=64)


def test_pairs_of_a_weighted_mix_by_hand(settings, sums, monkeypatch):
    """A right answer against a wrong one; two right ones; a right one that is too long; two wrong ones.

    The third costs 2 * 1.0 before the length is clipped, which is what is logged, and 2 * 0.4 after it, which decides.
    """
    texts = ["#### 7", "#### 8", "#### 7", "= #### 7", "8", "yes yes yes #### 7", "8", "9"]
    length = LengthSpec(max=8, penalty=0.1, unit="characters")
    rewards = [RewardSpec(answer="gsm8k"), RewardSpec(length=length, clip=(-0.4, 0.0), weight=2.0)]
    training = TrainingConfig(batch_size=4, max_steps=1)
    _, config = settings(rewards=rewards, data=sums, training=training, tie_margin=0.15, loss="odpo")
    state, prompts = built(config)
    ids = [state.start.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [prompt for prompt in prompts for _ in range(2)]
    drawn = SampledResponses(rows, list(range(8)), Generation([], ids, [[-1.0] * len(row) for row in ids], [False] * 8))
    monkeypatch.setattr(rollout, "draw_samples", lambda *_: drawn)
    samples = collect(state, config, prompts, 0)
    pairs, metrics = make_pairs(samples, config, state.process_group)
    first, third = pairs
    assert (first.row_id, third.row_id) == (rows[0].row_id, rows[4].row_id)
    assert third.documents[0][-len(ids[5]) :] == ids[5] and third.documents[1][-len(ids[4]) :] == ids[4]
    assert (first.values.get("margin"), third.values.get("margin")) == (pytest.approx(1.0), pytest.approx(0.2))
    assert metrics["pairs"] == 2 and metrics["score_ties"] == 0.5 and metrics["unjudged"] == 0
    assert metrics["chosen_score"] == pytest.approx((1.0 - 1.0) / 2) and metrics["rejected_score"] == 0
    logged = sample_metrics(samples, state)
    assert logged["score"] == pytest.approx((1 + 0 + 1 + 1 + 0 - 1 + 0 + 0) / 8)
    assert logged["score/answer"] == 0.5 and logged["score/length"] == pytest.approx(-1.0 / 8)
    assert logged["unscored_share/answer"] == logged["unscored_share/length"] == 0


def part(name, *values, max_failed_share=None):
    return RewardPart(name, lambda *_: torch.tensor(values), max_failed_share=max_failed_share)


def test_what_is_unjudged_by_hand(settings):
    """A judge that failed is no evidence; a rule that does not apply to a prompt counts 0, unless no other one applies."""
    prompts = [prompt_example([7], "", {}, f"row {i}") for i in range(4)]
    rules = part("rule", 1.0, NAN, NAN, 2.0), part("other", 0.5, 3.0, NAN, NAN)
    scores = Rewards(rules, lambda sums: sums)(prompts, [], [])
    assert scores.total[[0, 1, 3]].tolist() == scores.shaped[[0, 1, 3]].tolist() == [1.5, 3.0, 2.0]
    assert scores.total.isnan().tolist() == scores.shaped.isnan().tolist() == [False, False, True, False]
    judge = part("judge", 1.0, 1.0, 1.0, NAN, max_failed_share=0.5)
    assert Rewards((*rules, judge), lambda sums: sums)(prompts, [], []).total.isnan().tolist() == [False] * 3 + [True]


# The short form


def test_one_entry_is_the_short_form(settings, stage):
    """`rewards` with one reward model gives the pairs, margins and policy of `reward_model` to the last bit."""
    model = str(stage("reward") / "model")
    forms = {
        "short": {"reward_model": model},
        "list": {"rewards": [RewardSpec(model)]},
        "normalized": {"rewards": [RewardSpec(model, normalize="first")]},
    }
    found = {}
    for name, form in forms.items():
        _, config = settings(name, **form, loss="odpo", max_new_tokens=6, missing_end_penalty=0.5)
        state, prompts = built(config)
        history = [sample_and_update(state, config, prompts, step) for step in range(2)]
        weights = torch.cat([parameter.detach().flatten() for parameter in state.policy.model.parameters()])
        found[name] = [metrics for metrics, _ in history], [samples.scores for _, samples in history], weights
    metrics, scores, weights = found["short"]
    others, other_scores, other_weights = found["list"]
    assert torch.equal(weights, other_weights) and all(map(torch.equal, scores, other_scores))
    for line, other in zip(metrics, others, strict=True):
        kept = [name for name in line if "second" not in name]
        assert [line[name] for name in kept] == [other[name] for name in kept]
        assert {*other} - {*line} == {"score/reward_model", "unscored_share/reward_model"}
        assert other["score/reward_model"] == pytest.approx(line["score"])
    assert not torch.equal(weights, found["normalized"][2])  # so margins do tell the forms apart


# Settings


def test_impossible_rewards_are_refused_before_a_network_is_loaded(settings, stage, sums, monkeypatch):
    from alignment.algorithms.rollouts import setup

    monkeypatch.setattr(setup, "load_policy", lambda *_, **__: pytest.fail("a network was loaded"))
    answer = RewardSpec(answer=AnswerSpec("exact", column="solution"))
    run, config = settings("column", rewards=[answer], data=sums)
    with pytest.raises(UserError, match="needs the column 'solution': it is missing in 4 of 4 prompts"):
        run(config)
    single = RewardSpec(str(stage("reward") / "model"), reward_combine="min")
    run, config = settings("members", rewards=[single])
    with pytest.raises(UserError, match="reward_combine=min combines the members of an ensemble"):
        run(config)
    run, config = settings("function", rewards=[RewardSpec(function="nowhere:f")])
    with pytest.raises(UserError, match="nowhere"):
        run(config)


# A judge that fails


def spec_of(server, **settings):
    return RewardSpec(judge=JudgeSpec(server.url, retries=0, timeout_seconds=5.0, **settings))


def test_a_failed_judgment_leaves_its_prompt_without_a_pair(settings):
    """Two responses of sixteen: their prompts are counted and learned nothing from; the others are."""
    broken = set()

    def answer(body, count):
        key = body["prompt"], body["response"]
        return (
            (500, {}, "") if key in broken else good(len(body["response"]) + sum(body["response"].encode()) % 97 / 100)
        )

    with serving(answer) as server:
        _, config = settings(rewards=[spec_of(server, max_failed_share=0.5)], missing_end_penalty=0.0)
        state, prompts = built(config)
        drawn = draw_samples(state, config, prompts, 0)
        tokenizer, responses = state.start.tokenizer, drawn.responses
        texts = [response_text(tokenizer, *row) for row in zip(responses.token_ids, responses.ended, strict=True)]
        keys = [(row.prompt, text) for row, text in zip(drawn.prompts, texts, strict=True)]
        broken.update((keys[0], keys[5]))
        failed = [key in broken for key in keys]
        metrics, samples = sample_and_update(state, config, prompts, 0)
        pairs, _ = make_pairs(samples, config, state.process_group)
    assert samples.score_parts["judge"].isnan().tolist() == failed and samples.scores.isnan().tolist() == failed
    lost = {drawn.prompts[row].row_id for row in range(16) if failed[row]}
    assert metrics["unscored_share/judge"] == sum(failed) / 16 and metrics["unjudged"] == len(lost) / 8 > 0
    assert pairs and lost.isdisjoint(pair.row_id for pair in pairs)
    assert metrics["pairs"] == len(pairs) and metrics["score"] > 1 and state.policy.step > 0


def test_more_failures_than_allowed_end_the_run(settings, tmp_path):
    with serving(lambda body, count: (500, {}, "") if count % 4 == 0 else good(1.0)) as server:
        run, config = settings("run", rewards=[spec_of(server, max_failed_share=0.1, requests=1)])
        with pytest.raises(UserError, match=r"judge gave no score for .* of 16 responses; at most 10% may fail"):
            run(config)
        assert not (tmp_path / "run" / "model").exists()
    with serving(lambda body, count: (500, {}, "")) as server:
        run, config = settings("silent", rewards=[spec_of(server, max_failed_share=1.0)])
        with pytest.raises(UserError, match="rewards could not judge the responses to 8 of 8 prompts"):
            run(config)


# Runs


def test_it_learns_what_a_function_pays_for(settings, read_metrics, tmp_path):
    """Twelve iterations raise the share of vowels by half; with the sign of the weight turned they halve it."""
    found = {}
    for weight in (1.0, -1.0):
        run, config = settings(
            f"weight{weight}", rewards=[RewardSpec(function="tests.algorithms.test_best_of_n:vowels", weight=weight)],
            responses_per_prompt=4, epochs=1, minibatches=1, max_new_tokens=6, missing_end_penalty=0.0, beta=0.05,
            optim=OptimConfig(learning_rate=2e-2), training=TrainingConfig(batch_size=16, max_steps=12),
        )  # fmt: skip
        run(config)
        lines = read_metrics(tmp_path / f"weight{weight}")
        assert all(line["score"] == pytest.approx(weight * line["score/vowels"], abs=1e-6) for line in lines)
        shares = [line["score/vowels"] for line in lines]
        found[weight] = sum(shares[-3:]) / sum(shares[:3])
    assert found[1.0] > 1.4 and found[-1.0] < 0.6, found

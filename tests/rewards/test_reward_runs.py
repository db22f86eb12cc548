"""PPO on several rewards: two reward models, a function and a rule; what is logged, and that a resumed run is the same run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo import iterate, ppo
from alignment.algorithms.ppo.advantages import add_advantages, greedy_baseline
from alignment.algorithms.ppo.ppo import update_policy_and_value
from alignment.algorithms.rollouts.rollout import Baseline, collect
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.reward_model import load_reward_model
from alignment.rewards import AnswerSpec, LengthSpec, RewardSpec
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import read_lines
from tests.ppo_states import state_of

TIMES = ("second", "mfu")  # names of what differs from run to run


def vowels(prompts, responses, **columns):
    """Share of vowels; does not apply to empty responses."""
    return [sum(c in "aeiou" for c in text) / len(text) if text else None for text in responses]


def three_of_four(prompts, responses, **columns):
    """Less for many vowels, and far below 0; fails on every fourth response."""
    shares = [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]
    return [None if number % 4 == 3 else -2 - share for number, share in enumerate(shares)]


def some(prompts, responses, **columns):
    """Share of vowels; fails where the length leaves 1 over 4."""
    return [None if len(text) % 4 == 1 else sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]


def constant(prompts, responses, **columns):
    """The same for every response."""
    return [0.7] * len(responses)


@pytest.fixture
def several(stage, make_stage, tmp_path):
    """`several(output, rewards, **changes)` -> run function and config of PPO on several rewards."""

    def make(output="ppo", rewards=None, **changes):
        model = str(stage("reward") / "model")
        rewards = (
            []
            if "reward_model" in changes
            else rewards
            or [
                RewardSpec(reward_model=model),
                RewardSpec(reward_model=model, name="again", weight=0.5, normalize="running", clip=(-1.0, 1.0)),
                RewardSpec(function="tests.rewards.test_reward_runs:vowels", weight=2.0),
                RewardSpec(length=LengthSpec(max=4, penalty=0.25), clip=(-1.0, 0.0)),
            ]
        )
        changes = {"value_model": "policy"} | changes
        return make_stage("ppo", str(stage("sft") / "model"), tmp_path / output, rewards=rewards, **changes)

    return make


def test_ppo_learns_from_the_sum_of_its_rewards_and_logs_each(several, tmp_path):
    run, config = several()
    run(config)
    for line in read_lines(tmp_path / "ppo" / "metrics.jsonl"):
        total = line["score/reward_model"] + 0.5 * line["score/again"] + line["score/length"]
        applies = 1 - line["unscored_share/vowels"]
        assert line["score"] == pytest.approx(total + 2 * line["score/vowels"] * applies, abs=1e-5)
        assert line["score/again"] == pytest.approx(line["score/reward_model"])
        assert line["unscored_share/length"] == 0


def select(rollout, rows):
    """Some rows of a rollout."""
    names = ("mask", "log_probs", "sampled_log_probs", "reference_log_probs", "values", "scores", "ended")
    optional = ("shaped_scores", "rewards", "advantages", "returns")
    tensors = {name: getattr(rollout, name) for name in (*names, *optional)}
    lists = {name: [getattr(rollout, name)[row] for row in rows] for name in ("prompts", "responses", "numbers")}
    chosen = {name: None if values is None else values[rows] for name, values in tensors.items()}
    baseline = rollout.baseline
    if baseline is not None:
        baseline = Baseline(baseline.scores[rows], baseline.ended[rows], baseline.shaped_scores[rows])
    return replace(rollout, **lists, **chosen, baseline=baseline)


@pytest.mark.parametrize("advantages", ["grpo", "rloo", "dr_grpo", "reinforce++", "remax", "gae"])
def test_a_response_without_a_score_is_learned_from_as_if_it_were_not_there(several, advantages):
    """Four responses to each prompt, of which the function fails on the last: what the other three give."""
    changes = (
        {"kl_in": "loss", "kl_estimator": "k3", "loss_normalization": "sequence_mean"} if advantages == "grpo" else {}
    )
    changes |= {} if advantages == "gae" else {"value_model": "reward_model"}
    rewards = [RewardSpec(function="tests.rewards.test_reward_runs:three_of_four")]
    settings = {"advantages": advantages, "epochs": 1, "minibatches": 1, "temperature": 2.0, **changes}

    def state_with(count):
        return several(f"of {count}", rewards, responses_per_prompt=count, **settings)[1]

    config, fewer = state_with(4), state_with(3)
    (state, prompts), (other, _) = state_of(config), state_of(fewer)
    rollout = collect(state, config, prompts, 0)
    if advantages == "remax":
        rollout = replace(rollout, baseline=greedy_baseline(rollout, state, config, prompts))
    rows = [row for row in range(len(rollout.prompts)) if row % 4 != 3]
    whole = add_advantages(rollout, config, state.normalizer, 0.1, lambda x: x)
    wanted = add_advantages(select(rollout, rows), fewer, other.normalizer, 0.1, lambda x: x)
    for name in ("rewards", "advantages", "returns"):
        assert_close(getattr(whole, name)[rows], getattr(wanted, name), atol=1e-6, rtol=0)
        assert not getattr(whole, name)[3::4].any()
    assert wanted.advantages.abs().max() > 0.02
    first = update_policy_and_value(state, config, whole, 0)
    second = update_policy_and_value(other, fewer, wanted, 0)
    timeless = {name for name in first if not any(word in name for word in TIMES)}
    assert {name: first[name] for name in timeless} == pytest.approx(
        {name: second[name] for name in timeless}, abs=1e-6
    )
    for one, two in zip(state.engines.values(), other.engines.values(), strict=True):
        for before, after in zip(*(engine.backend.unwrapped.parameters() for engine in (one, two)), strict=True):
            assert_close(before, after, atol=1e-6, rtol=0)


def test_a_function_that_fails_on_a_quarter_is_logged_by_what_it_gave(several, tmp_path):
    rewards = [RewardSpec(function="tests.rewards.test_reward_runs:three_of_four")]
    grpo = {"advantages": "grpo", "responses_per_prompt": 4, "value_model": "reward_model"}
    for name, changes in {"grpo": grpo, "gae": {}}.items():
        run, config = several(name, rewards, **changes)
        run(config)
        for line in read_lines(tmp_path / name / "metrics.jsonl"):
            assert line["unscored_share"] == line["unscored_share/three_of_four"] == 0.25
            assert line["score"] == pytest.approx(line["score/three_of_four"]) and line["score"] <= -2
            assert line["score_std"] < 0.5  # with 0 for the failures above 0.8


def test_ranks_share_the_responses_that_have_a_score(several, monkeypatch):
    """Three prompts with two responses each on two ranks; of six responses numbers 1 and 2 have no score."""
    config = several(responses_per_prompt=2, minibatches=2, epochs=1)[1]
    nan, held, seen = float("nan"), {0: [0, 1, 4, 5], 1: [2, 3]}, []
    scores = torch.tensor([1.0, nan, nan, 2.0, 3.0, 4.0])
    monkeypatch.setattr(ppo, "local_batches", lambda rollout, rows, group, config: rows)
    for rank, rows in held.items():
        group = SimpleNamespace(rank=rank, size=2, gather_objects=lambda own: seen.append(own) or [[0, 4, 5], [3]])
        rollout = SimpleNamespace(learned=~scores[rows].isnan(), prompts=rows)
        first, second = ppo.minibatches(rollout, config, group, 0)
        assert sorted(first + second) == [0, 3, 4, 5] and len(first) == len(second)
    assert seen == [[0, 4, 5], [3]]


def test_equal_scores_pay_nothing_for_an_end_and_the_penalty_grows_with_the_scores(several):
    """The reward times 10 is worth ten times as much in all: with a penalty of fixed size it would not be."""

    def rewards_of(name, **spec):
        config = several(name, [RewardSpec(**spec)], kl_coef=0.0, missing_end_penalty=1.5)[1]
        state, prompts = state_of(config)
        state.stop_ids = list(range(0, 384, 12))  # so that some responses end and some do not
        rollout = collect(state, config, prompts, 0)
        assert 0 < rollout.ended.sum() < len(rollout.ended)
        return rollout, add_advantages(rollout, config, state.normalizer, 0.0, lambda x: x).rewards.sum(1)

    _, equal = rewards_of("constant", function="tests.rewards.test_reward_runs:constant")
    assert_close(equal, torch.full_like(equal, 0.7))
    length = LengthSpec(target=3, unit="characters")
    (rollout, one), (_, ten) = (rewards_of(f"by {weight}", length=length, weight=weight) for weight in (1.0, 10.0))
    assert_close(ten, 10 * one)
    spread = rollout.scores.std(correction=0)
    assert spread > 0 and rollout.score_deviation == pytest.approx(spread.item())
    assert_close(one, rollout.scores - 1.5 * spread * (~rollout.ended).float())


def test_one_entry_is_the_short_form(several, stage):
    """`rewards` with one reward model gives the rewards, and so the policy, of `reward_model` to the last bit."""
    model = str(stage("reward") / "model")
    found = []
    for output, settings in (("short", {"reward_model": model}), ("list", {"rewards": [RewardSpec(model)]})):
        _, config = several(output, **settings)
        state, prompts = state_of(config)
        metrics, rollout = iterate(state, config, prompts, 0)
        found.append(
            (metrics, rollout.rewards, [p.detach().clone() for p in state.policy.backend.unwrapped.parameters()])
        )
    (metrics, rewards, weights), (others, other_rewards, other_weights) = found
    assert torch.equal(rewards, other_rewards)
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))
    kept = [name for name in metrics if not any(word in name for word in TIMES)]
    assert [metrics[name] for name in kept] == [others[name] for name in kept] and "score" in kept


def test_a_reward_model_with_another_tokenizer_gives_exactly_the_score_of_the_text(several, foreign, stage):
    """Beside one that shares the policy's tokenizer, which is given the very ids."""
    own = str(stage("reward") / "model")
    state, prompts = state_of(several(rewards=[RewardSpec(foreign, name="foreign"), RewardSpec(own, name="own")])[1])
    _, rollout = iterate(state, several()[1], prompts, 0)
    tokenizer, ended = state.start.tokenizer, rollout.ended.tolist()
    texts = [
        (prompt.prompt, response_text(tokenizer, ids, end))
        for prompt, ids, end in zip(prompts, rollout.responses, ended, strict=True)
    ]
    wanted = load_reward_model(foreign).score(texts, ended=ended)
    assert torch.equal(rollout.score_parts["foreign"], wanted) and wanted.std() > 0.01
    ids = [[*prompt, *response] for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)]
    assert torch.equal(rollout.score_parts["own"], load_reward_model(own).score_ids(ids))
    assert_close(rollout.scores, wanted + rollout.score_parts["own"])


def test_a_run_without_any_reward_model_is_paid_by_the_column_of_its_rows(several, tmp_path, read_metrics):
    """Answers are one letter or another; half of the rows accept what every response has."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Room {i}?", "gold": ["", "zzz"] if i % 2 else "zzz", "word": "a"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=str(path), max_length=64)
    answer = RewardSpec(answer=AnswerSpec("exact", column="gold", otherwise=-1.0))
    run, config = several("refused", rewards=[answer], data=data)
    with pytest.raises(UserError, match=r"needs the column 'gold': it holds nothing to compare in 4 of 8 prompts .*:2"):
        run(config)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    answer = RewardSpec(answer=AnswerSpec("exact", column="word", otherwise=-1.0))
    run, config = several("paid", rewards=[answer, RewardSpec(regex="a|e|i|o|u", weight=0.5)], data=data)
    run(config)
    for line in read_metrics(tmp_path / "paid"):
        assert line["score"] == pytest.approx(line["score/answer"] + 0.5 * line["score/regex"], abs=1e-6)
        assert -1 <= line["score/answer"] <= 1 and 0 <= line["score/regex"] <= 1


def test_greedy_responses_of_remax_are_in_no_statistics(several, stage):
    running = RewardSpec(str(stage("reward") / "model"), normalize="running", clip=(-3.0, 3.0))
    _, config = several(rewards=[running], advantages="remax", value_model="reward_model")
    state, prompts = state_of(config)
    _, rollout = iterate(state, config, prompts, 0)
    assert state.score.state()["reward_model"][0] == 8.0
    assert rollout.baseline.shaped_scores.abs().max() <= 3 and rollout.baseline.shaped_scores.std() > 0


@pytest.mark.slow
def test_ppo_learns_what_a_function_pays_for(several, read_metrics, tmp_path):
    """Twelve iterations raise the share of vowels by a third; with the sign of the weight turned they lower it."""
    found = {}
    for weight in (1.0, -1.0):
        spec = RewardSpec(function=f"{__name__}:vowels", weight=weight, normalize="first")
        training = TrainingConfig(batch_size=16, max_steps=12)
        settings = {"kl_coef": 0.0, "missing_end_penalty": 0.0, "training": training, "epochs": 4, "gae_lambda": 1.0}
        settings["optim"] = OptimConfig(learning_rate=1e-2, eps=1e-5, schedule="constant", warmup_steps=0)
        run, config = several(f"weight{weight}", rewards=[spec], **settings)
        run(config)
        shares = [line["score/vowels"] for line in read_metrics(tmp_path / f"weight{weight}")]
        found[weight] = sum(shares[-3:]) / sum(shares[:3])
    assert found[1.0] > 1.33 and found[-1.0] < 0.75, found


def test_a_checkpoint_of_other_rewards_is_refused(several, stage):
    state, _ = state_of(several("other", rewards=[RewardSpec(str(stage("reward") / "model"), name="new")])[1])
    with pytest.raises(
        UserError, match="holds statistics of reward_model, and the config normalizes new; keep the rewards"
    ):
        state.score.load({"reward_model": [1.0, 0.0, 1.0]})

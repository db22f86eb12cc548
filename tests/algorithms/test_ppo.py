"""PPO as it runs: what it pays for, what it starts from, and that memory settings stay memory settings."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import load_reward_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.ppo import iterate
from alignment.algorithms.ppo.setup import build_state, start_value_model
from alignment.data.config import DataConfig
from alignment.data.text.chat import prompt_ids
from alignment.errors import UserError
from alignment.hotel_world.gold import gold_score
from alignment.reward_model import load_reward_network
from alignment.rewards.build import response_scorer
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import read_lines, write_lines
from tests.examples import prompt_example
from tests.ppo_states import state_of


@pytest.fixture
def text(world):
    return DataConfig(train=world["pretrain"], max_length=128)


# --- the update -----------------------------------------------------------------------------------------------------


def test_rows_that_fill_no_last_batch_are_made_up_for_from_the_next_epoch(ppo, read_metrics, tmp_path):
    """16 prompts in batches of 5 are 4 iterations; a last batch of 1 could not be cut into 2 minibatches."""
    run, config = ppo(training=TrainingConfig(batch_size=5, epochs=1), epochs=1, max_new_tokens=4)
    run(config)
    assert [line["step"] for line in read_metrics(tmp_path / "ppo")] == [1, 2, 3, 4]


# --- rewards --------------------------------------------------------------------------------------------------------


def test_a_reward_model_that_cannot_tell_is_refused(ppo):
    _, config = ppo()
    state, prompts = state_of(config)
    state.score = lambda prompts, responses, ended: torch.ones(len(prompts))
    with pytest.raises(UserError, match="same number"):
        iterate(state, config, prompts, 0)


def test_a_score_is_paid_at_the_end_less_what_a_missing_end_costs(ppo):
    """[H29] By the reason it ended: stop tokens of the run's own end a response as the tokenizer's end token does."""
    _, config = ppo(kl_coef=0.0, missing_end_penalty=2.0)
    state, prompts = state_of(config)
    state.stop_ids = list(range(0, 384, 12))  # so that some responses end and some do not
    state.score = lambda prompts, responses, ended: torch.arange(float(len(prompts)))
    _, rollout = iterate(state, config, prompts, 0)
    assert 0 < rollout.ended.sum() < len(prompts)
    last = rollout.rewards[torch.arange(len(prompts)), rollout.mask.sum(1) - 1]
    normal = (rollout.scores - rollout.scores.mean()) / rollout.scores.std(correction=0)
    assert_close(last, normal - 2.0 * (~rollout.ended).float(), atol=1e-5, rtol=0)
    assert_close(rollout.rewards.sum(1), last)  # and nothing before the end


def test_the_adaptive_coefficient_follows_the_measured_kl(ppo, read_metrics, tmp_path):
    training = TrainingConfig(batch_size=8, max_steps=4)
    run, config = ppo(
        training=training, kl_coef=0.3, kl_target=0.01, kl_horizon=40, optim=OptimConfig(learning_rate=1e-2)
    )
    run(config)
    lines = read_metrics(tmp_path / "ppo")
    coef = 0.3
    for line in lines:
        assert line["kl_coef"] == pytest.approx(coef)
        coef *= 1 + min(max(line["kl"] / 0.01 - 1, -0.2), 0.2) * 8 / 40
    assert len({line["kl_coef"] for line in lines}) == 4


# --- the four networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward_model", ["reward", "reward lora", "reward prefix", "reward lora on a whole policy"])
def test_the_value_model_is_the_reward_model_with_a_head_of_zeros(ppo, stage, make_stage, tmp_path, reward_model):
    """Where scores are normalized the head's scale means nothing; else it is kept. True of adapters too."""
    if reward_model == "reward lora on a whole policy":
        run, config = make_stage("reward", str(stage("sft") / "model"), tmp_path / "reward", adapter=LoRASpec(rank=2))
        directory = str(run(config))
    else:
        directory = str(stage(reward_model) / "model")
    ids = torch.arange(3, 40)[None]
    judge = load_reward_network(directory)
    adapter = LoRASpec(rank=2) if reward_model != "reward prefix" else None
    for normalize, factor in ((True, 0.0), (False, 1.0)):
        _, config = ppo(reward_directory=directory, adapter=adapter, normalize_scores=normalize)
        value_model = start_value_model(config, load_tokenizer(config.policy)).model.eval()
        with torch.no_grad():
            assert_close(value_model(ids).values, factor * judge(ids).values, atol=1e-5, rtol=0)
        assert value_model.head.weight.requires_grad


def test_the_value_model_writes_nothing_over_the_policys_base(ppo, stage, tmp_path):
    """Policy and reward model both adapters, of another kind than the new ones: `base` holds the starting policy."""
    from alignment.loading import load_model

    run, config = ppo(policy="sft lora", reward_model="reward lora", adapter=PrefixSpec(tokens=2))
    run(config)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        start = load_model(str(stage("sft lora") / "model"))(ids).logits
        assert_close(load_model(str(tmp_path / "ppo" / "base"))(ids).logits, start, atol=1e-5, rtol=0)


HEADED = (  # roles as words, turns end with the end token
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BRACKETED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endif %}{% endfor %}"
)


def with_template(directory, template):
    (Path(directory) / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(directory)


@pytest.fixture
def dialogues(tmp_path, stage):
    """A policy with a chat template, and 8 prompts of messages."""
    policy = with_template(shutil.copytree(stage("sft") / "model", tmp_path / "policy"), HEADED)
    rows = [
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Where is room {number}?"}]
        for number in range(8)
    ]
    path = tmp_path / "dialogues.jsonl"
    write_lines(path, ({"prompt": row} for row in rows))
    return policy, str(path), rows


def test_a_foreign_reward_model_reads_chats_through_its_own_template(ppo, foreign, dialogues, tmp_path):
    """What PPO notes as a sample's score is the score of its prompt's messages and its text; a response cut at its length
    is read without an end token. Up to the rounding of another batch."""
    policy, path, rows = dialogues
    judge = load_reward_model(with_template(foreign, BRACKETED))
    training = TrainingConfig(batch_size=8, max_steps=2)
    run, config = ppo(
        reward_directory=foreign, value_model="policy", training=training, max_new_tokens=4, data=DataConfig(train=path)
    )
    run(replace(config, policy=policy))
    for sample in map(json.loads, (tmp_path / "ppo" / "samples.jsonl").read_text(encoding="utf-8").splitlines()):
        [row] = [row for row in rows if row[1]["content"] in sample["prompt"]]
        ids = [judge.tokenizer.bos_token_id, *judge.tokenizer.apply_chat_template(row, tokenize=True)["input_ids"]]
        ids += judge.tokenizer(" " + sample["response"], add_special_tokens=False).input_ids
        assert sample["score"] == pytest.approx(judge.score_ids([ids]).item(), abs=5e-6)


def test_a_response_that_ended_is_scored_with_the_reward_models_own_end(tokenizer, dialogues, foreign):
    judge = load_reward_model(with_template(foreign, BRACKETED))
    policy, _, rows = dialogues
    words = tokenizer("At nine.", add_special_tokens=False).input_ids
    prompts = [prompt_example([5], rows[0], {}, "r")] * 2
    given = response_scorer(judge, load_tokenizer(policy), 1000)(
        prompts, [[*words, tokenizer.eos_token_id], words], [True, False]
    )
    expected = judge.score([(rows[0], "At nine.")] * 2, ended=[True, False])
    assert given.tolist() == expected.tolist() and abs(expected[0] - expected[1]) > 0.1
    assert_close(expected[:1], judge.score([(rows[0], "At nine.")]), atol=5e-6, rtol=0)


def test_cut_prompts_are_refused_for_a_foreign_reward_model(ppo, foreign, dialogues):
    policy, path, _ = dialogues
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": [{"role": "user", "content": "Where is it? " * 40}]}) + "\n")
    data = DataConfig(train=path, max_length=64)
    run, config = ppo(reward_directory=with_template(foreign, BRACKETED), value_model="policy", data=data)
    with pytest.raises(
        UserError, match=r"1 of 9 without their beginning .*jsonl:9.*raise data.max_length \(it is 64\)"
    ):
        run(replace(config, policy=policy))


def test_a_template_that_refuses_prompts_is_noticed_before_sampling(ppo, foreign, dialogues, tmp_path):
    policy, path, _ = dialogues
    with_template(foreign, "{{ raise_exception('no system role') }}")
    run, config = ppo(reward_directory=foreign, value_model="policy", data=DataConfig(train=path))
    with pytest.raises(UserError, match="no system role"):
        run(replace(config, policy=policy))
    assert not (tmp_path / "ppo" / "samples.jsonl").exists()


def test_a_reward_model_with_another_template_reads_through_its_own(dialogues, stage, tmp_path):
    policy, _, rows = dialogues
    directory = with_template(shutil.copytree(stage("reward") / "model", tmp_path / "judge"), BRACKETED)
    judge, tokenizer = load_reward_model(directory), load_tokenizer(policy)
    words = tokenizer("At nine.", add_special_tokens=False).input_ids
    example = prompt_example(prompt_ids(tokenizer, rows[0]), rows[0], {}, "r")
    given = response_scorer(judge, tokenizer, 1000)([example], [words], [False])
    assert given.tolist() == judge.score([(rows[0], "At nine.")], ended=[False]).tolist()


def test_a_foreign_reward_model_needs_a_value_model_of_the_policy(ppo, foreign, read_metrics, tmp_path):
    run, config = ppo("refused", reward_directory=foreign)
    with pytest.raises(UserError, match="value_model=policy"):
        run(config)
    run, config = ppo("done", reward_directory=foreign, value_model="policy")
    run(config)
    assert all(math.isfinite(line["value_loss"]) for line in read_metrics(tmp_path / "done"))


def test_a_value_model_from_the_policy_starts_at_zero(ppo):
    _, config = ppo(value_model="policy")
    state, prompts = state_of(config)
    _, rollout = iterate(state, config, prompts, 0)
    assert rollout.values.abs().max() == 0
    _, rollout = iterate(state, config, prompts, 1)
    assert rollout.values.abs().max() > 0


# --- metrics of the texts -------------------------------------------------------------------------------------------


def count_words(prompts, responses):
    return [len(prompt.split()) + len(response.split()) for prompt, response in zip(prompts, responses, strict=True)]


def kl(prompts, responses):
    """Named like a metric of PPO's own."""
    return [0.0 for _ in prompts]


def test_text_metrics_are_logged_under_their_functions_names(ppo, read_metrics, tmp_path):
    training = TrainingConfig(batch_size=2, max_steps=2)
    run, config = ppo(metrics=["hotel_gold", f"{__name__}:count_words"], training=training)
    run(config)
    samples = read_lines(tmp_path / "ppo" / "samples.jsonl")  # both responses of each iteration
    for line in read_metrics(tmp_path / "ppo"):
        prompts, responses = zip(
            *((s["prompt"], s["response"]) for s in samples if s["step"] == line["step"]), strict=True
        )
        assert line["count_words"] == sum(count_words(prompts, responses)) / 2
        assert line["gold_score"] == pytest.approx(sum(gold_score(prompts, responses)) / 2)


@pytest.mark.parametrize("names", [["nowhere:count"], ["math:count"], ["math:fsum", "math:fsum"]])
def test_unknown_metrics_are_refused_before_a_model_is_loaded(ppo, names):
    _, config = ppo(metrics=names)
    with pytest.raises(UserError, match="metrics: "):
        build_state(replace(config, policy="nowhere"), None)
    with pytest.raises(ValueError, match=r"metrics \['gold'\] are unknown; known: hotel_gold"):
        replace(config, metrics=["gold"])


def test_a_metric_named_like_one_of_the_run_ends_it(ppo):
    run, config = ppo(metrics=[f"{__name__}:kl"])
    with pytest.raises(UserError, match="are the run's own"):
        run(config)

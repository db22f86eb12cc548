"""Reward models that are encoders: texts and pairs with their tokenizer's special tokens, scores equal to transformers'."""

import pytest
import torch
from torch.testing import assert_close

from alignment import load_reward_model
from alignment.algorithms.scoring import RewardSource
from alignment.data.config import DataConfig
from alignment.data.encoder_inputs import encode_comparisons
from alignment.data.rows.records import Comparison, Prompt
from alignment.data.tokenize import EQUAL
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_wordpiece
from alignment.errors import UserError
from alignment.generation import Generation
from alignment.judging.responses import ResponseScorer
from alignment.models.weights_config import WeightsConfig
from tests.examples import prompt_example

TEXTS = ["what is the tallest tree", "a very tall one", "the redwood , by some way", "i do not know"]


@pytest.fixture
def directory(tmp_path):
    import transformers

    tokenizer = train_wordpiece(TEXTS * 4, 80)
    save_tokenizer(tokenizer, tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, id2label={0: "score"},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    return tmp_path, model


@torch.no_grad()
def test_pairs_and_texts_score_as_in_transformers(directory):
    path, model = directory
    reward = load_reward_model(str(path))
    pairs = [(TEXTS[0], TEXTS[2]), (TEXTS[0], TEXTS[3])]
    expected = [model(**reward.tokenizer(*pair, return_tensors="pt")).logits[0, 0] for pair in pairs]
    alone = model(**reward.tokenizer(TEXTS[1], return_tensors="pt")).logits[0, 0]
    assert_close(reward.score([*pairs, TEXTS[1]]), torch.stack([*expected, alone]), atol=1e-5, rtol=1e-5)
    assert expected[0] != expected[1]


def test_a_pair_that_is_equal_once_cut_is_dropped_and_not_counted_as_cut():
    tokenizer = train_wordpiece(["one two three"], 60)
    _, counts = encode_comparisons([Comparison("", "one one one two", "one one one three", None, "r1")], tokenizer, 5)
    assert counts.dropped == {EQUAL: 1} and counts.cut == {}


def test_a_prompt_of_messages_is_refused(directory):
    reward = load_reward_model(str(directory[0]))
    with pytest.raises(UserError, match="give each prompt as one text"):
        reward.score([([{"role": "user", "content": TEXTS[0]}], TEXTS[2])])


def test_ids_of_a_policy_are_not_read_without_special_tokens(directory):
    reward = load_reward_model(str(directory[0]))
    assert not reward.shares_token_ids(reward.tokenizer)


def test_prompts_of_messages_are_refused_before_any_is_answered(directory):
    reward = load_reward_model(str(directory[0]))
    prompts = [prompt_example([3, 4], [{"role": "user", "content": TEXTS[0]}], {}, "rows.jsonl:1")]
    source = RewardSource(
        reward_model="judge", rewards=[], data=DataConfig("rows.jsonl"), max_new_tokens=8, micro_batch_tokens=64
    )
    with pytest.raises(UserError, match=r"judge: the reward model is an encoder .* 1 of 1 prompts are messages"):
        source.check(prompts, reward, reward.tokenizer, "judge")


def test_a_judging_encoder_scores_pairs_of_texts(directory):
    judge = load_reward_model(str(directory[0]))
    answer = Generation([TEXTS[2], TEXTS[2]], [[3], [3]], [[0.0], [0.0]], [True, True])
    prompts = [Prompt(text, {}, f"r{row}") for row, text in enumerate(TEXTS[:2])]
    scorer = ResponseScorer(str(directory[0]), WeightsConfig())
    scorer.add(prompts, [(None, answer)])
    expected = judge.score([(text, TEXTS[2]) for text in TEXTS[:2]]).tolist()
    assert list(scorer.scores.values()) == scorer(prompts, answer.texts) == pytest.approx(expected, abs=1e-5)

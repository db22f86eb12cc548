"""A vocabulary with more rows than the tokenizer has tokens: no id without a token is drawn, and none is learned from. [C10]"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment import generate, load_model, load_tokenizer
from alignment.algorithms.best_of_n import BestOfNConfig
from alignment.algorithms.best_of_n import run as run_best_of_n
from alignment.algorithms.sft import SamplesConfig
from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.generation import SamplingConfig
from alignment.generation.sampling import RowSampler
from alignment.judging.likelihood import LanguageScorer
from alignment.judging.responses import sample_responses
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import OptimConfig, TrainingConfig

PROMPTS = ["Where is the spa?", "Hello"]
REWARDS = [RewardSpec(length=LengthSpec(target=3, unit="characters"))]
SAMPLED = {"advantages": "rloo", "responses_per_prompt": 2, "rewards": REWARDS, "max_new_tokens": 8}
NUMBERS = ("loss", "policy_loss", "entropy", "kl", "kl_k3", "grad_norm", "reverse_kl", "accuracy", "margin")


@pytest.fixture(scope="module")
def policies(tmp_path_factory, write_checkpoint, tokenizer):
    """The same model with a vocabulary of the tokenizer's size (0) and with 64 and 96 rows more, which are the likeliest."""
    largest = Path(write_checkpoint(tmp_path_factory.mktemp("96"), "llama", vocab_size=len(tokenizer) + 96))
    weights = load_file(largest / "model.safetensors")
    weights["lm_head.weight"][: len(tokenizer)] *= 8
    weights["lm_head.weight"][len(tokenizer) :] *= 30
    config = json.loads((largest / "config.json").read_text())
    directories = {96: str(largest)}
    for rows in (0, 64):
        directory = Path(write_checkpoint(tmp_path_factory.mktemp(str(rows)), "llama"))
        directories[rows] = str(directory)
    for rows, directory in directories.items():
        size = len(tokenizer) + rows
        cut = {n: x[:size].clone() if len(x) == len(tokenizer) + 96 else x for n, x in weights.items()}
        save_file(cut, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return directories


@pytest.fixture
def drawn(monkeypatch):
    """All token ids that are drawn."""
    ids, draw = [], RowSampler.draw

    def watched(self, *inputs):
        sampled = draw(self, *inputs)
        ids.extend(sampled.tokens.tolist())
        return sampled

    monkeypatch.setattr(RowSampler, "draw", watched)
    return ids


WAYS = {
    "sampled": {}, "greedy": {"temperature": 0.0}, "filtered": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "processed": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "beams": {"num_beams": 3}, "beams processed": {"num_beams": 3, "repetition_penalty": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_padded_model_writes_what_it_writes_without_padding(way, policies, tokenizer):
    wanted, found = (
        generate(load_model(policies[rows]), tokenizer, PROMPTS * 8, max_new_tokens=12, **WAYS[way]) for rows in (0, 64)
    )
    assert found.token_ids == wanted.token_ids and max(map(max, found.token_ids)) < len(tokenizer)
    for own, other in zip(found.log_probs, wanted.log_probs, strict=True):
        assert_close(torch.tensor(own), torch.tensor(other), atol=1e-5, rtol=1e-5)


def sft(policy, make_stage, world, folder):
    run, config = make_stage(
        "sft", policy, folder / "sft", samples=SamplesConfig(max_new_tokens=12),
        data=DataConfig(train=world["demonstrations"], max_rows=4, max_length=256),
        training=TrainingConfig(batch_size=4, max_steps=1),
    )  # fmt: skip
    run(config)


def best_of(policy, make_stage, world, folder):
    data = DataConfig(train=world["prompts"], max_rows=4, max_length=128)
    more = {"rewards": REWARDS, "responses_per_prompt": 4, "max_new_tokens": 8, "require_end": False}
    run_best_of_n(BestOfNConfig(policy=policy, data=data, output=str(folder / "best"), **more))


def evaluated(policy, make_stage, world, folder):
    prompts = [Prompt(text, {}, text) for text in PROMPTS]
    sample_responses(policy, prompts, [SamplingConfig(12)], weights=WeightsConfig(), max_length=64)


def benchmarked(policy, make_stage, world, folder):
    LanguageScorer(load_model(policy), load_tokenizer(policy)).responses(PROMPTS, SamplingConfig(12))


@pytest.mark.parametrize("use", [sft, best_of, evaluated, benchmarked], ids=lambda use: use.__name__)
def test_nothing_that_samples_draws_an_id_without_a_token(use, policies, drawn, make_stage, world, tmp_path, tokenizer):
    use(policies[64], make_stage, world, tmp_path)
    assert len(drawn) > 10 and max(drawn) < len(tokenizer)


@pytest.mark.parametrize("stage", ["ppo", "ppo filtered", "online_dpo", "distill"])
def test_what_learns_from_its_samples_learns_without_the_padding(
    stage, policies, drawn, make_stage, world, tmp_path, tokenizer, read_metrics
):
    """Losses, KL and entropy are of the distributions that are sampled: all metrics are those of the unpadded networks."""
    changes = {
        "ppo": SAMPLED | {"kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.01},
        "ppo filtered": SAMPLED | {"top_p": 0.9, "min_p": 0.01},
        "online_dpo": {key: value for key, value in SAMPLED.items() if key != "advantages"},
        "distill": {"teacher": policies[96], "max_new_tokens": 8},
    }[stage]
    lines = {}
    for rows in (0, 64):
        run, config = make_stage(
            stage.split()[0], policies[rows], tmp_path / str(rows), **changes,
            data=DataConfig(train=world["prompts"], max_length=256), optim=OptimConfig(learning_rate=1e-2, eps=1e-5),
            training=TrainingConfig(batch_size=4, max_steps=2),
        )  # fmt: skip
        run(config)
        lines[rows] = read_metrics(tmp_path / str(rows))
    assert max(drawn) < len(tokenizer)
    for plain, padded in zip(lines[0], lines[64], strict=True):
        for name in {*NUMBERS} & plain.keys():
            assert padded[name] == pytest.approx(plain[name], rel=2e-3, abs=2e-5), name
        assert padded.get("first_ratio_error", 0) < 1e-5
        assert padded.get("sampling_error", 0) == pytest.approx(plain.get("sampling_error", 0), abs=1e-3)


def test_a_teacher_and_a_student_may_be_padded_differently(policies, make_stage, world, tmp_path, read_metrics):
    """[C15] As Qwen2.5's 0.5B and 7B are: the same weights but for the padding have no KL from each other."""
    for student, teacher in ((64, 96), (96, 0), (0, 64)):
        run, config = make_stage(
            "distill", policies[student], tmp_path / f"{student}", teacher=policies[teacher],
            data=DataConfig(train=world["prompts"], max_length=256), training=TrainingConfig(batch_size=4, max_steps=1),
            epochs=1, minibatches=1,
        )  # fmt: skip
        run(config)
        assert abs(read_metrics(tmp_path / f"{student}")[0]["reverse_kl"]) < 1e-4


def test_log_probabilities_outside_of_sampling_are_of_the_whole_vocabulary(policies):
    """Evaluation and fine-tuning have transformers' softmax, so that training holds the rows of the padding down."""
    model = load_model(policies[64])
    ids = [3, 5, 7, 9]
    log_probs = model(batch=Ragged.build([ids])).log_probs
    logits = model(torch.tensor([ids])).logits[0, :-1]
    assert_close(log_probs, logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])

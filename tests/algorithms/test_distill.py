"""On-policy distillation: a student's own loss by hand, runs that learn, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import LoRASpec
from alignment.algorithms.distill import DistillConfig, build_distill_state, distill_loss_fn, sample_and_distill
from alignment.algorithms.rollouts.rollout import collect, ragged_of
from alignment.algorithms.rollouts.setup import read_rollout_data
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.losses.language import kl_divergence
from alignment.training import OptimConfig, Run, TrainingConfig
from tests.ppo_states import exact_kl


@pytest.fixture
def built(stage, make_stage, tmp_path, checkpoints):
    """`built(**config changes)` -> config, data and state of a run whose teacher is the SFT policy."""

    def build(**changes):
        settings = {"teacher": str(stage("sft") / "model"), **changes}
        _, config = make_stage("distill", settings.pop("policy", checkpoints["llama"]), tmp_path / "run", **settings)
        with Run(config.output, {}, stage="distill") as directory:
            data = read_rollout_data(config, directory)
            return config, data, build_distill_state(config, data)

    return build


def batch_of(rollout):
    return ragged_of(rollout.prompts, rollout.responses, rollout.numbers)


def test_the_loss_is_the_kl_of_whole_distributions(built):
    config, data, state = built(temperature=0.7, max_new_tokens=5)
    samples = collect(state, config, data.prompts.rows_at(0), 0)
    loss = state.loss_fn(batch := batch_of(samples))
    student, teacher = load_model(config.policy), load_model(config.teacher)
    values = exact_kl(student, teacher, samples.prompts, samples.responses, 0.7)
    assert float(loss.total.detach()) == pytest.approx(sum(values), rel=1e-4) and loss.total > 0
    assert batch.weight == sum(map(len, samples.responses))
    with torch.no_grad():
        both = (model(batch=batch, return_logits=True).logits / 0.7 for model in (student, teacher))
    assert float(loss.total.detach()) == pytest.approx(float(kl_divergence(*both).sum()), rel=1e-4)


@pytest.mark.parametrize("likeliest", [None, 4])
def test_a_student_that_equals_its_teacher_learns_nothing(built, stage, likeliest):
    config, data, state = built(policy=str(stage("sft") / "model"), likeliest=likeliest)
    samples = collect(state, config, data.prompts.rows_at(0), 0)
    loss = state.loss_fn(batch_of(samples))
    loss.total.backward()
    gradients = [x.grad for x in state.policy.backend.unwrapped.parameters() if x.grad is not None]
    assert float(loss.total.detach()) == pytest.approx(0, abs=1e-4) and gradients
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


def test_transformers_classes_have_the_loss_of_our_own(built, stage):
    config, data, state = built(temperature=0.7, max_new_tokens=5)
    batch = batch_of(collect(state, config, data.prompts.rows_at(0), 0))
    wanted = state.loss_fn(batch)
    wanted.total.backward()
    own = state.policy.backend.unwrapped
    external = load_external(config.policy)
    state.policy.model = external
    found = distill_loss_fn(state.policy, load_external(config.teacher), config)(batch)
    found.total.backward()
    assert_close(found.total, wanted.total, rtol=1e-4, atol=1e-4)
    embedding = external.inner.get_input_embeddings().weight
    assert_close(embedding.grad, own.trunk.embed.weight.grad, rtol=1e-3, atol=1e-4)


def load_external(directory):
    """A checkpoint as transformers' class runs it."""
    from transformers import AutoModelForCausalLM

    from alignment.models.external.models import ExternalLanguageModel
    from alignment.models.safetensors_files import read_config

    return ExternalLanguageModel(AutoModelForCausalLM.from_pretrained(directory), read_config(directory), "language")


@pytest.mark.parametrize("changes", [{}, {"likeliest": 8}, {"adapter": LoRASpec(rank=4)}], ids=["whole", "8", "lora"])
def test_the_student_comes_nearer_to_its_teacher_and_everything_is_logged(
    ran, stage, checkpoints, tmp_path, read_metrics, changes
):
    """The SFT policy has learned for three updates: a few of the student's own make up for much of it."""
    ran(
        "distill", checkpoints["llama"], tmp_path, teacher=str(stage("sft") / "model"), epochs=1, minibatches=1,
        metrics=["hotel_gold"], training=TrainingConfig(batch_size=16, max_steps=8),
        optim=OptimConfig(learning_rate=1e-2 if "adapter" in changes else 3e-3), **changes,
    )  # fmt: skip
    lines = read_metrics(tmp_path)
    assert lines[-1]["reverse_kl"] < 0.6 * lines[0]["reverse_kl"] and lines[0]["loss"] == lines[0]["reverse_kl"]
    assert {"ended_share", "response_tokens", "distinct_share", "grad_norm", "gold_score", "seconds_sampling"} <= {
        *lines[0]
    }
    assert not {"score", "unscored_share", "kl"} & {*lines[0]}
    notes = json.loads((tmp_path / "lineage.json").read_text())["notes"]
    assert any("memory: teacher" in note for note in notes)
    assert load_model(str(tmp_path / "model")) is not None


def test_every_weight_of_the_student_trains_and_none_of_the_teacher(built):
    config, data, state = built(epochs=2, minibatches=2)
    student, [_, teacher] = state.policy.backend.unwrapped, state.roles
    before = [x.clone() for x in student.parameters()], [x.clone() for x in teacher.model.parameters()]
    sample_and_distill(state, config, data.prompts.rows_at(0), 0)
    assert state.policy.step == 4
    assert all(not torch.equal(old, new) for old, new in zip(before[0], student.parameters(), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(before[1], teacher.model.parameters(), strict=True))


def test_the_update_does_not_depend_on_how_the_responses_are_cut(built):
    found = []
    for tokens in (1, 200, 10**6):
        config, data, state = built(training=TrainingConfig(batch_size=8, max_steps=1, micro_batch_tokens=tokens))
        metrics, _ = sample_and_distill(state, config, data.prompts.rows_at(0), 0)
        found.append((metrics["loss"], metrics["grad_norm"]))
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-4)


# What is refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reference": "other"}, "reference has no effect"),
        ({"reward_model": "other"}, "rewards are not learned from"),
        ({"missing_end_penalty": 2.0}, "missing_end_penalty"),
        ({"data": DataConfig("prompts", evaluation="others")}, "data.evaluation is not read"),
        ({"training": TrainingConfig(keep_best="held_out_loss", evaluate_every_steps=1)}, "training.keep_best has no effect"),
        ({"adapter": LoRASpec(rank=2, dropout=0.1)}, "adapter.dropout must be 0"),
        ({"likeliest": 0}, "likeliest"),
    ],
)  # fmt: skip
def test_settings_without_an_effect_are_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        DistillConfig(**{"policy": "p", "data": DataConfig("prompts"), "output": "o", "teacher": "t", **changes})


def test_a_teacher_of_another_tokenizer_is_refused(built, foreign):
    with pytest.raises(UserError, match=r"teacher: .*foreign has another tokenizer"):
        built(teacher=foreign)


def test_a_teacher_without_the_students_tokens_or_positions_is_refused(built, checkpoints, tmp_path, tokenizer):
    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.models.build import build_model
    from alignment.models.huggingface.checkpoint import save_model

    original = json.loads((Path(checkpoints["llama"]) / "config.json").read_text(encoding="utf-8"))

    def saved(name, **changes):
        (tmp_path / name).mkdir()
        save_model(build_model(original | changes), tmp_path / name)
        save_tokenizer(tokenizer, tmp_path / name)
        return str(tmp_path / name)

    vocabulary = original["vocab_size"]
    built(teacher=saved("padded", vocab_size=vocabulary + 8))
    with pytest.raises(UserError, match="lacks"):
        built(teacher=saved("narrower", vocab_size=vocabulary - 8))
    with pytest.raises(UserError, match="max_new_tokens"):
        built(teacher=saved("shorter", max_position_embeddings=16))

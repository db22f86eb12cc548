"""Adapters that act in the forward learn in every stage and leave the base weights as they are, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import BottleneckSpec, PrefixSpec, PromptSpec, attach
from alignment.algorithms import pretrain
from alignment.algorithms.pretrain import Causal, Masked, SpanCorruption
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.training import OptimConfig, TrainingConfig
from tests.adapters.tiny_models import ISSUE, disturb, training_batch, write
from tests.conftest import write_lines
from tests.stopping import assert_goes_on

SPECS = {
    "prompt": PromptSpec(tokens=4),
    "prefix": PrefixSpec(tokens=4),
    "bottleneck": BottleneckSpec(width=8, placement="houlsby"),
}
RATES = {"prompt": 0.3, "prefix": 0.03, "bottleneck": 0.03}  # 0.3 is that of prompt tuning's paper
KIND = pytest.mark.parametrize("kind", SPECS)
NEW_KIND = pytest.mark.parametrize("kind", ["prompt", "bottleneck"])


@KIND
@pytest.mark.parametrize("name", ISSUE)
def test_the_loss_falls_in_20_steps_and_the_base_does_not_move(name, kind, tmp_path):
    write(name, tmp_path)
    model = attach(load_pretrained(tmp_path), SPECS[kind]).train()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATES[kind])
    batch = training_batch(name)

    def loss_without_dropout() -> float:  # whose draws are worth more than what a soft prompt learns in 20 steps
        with torch.no_grad():
            loss = -model.eval()(batch=batch).log_probs.mean().item()
        model.train()
        return loss

    first = loss_without_dropout()
    for _ in range(20):
        loss = -model(batch=batch).log_probs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A few vectors say little to a random base.
    assert loss_without_dropout() < first - (0.05 if kind == "prompt" else 0.2)
    after = dict(model.named_parameters())
    assert frozen and all(torch.equal(after[name], before) for name, before in frozen.items())


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", ["llama", "t5", "stablelm"])
def test_every_weight_has_a_gradient_and_the_same_with_recomputed_layers(name, kind, tmp_path):
    write(name, tmp_path)
    spec = SPECS[kind]
    model = disturb(attach(load_pretrained(tmp_path), spec)).eval()

    def gradients():
        model.zero_grad()
        model(batch=training_batch(name)).log_probs.sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    kept = gradients()
    assert all(gradient.abs().sum() > 0 for gradient in kept)
    if name == "stablelm" and isinstance(spec, PrefixSpec):
        with pytest.raises(UserError, match="would fill twice"):
            model.checkpoint_activations()
        return
    model.checkpoint_activations()
    assert_close(gradients(), kept, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def started(make_stage, checkpoints, tmp_path_factory):
    """`started(kind)` -> output of one SFT step under an adapter."""
    done = {}

    def run_once(kind):
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp(kind)
            run, config = make_stage("sft", checkpoints["llama"], done[kind], adapter=SPECS[kind], training=ONE_STEP)
            run(config)
        return done[kind]

    return run_once


ONE_STEP = TrainingConfig(batch_size=4, max_steps=1)


@NEW_KIND
def test_dpo_has_the_policy_without_its_adapter_as_reference(kind, make_stage, checkpoints, tmp_path, read_metrics):
    run, config = make_stage("dpo", checkpoints["llama"], tmp_path, adapter=SPECS[kind], training=ONE_STEP)
    model = load_model(str(run(config)))
    first = read_metrics(tmp_path)[0]
    assert model.training is False and first["step"] == 1
    if kind == "bottleneck":  # starts as the identity
        assert first["loss"] == pytest.approx(0.693147, abs=1e-6)
    else:
        assert first["loss"] > 0 and first["loss"] != pytest.approx(0.693147, abs=1e-6)


@NEW_KIND
def test_reward_model_and_ppo_go_on_from_the_adapter_of_sft(kind, started, make_stage, tmp_path, read_metrics):
    policy = str(started(kind) / "model")
    run, config = make_stage("reward", policy, tmp_path / "reward", training=ONE_STEP)
    reward_model = str(run(config))
    assert "score.weight" in " ".join(load_file(tmp_path / "reward" / "model" / "adapter_model.safetensors"))
    run, config = make_stage("ppo", policy, tmp_path / "ppo", reward_model=reward_model, training=ONE_STEP)
    run(config)
    line = read_metrics(tmp_path / "ppo")[-1]
    assert line["first_ratio_error"] < 1e-4  # sampled through the cache as the whole forward computes it
    before = load_file(started(kind) / "model" / "adapter_model.safetensors")
    after = load_file(tmp_path / "ppo" / "model" / "adapter_model.safetensors")
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


@NEW_KIND
def test_a_start_with_such_an_adapter_takes_no_other(kind, started, make_stage, tmp_path):
    run, config = make_stage("sft", str(started(kind) / "model"), tmp_path, adapter=PrefixSpec())
    with pytest.raises(UserError, match=f"ends in a {kind} adapter, which cannot lie under another one"):
        run(config)


@NEW_KIND
def test_stopped_and_resumed_equals_uninterrupted(kind, checkpoints, make_stage, tmp_path):
    changes = {"adapter": SPECS[kind], "training": TrainingConfig(batch_size=4, max_steps=3)}
    assert_goes_on(lambda name: make_stage("sft", checkpoints["llama"], tmp_path / name, **changes), 1, tmp_path)


PRETRAINED = {
    "causal": (Causal(), {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 96,
    }, {"vocabulary": 300}),
    "masked": (Masked(), {
        "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 96,
    }, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "span_corruption": (SpanCorruption(), {
        "model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2,
    }, {"vocabulary": 300, "tokenizer_kind": "unigram", "sentinels": 16}),
}  # fmt: skip


@pytest.mark.parametrize("objective", PRETRAINED)
def test_pretraining_goes_on_under_an_adapter(objective, world, tmp_path, read_metrics):
    """Every kind learns one text by heart over one short-trained base; what is saved is the adapter, and the base stays as it was."""
    goal, model, tokenizer = PRETRAINED[objective]
    data = DataConfig(train=world["pretrain"], max_length=48, max_rows=32)
    text = json.loads(Path(world["pretrain"]).read_text().splitlines()[0])["text"][:150]
    write_lines(tmp_path / "one.jsonl", ({"text": text} for _ in range(16)))
    first = pretrain.PretrainConfig(
        data=data, objective=goal, output=str(tmp_path / "base"), model=model, optim=OptimConfig(learning_rate=1e-2),
        training=TrainingConfig(batch_size=16, max_steps=20), **tokenizer,
    )  # fmt: skip
    base = pretrain.run(first)
    weights = (base / "model.safetensors").read_bytes()
    for kind, spec in SPECS.items():
        output = tmp_path / kind
        config = pretrain.PretrainConfig(
            data=replace(data, train=str(tmp_path / "one.jsonl")), objective=goal, output=str(output),
            policy=str(base), adapter=spec, optim=OptimConfig(learning_rate=3e-2),
            training=TrainingConfig(batch_size=16, max_steps=16),
        )  # fmt: skip
        directory = pretrain.run(config)
        losses = [line["loss"] for line in read_metrics(output)]
        # A base of 20 steps hardly attends to anything, and so hardly to a prefix or a soft prompt.
        assert sum(losses[-3:]) / 3 < losses[0] + (0.02 if kind != "bottleneck" else -0.01), kind
        assert not (directory / "model.safetensors").exists()
        assert type(load_model(str(directory))) is type(load_model(str(base)))
    assert (base / "model.safetensors").read_bytes() == weights


def test_an_adapter_of_a_fresh_model_is_refused():
    data = DataConfig(train="x.jsonl")
    with pytest.raises(ValueError, match="freezes trained weights, and a fresh model has none"):
        pretrain.PretrainConfig(
            data=data, output="x", model={"model_type": "llama"}, vocabulary=300, adapter=PromptSpec()
        )

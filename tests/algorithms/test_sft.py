"""Supervised fine-tuning and pretraining, as runs."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.training import OptimConfig, TrainingConfig


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=8)], ids=["full", "LoRA"])
def test_the_loss_falls_on_seen_and_unseen_rows(adapter, checkpoints, world, ran, tmp_path, read_metrics):
    data = DataConfig(train=world["demonstrations"], evaluation=world["demonstrations"], max_rows=16)
    training = TrainingConfig(batch_size=8, epochs=6, evaluate_every_steps=3)
    optim = OptimConfig(learning_rate=1e-2)
    ran("sft", checkpoints["llama"], tmp_path, data=data, training=training, optim=optim, adapter=adapter)
    lines = read_metrics(tmp_path)
    assert len(lines) == 12
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert [line["step"] for line in lines if "held_out_loss" in line] == [3, 6, 9, 12]
    assert lines[-1]["held_out_loss"] < lines[2]["held_out_loss"]


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=8, dropout=0.1)], ids=["full", "LoRA"])
def test_the_same_seed_gives_the_same_weights(adapter, checkpoints, make_stage, tmp_path):
    weights = []
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        training = TrainingConfig(batch_size=8, max_steps=2, seed=seed)
        run, config = make_stage("sft", checkpoints["llama"], tmp_path / name, training=training, adapter=adapter)
        weights.append(load_file(next(run(config).glob("*.safetensors"))))
    assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not any(weights[0][name].equal(weights[2][name]) for name in weights[0])


def test_pretraining_starts_from_nothing_with_a_tokenizer_of_its_own(world, make_stage, tmp_path, read_metrics):
    from alignment.algorithms import pretrain
    from alignment.loading import load_model, load_tokenizer

    data = DataConfig(train=world["pretrain"], evaluation=world["pretrain_heldout"], max_length=128)
    shape = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    config = pretrain.PretrainConfig(
        data=data, output=str(tmp_path), model=shape, vocabulary=300,
        optim=OptimConfig(learning_rate=1e-2), training=TrainingConfig(batch_size=8, epochs=2),
    )  # fmt: skip
    directory = str(pretrain.run(config))
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    assert model.spec.vocabulary == len(tokenizer) == 300
    assert model.config["eos_token_id"] == tokenizer.eos_token_id
    lines = read_metrics(tmp_path)
    assert lines[-1]["held_out_loss"] < lines[0]["loss"] - 0.5


def test_a_model_with_too_few_embeddings_is_refused_before_training(world, checkpoints, make_stage, tmp_path):
    from alignment.algorithms import pretrain

    shape = {
        "model_type": "llama", "vocab_size": 200, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
    }  # fmt: skip
    config = pretrain.PretrainConfig(
        data=DataConfig(train=world["pretrain"]), output=str(tmp_path), model=shape, tokenizer=checkpoints["llama"]
    )
    with pytest.raises(UserError, match="200"):
        pretrain.run(config)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_checkpoint_that_does_not_exist_is_named(make_stage, tmp_path):
    run, config = make_stage("sft", str(tmp_path / "nowhere"), tmp_path / "out")
    with pytest.raises(UserError, match="nowhere"):
        run(config)


def test_a_run_does_not_load_what_it_does_not_need(world, write_checkpoint, tmp_path):
    policy = write_checkpoint(tmp_path / "policy", "llama")
    check = (
        "import sys\nfrom alignment.cli import main\n"
        f"sys.argv = ['alignment', 'sft', {str(tmp_path / 'config.yaml')!r}]\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = ['torch._dynamo', 'sympy', 'scipy', 'pandas', 'datasets', 'trl', 'peft', 'deepspeed']\n"
        "print('loaded', [name for name in heavy if name in sys.modules])"
    )
    (tmp_path / "config.yaml").write_text(
        f"{{policy: {policy}, output: {tmp_path / 'out'}, data: {{train: {world['demonstrations']}}}, "
        "training: {max_steps: 1, batch_size: 2}}"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["loaded []"], ran.stdout + ran.stderr

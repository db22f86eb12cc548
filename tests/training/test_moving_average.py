"""The moving average of the weights: its numbers, what is evaluated and written, and that frozen weights have none."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from alignment.adapters import LoRASpec
from alignment.training import Engine, LossSum, OptimConfig, Run, Term, TrainingConfig, fit
from tests.training.toys import ToyStream, collate_by, squared_error, toy_batches, toy_engine, toy_rows, weights


def averaged(engine: Engine) -> dict[str, torch.Tensor]:
    with engine.averaged_weights():
        return weights(engine)


def update(engine: Engine, step: int) -> None:
    engine.update(Term(toy_batches(toy_rows(step), [8]), squared_error(engine.model)))


def test_the_average_by_hand():
    # weights 1, then 0.9 and 0.8 with constant steps of 0.1; decay 0.75: 0.75 + 0.25 * 0.9 = 0.975, then 0.93125
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    config = OptimConfig(0.1, name="sgd", momentum=0.0, schedule="constant", weight_decay=0.0, max_grad_norm=0.0)
    engine = Engine(model, config, TrainingConfig(ema_decay=0.75), total_steps=2)
    for expected in (0.975, 0.93125):
        batch = toy_batches([(torch.ones(1), torch.zeros(1), "row")], [1])
        engine.update(Term(batch, lambda batch: LossSum(engine.model(batch.x).sum())))  # gradient 1
        assert averaged(engine)["weight"].item() == pytest.approx(expected, abs=1e-6)


def test_it_is_that_of_torch():
    engine = toy_engine(training=TrainingConfig(ema_decay=0.9))
    theirs = torch.optim.swa_utils.AveragedModel(
        engine.backend.unwrapped, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    theirs.update_parameters(engine.backend.unwrapped)  # torch's first call copies
    for step in range(4):
        update(engine, step)
        theirs.update_parameters(engine.backend.unwrapped)
    expected = dict(theirs.module.named_parameters())
    for name, value in averaged(engine).items():
        assert_close(value, expected[name].detach(), atol=1e-7, rtol=1e-6)


def test_swapping_changes_no_bit_of_the_weights_nor_of_the_training():
    plain, with_average = toy_engine(), toy_engine(training=TrainingConfig(ema_decay=0.9))
    for step in range(3):
        update(plain, step)
        update(with_average, step)
        assert not torch.equal(averaged(with_average)["first.weight"], weights(plain)["first.weight"])
    assert all(torch.equal(value, weights(with_average)[name]) for name, value in weights(plain).items())


def test_a_resumed_run_has_the_same_average(tmp_path, capsys):
    def train(output, steps):
        training = TrainingConfig(max_steps=4, ema_decay=0.8, save_every_steps=2)
        engine, seen = toy_engine(dropout=0.1, steps=4, training=training), []
        config = {"output": str(output), "training": {"trackers": []}}
        with Run(output, config, stage="toy") as run:

            def evaluate() -> dict[str, float]:
                seen.append(weights(engine))
                if engine.step == steps:
                    raise KeyboardInterrupt
                return {"held_out_loss": 1.0}

            fit(
                engine, ToyStream(), collate_by(3), squared_error(engine.model), training=training, run=run,
                evaluate=evaluate, save=lambda: seen.append(weights(engine)),
            )  # fmt: skip
        return engine, seen

    training_end, (saved, evaluated) = train(tmp_path / "whole", 0)
    assert all(torch.equal(value, evaluated[name]) for name, value in saved.items())
    raw = weights(training_end)
    assert not torch.equal(raw["first.weight"], saved["first.weight"])
    kept = load_file(tmp_path / "whole/checkpoints/step-000004/model.safetensors")
    assert all(torch.equal(value, raw[name]) for name, value in kept.items())
    assert "model/ holds the moving average of the weights at step 4" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", 4)  # killed after the checkpoint of step 2
    resumed, (again, _) = train(tmp_path / "parts", 0)
    assert all(torch.equal(value, again[name]) for name, value in saved.items())
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in raw.items())


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=4)], ids=["full", "LoRA"])
def test_an_sft_run_evaluates_and_writes_the_average(checkpoints, make_stage, world, tmp_path, read_metrics, adapter):
    from alignment.data.config import DataConfig

    data = DataConfig(train=world["demonstrations"], evaluation=world["demonstrations"], max_rows=8)

    def sft(name, **settings):
        training = TrainingConfig(batch_size=4, max_steps=4, **settings)
        optim = OptimConfig(learning_rate=1e-2)
        run, config = make_stage(
            "sft", checkpoints["llama"], tmp_path / name, data=data, training=training, adapter=adapter, optim=optim
        )
        return load_file(next(run(config).glob("*.safetensors"))), read_metrics(tmp_path / name)

    (plain, plain_lines), (average, lines) = sft("plain"), sft("average", ema_decay=0.9)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain_lines]  # the training is the same
    assert plain.keys() == average.keys() and not any(plain[name].equal(average[name]) for name in plain)
    # the average lags behind, so that it has learned less in four steps
    assert plain_lines[-1]["held_out_loss"] < lines[-1]["held_out_loss"] < plain_lines[0]["loss"]
    assert "moving average" in json.dumps(json.loads((tmp_path / "average" / "lineage.json").read_text())["notes"])

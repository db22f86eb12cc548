"""DPO as runs; its first loss is an invariant (I7), its formula is tested with the losses."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from alignment.algorithms.dpo import DPOConfig, dpo_loss_fn
from alignment.algorithms.dpo.config import loss_weights
from alignment.data.batches import PairBatch
from alignment.data.config import DataConfig
from alignment.ragged import Ragged
from alignment.training import LossSum, OptimConfig, TrainingConfig, held_out_metrics


@pytest.mark.parametrize("variant", ["", "lora", "prefix"])
def test_the_margin_grows(variant, stage, world, ran, tmp_path, read_metrics):
    data = DataConfig(train=world["comparisons"], evaluation=world["comparisons"], max_rows=8)
    training = TrainingConfig(batch_size=8, max_steps=8)
    optim = OptimConfig(learning_rate=0.1 if variant == "prefix" else 1e-2, schedule="constant")
    policy = str(stage(f"sft {variant}".strip()) / "model")
    ran("dpo", policy, tmp_path, data=data, training=training, optim=optim, beta=0.5)
    lines = read_metrics(tmp_path)
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["margin"] > 0.2 and lines[-1]["loss"] < math.log(2) - 0.1
    assert lines[-1]["margin"] == pytest.approx(lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"], abs=1e-4)
    assert lines[-1]["held_out_accuracy"] >= 0.75


def test_a_named_reference_is_the_one_compared_with(stage, ran, tmp_path, read_metrics):
    """With the policy itself named as the reference nothing changes."""
    training = TrainingConfig(batch_size=8, max_steps=2)
    policy = str(stage("sft") / "model")
    lines = []
    for name, reference in (("a", None), ("b", policy), ("c", str(stage("dpo") / "model"))):
        ran("dpo", policy, tmp_path / name, training=training, reference=reference)
        lines.append([(line["loss"], line["chosen_reward"]) for line in read_metrics(tmp_path / name)])
    assert lines[0] == lines[1]
    assert abs(lines[2][0][1]) > 1e-3
    assert str(stage("dpo") / "model") in json.dumps(
        json.loads((tmp_path / "c" / "lineage.json").read_text())["parents"]
    )


def test_the_loss_is_worked_by_hand_with_its_beta_and_label_smoothing():
    # margin = 0.5 * ((-1 + 3) - (-4 + 3)) = 1.5; softplus(-1.5) = 0.201413, softplus(1.5) = 1.701413
    batch = PairBatch(Ragged.build([[1, 2], [1, 3]], weight=1), None)
    policy, reference = (
        lambda batch, values=values: SimpleNamespace(log_probs=torch.tensor(values))
        for values in ([-1.0, -4.0], [-3.0, -3.0])
    )
    for label_smoothing, wanted in ((0.0, 0.201413), (0.1, 0.9 * 0.201413 + 0.1 * 1.701413)):
        config = DPOConfig("p", DataConfig(train="t"), "o", beta=0.5, label_smoothing=label_smoothing)
        result = dpo_loss_fn(policy, reference, config)(batch)
        assert result.total.item() == pytest.approx(wanted, abs=1e-5)
        assert {name: value.item() for name, value in result.metrics.items()} == {
            "accuracy": 1, "ties": 0, "margin": 1.5, "chosen_reward": 1.0, "rejected_reward": -0.5,
            "chosen_log_prob": -1, "rejected_log_prob": -4, "chosen_log_prob_change": 2, "rejected_log_prob_change": -1,
            "length_difference": 0, "margin_squared": 2.25, "length_difference_squared": 0, "margin_by_length_difference": 0,
        }  # fmt: skip


def test_an_evaluation_leaves_the_mode_of_a_model_whose_wrapper_does_not_know_it():
    """DeepSpeed's wrapper says that it is training whatever its module does; dropout must stay off in DPO."""
    module = torch.nn.Dropout(0.5).eval()
    wrapper = torch.nn.Sequential(module)  # a new module is in training mode, and its own mode is not that of its parts
    engine = SimpleNamespace(
        model=wrapper,
        backend=SimpleNamespace(unwrapped=module, autocast=nullcontext),
        process_group=SimpleNamespace(device=torch.device("cpu")),
    )
    held_out_metrics(
        engine, [SimpleNamespace(weight=1.0, to=lambda device: None)], lambda batch: LossSum(torch.zeros(()), {})
    )  # type: ignore[arg-type]
    assert not module.training


@pytest.mark.parametrize(
    "settings", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"f_alpha": 0.3}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DPOConfig(policy="p", data=DataConfig(train="t"), output="o", **settings)


def test_the_loss_of_dpo_goes_by_its_method_s_name_too():
    settings = {"policy": "p", "data": DataConfig(train="t"), "output": "o"}
    assert loss_weights(DPOConfig(**settings, loss="dpo")) == loss_weights(DPOConfig(**settings)) == {"sigmoid": 1.0}

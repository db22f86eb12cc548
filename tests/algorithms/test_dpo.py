"""DPO: runs, the cached reference (H40), what losses take of the whole batch (H12); its first loss is an invariant (I7)."""

import dataclasses
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.dpo import DPOConfig, dpo_loss_fn, global_inputs
from alignment.algorithms.dpo.config import loss_weights
from alignment.algorithms.dpo.global_inputs import GlobalInputs, PreferenceUpdates
from alignment.algorithms.dpo.responses import ResponseLogProbs, desirability_metrics
from alignment.algorithms.dpo.variants import variant_loss
from alignment.data.batches import Example, PairBatch, collate_labeled, collate_pairs
from alignment.data.config import DataConfig
from alignment.models.build import build_language_model
from alignment.ragged import Ragged
from alignment.training import Engine, LossSum, OptimConfig, TrainingConfig, held_out_metrics
from tests.examples import labeled_example, pair_example, sides


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


def test_an_evaluation_leaves_the_mode_of_a_wrapped_model():
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


def test_the_loss_of_dpo_goes_by_its_method_s_name_too():
    settings = {"policy": "p", "data": DataConfig(train="t"), "output": "o"}
    assert loss_weights(DPOConfig(**settings, loss="dpo")) == loss_weights(DPOConfig(**settings)) == {"sigmoid": 1.0}


CONFIG = {
    "model_type": "llama", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def test_h26_rewards_at_the_reference_point_count_half():
    # As all of them do before the first update; otherwise the accuracy of KTO would begin at the share of undesirable rows.
    [loss] = DPOConfig("p", DataConfig(train="t"), "o", loss="kto").losses
    policy, labels = torch.tensor([-3.0, -3.0, -2.0, -5.0]), torch.tensor([True, False, False, False])
    responses = ResponseLogProbs(policy, torch.tensor([-3.5, -3.5, -3.0, -5.0]), torch.ones(4))
    measured = desirability_metrics(responses, SimpleNamespace(desirable=labels), loss, torch.tensor(0.5))
    assert measured.accuracy.tolist() == [0.5, 0.5, 0.0, 1.0] and measured.sums["accuracy"].item() == 2.0


def rows_of(count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        ids = torch.randint(1, 23, (4 + number % 5,), generator=generator).tolist()
        response = Example.single(ids, [False] * 2 + [True] * (len(ids) - 2), str(number))
        rows.append(labeled_example(response, number % 3 > 0, str(number)))
    return rows


def one_update(name: str, tokens: int):
    """Gradients and metrics of one update of a loss, in micro-batches of so many tokens."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = build_language_model(CONFIG).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        models.append(model)
    policy, reference = models
    training = TrainingConfig(batch_size=8, max_steps=1)
    data = DataConfig(train="t", max_length=32)
    config = DPOConfig("p", data, "o", loss=name, beta=0.3, sft_coef=0.5, training=training)
    engine = Engine(policy, OptimConfig(learning_rate=1e-3), training, total_steps=1)
    frozen = torch.no_grad()(reference)
    labeled = rows_of(8)
    rows = labeled
    if config.rows == "comparisons":
        rows = [
            pair_example(sides(a)[0], sides(b)[0], None, a.row_id)
            for a, b in zip(labeled[:4], labeled[4:], strict=True)
        ]
    collate = collate_labeled if config.rows == "labels" else collate_pairs
    updates = PreferenceUpdates(
        engine, config, dpo_loss_fn(engine.model, frozen, config), frozen, lambda rows: collate(rows, tokens)
    )
    return updates.update(0, rows)


def test_bcos_shift_is_the_mean_over_all_updates_so_far():
    """Three pairs with log-ratios of mean 1, then one with mean 5: the shift is 1, then (3 * 1 + 5) / 4 = 2, times beta."""
    [loss] = DPOConfig(policy="p", data=DataConfig(train="t"), output="o", loss="bco", beta=0.3).losses
    first = torch.tensor([[-2.0, -4.0, -4.0, -4.0]] * 3)
    second = torch.tensor([[-2.0, -1.0, -8.0, -5.0]])
    unused: Any = None
    updates = PreferenceUpdates(unused, unused, unused, unused, unused)
    found = []
    for pairs in (first, second):
        updates.add_to_shift(pairs)
        found.append(updates.shift)
    assert found == pytest.approx([1.0, 2.0])
    responses = ResponseLogProbs(second[0, :2], second[0, 2:], torch.ones(2))
    cost = variant_loss(loss, responses, SimpleNamespace(), GlobalInputs(shift=found[1]))  # rewards 1.8 and 1.2
    wanted = torch.nn.functional.softplus(torch.tensor([0.6 - 1.8, 1.2 - 0.6])).sum(0, keepdim=True)
    assert_close(cost, wanted)


@pytest.mark.parametrize("name", ["kto", "aot", "aot_unpaired", "bco", "ipo", "orpo"])
def test_H12_an_update_does_not_depend_on_how_its_batch_is_cut(name):
    whole, cut = one_update(name, 10_000), one_update(name, 14)
    assert whole.keys() == cut.keys()
    for key, value in whole.items():
        assert cut[key] == pytest.approx(value, abs=1e-4, rel=1e-4), key


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_pairs_are_sorted_by_position_and_not_by_value(name, monkeypatch):
    """The chosen responses' log-probabilities before the update are 1e-5 lower than in it, and each is its own pair's."""
    plain, real = one_update(name, 14), global_inputs.response_log_probs

    def lower(*arguments):
        found = real(*arguments)
        chosen, rejected = found.policy.chunk(2)
        return dataclasses.replace(found, policy=torch.cat([chosen - 1e-5, rejected]))

    monkeypatch.setattr(global_inputs, "response_log_probs", lower)
    for key, value in one_update(name, 14).items():
        assert value == pytest.approx(plain[key], abs=1e-4), key


@pytest.mark.parametrize("variant", ["", "lora"])
def test_H40_cached_log_probs_train_as_computed_ones(variant, stage, make_stage, tmp_path, read_metrics):
    """The losses of a run with cached log-probabilities are those of one that computes them, from ln 2 on."""
    policy, training = str(stage(f"sft {variant}".strip()) / "model"), TrainingConfig(batch_size=8, max_steps=2)
    folder, losses = tmp_path / "log_probs", {}
    for name in ("compute", "cache", "again"):
        more = {} if name == "compute" else {"reference_log_probs": "cache", "reference_cache": str(folder)}
        run, config = make_stage("dpo", policy, tmp_path / name, training=training, **more)
        run(config)
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert losses["compute"] == pytest.approx(losses["cache"], abs=1e-5) and losses["cache"] == losses["again"]
    assert losses["cache"][0] == pytest.approx(0.693147, abs=1e-5)
    notes = " ".join(json.loads((tmp_path / "again" / "lineage.json").read_text())["notes"])
    assert "are read from" in notes and "no weights of its own" in notes

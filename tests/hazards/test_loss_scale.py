"""Faults of loss scale and optimization that trainers have had, each with its worked numbers: H10, H11, H14 to H16.

H12 and H17 are in test_invariants.py (I3, I14), H13 in tests/losses.
"""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.training import LossSum, Term, TrainingConfig, shard_rows
from alignment.training.backends.base import checked_step
from tests.distributed.processes import FSDP2, run_ranks
from tests.hazards.two_ranks import TOKENS, batch_of, engine_of
from tests.training.toys import collate_by, squared_error, toy_engine, toy_rows, weights

# 12 updates, warm-up 3, cosine, peak 2e-4; the 13th value is where the schedule ends.
RATES = [
    0, 6.667e-5, 1.3333e-4, 2e-4, 1.9397e-4, 1.7660e-4, 1.5e-4, 1.1736e-4, 8.2635e-5, 5e-5, 2.3396e-5, 6.0307e-6, 0,
]  # fmt: skip


@pytest.mark.parametrize(
    "cut",
    [
        [[1.2], [0.4, 0.6], [0.1, 0.2, 0.3, 0.4, 0.5]],
        [[1.2, 0.4, 0.6], [0.1, 0.2, 0.3, 0.4, 0.5]],
        [[1.2, 0.4, 0.6, 0.1, 0.2, 0.3, 0.4, 0.5]],
    ],
)
def test_h10_the_loss_is_the_mean_over_all_tokens_of_the_global_batch(cut):
    # 3.7 / 8; a mean of means would give 0.6667 or 0.5167
    engine = engine_of(1, 0.0)
    metrics = engine.update(Term([batch_of(part) for part in cut], lambda batch: LossSum(engine.model(batch.x).sum())))
    assert metrics["loss"] == pytest.approx(0.4625, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0.4625, abs=1e-6)
    assert weights(engine)["weight"].item() == pytest.approx(1 - 0.4625, abs=1e-6)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """What rank 0 measured on two processes, by way to spread the model."""
    folder = tmp_path_factory.mktemp("ranks")

    def measured(name: str) -> dict:
        file = folder / f"{name}.json"
        if not file.exists():
            run_ranks(2, "tests.hazards.two_ranks", str(file), **(FSDP2 if name == "fsdp2" else {}))
        return json.loads(file.read_text())

    return measured


WAYS = pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.distributed_slow)])


@pytest.mark.distributed
@WAYS
def test_h11_ranks_of_three_and_nine_tokens_have_the_gradient_of_their_union(on_two_ranks, way):
    found = on_two_ranks(way)
    union = sum(map(sum, TOKENS)) / 12  # 0.55; a mean of the ranks' means would give 0.7
    assert union == pytest.approx(0.55)
    assert found["loss"] == pytest.approx(union, abs=1e-6)
    assert found["weights"]["shares"] == pytest.approx([1 - union], abs=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_h14_the_logged_rate_is_that_of_the_update_whatever_the_accumulation(micro_batch):
    engine = toy_engine(learning_rate=2e-4, warmup_steps=3, steps=12)
    logged = []
    for step in range(12):
        before = [parameter.detach().clone() for parameter in engine.backend.unwrapped.parameters()]
        batches = shard_rows(toy_rows(step, 4), collate_by(micro_batch))
        logged.append(engine.update(Term(batches, squared_error(engine.model)))["learning_rate"])
        moved = any(not torch.equal(a, b) for a, b in zip(before, engine.backend.unwrapped.parameters(), strict=True))
        assert moved == (step > 0)  # the first update of a warm-up uses 0
    assert logged == pytest.approx(RATES[:12], rel=1e-4, abs=1e-12)


@pytest.mark.distributed
@WAYS
def test_h14_two_ranks_go_through_the_schedule_at_the_speed_of_one(on_two_ranks, way):
    assert on_two_ranks(way)["rates"] == pytest.approx(RATES[:12], rel=1e-4, abs=1e-12)


def test_h15_clipping_uses_the_global_norm():
    # gradient (3, 4, 12): norm 13, coefficient 1/13
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 4.0, 12.0])
    _, norm = checked_step(torch.optim.SGD([weight], lr=9.0), 1.0, 1.0, torch.zeros(1), 1)
    assert norm == pytest.approx(13.0)
    assert_close(weight.detach(), -0.0769231 * torch.tensor([3.0, 4.0, 12.0]), rtol=1e-6, atol=0)


@pytest.mark.distributed
@WAYS
def test_h15_both_ranks_log_and_clip_by_the_norm_of_the_whole_gradient(on_two_ranks, way):
    found = on_two_ranks(way)
    assert found["norms"] == pytest.approx([13.0, 13.0], rel=1e-6)
    assert found["weights"]["clipped"] == pytest.approx([1 - value / 13 for value in (3, 4, 12)], rel=1e-5)


def test_h16_bf16_computes_in_bf16_and_updates_float32_weights():
    engine = toy_engine(learning_rate=1e-6, schedule="constant", training=TrainingConfig(precision="bf16"))
    before, seen = weights(engine), []

    def loss_fn(batch) -> LossSum:
        answer = engine.model(batch.x)
        seen.append(answer.dtype)
        return LossSum((answer.float() - batch.y).pow(2).sum())

    engine.update(Term(collate_by(8)(toy_rows(0)), loss_fn))
    after = weights(engine)
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    assert seen == [torch.bfloat16]
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert changed / sum(value.numel() for value in before.values()) > 0.9
    with engine.backend.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16

"""One update: the same however it is cut, checked before the weights change, told truly in its metrics."""

import json
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.ragged import fill_groups
from alignment.training import (
    Engine,
    LossSum,
    NonFiniteError,
    OptimConfig,
    Term,
    TrainingConfig,
    ZeroWeightBatch,
    shard_rows,
)
from alignment.training.backends.base import checked_step
from tests.distributed.processes import FSDP2, run_ranks
from tests.distributed.two_ranks import TOKENS, engine_of
from tests.training.toys import (
    Scale,
    ToyBatch,
    collate_by,
    plain_batch,
    squared_error,
    toy_batches,
    toy_engine,
    toy_rows,
    weights,
)


def straight_engine(size: int = 1, **optim) -> Engine:
    settings = {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": 0.0, **optim}
    return Engine(Scale(size), OptimConfig(**settings), TrainingConfig(), total_steps=10)


def test_terms_are_weighed_each_over_its_own_weight():
    engine = straight_engine()
    first = Term([plain_batch([1.0, 3.0])], lambda batch: LossSum(engine.model(batch.x).sum()))
    second = Term(
        [plain_batch([10.0]), plain_batch([20.0, 30.0, 40.0])],
        lambda batch: LossSum(engine.model(batch.x).sum(), {"largest": batch.x.max()}),
        coef=0.5,
        name="pretrain",
    )
    metrics = engine.update(first, second)
    assert metrics["loss"] == pytest.approx(2.0 + 0.5 * 25.0)
    assert metrics["grad_norm"] == pytest.approx(2.0 + 0.5 * 25.0)
    assert metrics["pretrain_loss"] == pytest.approx(25.0)
    assert metrics["pretrain_largest"] == pytest.approx((10 + 40) / 4)


def test_means_have_weights_of_their_own_and_none_is_logged_without():
    engine = straight_engine()

    def loss_fn(batch: ToyBatch) -> LossSum:
        total, one = engine.model(batch.x).sum(), torch.ones(())
        means = {"loss/a": (total, one * 4), "loss/b": (torch.zeros(()), one * 0)}
        return LossSum(total, {"plain": total}, means)

    metrics = engine.update(Term([plain_batch([1.0, 3.0]), plain_batch([8.0])], loss_fn, name="mix"))
    assert metrics["mix_loss/a"] == 12 / 8  # (4 + 8) / (4 + 4), however many rows the batches hold
    assert metrics["mix_plain"] == 12 / 3
    assert not [name for name in metrics if "loss/b" in name]


def test_a_borrowed_batch_changes_nothing():
    rows = toy_rows(0)
    plain, lent = toy_engine(), toy_engine()
    plain.update(Term(toy_batches(rows, [8]), squared_error(plain.model)))
    batches = [*toy_batches(rows, [8]), ZeroWeightBatch(toy_batches(rows[:1], [1])[0])]
    metrics = lent.update(Term(batches, squared_error(lent.model)))
    assert all(torch.equal(value, weights(lent)[name]) for name, value in weights(plain).items())
    assert metrics["tokens"] == 8 * 5


def test_shares_deal_rows_round_and_lend_one_to_a_rank_without():
    rows = toy_rows(0, 3)
    names = [[name for batch in shard_rows(rows, collate_by(2), rank, 2) for name in batch.row_ids] for rank in (0, 1)]
    assert names == [["row-0-0", "row-0-2"], ["row-0-1"]]
    (lent,) = shard_rows(rows[:1], collate_by(2), 1, 2)
    assert isinstance(lent, ZeroWeightBatch) and lent.weight == 0.0 and lent.batch.row_ids == ("row-0-0",)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_value_that_is_not_finite_stops_before_the_weights_change(poison):
    engine = toy_engine(schedule="constant")

    def loss_fn(batch: ToyBatch) -> LossSum:
        good = squared_error(engine.model)(batch)
        if engine.step < 2 or "row-2-5" not in batch.row_ids:
            return good
        bad = good.total * math.nan if poison == "loss" else (good.total - good.total).sqrt()  # 0, with gradient inf
        return LossSum(bad, good.metrics)

    for step in range(2):
        engine.update(Term(toy_batches(toy_rows(step), [2] * 4), loss_fn))
    before = weights(engine)
    moments = [state["exp_avg"].clone() for state in engine.backend.optimizer.state.values()]
    with pytest.raises(NonFiniteError, match=r"update 3 .*row-2-4, row-2-5") as caught:
        engine.update(Term(toy_batches(toy_rows(2), [2] * 4), loss_fn, name="main"))
    if poison == "loss":
        assert "main" in str(caught.value) and "row-2-3" not in str(caught.value)
    assert all(torch.equal(value, weights(engine)[name]) for name, value in before.items())
    kept = [state["exp_avg"] for state in engine.backend.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))
    assert engine.step == 2


def test_a_parameter_without_gradient_is_named_and_left_alone():
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    engine = Engine(Forgetful(), OptimConfig(1e-2, weight_decay=0.1), TrainingConfig(), total_steps=1)
    before = weights(engine)
    with pytest.warns(UserWarning, match=r"unused\.weight, unused\.bias"):
        engine.update(Term(toy_batches(toy_rows(0), [8]), squared_error(engine.model)))
    assert engine.untrained == ["unused.weight", "unused.bias"]
    assert torch.equal(before["unused.weight"], weights(engine)["unused.weight"])


@pytest.mark.parametrize(
    ("batches", "problem"), [([], "no micro-batch"), ([plain_batch([1.0], weight=0.0)], "nothing counts")]
)
def test_a_term_of_which_nothing_counts_is_refused(batches, problem):
    engine = straight_engine()
    with pytest.raises(ValueError, match=problem):
        engine.update(Term(batches, lambda batch: LossSum(engine.model(batch.x).sum())))


def test_running_out_of_memory_says_which_setting_to_lower():
    engine = toy_engine()

    def loss_fn(batch: ToyBatch) -> LossSum:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(UserError, match=r"update 1, on a micro-batch of 40 tokens .*row-0-0.*micro_batch_tokens"):
        engine.update(Term(toy_batches(toy_rows(0), [8]), loss_fn))


def test_groups_of_gradients_keep_order_and_size():
    assert fill_groups(range(4), [3, 3, 9, 1], 6) == [[0, 1], [2], [3]]


def test_two_engines_live_side_by_side():
    policy, value = toy_engine(seed=0), toy_engine(seed=1)
    before = weights(value)
    policy.update(Term(toy_batches(toy_rows(0), [8]), squared_error(policy.model)))
    assert all(torch.equal(tensor, weights(value)[name]) for name, tensor in before.items())


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
    metrics = engine.update(
        Term([plain_batch(part) for part in cut], lambda batch: LossSum(engine.model(batch.x).sum()))
    )
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
            run_ranks(2, "tests.distributed.two_ranks", str(file), **(FSDP2 if name == "fsdp2" else {}))
        return json.loads(file.read_text())

    return measured


WAYS = pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.distributed_slow)])


@pytest.mark.distributed
@WAYS
def test_h11_ranks_of_three_and_nine_tokens_have_the_union_s_gradient(on_two_ranks, way):
    found = on_two_ranks(way)
    union = sum(map(sum, TOKENS)) / 12  # 0.55; a mean of the ranks' means would give 0.7
    assert union == pytest.approx(0.55)
    assert found["loss"] == pytest.approx(union, abs=1e-6)
    assert found["weights"]["shares"] == pytest.approx([1 - union], abs=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_h14_the_logged_rate_is_that_of_the_update(micro_batch):
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

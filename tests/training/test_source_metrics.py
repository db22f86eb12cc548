"""Losses and metrics of each source, worked by hand: means over its own tokens, shares, sources without a row."""

import math

import pytest
import torch

from alignment.data.batches import Example, collate, collate_pairs
from alignment.training import LossSum
from alignment.training.terms import Sources, averages
from tests.examples import pair_example


def example(targets, source, name="row"):
    return Example.single([0] * (targets + 1), [False] + [True] * targets, name, source=source)


def logged(*losses, weight):
    """What an update over several micro-batches logs."""
    sums = {}
    for loss in losses:
        for key, value in loss.named_sums().items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return {"loss": sum(float(loss.total.detach()) for loss in losses) / weight, **averages(sums, weight)}


TWO = Sources(("code", "chat"))


def test_means_of_each_source_by_hand():
    # code: 3 tokens of losses 1, 2, 3; chat: one token of loss 6. All: (1 + 2 + 3 + 6) / 4 = 3
    [batch] = collate([example(3, 0), example(1, 1)], 100)
    loss = TWO.loss_sum(torch.tensor([1.0, 2.0, 3.0, 6.0]), batch, {"wins": torch.tensor(3.0)})
    assert logged(loss, weight=batch.weight) == {
        "loss": 3.0, "wins": 0.75, "loss/code": 2.0, "loss/chat": 6.0, "share/code": 0.75, "share/chat": 0.25,
    }  # fmt: skip


def test_the_split_into_micro_batches_changes_no_mean():
    rows = [example(3, 0), example(1, 1), example(2, 1)]
    losses = {3: [1.0, 2.0, 3.0], 1: [6.0], 2: [0.0, 3.0]}
    results = []
    for limit in (100, 4):
        batches = collate(rows, limit)
        sums = [
            TWO.loss_sum(torch.tensor([loss for length in batch.lengths for loss in losses[length - 1]]), batch)
            for batch in batches
        ]
        results.append(logged(*sums, weight=sum(batch.weight for batch in batches)))
    assert len(batches) > 1
    # (6 + 9) / 6 = 2.5; chat: 9 / 3
    assert results[0] == pytest.approx(
        {"loss": 2.5, "loss/code": 2.0, "loss/chat": 3.0, "share/code": 0.5, "share/chat": 0.5}
    )
    assert results[1] == pytest.approx(results[0])


def test_a_source_without_a_row_is_left_out():
    [batch] = collate([example(2, 1)], 100)
    metrics = logged(TWO.loss_sum(torch.tensor([1.0, 2.0]), batch, accuracy=torch.tensor([1.0, 0.0])), weight=2.0)
    assert metrics == {"loss": 1.5, "loss/chat": 1.5, "accuracy/chat": 0.5, "share/code": 0.0, "share/chat": 1.0}
    assert all(map(math.isfinite, metrics.values()))


def test_pairs_are_counted_by_pair():
    pairs = [
        pair_example(example(chosen, 0, name), example(rejected, 0, name), None, name, source=source)
        for name, chosen, rejected, source in (("a", 5, 1, 0), ("b", 1, 5, 1), ("c", 1, 1, 1))
    ]
    sources = Sources(("hh", "stack"))
    [batch] = collate_pairs(pairs, 100)
    order = {"a": 4.0, "b": 1.0, "c": 3.0}
    losses = torch.tensor([order[name] for name in batch.row_ids[:3]])
    wins = torch.tensor([float(name == "b") for name in batch.row_ids[:3]])
    metrics = logged(sources.loss_sum(losses, batch, {"accuracy": wins.sum()}, accuracy=wins), weight=batch.weight)
    assert metrics == pytest.approx(
        {"loss": (4 + 1 + 3) / 3, "accuracy": 1 / 3, "share/hh": 1 / 3, "share/stack": 2 / 3}
        | {"loss/hh": 4.0, "loss/stack": 2.0, "accuracy/hh": 0.0, "accuracy/stack": 0.5}
    )


def test_a_perplexity_is_the_exponential_of_the_mean_over_the_whole_update():
    # nats 1 and 3 in two micro-batches: exp((1 + 3) / 2), not the mean of exp(1) and exp(3)
    parts = [
        LossSum(torch.tensor(0.0), {}, {"perplexity/code": (torch.tensor(nats), torch.tensor(1.0))})
        for nats in (1.0, 3.0)
    ]
    assert logged(*parts, weight=2.0)["perplexity/code"] == pytest.approx(math.exp(2.0))
    huge = LossSum(torch.tensor(0.0), {}, {"perplexity": (torch.tensor(1e6), torch.tensor(1.0))})
    assert logged(huge, weight=1.0)["perplexity"] == math.inf

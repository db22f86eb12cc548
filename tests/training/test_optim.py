"""The learning rate of each update, and which parameters decay."""

import pytest
import torch
from torch import nn

from alignment.training import OptimConfig, TrainingConfig, learning_rate_at
from alignment.training.optim import build_optimizer, parameter_groups

# peak 1, 2 updates of warm-up, 12 in total, decay over the last 4: 1 - sqrt(0, 1/4, 1/2, 3/4), and the end value
WSD = [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.2928932, 0.1339746, 0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "wsd", "warmup_steps": 2, "decay_ratio": 1 / 3}, WSD),
        ({"schedule": "wsd", "warmup_steps": 2, "decay_ratio": 0.3, "decay_type": "linear"},  # 3.6 updates, rounded up
         [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "wsd", "decay_ratio": 0.3, "decay_type": "linear", "min_learning_rate_ratio": 0.2},
         [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "inverse_sqrt", "warmup_steps": 3},  # sqrt(3 / k) after k = 3 updates
         [0, 1 / 3, 2 / 3, 1, 0.8660254, 0.7745967, 0.7071068, 0.6546537, 0.6123724, 0.5773503]),
        ({"schedule": "inverse_sqrt", "timescale": 4}, [1, 0.8944272, 0.8164966, 0.7559289, 0.7071068]),
    ],
)  # fmt: skip
def test_wsd_and_inverse_sqrt_follow_the_worked_example(settings, expected):
    config = OptimConfig(learning_rate=1.0, **settings)
    rates = [learning_rate_at(update, config, 12) for update in range(1, len(expected) + 1)]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("warmup_stable_decay", {"schedule": "wsd", "decay_ratio": 0.25}, {"num_decay_steps": 5, "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"schedule": "wsd", "decay_ratio": 0.25, "decay_type": "cosine"}, {"num_decay_steps": 5}),
        ("warmup_stable_decay", {"schedule": "wsd", "decay_ratio": 0.85, "decay_type": "linear"},
         {"num_decay_steps": 17, "decay_type": "linear"}),
        ("inverse_sqrt", {"schedule": "inverse_sqrt"}, {}),
        ("inverse_sqrt", {"schedule": "inverse_sqrt", "timescale": 50}, {"timescale": 50}),
    ],
)  # fmt: skip
def test_every_rate_is_that_of_transformers(name, settings, theirs):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(name, optimizer, 3, 20, scheduler_specific_kwargs=theirs)
    config = OptimConfig(learning_rate=0.3, warmup_steps=3, **settings)
    for update in range(1, 22):
        assert learning_rate_at(update, config, 20) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12), update
        optimizer.step()
        scheduler.step()


def test_a_decay_that_a_warmup_reaches_into_is_shorter():
    config = OptimConfig(learning_rate=1.0, schedule="wsd", warmup_steps=8, decay_ratio=0.5, decay_type="linear")
    assert [learning_rate_at(update, config, 12) for update in (8, 9, 10, 11, 13)] == [0.875, 1.0, 0.75, 0.5, 0.0]


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    decayed, plain = parameter_groups(model, 0.1)
    assert [tuple(parameter.shape) for parameter in decayed["params"]] == [(3, 4), (2, 4)]
    assert [tuple(parameter.shape) for parameter in plain["params"]] == [(4,), (4,), (2,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_low_precision_weights_are_refused_by_name():
    with pytest.raises(ValueError, match=r"parameter weight is torch\.bfloat16"):
        build_optimizer(nn.Linear(2, 2).bfloat16(), OptimConfig(1e-3))


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"), [(0.25, 12, 3), (0.2, 12, 3), (0.9, 3, 2), (0.03, 9, 1), (0.5, 1, 0)]
)
def test_a_warmup_ratio_is_the_warmup_of_so_many_steps(ratio, steps, warmup):
    # a share of the run, rounded up as in transformers; one update is always left for the peak
    as_share = OptimConfig(learning_rate=2e-4, warmup_ratio=ratio)
    as_steps = OptimConfig(learning_rate=2e-4, warmup_steps=warmup)
    rates = [learning_rate_at(update, as_share, steps) for update in range(1, steps + 1)]
    assert rates == [learning_rate_at(update, as_steps, steps) for update in range(1, steps + 1)]
    assert max(rates) == 2e-4


def test_number_of_updates_counts_the_last_smaller_batch():
    assert TrainingConfig(epochs=2, batch_size=4).steps(rows=5) == 3  # 10 rows in batches of 4
    assert TrainingConfig(epochs=1, max_steps=7).steps(rows=5) == 7

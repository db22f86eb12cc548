"""Alarms of collapse: each is given for what it is named after, once until it clears, and for nothing a healthy run does."""

import json

import pytest

from alignment.algorithms.rollouts.alarms import Alarms, new_alarms

HEALTHY = {
    "entropy": 2.0, "repetition": 0.05, "distinct_share": 1.0, "ended_share": 0.8, "response_tokens": 20.0, "kl": 0.1,
    "responses": 64.0,
}  # fmt: skip


def line(step, **changes):
    return {**HEALTHY, "score": 0.1 * step, "score/length": 1.0 - 0.01 * step, "loss": 0.5, **changes}


def notes_of(changes, steps=12, start=4):
    """Notes of a run that is healthy for `start` iterations, then has `changes`."""
    alarms = Alarms()
    return [
        note
        for step in range(steps)
        for note in new_alarms(alarms, step, line(step, **(changes if step >= start else {})))
    ]


CASES = {
    "entropy": ({"entropy": 0.4}, "entropy fell to 0.4 nats per token from 2 at the start"),
    "repetition": ({"repetition": 0.4}, "40% of the n-grams of a response repeat earlier ones, 5% at the start"),
    "distinct responses": ({"distinct_share": 0.4}, "40% of the responses are distinct, 100% at the start"),
    "missing ends": ({"ended_share": 0.3}, "60% of the last responses end by themselves, 80% at the start"),
    "KL negative": ({"kl": -0.2}, "kl was below 0 in the last 5 iterations, -0.2 nats on average"),
    "score flat": ({"score/length": 0.5}, "score/length = 0.5; nothing is learned from it"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_collapse_is_noted_once_with_its_numbers(name):
    """[H28] A kl that stays negative among them."""
    changes, text = CASES[name]
    notes = notes_of(changes)
    assert len(notes) == 1 and f"({name})" in notes[0] and text in notes[0]
    read_a_window = {"missing ends": 5, "KL negative": 8, "score flat": 8}  # two of its five iterations, or all of them
    assert f"iteration {read_a_window.get(name, 4)}" in notes[0]


def test_a_healthy_run_raises_none():
    assert notes_of({}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy": 0.61}, {"repetition": 0.19}, {"distinct_share": 0.51}, {"ended_share": 0.71}, {"kl": -0.015},
        {"kl": -0.2, "kl_k3": 2.0},
    ],
)  # fmt: skip
def test_less_than_the_limits_raises_none(changes):
    assert notes_of(changes) == []


def test_an_alarm_comes_again_after_it_has_cleared():
    alarms = Alarms()
    entropies = [2, 2, 2, 0.4, 0.4, 2, 0.4]
    notes = [new_alarms(alarms, step, line(step, entropy=value)) for step, value in enumerate(entropies)]
    assert [len(found) for found in notes] == [0, 0, 0, 1, 0, 0, 1]


def test_a_sampler_without_a_choice_is_noted_from_the_first_iteration():
    """H32: a checkpoint's generation config that leaks into the rollouts makes them all alike."""
    notes = new_alarms(Alarms(), 1, line(1, distinct_share=0.02))
    assert len(notes) == 1 and "leave the sampler no choice" in notes[0]
    assert (
        new_alarms(Alarms(), 1, line(1, distinct_share=0.02, response_tokens=1.0)) == []
    )  # there are only so many tokens


def test_signed_kl_around_zero_is_no_alarm():
    alarms = Alarms()
    assert not [note for step in range(20) for note in new_alarms(alarms, step, line(step, kl=(-1) ** step * 0.3))]


def test_a_resumed_run_goes_on_with_the_same_alarms():
    whole, parts = Alarms(), Alarms()
    values = [2, 2, 1.9, 1, 0.4, 0.3, 0.2]
    expected = [new_alarms(whole, step, line(step, entropy=value)) for step, value in enumerate(values)]
    found = []
    for step, value in enumerate(values):
        parts = Alarms(**json.loads(json.dumps(vars(parts))))
        found.append(new_alarms(parts, step, line(step, entropy=value)))
    assert found == expected and sum(map(len, found)) == 1

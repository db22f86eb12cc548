"""What the measuring scripts share: turns, medians, ratios, lengths of responses."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import measuring


def test_calls_take_turns_and_warm_up_rounds_are_not_counted():
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert measuring.take_turns(calls, 2, warm_up=1) == {"a": [3, 5], "b": [4, 6]}
    assert order == ["a", "b"] * 3


def test_medians_and_ratios_are_over_rounds():
    ours, theirs = ([{"speed": speed} for speed in speeds] for speeds in ((4, 9, 8), (2, 3, 8)))
    assert measuring.medians(ours, ["speed"]) == {"speed": 8, "speed_spread": [4, 9]}
    assert measuring.ratios(ours, theirs, ["speed"]) == {"speed": 2}


@pytest.mark.parametrize(("count", "sigma"), [(64, 0.6), (256, 0.8)])
def test_log_normal_ends_have_their_mean_and_stay_in_range(count, sigma):
    ends = measuring.log_normal_ends(count, 25, 64, sigma)
    assert 25 <= statistics.mean(ends) < 25.5
    assert min(ends) >= 1 and max(ends) == 64 and len(set(ends)) > 20


def test_a_process_that_fails_ends_the_script_with_its_error():
    assert measuring.in_process(measuring.log_normal_ends, 1, 3, 3, 0.1) == [3]
    with pytest.raises(SystemExit, match=r"(?s)log_normal_ends failed.*missing 3"):
        measuring.in_process(measuring.log_normal_ends, 1)


def test_the_peak_is_of_this_process_and_begins_anew():
    before = measuring.reset_peak()
    held = bytes(b"1" * 2**26)
    assert measuring.resident("VmHWM") - before > 0.9 * len(held)
    del held
    assert measuring.reset_peak() - before < 2**25

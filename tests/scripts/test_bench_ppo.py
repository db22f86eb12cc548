"""PPO's benchmark: ends of responses that are equal on both sides, and the arithmetic of its figures."""

import sys
from pathlib import Path

import pytest

from alignment.generation import SamplingConfig, decode_responses
from alignment.models.build import build_language_model
from tests.models.conftest import CONFIGS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_ppo import Phases, Settings, check_ends, forced_ends, operations

PROMPTS, ENDS = [[5, 6, 7], [8, 9], [3, 3, 3, 3]], [1, 7, 4]


SETTINGS = Settings("p", "r", PROMPTS, ENDS, forced=True)


def test_our_sampler_ends_each_response_where_its_row_says_and_no_earlier():
    model = build_language_model(CONFIGS["llama"]).eval()
    with forced_ends(SETTINGS, stop=2):
        responses = decode_responses(model, PROMPTS, SamplingConfig(max_new_tokens=7), stop_ids=[2])
    assert [len(ids) for ids in responses.token_ids] == ENDS
    assert [ids.index(2) for ids in responses.token_ids] == [0, 6, 3] and responses.ended == [True] * 3
    check_ends(SETTINGS, PROMPTS[::-1], ENDS[::-1])
    with pytest.raises(SystemExit, match="were wanted"):
        check_ends(SETTINGS, PROMPTS, [1, 7, 5])


def test_useful_operations_of_an_iteration():
    """9 prompt tokens and 12 of responses; 4 forwards at 2 operations, 4 updates of 2 networks at 6."""
    assert operations(SETTINGS, weights=100) == 100 * 21 * (4 * 2 + 4 * 2 * 6)


def test_phases_leave_the_first_iteration_out():
    phases = Phases()
    for seconds in (9.0, 1.0, 3.0):
        phases.iterations.append({"seconds": seconds, "cpu_seconds": seconds, "update": seconds / 2})
    figures = phases.figures()
    assert (figures["seconds"], figures["update"]) == (2.0, 1.0)
    assert figures["peak_mb"] > 10

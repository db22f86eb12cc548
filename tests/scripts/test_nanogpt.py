"""The plain decoder of scripts/nanogpt.py and our stack are the same computation, from the first update to the last."""

import sys

import pytest
import torch

from alignment.config.load import packaged_folder

sys.path.insert(0, str(packaged_folder("configs").parent / "scripts"))
import nanogpt

TEXT = "".join(chr(97 + number * number % 23) for number in range(4000))


@pytest.fixture(scope="module")
def found():
    return nanogpt.measure(TEXT, steps=12, block=5, seed=0)


def test_both_sides_have_equal_losses_before_and_after_training(found):
    for name in ("first_loss", "validation_loss"):
        assert found["ours"][name] == pytest.approx(found["plain"][name], abs=1e-4)
    assert found["ours"]["validation_loss"] < found["ours"]["first_loss"]
    assert [len(side["milliseconds"]) for side in found.values()] == [3, 3]  # 5, 5 and 2 updates


def test_both_sides_have_as_many_weights_as_nanogpt(found):
    """Tables of tokens and of 64 positions, 12 * 128^2 and two norms a layer, the last norm: nanoGPT prints 0.80M of 65 tokens."""
    kinds = len(set(TEXT))
    assert (65 + 64) * 128 + 4 * (12 * 128**2 + 2 * 128) + 128 == 804_096
    for side in found.values():
        assert side["parameters"] == 804_096 - (65 - kinds) * 128


def test_a_window_predicts_each_of_its_characters_but_the_first():
    windows = torch.arange(65).repeat(2, 1)
    batch = nanogpt.batch_of(windows)
    assert batch.lengths == (64, 64) and batch.weight == 128
    assert batch.labels is not None and batch.labels.tolist() == [*range(1, 65)] * 2


def test_the_table_has_both_sides_and_their_ratio(found):
    lines = nanogpt.report([found, found]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| ours", "| plain"]
    assert lines[2].count(f"{found['ours']['validation_loss']:.4f}") == 2
    assert lines[-1].startswith("plain over ours, block by block: ")

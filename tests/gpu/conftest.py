"""Fixtures of the tests that need a CUDA device; without one they are skipped, and counted as such."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is marked `gpu`."""
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """The first GPU, its memory statistics reset."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda", 0)

"""For all tests: the folder of real data, and skips where there is none."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ALIGNMENT_DATA") or ROOT.parent / "shared" / "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without real data its tests are skipped, and counted as such."""
    if DATA.is_dir():
        return
    skip = pytest.mark.skip(reason=f"no real data in {DATA}; set ALIGNMENT_DATA")
    for item in items:
        if item.get_closest_marker("real_data"):
            item.add_marker(skip)


@pytest.fixture
def data_folder() -> Path:
    """Folder of real data; for tests marked `real_data`."""
    return DATA

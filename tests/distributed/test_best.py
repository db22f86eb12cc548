"""Early stopping, best weights, their moving average and saves on two processes: what one has, and all ranks agree."""

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.distributed.processes import FSDP2, run_ranks

WAYS = [
    pytest.param({}, "ddp", marks=pytest.mark.distributed_slow),
    pytest.param(FSDP2, "fsdp2", marks=pytest.mark.distributed_slow),
]


@pytest.mark.parametrize(("environment", "kind"), WAYS)
def test_two_processes_end_early_with_the_average_of_one_and_resume(tmp_path, environment, kind):
    from tests.distributed import best

    best.train(tmp_path / "one")
    run_ranks(2, "tests.distributed.best", str(tmp_path / "two"), **environment)
    one = tmp_path / "one"
    for name in ("whole", "parts"):
        two = tmp_path / "two" / name
        assert json.loads((two / "end.json").read_text()) == {"step": 6, "kind": kind}
        assert sorted(path.name for path in (two / "checkpoints/best").iterdir()) == ["step-000003"]
        for file in ("model.safetensors", "raw.safetensors"):
            ours, theirs = load_file(two / file), load_file(one / file)
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert_close(value, theirs[key], atol=1e-6, rtol=1e-5)
    whole, parts = (load_file(tmp_path / "two" / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(value.equal(parts[key]) for key, value in whole.items())
    assert not all(value.equal(load_file(one / "raw.safetensors")[key]) for key, value in whole.items())
    sharded = list((tmp_path / "two/whole/checkpoints/best/step-000003").glob("average-shards/*"))
    assert len(sharded) == (2 if kind == "fsdp2" else 0)


@pytest.mark.distributed
def test_two_processes_save_by_one_clock_and_know_a_finished_run(tmp_path):
    run_ranks(2, "tests.distributed.best", str(tmp_path), "clock")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000020"]
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["[False, True]"] * 2

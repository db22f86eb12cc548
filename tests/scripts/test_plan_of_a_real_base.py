"""The plan of a LoRA run on SmolLM2 beside the memory that the run takes."""

import json
import sys

import pytest

from alignment.commands.plan import plan_config
from tests.conftest import BASES, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import plan_vs_measured
from measuring import in_process, write_rows

pytestmark = pytest.mark.real_base


def test_a_plan_on_smollm2_is_within_5_percent_of_the_measured_peak(tmp_path):
    text = " ".join(f"The spa of room {number} is on floor {number % 9}." for number in range(60))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Where is the spa?", "completion": " " + text}] * 4)
    plan_vs_measured.write_inputs(tmp_path / "small", width=64, layers=2)
    _, warm_up = plan_vs_measured.write_config("lora", tmp_path / "small", "warm_up")
    settings = {
        "policy": str(BASES / "smollm2"), "output": str(tmp_path / "run"), "optim": {"learning_rate": 1e-4},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 256, "max_cut_share": 1.0},
        "adapter": plan_vs_measured.LORA,
        "training": {"max_steps": 2, "batch_size": 4, "micro_batch_tokens": 1024, "precision": "auto"},
    }  # fmt: skip
    # about 70 MB of every peak are no tensors, so the batch is one in which they are 4 %: the tokenizer of 49,152 tokens
    # (32 MB), the kernels that oneDNN compiles for each shape (18), MKL's buffers (5)
    config = tmp_path / "sft.yaml"
    config.write_text(json.dumps(settings))
    planned = plan_config(str(config), [], stage="sft", tflops=1.0).peak.total
    measured = in_process(plan_vs_measured.measure, "sft", str(config), warm_up, **plan_vs_measured.CHILD)["peak"]
    assert planned == pytest.approx(measured, rel=0.05)

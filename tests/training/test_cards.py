"""Cards by what they say of themselves: peak rates beside the vendors' figures, and what a run sets on its GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignment.algorithms import runs
from alignment.errors import UserError
from alignment.models.weights_config import set_up_device
from alignment.planning.layout import find_device
from alignment.training import TrainingConfig
from alignment.training.speed import PEAK_BANDWIDTH, PEAK_TFLOPS, card_bandwidth, peak_tflops

CARD = torch.device("cuda", 0)
# Name, capability, multiprocessors, kHz of the processor and of the memory, bits of its bus, GB: what the driver says.
CARDS = {
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1_410_000, 1_593_000, 5120, 80),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1_980_000, 2_619_000, 5120, 80),
    "H100 PCIe": ("NVIDIA H100 PCIe", (9, 0), 114, 1_755_000, 1_593_000, 5120, 80),
    "H200": ("NVIDIA H200", (9, 0), 132, 1_980_000, 3_201_000, 6144, 141),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2_520_000, 10_501_000, 384, 24),
    "L40S": ("NVIDIA L40S", (8, 9), 142, 2_520_000, 9_001_000, 384, 48),
    "B200": ("NVIDIA B200", (10, 0), 148, 1_965_000, 3_996_000, 8192, 180),
    "T4": ("Tesla T4", (7, 5), 40, 1_590_000, 5_001_000, 256, 16),
}
# 10^12 dense operations a second in bf16, tf32 and fp32, and 10^12 bytes a second, from the data sheets
SHEETS = {
    "A100": (312, 156, 19.5, 2.039),
    "H100": (989, 495, 67, 3.35),
    "H100 PCIe": (756, 378, 51, 2.0),
    "H200": (989, 495, 67, 4.8),
    "RTX 4090": (165, 82.6, 82.6, 1.008),
    "L40S": (362, 183, 91.6, 0.864),
    "B200": (2250, 1120, 75, 8.0),
}


def insert(monkeypatch, name: str) -> None:
    """Let torch say that this machine has such a card."""
    title, capability, processors, clock, memory_clock, bus, size = CARDS[name]
    card = SimpleNamespace(
        name=title, major=capability[0], minor=capability[1], multi_processor_count=processors, clock_rate=clock,
        memory_clock_rate=memory_clock, memory_bus_width=bus, total_memory=size * 10**9,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: title)


@pytest.fixture(autouse=True)
def everything_as_before():
    """Rates that were asked for are forgotten, and torch's settings are put back."""
    peak_tflops.cache_clear()
    products, attention = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    peak_tflops.cache_clear()
    torch.set_float32_matmul_precision(products)
    torch.backends.cuda.enable_cudnn_sdp(attention)


@pytest.mark.parametrize("name", SHEETS)
def test_rates_of_a_card_are_those_of_its_data_sheet(monkeypatch, name):
    insert(monkeypatch, name)
    *rates, bandwidth = SHEETS[name]
    found = [peak_tflops(CARD, precision) for precision in ("bf16", "tf32", "fp32")]
    assert found == [pytest.approx(rate, rel=0.1) for rate in rates]
    assert card_bandwidth(0) == pytest.approx(bandwidth * 1e12, rel=0.1)


def test_properties_of_a_card_have_the_names_that_are_read():
    stubs = (
        Path(torch.__file__).parent / "_C" / "__init__.pyi"
    ).read_text()  # a build without CUDA has no more of the class
    properties = stubs.partition("class _CudaDeviceProperties")[2].partition("\n\n")[0]
    for name in ("multi_processor_count", "clock_rate", "memory_clock_rate", "memory_bus_width", "total_memory"):
        assert f" {name}: _int" in properties


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "RTX 4090"])
def test_the_table_for_planning_agrees_with_the_cards(monkeypatch, name):
    insert(monkeypatch, name)
    for precision, rate in PEAK_TFLOPS[name].items():
        assert peak_tflops(CARD, precision) == pytest.approx(rate, rel=0.02)
    assert PEAK_BANDWIDTH[name] == pytest.approx(
        card_bandwidth(0), rel=0.25 if name == "A100" else 0.03
    )  # of 40 GB: 1.6


def test_an_unknown_capability_has_no_rate_and_is_assumed_one(monkeypatch):
    insert(monkeypatch, "T4")
    assert peak_tflops(CARD, "bf16") is None
    device = find_device(None, None, "bf16", None)
    assert device.assumed and device.memory == 16 * 10**9 and device.tflops == PEAK_TFLOPS["RTX 4090"]["bf16"]
    given = find_device(None, None, "bf16", 65.0)
    assert not given.assumed and given.tflops == 65.0 and given.bandwidth == pytest.approx(0.32e12, rel=0.01)


@pytest.mark.parametrize("name", SHEETS)
def test_a_plan_takes_the_card_of_this_machine_for_what_it_is(monkeypatch, name):
    insert(monkeypatch, name)
    device = find_device(None, 8, "bf16", None)
    assert device.gpu and not device.assumed and device.name == CARDS[name][0]
    assert device.tflops == pytest.approx(SHEETS[name][0], rel=0.1)
    other = find_device(40, None, "tf32", None)  # asked for: not the one of this machine
    assert other.assumed and (other.name, other.tflops) == ("A100", 156.0)


@pytest.mark.parametrize("precision, products", [("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")])
def test_a_run_sets_its_precision_and_leaves_out_attention_by_cudnn(monkeypatch, precision, products):
    insert(monkeypatch, "A100")
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("medium")
    remark = set_up_device(precision)
    assert torch.get_float32_matmul_precision() == products and not torch.backends.cuda.cudnn_sdp_enabled()
    assert (remark is not None and "several times as fast in bf16" in remark) is (precision == "fp32")


@pytest.mark.parametrize("name, precision", [("A100", "bf16"), ("T4", "fp32")])
def test_auto_is_bf16_on_cards_that_have_it(monkeypatch, name, precision):
    insert(monkeypatch, name)
    assert TrainingConfig(precision="auto").precision == precision


def test_loading_alone_leaves_out_attention_by_cudnn_and_no_more(monkeypatch):
    insert(monkeypatch, "A100")
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("medium")
    assert set_up_device() is None
    assert torch.get_float32_matmul_precision() == "medium" and not torch.backends.cuda.cudnn_sdp_enabled()


def test_tf32_is_refused_where_no_device_has_it(monkeypatch):
    with pytest.raises(UserError, match="precision tf32: only GPUs from Ampere on have it; set it to fp32"):
        set_up_device("tf32")
    insert(monkeypatch, "T4")
    with pytest.raises(UserError, match="only GPUs from Ampere on"):
        set_up_device("tf32")


def test_a_run_in_float32_on_a_gpu_is_told_so_once(monkeypatch, ran, checkpoints, tmp_path, capsys):
    def set_up(precision):
        with monkeypatch.context() as patch:
            insert(patch, "A100")
            return set_up_device(precision)

    monkeypatch.setattr(runs, "set_up_device", set_up)
    ran("sft", checkpoints["llama"], tmp_path / "run", training=TrainingConfig(batch_size=8, max_steps=2))
    notes = json.loads((tmp_path / "run" / "lineage.json").read_text())["notes"]
    assert sum("training.precision is fp32" in note for note in notes) == 1
    assert capsys.readouterr().err.count("training.precision is fp32") == 1

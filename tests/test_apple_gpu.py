"""Apple's GPU: chosen where there is one; what it lacks is refused in words, and no float64 tensor comes to lie on it.

No such GPU is at hand. Tensors of the device `meta` stand in for those on it, and torch's answer that there is one is patched.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment import load_model
from alignment.algorithms.dpo.global_inputs import mean_log_ratio
from alignment.algorithms.rollouts.metrics import moments
from alignment.errors import UserError
from alignment.evaluation import language_loss
from alignment.generation import SamplingConfig
from alignment.generation.engine import _read
from alignment.generation.sampling import RowSampler
from alignment.loading import best_device
from alignment.models.build import build_language_model
from alignment.models.layers import DynamicScaling, RotarySpec
from alignment.models.layers.rotary import scaled_frequencies
from alignment.models.weights_config import set_up_device
from alignment.ragged import Ragged, has_apple_gpu, on_float64_device
from alignment.rewards.combine import part_metrics
from alignment.training import OptimConfig
from alignment.training.distributed import ProcessGroup, init_distributed
from alignment.training.optim import check_optimizer

ALONE = ProcessGroup("single", 0, 1, torch.device("cpu"), None)


@pytest.fixture
def apple(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_device_is_chosen_and_can_be_left_out(apple, monkeypatch):
    assert best_device() == "mps" and has_apple_gpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert best_device() == "cpu" and not has_apple_gpu()
    set_up_device("bf16")


def test_an_nvidia_gpu_comes_first(apple, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert best_device() == "cuda"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: set_up_device("bf16"), r"training\.precision bf16 .* set it to fp32"),
        (lambda: set_up_device("tf32"), r"training\.precision tf32: only GPUs from Ampere on"),
        (lambda: load_model("no such model", quantize="nf4"), r"weights\.quantize nf4 does not run on Apple's GPUs"),
        (
            lambda: check_optimizer(OptimConfig(1e-3, name="adamw_8bit"), "single"),
            "adamw_8bit does not run on Apple's GPUs",
        ),
    ],
)
def test_what_it_lacks_is_refused_before_a_model_is_loaded(apple, refused, message):
    with pytest.raises(UserError, match=message):
        refused()


@pytest.mark.parametrize(
    "launch",
    [{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"ACCELERATE_USE_DEEPSPEED": "true"}, {"WORLD_SIZE": "2"}],
)
def test_several_processes_and_sharding_are_refused(apple, monkeypatch, launch):
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="Apple's GPU trains in one process"):
        init_distributed()


def test_cuda_graphs_are_refused_before_a_model_is_loaded(make_stage, tmp_path, world):
    run, config = make_stage("ppo", "no such model", tmp_path, reward_model="none", cuda_graphs=True)
    with pytest.raises(UserError, match="cuda_graphs: there is no GPU"):
        run(config)


# float64


class WithoutFloat64(TorchDispatchMode):
    """Fails where an operation gives a float64 tensor on another device than the CPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        wrong = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor) and each.dtype == torch.float64]
        assert all(each.device.type == "cpu" for each in wrong), f"{function} makes float64"
        return found


@pytest.fixture
def stand_in(monkeypatch):
    """Tensors on `meta` come back to the CPU as zeros, by way of `cpu` and of `on_float64_device`."""
    cpu = torch.Tensor.cpu

    def zeros(values):
        return torch.zeros(values.shape, dtype=values.dtype) if values.is_meta else cpu(values)

    monkeypatch.setattr(torch.Tensor, "cpu", zeros)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # torch knows no autocast of `meta`
    for name, module in list(sys.modules.items()):
        if name.startswith("alignment.") and hasattr(module, "on_float64_device"):
            monkeypatch.setattr(module, "on_float64_device", zeros)


def small_model():
    fields = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = {"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 32, **fields}
    return build_language_model(config).eval()


def numbers(*shape):
    return torch.zeros(shape, device="meta")


def drawn():
    """Two tokens of a sampler on the device, from a vocabulary of 20."""
    request = SimpleNamespace(sampling=SamplingConfig(), stop_ids=())
    rows = [SimpleNamespace(request=request, drawn=0, uniform_at=lambda step: 0.5) for _ in range(2)]
    return RowSampler(rows, torch.device("meta"), steps=4).draw(numbers(2, 20), None)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: list(_read([drawn(), drawn()])),
        lambda: language_loss(small_model().to("meta"), [Ragged.build([[1, 2, 3], [4, 5]])]),
        lambda: mean_log_ratio(numbers(3, 4)),
        lambda: moments({"one": numbers(3), "two": numbers(3)}, ALONE),
        lambda: part_metrics({"one": numbers(3), "two": numbers(3)}, lambda values: values),
        lambda: scaled_frequencies(
            RotarySpec(width=8, theta=1e4, scaling=DynamicScaling(2.0, 16)), torch.ones(3, device="meta")
        ),
    ],
)
def test_no_float64_on_the_gpu(stand_in, compute):
    with WithoutFloat64():
        try:
            compute()
        except (NotImplementedError, RuntimeError) as error:
            assert "meta" in str(error)  # a number was read, behind all that is computed on the device


def test_values_stay_where_float64_is():
    values = torch.ones(2)
    assert on_float64_device(values) is values

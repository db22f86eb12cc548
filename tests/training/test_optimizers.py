"""Each optimizer by name: it finds an optimum, resumes to the bit, and has as many bytes of state as stated."""

import importlib.util
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from alignment.data.batches import collate
from alignment.errors import UserError
from alignment.models.build import build_language_model
from alignment.training import Engine, OptimConfig, Term, TrainingConfig, restore_checkpoint, save_checkpoint
from alignment.training.backends.base import checked_step
from alignment.training.optim import (
    MuonWithAdamW,
    OptimizerName,
    build_optimizer,
    check_optimizer,
    hidden_matrices,
    optimizer_bytes,
    parameter_groups,
    trainable_parameters,
)
from tests.distributed.worker import documents, next_token
from tests.training.toys import equal

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
HERE = ["adamw", pytest.param("adamw_8bit", marks=needs_bitsandbytes), "adafactor", "muon", "sgd"]
LLAMA = {
    "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def config_of(name: str, rate: float, **settings: Any) -> OptimConfig:
    return OptimConfig(rate, name=name, **settings)  # pyright: ignore[reportArgumentType]


def language_engine(name: str, seed: int = 0, **settings: Any) -> Engine:
    torch.manual_seed(seed)
    settings = {"weight_decay": 0.1, "learning_rates": {"embed": 2.0}, **settings}
    config = config_of(name, 0.3 if name == "sgd" else 5e-3, **settings)
    return Engine(build_language_model(dict(LLAMA)), config, TrainingConfig(), total_steps=30)


def train(engine: Engine, updates: int) -> list[float]:
    """Losses of updates on the same few documents."""
    return [engine.update(Term(collate(documents(0), 400), next_token(engine)))["loss"] for _ in range(updates)]


@pytest.mark.parametrize("name", HERE)
def test_a_language_model_learns(name):
    losses = train(language_engine(name), 25)
    assert losses[-1] < 0.6 * losses[0], (name, losses)


def types_of_state(engine: Engine) -> dict[str, dict[str, Any]]:
    """The type of each entry of the state, by parameter."""
    backend: Any = engine.backend
    return {
        name: {key: getattr(value, "dtype", type(value)) for key, value in backend.optimizer.state[parameter].items()}
        for name, parameter in backend.unwrapped.named_parameters()
    }


@pytest.mark.parametrize("name", HERE)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path, name):
    engine = language_engine(name)
    train(engine, 3)
    path = save_checkpoint(tmp_path, 3, {"policy": engine}, {}, {}, keep=1)
    other = language_engine(name, seed=7)
    restore_checkpoint(path, {"policy": other}, {})
    assert types_of_state(engine) == types_of_state(other)
    assert train(engine, 4) == train(other, 4)
    assert equal(engine, other)


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the state, each memory once."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize("name", HERE)
def test_the_state_has_the_bytes_that_are_stated(name):
    engine = language_engine(name)
    train(engine, 1)
    model = engine.backend.unwrapped
    shapes = {key: tuple(parameter.shape) for key, parameter in trainable_parameters(model).items()}
    stated = optimizer_bytes(shapes, engine.config, hidden=hidden_matrices(model))
    assert stated == held_bytes(engine.backend.optimizer)  # pyright: ignore[reportAttributeAccessIssue]


def test_bytes_of_a_large_matrix_by_hand():
    shapes = {"blocks.0.weight": (4096, 1024)}  # 4,194,304 elements
    hidden = set(shapes)
    bytes_of = {name: optimizer_bytes(shapes, config_of(name, 1e-3), hidden=hidden) for name in get_args(OptimizerName)}
    assert bytes_of["adamw"] == 2 * 4 * 4_194_304 + 4  # two moments and the number of updates
    assert bytes_of["adamw_8bit"] == bytes_of["paged_adamw_8bit"] == 2 * (4_194_304 + 4 * 16_384) + 2_048
    assert bytes_of["adafactor"] == 4 * (4096 + 1024 + 1)
    assert bytes_of["muon"] == bytes_of["sgd"] == 4 * 4_194_304
    assert optimizer_bytes(shapes, config_of("muon", 1e-3)) == bytes_of["adamw"]
    assert optimizer_bytes(shapes, config_of("sgd", 1e-3, momentum=0.0)) == 0


@needs_bitsandbytes
def test_eight_bits_follow_thirty_two():
    wide, narrow = train(language_engine("adamw"), 15), train(language_engine("adamw_8bit"), 15)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.05)


def test_adafactor_moves_by_the_learning_rate_itself():
    model = nn.Linear(4, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, config_of("adafactor", 1e-2))
    model.weight.grad = torch.full((3, 4), 0.5)
    optimizer.step()
    # a constant gradient divided by its root mean square is 1, whatever the size of the weight
    assert torch.allclose(before - model.weight.detach(), torch.full((3, 4), 1e-2), atol=1e-6)


def test_muon_takes_a_step_of_the_size_of_its_scaling():
    layer = nn.Linear(16, 64, bias=False)
    model, weight = nn.Sequential(nn.ModuleList([layer])), layer.weight
    before = weight.detach().clone()
    optimizer = build_optimizer(model, config_of("muon", 1e-2))
    weight.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    singular = torch.linalg.svdvals(before - weight.detach()) / (1e-2 * 0.2 * 8)
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3  # orthogonal, up to Newton-Schulz's five steps


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = build_language_model(dict(LLAMA))
    optimizer = build_optimizer(model, config_of("muon", 1e-3))
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = ([names[id(p)] for group in part.param_groups for p in group["params"]] for part in optimizer._parts)
    assert len(muon) == 2 * 7 and all(".blocks." in name and "norm" not in name for name in muon)
    assert sorted(muon + adamw) == sorted(names.values())
    assert {name.rsplit(".", 2)[-2] for name in adamw} >= {"embed", "attention_norm", "feedforward_norm"}


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(UserError, match="no matrix of the model's blocks is trained"):
        build_optimizer(nn.Linear(3, 3), config_of("muon", 1e-3))


def test_sgd_by_hand():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = build_optimizer(model, config_of("sgd", 0.1, momentum=0.5))
    seen = []
    for _ in range(3):  # f = w^2 / 2: v <- 0.5 v + w, w <- w - 0.1 v
        model.weight.grad = model.weight.detach().clone()
        optimizer.step()
        seen.append(float(model.weight))
    assert seen == pytest.approx([0.9, 0.76, 0.614])


class Named(nn.Module):
    """Parameters of the names that patterns are searched in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"lora_A": nn.Linear(2, 2, False), "lora_B": nn.Linear(2, 2, False)})]
        )
        self.embed = nn.Embedding(2, 2)


@pytest.mark.parametrize(
    ("patterns", "scales"),
    [
        ({"lora_B": 16.0, r"^embed\.": 0.5}, [1.0, 16.0, 0.5]),
        ({"lora_A": 2.0, "blocks": 3.0}, [2.0, 3.0, 1.0]),  # the first that matches counts
    ],
)
def test_a_pattern_scales_the_rate_of_the_names_it_is_found_in(patterns, scales):
    groups = parameter_groups(model := Named(), 0.0, patterns)
    found = {id(x): group.get("lr_scale", 1.0) for group in groups for x in group["params"]}
    assert [found[id(parameter)] for parameter in model.parameters()] == scales


@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        ({"lora_C": 16.0}, r"'lora_C' is found in the name of no trainable parameter; there are: blocks\.\*\.lora_A"),
        ({"blocks": 2.0, "lora": 4.0}, "'lora' has no effect: patterns before it match all its parameters"),
    ],
)
def test_a_pattern_without_effect_is_refused(patterns, why):
    with pytest.raises(UserError, match=why):
        parameter_groups(Named(), 0.0, patterns)


def test_each_group_steps_with_its_own_rate():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    config = OptimConfig(1e-2, learning_rates={r"^b\.": 4.0})
    optimizer = build_optimizer(model, config)
    assert [(len(g["params"]), g.get("lr_scale")) for g in optimizer.param_groups] == [(1, None), (1, 4.0)] * 2
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    checked_step(optimizer, 0.0, 1e-2, torch.zeros(1), 1)
    for name, value in model.named_parameters():  # Adam's first step is the rate itself
        assert torch.allclose(before[name] - value, torch.full_like(value, 4e-2 if name[0] == "b" else 1e-2), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("adamw_8bit", "fsdp2", "bitsandbytes cannot read sharded tensors"),
        ("paged_adamw_8bit", "fsdp2", "bitsandbytes cannot read sharded tensors"),
        ("adafactor", "fsdp2", "Adafactor cannot read sharded tensors"),
        ("adafactor", "deepspeed", "Adafactor needs rows and columns"),
        ("muon", "deepspeed", "Muon needs matrices"),
    ],
)
def test_an_optimizer_that_a_backend_cannot_run_is_refused_with_the_reason(name, kind, why):
    with pytest.raises(UserError, match=f"optim.name {name} does not run under {kind}: .*{why}"):
        check_optimizer(config_of(name, 1e-3), kind)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("alignment.training.optim.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"adamw_8bit needs bitsandbytes: pip install"):
        check_optimizer(config_of("adamw_8bit", 1e-3), "single")


@needs_bitsandbytes
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_paged_state_resumes_paged(tmp_path):
    engine = language_engine("paged_adamw_8bit")
    train(engine, 2)
    path = save_checkpoint(tmp_path, 2, {"policy": engine}, {}, {}, keep=1)
    other = language_engine("paged_adamw_8bit", seed=7)
    restore_checkpoint(path, {"policy": other}, {})
    assert train(engine, 3) == train(other, 3)

"""The choice between gathered and sharded weights for sampling, and the bytes that decide it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.rollouts import rollout, setup
from alignment.algorithms.rollouts.setup import choose_rollout_weights, sampling_bytes
from alignment.data.batches import Example
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import SamplingConfig
from alignment.models.build import build_language_model
from alignment.training import TrainingConfig
from alignment.training.backends.base import computing_types, whole_bytes, whole_parameters
from tests.examples import prompt_example

LLAMA = {
    "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
# Per block: query and output 32 x 32, key and value 16 x 32, three feed-forward matrices 48 x 32; two norms of 32.
LINEAR, REST = 2 * (2 * 1024 + 2 * 512 + 3 * 1536), 61 * 32 + 5 * 32


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_language_model(dict(LLAMA)).eval()


def state_of(model, whole: int, kind: str = "fsdp2"):
    """A state on four ranks of which each has the same memory."""
    backend = SimpleNamespace(unwrapped=model, whole_bytes=lambda: whole)
    group = SimpleNamespace(size=4, kind=kind, device=torch.device("cpu"), largest=lambda count: count)
    engine = SimpleNamespace(backend=backend)
    return SimpleNamespace(policy=engine, engines={"policy": engine, "value": engine}, process_group=group)


def prompt(length: int) -> Example:
    return prompt_example([1] * length, "", {}, "row")


def choose(model, setting: str, whole: int, free: int, monkeypatch, kind: str = "fsdp2", **changes):
    monkeypatch.setattr(setup, "free_bytes", lambda group: free)
    config = PPOConfig(
        "policy",
        reward_model="reward",
        data=DataConfig(train="rows"),
        output="output",
        rollout_weights=setting,
        **changes,
    )
    notes = []
    run = SimpleNamespace(note=notes.append)
    return choose_rollout_weights(config, [prompt(10)], state_of(model, whole, kind), run), notes


def test_bytes_of_cache_and_logits_by_hand(model):
    training = TrainingConfig(batch_size=30, precision="bf16")
    config = PPOConfig(
        "policy", reward_model="reward", data=DataConfig(train="rows"), output="output", max_new_tokens=6,
        training=training,
    )  # fmt: skip
    # 8 rows a rank; 16 tokens, each with keys and values of 2 heads of 8 numbers in 2 layers, in 2 bytes
    assert sampling_bytes(config, [prompt(10), prompt(3)], state_of(model, 1)) == 8 * (
        16 * 2 * 2 * 2 * 8 * 2 + 3 * 4 * 61
    )


def test_what_fits_is_gathered_and_what_does_not_stays_sharded(model, monkeypatch):
    choice, [note] = choose(model, "auto", 10**9, 10**10, monkeypatch)
    assert choice == "gathered"
    assert note.startswith("rollout_weights: gathered (auto): the whole policy takes 1 GB on each device")
    assert "10 GB are free" in note
    choice, [note] = choose(model, "auto", 10**10, 10**10, monkeypatch)
    assert choice == "sharded" and note.startswith("rollout_weights: sharded (auto)")
    choice, [note] = choose(model, "sharded", 10**9, 10**10, monkeypatch)
    assert choice == "sharded" and note.startswith("rollout_weights: sharded (as set)")


def test_graphs_are_left_out_with_a_note_where_the_weights_stay_sharded(model, monkeypatch):
    _, notes = choose(model, "auto", 10**10, 10**10, monkeypatch, cuda_graphs=True)
    assert notes[1:] == ["cuda_graphs: has no effect, because a step with sharded weights cannot be captured"]
    assert len(choose(model, "auto", 10**9, 10**10, monkeypatch, cuda_graphs=True)[1]) == 1
    with pytest.raises(ValueError, match=r"cuda_graphs.*leave it out with servers and rollout_weights=sharded"):
        choose(model, "sharded", 1, 1, monkeypatch, cuda_graphs=True)


@pytest.mark.parametrize("weights, captures", [("gathered", True), ("sharded", False)])
def test_only_whole_weights_are_decoded_by_graphs(model, monkeypatch, weights, captures):
    asked = []
    monkeypatch.setattr(rollout, "decode_responses", lambda *_, **options: asked.append(options["cuda_graphs"]))
    state = state_of(model, 1)
    state.policy.backend.full_parameters = state.policy.backend.sharded_decoding = nullcontext
    for name, value in {"servers": None, "rollout_weights": weights, "cuda_graphs": True, "stop_ids": []}.items():
        setattr(state, name, value)
    rollout.sample(state, SamplingConfig(4), [[1]], [0], 1)
    assert asked == [captures]


def test_gathered_weights_that_cannot_fit_are_refused(model, monkeypatch):
    with pytest.raises(UserError, match="rollout_weights=gathered does not fit: the whole policy takes 20 GB"):
        choose(model, "gathered", 2 * 10**10, 10**10, monkeypatch)


def test_without_sharding_nothing_is_chosen_or_noted(model, monkeypatch):
    assert choose(model, "auto", 0, 0, monkeypatch, "ddp") == ("gathered", [])
    choice, [note] = choose(model, "sharded", 0, 0, monkeypatch, "ddp")
    assert choice == "gathered" and "sharded has no effect" in note


def test_whole_copies_take_half_the_bytes_and_give_the_bits_of_autocast(model):
    types = computing_types(model, "bf16")
    assert whole_bytes(types, lambda parameter: True) == 2 * LINEAR + 4 * REST
    assert whole_bytes(computing_types(model, "fp32"), lambda parameter: True) == 4 * (LINEAR + REST)
    ids, before = torch.arange(12).view(2, 6), {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(ids).logits
        with whole_parameters(model, types, lambda parameter, dtype: parameter.detach().to(dtype)):
            assert model.trunk.blocks[0].attention.query.weight.dtype == torch.bfloat16
            assert model.head.weight is model.trunk.embed.weight and model.head.weight.dtype == torch.float32
            assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_layers_under_an_adapter_keep_their_type(model):
    from alignment.adapters.attach import attach
    from alignment.adapters.specs import LoRASpec

    attach(model, LoRASpec(rank=2, alpha=4.0, layers=r"attention\.query"))
    types = {name: computing_types(model, "bf16")[value] for name, value in model.named_parameters()}
    assert types["trunk.blocks.0.attention.query.base_layer.weight"] == torch.float32
    assert types["trunk.blocks.0.attention.key.weight"] == torch.bfloat16

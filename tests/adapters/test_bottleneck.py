"""Bottleneck adapters: what they compute, where they stand, and their files."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import BottleneckSpec, attach, disabled, load_adapter, merge_adapter, read_spec, save_adapter
from alignment.adapters.bottleneck import Bottleneck, bottlenecks
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.ragged import Ragged
from tests.adapters.tiny_models import ISSUE, MASKED, MODELS, TIGHT, disturb, inputs, write

SPECS = {
    "houlsby": BottleneckSpec(width=4, placement="houlsby", activation="gelu"),
    "pfeiffer": BottleneckSpec(reduction_factor=8),
}
PLACEMENT = pytest.mark.parametrize("placement", SPECS)
MPNET = {k: v for k, v in MODELS["bert"][1].items() if k != "max_position_embeddings"} | {"max_position_embeddings": 66}


@torch.no_grad()
def logits(model, name):
    return model.eval()(**inputs(name)).logits


def test_what_it_computes():
    """down = [1, 2], relu, up = [3, -1]: (1, 1) -> h = 3, + (9, -3); (-1, 0) -> h = 0, unchanged."""
    adapter = Bottleneck(BottleneckSpec(width=1), 2)
    x = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    assert torch.equal(adapter(x), x)  # at the start
    with torch.no_grad():
        adapter.down.weight.copy_(torch.tensor([[1.0, 2.0]]))
        adapter.up.weight.copy_(torch.tensor([[3.0], [-1.0]]))
    assert_close(adapter(x), torch.tensor([[10.0, -2.0], [-1.0, 0.0]]))
    assert adapter(x.bfloat16()).dtype == torch.bfloat16 and adapter.down.weight.dtype == torch.float32


@PLACEMENT
@pytest.mark.parametrize("name", [*ISSUE, "pegasus", "mpnet"])
def test_starts_as_the_base_and_opens_again_from_its_file(name, placement, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "mpnet", (MASKED, MPNET))
    write(name, tmp_path / "base")
    plain = logits(load_pretrained(tmp_path / "base"), name)
    model = attach(load_pretrained(tmp_path / "base"), SPECS[placement])
    layers = {"gemma3_text": 3, "t5": 6, "pegasus": 4}.get(name, 2)
    assert len(bottlenecks(model)) == layers * (2 if placement == "houlsby" else 1)
    assert torch.equal(logits(model, name), plain)
    wanted = logits(disturb(model), name)
    assert (wanted - plain).abs().max() > 0.05
    with disabled(model):
        assert torch.equal(logits(model, name), plain)
    save_adapter(model, tmp_path / "a", base=str(tmp_path / "base"))
    assert read_spec(tmp_path / "a") == SPECS[placement]
    assert torch.equal(logits(load_model(str(tmp_path / "a")), name), wanted)


def test_every_adapter_stands_on_the_output_of_its_layer(tmp_path):
    """After the output projection of attention and after the feed-forward layer, before what they are added to."""
    write("llama", tmp_path)
    model = attach(load_pretrained(tmp_path), SPECS["houlsby"])
    assert {name.rpartition(".")[0] for name in bottlenecks(model)} == {
        f"trunk.blocks.{i}.{part}" for i in (0, 1) for part in ("attention", "feedforward")
    }
    assert all(p.requires_grad == (".bottleneck." in name) for name, p in model.named_parameters())
    write("stablelm", tmp_path / "foreign")
    foreign = attach(load_pretrained(tmp_path / "foreign"), SPECS["houlsby"])
    assert {name.rpartition(".")[0] for name in bottlenecks(foreign)} == {
        f"inner.model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.o_proj", "mlp.down_proj")
    }


def test_the_same_numbers_here_and_in_transformers_class(tmp_path):
    """One llama in both: adapters of equal weights on the parts that correspond."""
    from alignment.models.external.load import load_external

    write("llama", tmp_path)
    ours = disturb(attach(load_pretrained(tmp_path), SPECS["houlsby"]))
    theirs = attach(load_external(tmp_path), SPECS["houlsby"])
    for mine, other in zip(bottlenecks(ours).values(), bottlenecks(theirs).values(), strict=True):
        other.load_state_dict(mine.state_dict())
    assert_close(logits(theirs, "llama"), logits(ours, "llama"), **TIGHT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_decoding_and_copies_of_the_model_have_the_adapter(name, tmp_path):
    write(name, tmp_path)
    model = disturb(attach(load_pretrained(tmp_path), SPECS["houlsby"])).eval()
    copy = deepcopy(model)
    prompts = [[5, 6, 7, 8], [9]]
    drawn = decode_responses(model, prompts, SamplingConfig(max_new_tokens=6), stop_ids=[])
    for prompt, response, log_probs in zip(prompts, drawn.token_ids, drawn.log_probs, strict=True):
        whole = copy(batch=Ragged.build([prompt + response])).log_probs[len(prompt) - 1 :]
        assert_close(torch.tensor(log_probs), whole, **TIGHT)
    next(iter(bottlenecks(copy).values())).down.weight.zero_()
    assert next(iter(bottlenecks(model).values())).down.weight.abs().sum() > 0


def test_what_does_not_fit_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "mamba", (MODELS["llama"][0], {"hidden_size": 32, "num_hidden_layers": 2}))
    write("mamba", tmp_path / "mamba")
    with pytest.raises(UserError, match=r"MambaForCausalLM: a bottleneck adapter looks for .*o_proj.*found 0 and 0"):
        attach(load_pretrained(tmp_path / "mamba"), SPECS["houlsby"])
    write("llama", tmp_path / "base")
    model = attach(load_pretrained(tmp_path / "base"), SPECS["pfeiffer"])
    with pytest.raises(UserError, match="cannot be merged into weights, and peft has no such adapter"):
        merge_adapter(model)
    save_adapter(model, tmp_path / "a", base=str(tmp_path / "base"))
    config, file = tmp_path / "a" / "adapter_config.json", tmp_path / "a" / "adapter_model.safetensors"
    whole = load_file(file)
    name = "trunk.blocks.1.feedforward.bottleneck.up.bias"
    save_file({key: tensor for key, tensor in whole.items() if key != name} | {"other": torch.ones(1)}, file)
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path / "a"))
    assert f"tensor for {name} is missing" in str(error.value) and "tensor other belongs nowhere" in str(error.value)
    save_file(whole, file)
    settings = json.loads(config.read_text())
    for change, message in (
        ({"width": 5}, r"shape \[4, 32\], the model wants \[5, 32\]"),
        ({"widht": 4}, "widht"),
        ({"placement": "houlsby"}, "is missing"),
        ({"peft_type": "BOTTLENECKS"}, "not one of those supported: .*bottleneck"),
    ):
        config.write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=message):
            load_adapter(load_pretrained(tmp_path / "base"), tmp_path / "a")
    for options in ({"width": 0}, {"reduction_factor": 0.5}, {"dropout": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            BottleneckSpec(**options)

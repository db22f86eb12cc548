"""Adapters on a head that shares the token table's weight: every merge gives the head a weight of its own."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.adapters import DoRASpec, IA3Spec, LoRASpec, attach, load_adapter, merge_adapter, save_adapter
from alignment.adapters.attach import merged_state
from alignment.commands.export import export_model
from alignment.errors import UserError
from alignment.files import write_json
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.models.safetensors_files import read_config
from alignment.training import OptimConfig, TrainingConfig
from tests.adapters.tiny_models import MODELS, disturb, inputs, write

HEAD = ("lm_head", r"attention\.(query|key|value)", "[qkv]_proj")
SPECS = {
    "lora": LoRASpec(rank=2, layers=HEAD),
    "dora": DoRASpec(rank=2, layers=HEAD),
    "ia3": IA3Spec(layers=HEAD, feedforward="(?!)"),
    "head whole": LoRASpec(rank=2, layers=HEAD[1:], modules_to_save=("lm_head",)),
    "rows below lora": LoRASpec(rank=2, layers=HEAD, token_rows=(5, 9)),
}
TABLES = {"llama": "embed_tokens", "gpt2": "wte", "bert": "word_embeddings", "stablelm": "embed_tokens"}
SHARED = "table of .* is one of several"


@torch.no_grad()
def logits(model, name):
    return model(**inputs(name)).logits


def check_merge(model, name, folder):
    """The model merged, in memory and from its directory here and in transformers, gives the logits that it gave."""
    wanted = logits(model, name)
    save_adapter(model, folder / "adapter", base=str(folder / "base"))
    assert_close(logits(load_adapter(load_pretrained(folder / "base"), folder / "adapter"), name), wanted)
    state = merged_state(model, model.state_dict())
    merged = merge_adapter(model)
    assert_close(state, dict(merged.state_dict()), atol=1e-5, rtol=1e-5)
    save_model(merged, folder / "merged")
    theirs = getattr(transformers, MODELS[name][0]).from_pretrained(folder / "merged").eval()
    for opened in (merged, load_pretrained(folder / "merged"), theirs):
        assert_close(logits(opened, name), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "stablelm", "pegasus"])
def test_a_tied_head_is_merged_alone(tmp_path, name, kind):
    write(name, tmp_path / "base", tie_word_embeddings=True)
    check_merge(disturb(attach(load_pretrained(tmp_path / "base"), SPECS[kind]), size=0.1).eval(), name, tmp_path)
    # transformers' encoder-decoders also tie both token tables by the key
    assert read_config(tmp_path / "merged")["tie_word_embeddings"] is (name == "pegasus")


@pytest.mark.parametrize("name", TABLES)
def test_a_tied_table_that_is_trained_whole_leaves_the_head(tmp_path, name):
    write(name, tmp_path / "base", tie_word_embeddings=True)
    spec = LoRASpec(rank=2, layers=HEAD[1:], modules_to_save=(TABLES[name],))
    check_merge(disturb(attach(load_pretrained(tmp_path / "base"), spec), size=0.1).eval(), name, tmp_path)


def test_a_head_of_its_own_does_not_change_the_scale_of_t5(tmp_path):
    write("t5", tmp_path / "base")
    config = read_config(tmp_path / "base")
    assert config.pop("scale_decoder_outputs")  # Google's files do not name it
    write_json(tmp_path / "base" / "config.json", config)
    spec = LoRASpec(rank=2, layers=("attention.query",), modules_to_save=("lm_head",))
    check_merge(disturb(attach(load_pretrained(tmp_path / "base"), spec), size=0.1).eval(), "t5", tmp_path)


@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("t5", LoRASpec(modules_to_save=("shared",)), SHARED),
        ("pegasus", LoRASpec(layers=("q_proj",), modules_to_save=("embed_tokens",)), SHARED),
        ("gpt2", replace(SPECS["dora"], token_rows=(5,)), "dora on a tied head"),
    ],
)
def test_tables_that_no_file_can_hold_apart_are_refused(tmp_path, name, spec, why):
    write(name, tmp_path)
    with pytest.raises(UserError, match=why):
        attach(load_pretrained(tmp_path), spec)


def test_every_next_stage_starts_from_what_the_adapter_computed(ran, checkpoints, read_metrics, tmp_path):
    def first_loss(name, policy, adapter=None, **optim):
        optim, training = OptimConfig(**{"learning_rate": 1e-12, **optim}), TrainingConfig(batch_size=4, max_steps=2)
        ran("sft", str(policy), tmp_path / name, adapter=adapter, training=training, optim=optim)
        return read_metrics(tmp_path / name)[0]["loss"]

    first = tmp_path / "first" / "model"
    untrained = first_loss("first", checkpoints["gpt2"], SPECS["lora"], learning_rate=0.05)
    export_model(str(first), None, str(tmp_path / "exported"))
    stacked = first_loss("stacked", first, LoRASpec(rank=2))
    losses = [
        first_loss("merged", first),
        first_loss("base", first, IA3Spec()),
        first_loss("whole", tmp_path / "exported"),
    ]
    assert losses == pytest.approx([stacked] * 3, abs=1e-4) and abs(stacked - untrained) > 0.1
    export_model(str(first), None, str(tmp_path / "half"), dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}

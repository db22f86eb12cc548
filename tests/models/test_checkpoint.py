"""Hugging Face directories, both ways: strict in, bit-equal out (I10, H20, H21)."""

import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alignment.errors import UserError
from alignment.files import byte_count
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.huggingface.checkpoint import (
    hf_locations,
    load_language_model,
    load_scalar_model,
    save_model,
    saved_names,
)
from alignment.models.huggingface.weight_map import read_parameters
from alignment.ragged import Ragged
from alignment.training import TrainingConfig
from tests.models.conftest import roughen, written_by_transformers

IDS = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(0))


SCORES = "AutoModelForSequenceClassification"


def written(directory, config, *door, **keys):
    """A random transformers model of the fixture's config in a directory."""
    plain = {key: value for key, value in config.items() if key != "model_type"}
    return written_by_transformers(directory, config["model_type"], plain, *door, **keys)


@pytest.fixture
def directory(config, tmp_path):
    written(tmp_path, config)
    return tmp_path


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory, **keys):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def names(directory):
    return sorted(load_file(directory / "model.safetensors"))


# Out: what we write


def test_saved_scalar_model_opens_in_transformers_with_equal_scores(config, tmp_path):
    model = roughen(build_scalar_model({**config, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}))
    save_model(model, tmp_path)
    reference, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert reference.config.num_labels == 1
    ids, mask = IDS.clamp(min=1), torch.ones_like(IDS)
    ids[1, 12:], mask[1, 12:] = 0, 0
    with torch.no_grad():
        assert_close(model(ids, mask).logits, reference(ids, attention_mask=mask).logits, atol=1e-5, rtol=0)


def test_h21_a_tie_undone_and_rows_added_are_saved_as_they_are(config, tmp_path):
    model = build_language_model({**config, "tie_word_embeddings": True})
    assert model.head.weight is model.trunk.embed.weight
    model.head.weight = torch.nn.Parameter(torch.randn(64, 32))
    model.trunk.embed = torch.nn.Embedding(64, 32)
    save_model(model, tmp_path)
    again = load_language_model(tmp_path)
    assert again.config["tie_word_embeddings"] is False and again.config["vocab_size"] == 64
    assert torch.equal(again.head.weight, model.head.weight)
    assert torch.equal(again.trunk.embed.weight, model.trunk.embed.weight)


def test_an_attached_part_is_not_saved_silently(config, tmp_path):
    model = build_language_model(config)
    model.prefix = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"prefix\.bias.*merge or detach"):
        save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_dtype_is_kept_and_told(config, tmp_path):
    save_model(build_language_model(config).to(torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_language_model(tmp_path, dtype=torch.bfloat16).trunk.embed.weight.dtype == torch.bfloat16
    assert load_language_model(tmp_path).trunk.embed.weight.dtype == torch.float32


# In: what we read


def test_a_wrong_shape_is_refused_with_both_shapes(directory):
    name = next(name for name in names(directory) if "embed_tokens" in name or "wte" in name)
    change_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(60, 32)}))
    with pytest.raises(UserError, match=rf"{name} has shape \(60, 32\), the config asks for \(61, 32\)"):
        load_language_model(directory)


@pytest.mark.parametrize(
    ("lost", "file", "content", "problem"),
    [
        ("model.safetensors", "pytorch_model.bin", "not even a pickle", r"pickle \(pytorch_model\.bin\)"),
        ("model.safetensors", "consolidated.00.pth", "not even a pickle", r"pickle \(consolidated"),
        ("model.safetensors", "model.pt", "not even a pickle", r"pickle \(model\.pt\)"),
        ("model.safetensors", "notes.txt", "", r"no model\.safetensors"),
        ("config.json", "notes.txt", "", r"no config\.json"),
        ("config.json", "config.json", "{", "not valid JSON"),
        ("config.json", "config.json", "[]", "one JSON object, got list"),
    ],
)
def test_directories_without_a_model_are_refused_and_pickles_unopened(directory, lost, file, content, problem):
    (directory / lost).unlink()
    (directory / file).write_text(content)
    with pytest.raises(UserError, match=problem):
        load_language_model(directory)


def test_old_buffers_are_no_weights(config, directory):
    mask = torch.ones(1, 1, 96, 96)
    old = {
        "gpt2": {"transformer.h.0.attn.bias": mask, "transformer.h.1.attn.masked_bias": torch.ones(1)},
        "llama": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    }[config["model_type"]]  # fmt: skip
    change_tensors(directory, lambda tensors: tensors.update(old))
    load_language_model(directory)


def test_a_bare_trunk_without_prefix_loads(config, tmp_path):
    reference = written(tmp_path, config, "AutoModel", tie_word_embeddings=True)
    assert not any(name.startswith(("transformer.", "model.")) for name in names(tmp_path))
    model = load_language_model(tmp_path)
    hidden = model.trunk(Ragged.build(IDS.tolist()))
    with torch.no_grad():
        assert_close(hidden.view(3, 20, -1), reference(IDS).last_hidden_state, atol=1e-5, rtol=0)


def test_a_tied_head_that_is_another_matrix_is_refused(config, directory):
    change_config(directory, tie_word_embeddings=True)
    head = torch.zeros(61, 32)
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        load_language_model(directory)
    embedding = next(name for name in names(directory) if "embed_tokens" in name or "wte" in name)
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    load_language_model(directory)


# Scalar models


def test_h24_a_reward_model_without_its_head_is_refused(config, tmp_path, directory):
    with pytest.raises(UserError, match=r"score\.weight is missing"):
        load_scalar_model(directory)
    written(tmp_path / "reward", config, SCORES, num_labels=1)
    change_tensors(tmp_path / "reward", lambda tensors: tensors.pop("score.weight"))
    with pytest.raises(UserError, match=r"score\.weight is missing"):
        load_scalar_model(tmp_path / "reward")


def test_a_head_with_two_labels_is_refused(config, tmp_path):
    written(tmp_path, config, SCORES, num_labels=2)
    with pytest.raises(UserError, match=r"score\.weight has shape \(2, 32\)"):
        load_scalar_model(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_opens_as_a_scalar_model_with_a_new_head(config, tmp_path, tied):
    written(tmp_path, config, tie_word_embeddings=tied)
    policy, zero = load_language_model(tmp_path), load_scalar_model(tmp_path, new_head="zero")
    assert torch.equal(zero.trunk.embed.weight, policy.trunk.embed.weight)
    assert (zero(IDS).values == 0).all()
    change_tensors(tmp_path, lambda tensors: tensors.pop(names(tmp_path)[3]))
    with pytest.raises(UserError, match="is missing"):
        load_scalar_model(tmp_path, new_head="zero")


def test_h25_deviation_of_a_new_head(tmp_path):
    # D = 1600: 1 / sqrt(1601) = 0.02499
    config = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 1600, "n_layer": 1, "n_head": 1, "n_inner": 4,
              "n_positions": 4}  # fmt: skip
    save_model(build_language_model(config), tmp_path)
    torch.manual_seed(0)
    head = load_scalar_model(tmp_path, new_head="normal").head.weight
    assert head.std().item() == pytest.approx(1601**-0.5, rel=0.05)


# One tensor at a time


def memory() -> int:
    """Anonymous memory of this process in bytes, without the pages of mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s*(\d+) kB", status)[0]) * 1024


def test_loading_in_another_type_holds_the_model_alone(tmp_path):
    """About 60 MB as bfloat16; the file's float32 would be twice that in addition."""
    wide = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    save_model(build_language_model({"model_type": "llama", **wide, **heads}), tmp_path)
    load_language_model(tmp_path, dtype=torch.bfloat16)  # what the first load allocates for good
    before, highest = memory(), 0
    original = torch.Tensor.copy_

    def noting(self, *arguments, **options):
        nonlocal highest
        result = original(self, *arguments, **options)
        highest = max(highest, memory())
        return result

    torch.Tensor.copy_ = noting
    try:
        model = load_language_model(tmp_path, dtype=torch.bfloat16)
    finally:
        torch.Tensor.copy_ = original
    size = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert size > 50 * 2**20 and highest - before < 1.15 * size


def test_each_tensor_keeps_its_own_type_where_none_is_asked_for(config, directory):
    norm = next(name for name in names(directory) if "norm" in name or "ln_f" in name)
    matrix = next(name for name in names(directory) if "mlp" in name)
    change_tensors(directory, lambda tensors: tensors.update({matrix: tensors[matrix].bfloat16()}))
    model = load_language_model(directory, dtype=None)
    kinds = {hf.name: model.state_dict()[ours].dtype for ours, hf in hf_locations(model).items()}
    assert (
        kinds.pop(matrix) == torch.bfloat16 and kinds[norm] == torch.float32 and set(kinds.values()) == {torch.float32}
    )
    change_tensors(directory, lambda tensors: tensors.update({matrix: tensors[matrix].to(torch.float8_e4m3fn)}))
    with pytest.raises(UserError, match=rf"{matrix} is float8_e4m3fn, which no model computes in"):
        load_language_model(directory, dtype=None)
    load_language_model(directory)


def test_unread_parameters_take_no_memory_and_know_every_slice(config, directory):
    whole, unread = load_language_model(directory), load_language_model(directory, device="meta")
    assert [name for name, _ in unread.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for (name, parameter), real in zip(unread.named_parameters(), whole.parameters(), strict=True):
        assert parameter.shape == real.shape and parameter.untyped_storage().nbytes() == 4 and parameter.isnan().all()
        with pytest.raises(RuntimeError), torch.no_grad():
            parameter[:1].zero_() if parameter.numel() == 1 else parameter.copy_(real)
        for start, stop in ((0, len(real)), (1, 2), (len(real) // 3, len(real) // 3 * 2 + 1)):
            assert torch.equal(parameter.stored.rows(start, stop), real[start:stop]), name
    read_parameters(unread)
    assert all(torch.equal(a, b) for a, b in zip(unread.parameters(), whole.parameters(), strict=True))
    assert torch.equal(unread(IDS).logits, whole(IDS).logits)


FUSED = {  # families whose files hold several of our matrices in one tensor, in groups or not, and tied or expert weights
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {"tie_word_embeddings": False},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "gemma": {"head_dim": 8, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", FUSED)
def test_every_slice_of_a_fused_tensor_equals_that_of_the_whole_model(family, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {} if family in ("bloom", "falcon") else {"intermediate_size": 48}
    save_model(roughen(build_language_model({"model_type": family, **sizes, **FUSED[family]})), tmp_path)
    whole, unread = load_language_model(tmp_path), load_language_model(tmp_path, device="meta")
    for (name, parameter), real in zip(unread.named_parameters(), whole.parameters(), strict=True):
        for ranks in (2, 3, 7):
            rows = -(-len(real) // ranks)
            for start in range(0, len(real), rows):
                part = parameter.stored.rows(start, min(len(real), start + rows))
                assert torch.equal(part, real[start : start + rows]), name


# Large models in several files


def test_shards_open_everywhere_and_one_file_has_the_same_bytes(config, tmp_path):
    model = roughen(build_language_model({**config, "bos_token_id": 1, "eos_token_id": 2}))
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    save_model(model, tmp_path / "one")
    tensors = ((name, model.state_dict()[name]) for name in saved_names(model))
    save_model(model, tmp_path / "many", tensors=tensors, max_shard_size="20KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values())) and len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    sizes = {name: sum(x.numel() * 4 for x in load_file(tmp_path / "many" / name).values()) for name in shards}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 20_000 or len(load_file(tmp_path / "many" / name)) == 1 for name, size in sizes.items())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    with torch.no_grad():
        assert_close(load_language_model(tmp_path / "many")(IDS).logits, reference(IDS).logits, atol=1e-5, rtol=0)
    # saved again in one file: the shards and their index are gone, and the bytes are those of the first save
    save_model(model, tmp_path / "many")
    assert [path.name for path in (tmp_path / "many").glob("*.safetensors*")] == ["model.safetensors"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_at_most_one_shard_is_held_while_tensors_come_in(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 32}
    model = build_language_model(config)
    alive, most = 0, 0

    def forget(size):
        nonlocal alive
        alive -= size

    def counted():
        nonlocal alive, most
        for name in saved_names(model):
            tensor = model.state_dict()[name].clone()
            alive += tensor.numel() * 4
            most = max(most, alive)
            weakref.finalize(tensor, forget, tensor.numel() * 4)
            yield name, tensor

    save_model(model, tmp_path, tensors=counted(), max_shard_size="30KB")
    total = sum(tensor.numel() * 4 for tensor in model.parameters())
    assert total > 200_000 and most < 80_000, (
        most
    )  # a shard, the tensor that did not fit, its parts before they are fused


def test_tensors_that_do_not_fit_leave_no_config(config, tmp_path):
    model = build_language_model(config)
    names = saved_names(model)
    with pytest.raises(ValueError, match=rf"missing \['{names[-1]}'\]"):
        save_model(model, tmp_path, tensors=((name, model.state_dict()[name]) for name in names[:-1]))
    with pytest.raises(ValueError, match=r"unexpected \['surplus'\]"):
        save_model(model, tmp_path, tensors=[("surplus", torch.zeros(2))])
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("size", ["5", "GB", "-1GB", "0GB", "5XB"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="is no size; give a number and a unit"):
        TrainingConfig(max_shard_size=size)
    assert [byte_count(text) for text in ("5GB", "1.5 mb", "2KiB", "7B")] == [5 * 10**9, 1_500_000, 2048, 7]


def test_h20_each_tensor_that_a_file_lacks_is_named(directory):
    whole = load_file(directory / "model.safetensors")
    assert len(whole) > 15
    for name in whole:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        save_file(rest, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"{re.escape(name)} is missing"):
            load_language_model(directory)


def test_h20_what_a_config_says_reaches_the_numbers(config, directory):
    before = load_language_model(directory)(IDS).logits
    change_config(directory, **{"layer_norm_epsilon" if config["model_type"] == "gpt2" else "rms_norm_eps": 0.5})
    assert (before - load_language_model(directory)(IDS).logits).abs().max() > 1e-3

"""Adapter directories: ours open in peft, peft's open here, and what does not fit is refused by name."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import LoRASpec, PrefixSpec, is_adapter, load_adapter, read_base, read_spec, save_adapter
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.reward_model import load_reward_network

TIGHT = {"atol": 1e-5, "rtol": 0}
SPECS = {
    "LoRA": LoRASpec(rank=4, alpha=6.0),
    "LoRA on query and value": LoRASpec(rank=3, layers=r"attention\.(query|value)"),
    "rsLoRA": LoRASpec(rank=4, alpha=3.0, rank_stabilized=True, dropout=0.1),
    "prefix": PrefixSpec(tokens=3),
    "projected prefix": PrefixSpec(tokens=3, projection_width=8),
}
EVERY = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
SCALAR = pytest.mark.parametrize("scalar", [False, True], ids=["policy", "reward model"])


@SCALAR
@EVERY
def test_our_directory_opens_in_peft_and_here_by_its_own_name(
    adapted, plain, base, ids, logits, tmp_path, spec, scalar
):
    from peft import PeftModel

    model = adapted(spec, scalar)
    save_adapter(model, tmp_path, base=base)
    theirs = PeftModel.from_pretrained(plain(scalar), tmp_path).eval()
    wanted = logits(model, ids)
    assert_close(logits(theirs, ids), wanted, **TIGHT)
    assert not torch.allclose(logits(plain(scalar), ids), wanted, atol=1e-2)  # the adapter does something
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == (
        "SEQ_CLS" if scalar else "CAUSAL_LM"
    )
    assert is_adapter(tmp_path) and read_base(tmp_path) == base
    again = (load_reward_network if scalar else load_model)(str(tmp_path))
    assert_close(logits(again, ids), wanted, atol=0 if spec != SPECS["projected prefix"] else 1e-6, rtol=0)
    if isinstance(spec, LoRASpec):
        assert (read_spec(tmp_path).rank, read_spec(tmp_path).dropout) == (spec.rank, spec.dropout)


THEIRS = {
    "llama": {"target_modules": "all-linear", "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "use_rslora": True},
}


@SCALAR
def test_a_lora_that_peft_made_opens_here(family, plain, ids, logits, tmp_path, scalar):
    theirs = made_by_peft(plain(scalar), tmp_path, scalar, THEIRS[family])
    ours = (load_reward_network if scalar else load_model)(str(tmp_path))
    assert_close(logits(ours, ids), logits(theirs, ids), **TIGHT)


def test_a_projected_prefix_that_peft_made_opens_here(plain, ids, logits, tmp_path):
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=8
    )
    theirs = get_peft_model(plain(), config)
    theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    assert ours.prefix.spec.tokens == 5
    assert_close(logits(ours, ids), logits(theirs, ids), **TIGHT)


def made_by_peft(model, directory, scalar, options):
    """The model with a LoRA of peft's own, its weights random, saved to `directory`."""
    from peft import LoraConfig, get_peft_model

    task = "SEQ_CLS" if scalar else "CAUSAL_LM"
    model = get_peft_model(model, LoraConfig(task_type=task, **{"r": 4, "lora_alpha": 8, **options})).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tying", [False, True])
def test_a_layer_that_peft_saves_beside_its_update_must_be_the_bases(family, plain, ids, logits, tmp_path, tying):
    targets = {"gpt2": ["c_attn", "lm_head"], "llama": ["q_proj", "lm_head"]}[family]
    tying = tying and family == "llama"  # acts on nothing where the head is not tied
    options = {"target_modules": targets, "ensure_weight_tying": tying}
    theirs = made_by_peft(plain(), tmp_path, False, options)
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    assert_close(logits(load_model(str(tmp_path)), ids), logits(theirs, ids), **TIGHT)
    edit_tensors(tmp_path, lambda tensors: {n: x + 0.01 * ("lm_head.base_layer" in n) for n, x in tensors.items()})
    with pytest.raises(UserError, match=r"lm_head .*is not the base's"):
        load_model(str(tmp_path))


UNFIT = {  # what peft trained -> changes of its config, and a word of the refusal
    "table": ({"target_modules": ["{query}", "{table}"]}, {}, "{table} .*target_modules"),
    "tied": ({"modules_to_save": ["{table}"]}, {"ensure_weight_tying": True}, "{table} .*ensure_weight_tying"),
    "other target": ({}, {"target_modules": ["c_fc", "k_proj"]}, "target_modules"),
    "other pattern": ({}, {"target_modules": r".*\.(c_fc|k_proj)"}, "target_modules"),
    "no pattern": ({}, {"target_modules": "("}, "no regular expression"),
    "fewer layers": ({}, {"layers_to_transform": [0]}, "1.*layers_to_transform"),
    "no such module": ({}, {"modules_to_save": ["{table}"]}, "{table} .*modules_to_save"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNFIT)
def test_a_config_that_does_not_fit_its_tensors_is_refused(family, plain, tmp_path, case):
    words = {"gpt2": {"query": "c_attn", "table": "wte"}, "llama": {"query": "q_proj", "table": "embed_tokens"}}[family]
    if case == "tied" and family == "llama":
        pytest.skip("its head is its own")

    def named(value):
        return [each.format(**words) for each in value] if isinstance(value, list) and "0" not in str(value) else value

    options, changes, why = UNFIT[case]
    options = {"target_modules": [words["query"]], **{key: named(value) for key, value in options.items()}}
    made_by_peft(plain(), tmp_path, False, options)
    change_config(tmp_path, **{key: named(value) for key, value in changes.items()})
    with pytest.raises(UserError, match=why.format(**words)):
        load_model(str(tmp_path))


def test_a_layer_whose_update_is_lost_is_noted(family, plain, tmp_path):
    query, layer = {"gpt2": ("c_attn", "h.1.attn"), "llama": ("q_proj", "layers.1.self_attn")}[family]
    made_by_peft(plain(), tmp_path, False, {"target_modules": [query, "never_there"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(str(tmp_path))
    edit_tensors(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if layer not in name})
    with pytest.warns(UserWarning, match=rf"{layer}\.{query}, whose update"):
        load_model(str(tmp_path))


def change_config(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


UNSUPPORTED = {
    "bias": "all", "layer_replication": [[0, 2]], "init_lora_weights": "pissa", "an_option_of_the_future": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_options_that_change_the_result_are_refused_by_name(checkpoints, tmp_path, option):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    made_by_peft(base, tmp_path, False, {"target_modules": ["q_proj"]})
    load_model(str(tmp_path))
    change_config(tmp_path, **{option: UNSUPPORTED[option]})
    with pytest.raises(UserError, match=option):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"peft_type": "VERA"}, r"VERA.*lora, dora"), ({"auto_map": {"AutoModel": "m.M"}}, "auto_map")],
)
def test_other_kinds_and_code_are_refused(adapted, base, tmp_path, change, message):
    save_adapter(adapted(LoRASpec(rank=2)), tmp_path, base=base)
    change_config(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_adapter(load_language_model(base), tmp_path)


@pytest.mark.parametrize("text", ['{"rnak": 4}', '{"rank": 0}', "not json"])
def test_spoilt_settings_of_ours_are_refused(adapted, base, tmp_path, text):
    save_adapter(adapted(LoRASpec(rank=2)), tmp_path, base=base)
    (tmp_path / "alignment_adapter.json").write_text(text)
    with pytest.raises(UserError, match=r"alignment_adapter\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=2)], ids=["LoRA", "prefix"])
def test_a_reward_adapter_without_its_score_head_is_refused(adapted, base, tmp_path, spec):
    """H24: a random head would give random rewards."""
    save_adapter(adapted(spec, scalar=True), tmp_path, base=base)
    edit_tensors(
        tmp_path, lambda tensors: {name: x for name, x in tensors.items() if not name.endswith("score.weight")}
    )
    with pytest.raises(UserError, match=r"head\.weight is missing"):
        load_reward_network(str(tmp_path))


def test_missing_unknown_and_misshapen_tensors_are_named(adapted, base, tmp_path):
    save_adapter(adapted(LoRASpec(rank=2)), tmp_path, base=base)
    name = next(
        name for name in sorted(load_file(tmp_path / "adapter_model.safetensors")) if name.endswith("lora_B.weight")
    )
    edit_tensors(
        tmp_path, lambda tensors: {n: x for n, x in tensors.items() if n != name} | {"stray.weight": torch.ones(1)}
    )
    with pytest.raises(UserError, match=r"lora_B\.default\.weight is missing[\s\S]*stray\.weight belongs nowhere"):
        load_model(str(tmp_path))
    edit_tensors(
        tmp_path, lambda tensors: {n: x for n, x in tensors.items() if "stray" not in n} | {name: torch.ones(7, 2)}
    )
    with pytest.raises(UserError, match="lora_B has 7 rows"):
        load_model(str(tmp_path))


def edit_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_a_scalar_model_keeps_its_own_head_where_asked(adapted, base, tmp_path):
    """The critic starts from a reward model's adapter with a head of zeros; a policy's adapter is no reward model."""
    save_adapter(adapted(LoRASpec(rank=2)), tmp_path / "policy", base=base)
    with pytest.raises(UserError, match="no score head"):
        load_reward_network(str(tmp_path / "policy"))
    save_adapter(adapted(LoRASpec(rank=2), scalar=True), tmp_path, base=base)
    model = load_adapter(load_scalar_model(base, new_head="zero"), tmp_path, with_head=False)
    assert model.head.weight.abs().sum() == 0 and model.head.weight.requires_grad
    with_head = load_adapter(load_scalar_model(base, new_head="zero"), tmp_path)
    assert with_head.head.weight.abs().sum() > 0


def test_a_base_that_is_not_named_is_asked_for(adapted, base, tmp_path):
    save_adapter(adapted(LoRASpec(rank=2)), tmp_path, base=None)
    with pytest.raises(UserError, match="base_model_name_or_path is empty"):
        load_model(str(tmp_path))
    assert load_adapter(load_language_model(base), tmp_path)  # which one it is may be said in code


@pytest.mark.parametrize("scalar", [False, True], ids=["policy", "reward model"])
@pytest.mark.parametrize("spec", [LoRASpec(rank=2), PrefixSpec(tokens=3, projection_width=8)], ids=["lora", "prefix"])
def test_a_sharded_model_s_adapter_is_written_from_its_whole_state_alone(adapted, tmp_path, spec, scalar):
    """Under ZeRO-3 live weights are empty, and a forward on one rank would wait for the others."""
    model = adapted(spec, scalar)
    save_adapter(model, tmp_path / "whole", base="base")
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def refuse(*_):
        raise AssertionError("the live model was called")

    for module in model.modules():
        module.register_forward_pre_hook(refuse)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    save_adapter(model, tmp_path / "sharded", base="base", state=state)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "sharded" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

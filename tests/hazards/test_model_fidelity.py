"""H19, H20 and H22: rotary positions, files that are read in part, parameters that never train."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.policies import language_loss_fn, load_policy
from alignment.data.batches import collate
from alignment.data.examples import Example
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.layers import RotarySpec
from alignment.training import Engine, OptimConfig, Term, TrainingConfig

POSITIONS = 256
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
}


# H19: the layout of rotary positions, their scaling and their precision


def written_llama(directory, rope):
    """transformers' own model with random weights, as it writes its file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, rope_parameters=dict(rope), bos_token_id=1,
        eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", ROPES)
def test_h19_logits_equal_transformers_at_all_of_256_positions(name, tmp_path):
    reference, ids = written_llama(tmp_path, ROPES[name]), torch.randint(3, 61, (1, POSITIONS))
    with torch.no_grad():
        theirs = reference(ids).logits
        ours = load_language_model(tmp_path)(ids).logits
        # The comparison tells angles apart: at far positions, and where a scaling is left out.
        reference.model.rotary_emb.inv_freq *= 1.001
        assert float((reference(ids).logits - theirs)[:, -16:].abs().max()) > 1e-3
    assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_h19_angles_stay_in_fp32_in_a_model_of_lower_precision():
    # In bf16 positions 256 and 257 are one number, and an angle of 200 radians is off by up to half a radian.
    spec, positions = RotarySpec(1e4, 32), torch.arange(2 * POSITIONS)
    exact = positions.double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    cast = spec.build()
    cast(positions, len(positions), lambda: positions)  # a table that is there when the model is cast
    for rotary in (spec.build(), spec.build().to(torch.bfloat16), cast.to(torch.bfloat16)):
        cosines, sines = rotary(positions, len(positions), lambda: positions)
        assert_close(cosines[:, 0, :16], exact.cos().float(), atol=1e-4, rtol=0)
        assert_close(sines[:, 0], exact.sin().float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "llama4"}, r"rope_type 'llama4' is not one of default, linear.*did you mean 'llama3'"),
        ({**LLAMA3, "factors": 2.0}, "unknown rope key 'factors'"),
        ({key: value for key, value in LLAMA3.items() if key != "factor"}, "rope key factor must be a number"),
    ],
)
def test_h19_rope_settings_that_would_be_ignored_are_refused(rope, message, checkpoints, tmp_path):
    changed(checkpoints["llama"], tmp_path, rope_parameters={"rope_theta": 5e5, **rope})
    with pytest.raises(UserError, match=message):
        load_language_model(tmp_path)


# H20: files that are read in part, settings that are passed over


def changed(directory, to, *, without="", **keys):
    """A copy of a checkpoint with one tensor less, or with other config keys."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")) | keys
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(Path(directory) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_h20_each_tensor_that_a_file_lacks_is_named(family, checkpoints, tmp_path):
    names = list(load_file(Path(checkpoints[family]) / "model.safetensors"))
    assert len(names) > 15
    for name in names:
        changed(checkpoints[family], tmp_path, without=name)
        with pytest.raises(UserError, match=f"tensor {re.escape(name)} is missing"):
            load_language_model(tmp_path)


def test_h20_a_misspelt_key_is_an_error_with_both_names(checkpoints, tmp_path):
    # With the default in this key's place, the model would run with another epsilon.
    changed(checkpoints["llama"], tmp_path, rms_norm_epss=1e-5)
    with pytest.raises(UserError, match="unknown key 'rms_norm_epss'; did you mean 'rms_norm_eps'"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("keys", [{"attn_logit_softcapping": 30.0}, {"sliding_window": 8}, {"residual_scale": 0.5}])
def test_h20_a_setting_that_the_family_does_not_have_is_an_error(keys, checkpoints, tmp_path):
    changed(checkpoints["llama"], tmp_path, **keys)
    with pytest.raises(UserError, match=next(iter(keys))):
        load_language_model(tmp_path)


def test_h20_what_a_config_says_reaches_the_numbers(checkpoints, tmp_path):
    ids = torch.randint(3, 300, (1, 12))
    changed(checkpoints["llama"], tmp_path, rms_norm_eps=0.5)
    with torch.no_grad():
        ours, other = load_language_model(checkpoints["llama"])(ids).logits, load_language_model(tmp_path)(ids).logits
    assert float((ours - other).abs().max()) > 1e-3


def test_h20_a_document_beyond_the_models_positions_is_an_error(checkpoints):
    with pytest.raises(UserError, match="320"), torch.no_grad():
        load_language_model(checkpoints["gpt2"])(torch.full((1, 321), 5))


# H22: parameters that never train


def one_update(checkpoint, adapter, tokenizer, output, **settings):
    """The adapter's weights after one update, and the frozen ones before and after it."""
    torch.manual_seed(0)
    policy = load_policy(checkpoint, adapter, tokenizer, str(output))
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    optim = OptimConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.0)
    engine = Engine(policy.model.train(), optim, TrainingConfig(**settings), total_steps=2)
    examples = [Example.single(list(range(4, 4 + size)), [False] + [True] * (size - 1), "") for size in (5, 9, 14)]
    engine.update(Term(collate(examples, 100), language_loss_fn(engine.model)))
    assert engine.untrained == []
    return before, policy.model.state_dict()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("adapter", [LoRASpec(rank=4, alpha=8.0), PrefixSpec(tokens=4)], ids=["lora", "prefix"])
def test_h22_checkpointing_of_activations_trains_every_weight_of_an_adapter(
    adapter, family, checkpoints, tokenizer, tmp_path
):
    trained = {}
    for recompute in (False, True):
        before, after = one_update(
            checkpoints[family], adapter, tokenizer, tmp_path / str(recompute), gradient_checkpointing=recompute
        )
        own = {name for name in before if ".lora_" in name or name.startswith("prefix.")}
        assert own
        for name in before:
            moved = not torch.equal(before[name], after[name])
            # A LoRA's B begins at 0, through which no gradient comes to its A in the first update.
            assert moved == (name in own and ".lora_a" not in name.lower()), name
        assert all(bool(after[name].any()) for name in own)
        trained[recompute] = {name: after[name].clone() for name in own}
    for name, value in trained[False].items():
        assert_close(trained[True][name], value, atol=1e-6, rtol=0)

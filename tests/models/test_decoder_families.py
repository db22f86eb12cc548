"""openai-gpt, gpt_neox, opt, bloom, falcon, phi3, mixtral: files and heads; transformers beside."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.ragged import Ragged

TINY_ROTARY = {
    "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TINY_OPT = {
    "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
TINY_FALCON = {
    "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 1.5, 3.0, 8.0],
}  # fmt: skip
STRETCHED = {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16}
TINY: dict[str, dict[str, Any]] = {
    "openai-gpt": {"model_type": "openai-gpt", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2,
                   "n_head": 4},
    "gpt_neox": {"model_type": "gpt_neox", **TINY_ROTARY},
    "opt": {"model_type": "opt", **TINY_OPT},
    "opt 350m": {"model_type": "opt", **TINY_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "bloom": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 36, "n_layer": 2, "n_head": 3},
    "bloom, normed residual": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4,
                               "apply_residual_connection_post_layernorm": True},
    "falcon, one key head": {"model_type": "falcon", **TINY_FALCON},
    "falcon, grouped": {"model_type": "falcon", **TINY_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, rw": {"model_type": "falcon", **TINY_FALCON, "alibi": True, "multi_query": False, "bias": True,
                   "parallel_attn": False},
    "phi3": {"model_type": "phi3", **TINY_ROTARY, "num_key_value_heads": 2, "sliding_window": 9, "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", **TINY_ROTARY, "num_key_value_heads": 2, "num_local_experts": 3},
}  # fmt: skip
LENGTHS = (40, 7, 1, 25)


def spec_of(model_type: str, **keys: Any) -> Any:
    config = {"model_type": model_type, **keys}
    return family_of(config).spec_from_config(config)


def written_by_transformers(config: dict[str, Any], directory, **saving: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    keys = {"bos_token_id": 1, "eos_token_id": 2, **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).eval()
    with torch.no_grad():  # as drawn, logits are too near zero to show an error
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    model.save_pretrained(directory, **saving)
    return model


def documents(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def their_logits(reference: Any, rows: list[list[int]]) -> torch.Tensor:
    """Document by document, so that no length bends another's positions; [N, V]."""
    return torch.cat([reference(input_ids=torch.tensor([row])).logits[0] for row in rows])


@torch.no_grad()
def our_logits(model: Any, rows: list[list[int]]) -> torch.Tensor:
    return model.head(model.trunk(Ragged.build(rows)))


def test_gpt1_calls_the_tanh_form_gelu():
    assert spec_of("openai-gpt").blocks[0].feedforward.activation == "gelu_new"


def test_published_gpt1_file_opens(tmp_path):
    # No prefix before the trunk's names and the causal mask saved as a buffer of each layer.
    reference = written_by_transformers(TINY["openai-gpt"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    save_file(old, tmp_path / "model.safetensors")
    rows = documents()
    assert_close(our_logits(load_pretrained(tmp_path), rows), their_logits(reference, rows), atol=1e-4, rtol=0)


def test_published_pythia_file_opens(tmp_path):
    reference = written_by_transformers(TINY["gpt_neox"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{prefix}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        tensors[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = documents()
    assert_close(our_logits(load_pretrained(tmp_path), rows), their_logits(reference, rows), atol=1e-4, rtol=0)


def test_falcon_counts_key_heads_as_its_files_do():
    def key_heads(**keys) -> int:
        return spec_of("falcon", **TINY_FALCON, **keys).blocks[0].attention.key_value_heads

    assert key_heads(num_kv_heads=2) == 1  # multi_query, whatever num_kv_heads says
    assert key_heads(multi_query=False, num_kv_heads=2) == 4
    assert key_heads(new_decoder_architecture=True, num_kv_heads=2) == 2
    assert key_heads(new_decoder_architecture=True) == 4


def test_alibi_models_have_no_longest_document():
    model = build_model(TINY["falcon, rw"])  # max_position_embeddings is 64
    assert our_logits(model, [[3] * 100]).shape == (100, 61)


def test_fresh_mixtral_is_balanced_and_a_loaded_one_as_its_config_says():
    fresh = build_model({**TINY["mixtral"]}).spec.blocks[0].feedforward
    assert fresh.balance_coef == 0.001
    assert (
        spec_of("mixtral", output_router_logits=False, router_aux_loss_coef=0.02).blocks[0].feedforward.balance_coef
        == 0.0
    )


def test_longrope_document_is_not_continued_across_the_original_context():
    model = build_model({**TINY["phi3"], **STRETCHED})
    within, beyond = documents((15, 20))
    cache = model.new_cache(2, 40)
    model.prefill(Ragged.build([within, beyond]), cache)
    model.decode(torch.tensor([3, 3]), cache)  # the 16th token of the first is the last within
    with pytest.raises(UserError, match="cannot be continued beyond"):
        model.decode(torch.tensor([3, 3]), cache)

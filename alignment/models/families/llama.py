"""Llama: rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/llama`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, Name, decoder_tasks, read_keys
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

# Keys with Llama's defaults, for decoders with grouped-query attention; other families override the defaults.
GROUPED_KEYS = {
    "vocab_size": Key(int, 32000, 1),
    "hidden_size": Key(int, 4096, 1),
    "intermediate_size": Key(int, 11008, 1),
    "num_hidden_layers": Key(int, 32, 1),
    "num_attention_heads": Key(int, 32, 1),
    "num_key_value_heads": Key(int, None, 1),
    "head_dim": Key(int, None, 2),
    "hidden_act": Key(str, "silu"),
    "max_position_embeddings": Key(int, 2048, 1),
    "initializer_range": Key(float, 0.02, 0),
    "rms_norm_eps": Key(float, 1e-6, 0),
    "tie_word_embeddings": Key(bool, False),
    "attention_dropout": Key(float, 0.0, 0),
}
KEYS = {**GROUPED_KEYS, "attention_bias": Key(bool, False), "mlp_bias": Key(bool, False)}
FIXED = {"pretraining_tp": (1, None), "rope_interleaved": (False,)}

PROJECTIONS: tuple[Name, ...] = (
    # Hugging Face name                          ours
    ("model.embed_tokens.weight",                "trunk.embed.weight"),
    ("model.layers.{}.self_attn.q_proj.weight",  "trunk.blocks.{}.attention.query.weight"),
    ("model.layers.{}.self_attn.q_proj.bias",    "trunk.blocks.{}.attention.query.bias"),
    ("model.layers.{}.self_attn.k_proj.weight",  "trunk.blocks.{}.attention.key.weight"),
    ("model.layers.{}.self_attn.k_proj.bias",    "trunk.blocks.{}.attention.key.bias"),
    ("model.layers.{}.self_attn.v_proj.weight",  "trunk.blocks.{}.attention.value.weight"),
    ("model.layers.{}.self_attn.v_proj.bias",    "trunk.blocks.{}.attention.value.bias"),
    ("model.layers.{}.self_attn.o_proj.weight",  "trunk.blocks.{}.attention.output.weight"),
    ("model.layers.{}.self_attn.o_proj.bias",    "trunk.blocks.{}.attention.output.bias"),
    ("model.layers.{}.mlp.gate_proj.weight",     "trunk.blocks.{}.feedforward.gate.weight"),
    ("model.layers.{}.mlp.gate_proj.bias",       "trunk.blocks.{}.feedforward.gate.bias"),
    ("model.layers.{}.mlp.up_proj.weight",       "trunk.blocks.{}.feedforward.up.weight"),
    ("model.layers.{}.mlp.up_proj.bias",         "trunk.blocks.{}.feedforward.up.bias"),
    ("model.layers.{}.mlp.down_proj.weight",     "trunk.blocks.{}.feedforward.down.weight"),
    ("model.layers.{}.mlp.down_proj.bias",       "trunk.blocks.{}.feedforward.down.bias"),
    ("model.norm.weight",                        "trunk.norm.weight"),
)  # fmt: skip
INPUT_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.input_layernorm.weight",           "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",  "trunk.blocks.{}.feedforward_norm.weight"),
)  # fmt: skip
NAMES = (*PROJECTIONS, *INPUT_NORMS)
INV_FREQ = r"(\w+\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in older files, a buffer and no weight


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Llama config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=("is_llama_config",), fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(config, value, value["attention_bias"], value["attention_bias"])
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], value["mlp_bias"])
    norm = RMSNormSpec(value["rms_norm_eps"])
    return llama_like(value, attention, (BlockSpec(attention, feedforward, norm),) * value["num_hidden_layers"], norm)


LLAMA = Family(
    name="llama",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Llama", ("sequence", "tokens", "span"), span_prefix="transformer."),
    ignored_tensors=(INV_FREQ,),
)

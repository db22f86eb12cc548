"""Phi-3 and Phi-4: Llama with query, key and value in one matrix, gate and up in another, and stretched positions.

Stretched positions ("longrope") divide angles by one list of factors up to the original context and by another beyond.
Here each document is judged by its own length; transformers judges the whole batch by its longest.

Source: Abdin et al. 2024, arXiv:2404.14219; Ding et al. 2024, arXiv:2402.13753; transformers, `models/phi3`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.rope import ORIGINAL, ROPE_KEYS
from alignment.models.layers import AttentionSpec, BlockSpec, GatedFeedForwardSpec, LongScaling, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 32064, 1),
    "hidden_size": Key(int, 3072, 1),
    "intermediate_size": Key(int, 8192, 1),
    "num_hidden_layers": Key(int, 32, 1),
    "num_attention_heads": Key(int, 32, 1),
    "num_key_value_heads": Key(int, None, 1),
    "hidden_act": Key(str, "silu"),
    "max_position_embeddings": Key(int, 4096, 1),
    "initializer_range": Key(float, 0.02, 0),
    "rms_norm_eps": Key(float, 1e-5, 0),
    "tie_word_embeddings": Key(bool, False),
    "resid_pdrop": Key(float, 0.0, 0),
    "embd_pdrop": Key(float, 0.0, 0),
    "attention_dropout": Key(float, 0.0, 0),
    "sliding_window": Key(int, None, 1),
}
FIXED = {
    "attention_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
}

NAMES = (  # Hugging Face name                              ours
    ("model.embed_tokens.weight",                           "trunk.embed.weight"),
    ("model.layers.{}.input_layernorm.weight",              "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.self_attn.qkv_proj.weight",          ("trunk.blocks.{}.attention.query.weight",
                                                            "trunk.blocks.{}.attention.key.weight",
                                                            "trunk.blocks.{}.attention.value.weight")),
    ("model.layers.{}.self_attn.o_proj.weight",             "trunk.blocks.{}.attention.output.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",     "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.layers.{}.mlp.gate_up_proj.weight",            ("trunk.blocks.{}.feedforward.gate.weight",
                                                            "trunk.blocks.{}.feedforward.up.weight")),
    ("model.layers.{}.mlp.down_proj.weight",                "trunk.blocks.{}.feedforward.down.weight"),
    ("model.norm.weight",                                   "trunk.norm.weight"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Phi-3 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(
        {ORIGINAL: 4096, **config}, value, False, False, partial=1.0, window=value["sliding_window"]
    )
    problems += attention_problems + _scaling_problems(attention) + activation_problems(value["hidden_act"])
    raise_all(problems)
    norm = RMSNormSpec(value["rms_norm_eps"])
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False)
    block = BlockSpec(attention, feedforward, norm, value["resid_pdrop"])
    blocks = (block,) * value["num_hidden_layers"]
    return llama_like(value, attention, blocks, norm, embedding_dropout=value["embd_pdrop"])


def _scaling_problems(attention: AttentionSpec) -> list[str]:
    scaling = attention.rotary and attention.rotary.scaling
    if scaling is None or isinstance(scaling, LongScaling):
        return []
    return ["config.json: rope_type of a phi3 model is default or longrope"]


PHI3 = Family(
    name="phi3",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Phi3"),
)

"""Gemma 2: Gemma with norms before and after each part, soft-capped scores and logits, every other layer windowed.

Source: Gemma team 2024, arXiv:2408.00118, section 2; transformers, `models/gemma2`.
"""

import math
from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like, windows
from alignment.models.families.family import Family, Key, Name, decoder_tasks, read_keys
from alignment.models.families.gemma import HARMLESS as GEMMA_HARMLESS
from alignment.models.families.gemma import KEYS as GEMMA_KEYS
from alignment.models.families.gemma import TANH_GELU
from alignment.models.families.llama import INV_FREQ, PROJECTIONS
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.heads import LanguageHeadSpec
from alignment.models.layers import AttentionSpec, BlockSpec, GatedFeedForwardSpec, UnitOffsetRMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **{name: key for name, key in GEMMA_KEYS.items() if name != "hidden_act"},
    "hidden_size": Key(int, 2304, 1),
    "intermediate_size": Key(int, 9216, 1),
    "num_hidden_layers": Key(int, 26, 1),
    "num_attention_heads": Key(int, 8, 1),
    "num_key_value_heads": Key(int, 4, 1),
    "hidden_activation": Key(str, TANH_GELU),
    "query_pre_attn_scalar": Key(float, 256, 1),
    "sliding_window": Key(int, 4096, 1, nullable=True),
    "layer_types": Key(list, None),
    "attn_logit_softcapping": Key(float, 50.0, 1e-6, nullable=True),
    "final_logit_softcapping": Key(float, 30.0, 1e-6, nullable=True),
}
# Published files name the activation twice; it is `hidden_activation` that acts.
FIXED = {"hidden_act": (TANH_GELU,), "use_bidirectional_attention": (None, False)}
HARMLESS = (*GEMMA_HARMLESS, "sliding_window_size")  # an older name beside `sliding_window`, never read

# Norms before and after attention and feed-forward.
SANDWICH_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.input_layernorm.weight",             "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",    "trunk.blocks.{}.attention_output_norm.weight"),
    ("model.layers.{}.pre_feedforward_layernorm.weight",   "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.layers.{}.post_feedforward_layernorm.weight",  "trunk.blocks.{}.feedforward_output_norm.weight"),
)  # fmt: skip
NAMES = (*PROJECTIONS, *SANDWICH_NORMS)


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Gemma 2 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED, by_hand=ROPE_KEYS)
    spans, window_problems = windows(value, value["sliding_window"], lambda layer: layer % 2 == 0)
    bias = value["attention_bias"]
    attention, attention_problems = grouped_attention(config, value, bias, bias)
    problems += window_problems + attention_problems + activation_problems(value["hidden_activation"])
    raise_all(problems)
    attention = replace(attention, softcap=value["attn_logit_softcapping"])
    return sandwich_decoder(value, [replace(attention, window=span) for span in spans])


def sandwich_decoder(value: HFConfig, attentions: list[AttentionSpec]) -> TransformerSpec:
    """Gemma 2's shape around one attention per layer, whose scale is `query_pre_attn_scalar` ** -0.5."""
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_activation"], bias=False)
    norm, scale = UnitOffsetRMSNormSpec(value["rms_norm_eps"]), value["query_pre_attn_scalar"] ** -0.5
    blocks = tuple(
        BlockSpec(replace(attention, scale=scale), feedforward, norm, wiring="sandwich") for attention in attentions
    )
    # A dynamic scaling lengthens what the layers that see everything can place; those that slide have no say.
    widest = next((attention for attention in attentions if attention.window is None), attentions[0])
    return llama_like(
        value,
        widest,
        blocks,
        norm,
        embedding_scale=math.sqrt(value["hidden_size"]),
        head=LanguageHeadSpec(softcap=value["final_logit_softcapping"]),
    )


GEMMA2 = Family(
    name="gemma2",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Gemma2"),
    ignored_tensors=(INV_FREQ,),
)

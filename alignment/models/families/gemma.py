"""Gemma, Gemma 2 and Gemma 3 (text only; what reads pictures, `model_type` gemma3, is not here).

Source: Gemma team 2024, arXiv:2403.08295, and 2024, arXiv:2408.00118, and 2025, arXiv:2503.19786, section 2 of each;
transformers, `models/gemma`, `models/gemma2`, `models/gemma3`.
"""

import math
from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import layer_ropes, rotary_attention, transformer_spec, windows
from alignment.models.families.family import BLOCK, Name, decoder_tasks, names_under
from alignment.models.families.llama import LAYER, PROJECTIONS, QUERY_KEY_NORMS, llama_family
from alignment.models.families.rope import ORIGINAL, ROPE_KEYS, shape_problems
from alignment.models.heads import LanguageHeadSpec
from alignment.models.layers import AttentionSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

TANH_GELU = "gelu_pytorch_tanh"
BIDIRECTIONAL = {"use_bidirectional_attention": (None, False)}
CACHE = "cache_implementation"  # how transformers lays its cache out; harmless


def _gemma(value: HFConfig) -> TransformerSpec:
    """Llama with norms that multiply by 1 + weight, scaled token vectors, a tied head and GeGLU."""
    # The first files say "gelu" and mean the tanh form, as transformers knows.
    activation = TANH_GELU if value["hidden_act"] == "gelu" else value["hidden_act"]
    return transformer_spec(
        value,
        rotary_attention(value),
        norm=RMSNormSpec(value["rms_norm_eps"], "unit_offset"),
        feedforward=GatedFeedForwardSpec(value["intermediate_size"], activation, bias=False),
        embedding_scale=math.sqrt(value["hidden_size"]),
    )


GEMMA = llama_family(
    "gemma",
    "Gemma",
    _gemma,
    ("attention_bias",),
    heads=("sequence", "tokens"),
    harmless=(CACHE,),
    # Published files name the activation twice. A value that would part from `hidden_act` is refused.
    fixed={"hidden_activation": (None, TANH_GELU), **BIDIRECTIONAL},
)


def _gemma2(value: HFConfig) -> TransformerSpec:
    """Gemma with norms before and after each part, soft-capped scores and logits, every other layer windowed."""
    spans = windows(value, value["sliding_window"], lambda layer: layer % 2 == 0)
    attention = rotary_attention(value, softcap=value["attn_logit_softcapping"])
    return _sandwich_decoder(value, [replace(attention, window=span) for span in spans])


def _sandwich_decoder(value: HFConfig, attentions: list[AttentionSpec]) -> TransformerSpec:
    """Gemma 2's shape around one attention per layer, whose scale is `query_pre_attn_scalar` ** -0.5."""
    scale = value["query_pre_attn_scalar"] ** -0.5
    return transformer_spec(
        value,
        [replace(attention, scale=scale) for attention in attentions],
        norm=RMSNormSpec(value["rms_norm_eps"], "unit_offset"),
        feedforward=GatedFeedForwardSpec(value["intermediate_size"], value["hidden_activation"], bias=False),
        block={"wiring": "sandwich"},
        embedding_scale=math.sqrt(value["hidden_size"]),
        head=LanguageHeadSpec(softcap=value["final_logit_softcapping"]),
    )


SANDWICH_KEYS = (
    "attention_bias",
    "hidden_activation",
    "query_pre_attn_scalar",
    "sliding_window",
    "layer_types",
    "final_logit_softcapping",
)
SANDWICH_NAMES: tuple[Name, ...] = (
    *PROJECTIONS,
    *names_under(LAYER, BLOCK, attention_norm="input_layernorm", attention_output_norm="post_attention_layernorm"),
    *names_under(
        LAYER, BLOCK, feedforward_norm="pre_feedforward_layernorm", feedforward_output_norm="post_feedforward_layernorm"
    ),
)
# Published files name the activation twice; it is `hidden_activation` that acts.
SANDWICH_FIXED = {"hidden_act": (TANH_GELU,), **BIDIRECTIONAL}
SANDWICH_HARMLESS = (CACHE, "sliding_window_size")  # the latter an older name beside `sliding_window`, never read

GEMMA2 = llama_family(
    "gemma2",
    "Gemma2",
    _gemma2,
    (*SANDWICH_KEYS, "attn_logit_softcapping"),
    names=SANDWICH_NAMES,
    heads=("sequence", "tokens"),
    defaults={"hidden_act": TANH_GELU},
    fixed=SANDWICH_FIXED,
    harmless=SANDWICH_HARMLESS,
)


def _gemma3(value: HFConfig) -> TransformerSpec:
    """Gemma 2 with a norm on queries and keys instead of caps, and rotary angles of two kinds.

    Layers that slide turn by `rope_local_base_freq`, layers that see everything by `rope_theta` and its scaling.
    """
    ropes = layer_ropes(value)
    scaling = value.get("rope_scaling") or {}
    problems = list(shape_problems(value))
    made_from = value.get("_sliding_window_pattern")
    pattern = value["sliding_window_pattern"]
    if value["layer_types"] is None and made_from not in (None, pattern):
        problems.append("config.json: _sliding_window_pattern without layer_types; name sliding_window_pattern instead")
    raise_all(problems)
    spans = windows(value, value["sliding_window"], lambda layer: (layer + 1) % pattern != 0)
    norm = RMSNormSpec(value["rms_norm_eps"], "unit_offset")
    wide = ropes.get("full_attention") or scaling
    near = {"rope_theta": value["rope_local_base_freq"], **(ropes.get("sliding_attention") or {})}
    everything, sliding = (
        rotary_attention(
            {"rope_theta": 1e6, **value, "rope_parameters": rope, "rope_scaling": None}, query_key_norm=norm
        )
        for rope in (wide, near)
    )
    return _sandwich_decoder(value, [replace(sliding, window=span) if span else everything for span in spans])


GEMMA3 = llama_family(
    "gemma3_text",
    "Gemma3Text",
    _gemma3,
    (*SANDWICH_KEYS, "sliding_window_pattern", "rope_local_base_freq"),
    names=(*SANDWICH_NAMES, *QUERY_KEY_NORMS),
    heads=("sequence",),
    defaults={"hidden_act": TANH_GELU, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    by_hand=tuple(key for key in ROPE_KEYS if key != ORIGINAL),  # of several mappings, none would own it
    fixed=SANDWICH_FIXED,
    harmless=(
        *SANDWICH_HARMLESS,
        "attn_logit_softcapping",  # no layer reads it: the norms of queries and keys took its place
        "_sliding_window_pattern",  # what `layer_types`, always beside it, was made from
    ),
)
GEMMA3 = replace(GEMMA3, tasks={**GEMMA3.tasks, "language": decoder_tasks("Gemma3")["language"]})

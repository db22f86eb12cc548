"""Llama and families that differ from it in a point or two: Mistral, Mixtral, Qwen 2 and 3, SmolLM 3, OLMo 2, Phi-3.

Llama itself has rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/FAMILY`, and the papers named at each family.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from alignment.errors import UserError
from alignment.models.families.decoders import rotary_attention, transformer_spec, windows
from alignment.models.families.family import BLOCK, GATE_UP, QUERY_KEY_VALUE, Family, Name, decoder_tasks, names_under
from alignment.models.families.rope import ORIGINAL, ROPE_KEYS
from alignment.models.layers import AttentionSpec, ExpertsSpec, GatedFeedForwardSpec, LongScaling, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_dropout",
)

LAYER = "model.layers.{}."
PROJECTIONS: tuple[Name, ...] = (
    ("model.embed_tokens", "trunk.embed"),
    *names_under(
        LAYER + "self_attn.", BLOCK + "attention.", query="q_proj", key="k_proj", value="v_proj", output="o_proj"
    ),
    *names_under(LAYER + "mlp.", BLOCK + "feedforward.", gate="gate_proj", up="up_proj", down="down_proj"),
    ("model.norm", "trunk.norm"),
)
INPUT_NORMS = names_under(LAYER, BLOCK, attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm")
# where queries and keys are normed
QUERY_KEY_NORMS = names_under(LAYER + "self_attn.", BLOCK + "attention.", query_norm="q_norm", key_norm="k_norm")
NAMES = (*PROJECTIONS, *INPUT_NORMS)


def llama_family(
    name: str,
    stem: str,
    spec: Callable[[HFConfig], TransformerSpec],
    keys: tuple[str, ...] = (),
    *,
    names: tuple[Name, ...] = NAMES,
    heads: Iterable[str] = ("sequence", "tokens", "span"),
    span_prefix: str | None = None,
    **more: Any,
) -> Family:
    """A family with Llama's keys and `keys`, whose classes of transformers begin with `stem`; `more` as in `Family`."""
    return Family(
        name=name,
        spec=spec,
        keys=(*KEYS, *keys),
        names=names,
        trunk_prefix="model.",
        tasks=decoder_tasks(stem, heads, span_prefix),
        # in older files, a buffer and no weight
        ignored_tensors=(r"(\w+\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        **{"by_hand": ROPE_KEYS, **more},
    )


LLAMA = llama_family(
    "llama",
    "Llama",
    lambda value: transformer_spec(value, rotary_attention(value)),
    ("attention_bias", "mlp_bias"),
    span_prefix="transformer.",
    harmless=("is_llama_config",),
    fixed={"pretraining_tp": (1, None), "rope_interleaved": (False,)},
)


# No biases, and a sliding window in every layer where one is set. Jiang et al. 2023, arXiv:2310.06825, section 2.
MISTRAL = llama_family(
    "mistral",
    "Mistral",
    lambda value: transformer_spec(value, rotary_attention(value, window=value["sliding_window"])),
    ("sliding_window",),
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},  # there are no such layers to have one
)


def _mixtral(value: HFConfig) -> TransformerSpec:
    """Mistral with several feed-forwards per layer, of which a router picks two for each token.

    transformers holds a layer's experts in one tensor while it runs, and writes them one by one as the table has them.

    Source: Jiang et al. 2024, arXiv:2401.04088.
    """
    attention = rotary_attention({"rope_theta": 1e6, **value}, window=value["sliding_window"])
    count = value["num_local_experts"]
    chosen = value["num_experts_per_tok"]
    if chosen > count:
        raise UserError(f"config.json: num_experts_per_tok = {chosen} is more than num_local_experts = {count}")
    experts = ExpertsSpec(
        GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False),
        count,
        chosen,
        # As over there: the balance is part of the loss only where the router's logits are asked for.
        balance_coef=value["router_aux_loss_coef"] if value["output_router_logits"] else 0.0,
    )
    return transformer_spec(value, attention, feedforward=experts)


MIXTRAL = llama_family(
    "mixtral",
    "Mixtral",
    _mixtral,
    ("sliding_window", "num_local_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    names=(
        *(line for line in NAMES if ".mlp." not in line[0]),
        (LAYER + "block_sparse_moe.gate", BLOCK + "feedforward.router"),
        *names_under(
            LAYER + "block_sparse_moe.experts.{}.", BLOCK + "feedforward.experts.{}.", gate="w1", up="w3", down="w2"
        ),
    ),
    fixed={"router_jitter_noise": (0,)},  # noise on what the router reads, in training
    new_model_config={"output_router_logits": True},  # with random weights an unbalanced router starves experts
)


def _with_upper_windows(value: HFConfig, attention: AttentionSpec) -> TransformerSpec:
    """A decoder with windows in layers from `max_window_layers` on, where `use_sliding_window`."""
    window = value["sliding_window"] if value["use_sliding_window"] else None
    spans = windows(value, window, lambda layer: window is not None and layer >= value["max_window_layers"])
    return transformer_spec(value, [replace(attention, window=span) for span in spans])


QWEN_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
# Biases on queries, keys and values; windows in the upper layers where asked for.
# Qwen team 2024, arXiv:2407.10671, section 2.2.
QWEN2 = llama_family(
    "qwen2",
    "Qwen2",
    lambda value: _with_upper_windows(value, rotary_attention(value, bias=True, output_bias=False)),
    QWEN_KEYS,
    span_prefix="transformer.",
    defaults={"head_dim": None},
    fixed={"use_mrope": (False,)},  # the vision models' places in three directions
)
# Qwen 2 with a norm on each head's queries and keys instead of biases, and a head width of its own.
# Qwen team 2025, arXiv:2505.09388, section 2.
QWEN3 = llama_family(
    "qwen3",
    "Qwen3",
    lambda value: _with_upper_windows(
        value, rotary_attention(value, query_key_norm=RMSNormSpec(value["rms_norm_eps"]))
    ),
    (*QWEN_KEYS, "attention_bias"),
    names=(*NAMES, *QUERY_KEY_NORMS),
    span_prefix="transformer.",
)


def _smollm3(value: HFConfig) -> TransformerSpec:
    """No rotary positions in every fourth layer; windows, where asked for, in just these layers.

    Source: Yang et al. 2025, arXiv:2501.18795 (layers without positions).
    """
    attention = rotary_attention({"rope_theta": 2e6, **value})
    turned = _turned(value)
    window = value["sliding_window"] if value["use_sliding_window"] else None
    spans = windows(value, window, lambda layer: window is not None and not turned[layer])
    plain = replace(attention, rotary=None)
    return transformer_spec(
        value, [replace(attention if turns else plain, window=span) for turns, span in zip(turned, spans, strict=True)]
    )


def _turned(value: HFConfig) -> list[bool]:
    """True for each layer that turns its queries and keys: 1 in `no_rope_layers`, whatever its name says."""
    count = value["num_hidden_layers"]
    listed = value["no_rope_layers"]
    if listed is None:
        return [(layer + 1) % value["no_rope_layer_interval"] != 0 for layer in range(count)]
    if len(listed) < count or any(entry not in (0, 1) for entry in listed):
        raise UserError(f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers, got {listed!r}")
    return [bool(entry) for entry in listed[:count]]


SMOLLM3 = llama_family(
    "smollm3",
    "SmolLM3",
    _smollm3,
    (
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
        "no_rope_layer_interval",
        "use_sliding_window",
        "sliding_window",
        "layer_types",
    ),
    span_prefix="transformer.",
    defaults={"head_dim": None},
    harmless=("max_window_layers", "pretraining_tp"),  # in the published file; nothing reads them
)


def _olmo2(value: HFConfig) -> TransformerSpec:
    """Norms on what each part adds and none before it, and one norm over all queries, one over all keys.

    Source: OLMo team 2025, arXiv:2501.00656.
    """
    norm = RMSNormSpec(value["rms_norm_eps"], "round_last")
    attention = rotary_attention(value, query_key_norm=norm, norm_heads="all")
    return transformer_spec(value, attention, norm=norm, block={"wiring": "output"})


OLMO2 = llama_family(
    "olmo2",
    "Olmo2",
    _olmo2,
    ("attention_bias",),
    names=(
        *PROJECTIONS,
        *QUERY_KEY_NORMS,
        (LAYER + "post_attention_layernorm", BLOCK + "attention_output_norm"),
        (LAYER + "post_feedforward_layernorm", BLOCK + "feedforward_output_norm"),
    ),
    heads=("sequence",),
    defaults={"head_dim": None},
)


def _phi3(value: HFConfig) -> TransformerSpec:
    """Query, key and value in one matrix, gate and up in another, and stretched positions ("longrope").

    Angles are divided by one list of factors up to the original context and by another beyond. Here each document is
    judged by its own length; transformers judges the whole batch by its longest.

    Source: Abdin et al. 2024, arXiv:2404.14219; Ding et al. 2024, arXiv:2402.13753.
    """
    attention = rotary_attention({ORIGINAL: 4096, **value}, whole=False, window=value["sliding_window"])
    if attention.rotary and not isinstance(attention.rotary.scaling, LongScaling | None):
        raise UserError("config.json: rope_type of a phi3 model is default or longrope")
    return transformer_spec(
        value, attention, block={"dropout": value["resid_pdrop"]}, embedding_dropout=value["embd_pdrop"]
    )


PHI3 = llama_family(
    "phi3",
    "Phi3",
    _phi3,
    ("resid_pdrop", "embd_pdrop", "sliding_window"),
    names=(
        *(line for line in NAMES if not line[0].endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))),
        (LAYER + "self_attn.qkv_proj", QUERY_KEY_VALUE),
        (LAYER + "mlp.gate_up_proj", GATE_UP),
    ),
    heads=("sequence", "tokens"),
    defaults={"head_dim": None},
    fixed={
        "attention_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "lm_head_bias": (False,),
        "mlp_bias": (False,),
    },
)

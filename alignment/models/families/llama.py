"""Llama: rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/llama`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from alignment.models.families.decoders import rotary_attention, rotary_decoder
from alignment.models.families.family import Family, Name, decoder_tasks
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "tie_word_embeddings", "attention_dropout",
)  # fmt: skip

PROJECTIONS: tuple[Name, ...] = (
    # Hugging Face name                          ours
    ("model.embed_tokens",                       "trunk.embed"),
    ("model.layers.{}.self_attn.q_proj",         "trunk.blocks.{}.attention.query"),
    ("model.layers.{}.self_attn.k_proj",         "trunk.blocks.{}.attention.key"),
    ("model.layers.{}.self_attn.v_proj",         "trunk.blocks.{}.attention.value"),
    ("model.layers.{}.self_attn.o_proj",         "trunk.blocks.{}.attention.output"),
    ("model.layers.{}.mlp.gate_proj",            "trunk.blocks.{}.feedforward.gate"),
    ("model.layers.{}.mlp.up_proj",              "trunk.blocks.{}.feedforward.up"),
    ("model.layers.{}.mlp.down_proj",            "trunk.blocks.{}.feedforward.down"),
    ("model.norm",                               "trunk.norm"),
)  # fmt: skip
INPUT_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.input_layernorm",          "trunk.blocks.{}.attention_norm"),
    ("model.layers.{}.post_attention_layernorm", "trunk.blocks.{}.feedforward_norm"),
)  # fmt: skip
QUERY_KEY_NORMS: tuple[Name, ...] = (  # where queries and keys are normed
    ("model.layers.{}.self_attn.q_norm",         "trunk.blocks.{}.attention.query_norm"),
    ("model.layers.{}.self_attn.k_norm",         "trunk.blocks.{}.attention.key_norm"),
)  # fmt: skip
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


def _spec(value: HFConfig) -> TransformerSpec:
    return rotary_decoder(value, rotary_attention(value))


LLAMA = llama_family(
    "llama",
    "Llama",
    _spec,
    ("attention_bias", "mlp_bias"),
    span_prefix="transformer.",
    harmless=("is_llama_config",),
    fixed={"pretraining_tp": (1, None), "rope_interleaved": (False,)},
)

"""Llama: rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/llama`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from alignment.models.families.decoders import rotary_attention, rotary_decoder
from alignment.models.families.family import BLOCK, Family, Name, decoder_tasks, names_under
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "tie_word_embeddings", "attention_dropout",
)  # fmt: skip

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
    lambda value: rotary_decoder(value, rotary_attention(value)),
    ("attention_bias", "mlp_bias"),
    span_prefix="transformer.",
    harmless=("is_llama_config",),
    fixed={"pretraining_tp": (1, None), "rope_interleaved": (False,)},
)

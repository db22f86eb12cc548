"""GPT-NeoX (and Pythia), BLOOM and Falcon: query, key and value in one matrix of the file, fused key head by key head.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373 (Pythia); BigScience 2022,
arXiv:2211.05100; Almazrouei et al. 2023, arXiv:2311.16867; transformers, `models/gpt_neox`, `models/bloom`,
`models/falcon`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from alignment.errors import raise_all
from alignment.models.families.decoders import attention_spec, rotary_attention, rotary_decoder
from alignment.models.families.family import BLOCK, QUERY_KEY_VALUE, Family, Name, decoder_tasks, names_under
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.init_weights import InitSpec
from alignment.models.layers import AlibiSpec, BlockSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

ALL = ("sequence", "tokens", "span")
INTERLEAVED = ("query_key_value.weight", "query_key_value.bias")


def _layer(prefix: str, attention: str) -> tuple[Name, ...]:
    """The weight table of one layer."""
    return (
        (f"{prefix}{attention}.query_key_value", QUERY_KEY_VALUE),
        (f"{prefix}{attention}.dense", BLOCK + "attention.output"),
        *names_under(prefix + "mlp.", BLOCK + "feedforward.", up="dense_h_to_4h", down="dense_4h_to_h"),
        *names_under(prefix, BLOCK, attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm"),
    )


def _gpt_neox(value: HFConfig) -> TransformerSpec:
    """Attention and feed-forward side by side, rotary positions on a quarter of each head."""
    rope = {"rope_theta": value["rotary_emb_base"], "partial_rotary_factor": value["rotary_pct"]}
    dropout = value["hidden_dropout"]
    return rotary_decoder(
        value,
        rotary_attention({**rope, **value}, whole=False),
        norm=LayerNormSpec(value["layer_norm_eps"]),
        feedforward=PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True),
        block={"wiring": "parallel" if value["use_parallel_residual"] else "pre", "dropout": dropout},
        embedding_dropout=dropout,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    spec=_gpt_neox,
    keys=(
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "attention_bias", "attention_dropout", "hidden_dropout", "classifier_dropout", "max_position_embeddings",
        "initializer_range", "layer_norm_eps", "rotary_pct", "rotary_emb_base", "tie_word_embeddings",
        "use_parallel_residual",
    ),
    names=(
        ("gpt_neox.embed_in", "trunk.embed"), *_layer("gpt_neox.layers.{}.", "attention"),
        ("gpt_neox.final_layer_norm", "trunk.norm"),
    ),
    trunk_prefix="gpt_neox.",
    tasks=decoder_tasks("GPTNeoX", ALL, language=("ForCausalLM", "embed_out"), classifier=("classifier_dropout",)),
    defaults={"rotary_pct": 0.25, "rotary_emb_base": 10000.0},
    by_hand=ROPE_KEYS,
    # Names of the library GPT-NeoX was trained with, for what is called *_dropout here.
    fixed={"attention_probs_dropout_prob": (0,), "hidden_dropout_prob": (0,), "rope_interleaved": (False,)},
    interleaved=INTERLEAVED,
    # once saved as buffers
    ignored_tensors=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    new_model_config={"classifier_dropout": 0.0},
)  # fmt: skip

BLOOM_FALCON = (
    ("transformer.word_embeddings", "trunk.embed"),
    *_layer("transformer.h.{}.", "self_attention"),
    ("transformer.ln_f", "trunk.norm"),
)


def _bloom(value: HFConfig) -> TransformerSpec:
    """ALiBi instead of positions, and a norm right after the embedding."""
    norm, width = LayerNormSpec(value["layer_norm_epsilon"]), value["hidden_size"]
    attention = attention_spec(value, "n_head", dropout=value["attention_dropout"], position_bias=AlibiSpec())
    feedforward = PlainFeedForwardSpec(4 * width, "gelu_new", bias=True)
    wiring = "residual" if value["apply_residual_connection_post_layernorm"] else "pre"
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=UNLIMITED,
        blocks=(BlockSpec(attention, feedforward, norm, value["hidden_dropout"], wiring),) * value["n_layer"],
        norm=norm,
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
        embedding_norm=norm,
    )


BLOOM = Family(
    name="bloom",
    spec=_bloom,
    keys=(
        "vocab_size", "hidden_size", "n_layer", "n_head", "layer_norm_epsilon", "initializer_range",
        "apply_residual_connection_post_layernorm", "hidden_dropout", "attention_dropout", "classifier_dropout",
        "tie_word_embeddings",
    ),
    names=(*BLOOM_FALCON, ("transformer.word_embeddings_layernorm", "trunk.embedding_norm")),
    trunk_prefix="transformer.",
    tasks=decoder_tasks("Bloom", ALL, classifier=("classifier_dropout", "hidden_dropout")),
    defaults={"classifier_dropout": None},
    # How the training library split and fused its work; softmax runs in fp32 here whatever they say. A longest document
    # is no part of ALiBi.
    harmless=(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "pretraining_tp",
        "seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
    ),
    fixed={"n_inner": (None,)},
    old_keys={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    interleaved=INTERLEAVED,
)  # fmt: skip


def _falcon(value: HFConfig) -> TransformerSpec:
    """One key head for all queries (7b), one per group of them (40b), or one each with ALiBi (rw).

    In training dropout is drawn for attention and feed-forward apart; transformers draws it once for their sum.
    """
    raise_all(_falcon_problems(value))
    key_heads = 1 if value["multi_query"] else None  # None: one for each query head
    if value["new_decoder_architecture"]:
        key_heads = value["num_kv_heads"]
    attention = rotary_attention({**value, "num_key_value_heads": key_heads}, bias=value["bias"])
    if value["alibi"]:
        attention = replace(attention, rotary=None, position_bias=AlibiSpec(attention.scale, bfloat16=True))
    inner = value["ffn_hidden_size"] or 4 * value["hidden_size"]
    return rotary_decoder(
        {**value, "max_position_embeddings": UNLIMITED} if value["alibi"] else value,
        attention,
        norm=LayerNormSpec(value["layer_norm_epsilon"]),
        feedforward=PlainFeedForwardSpec(inner, value["activation"], value["bias"]),
        block={"wiring": _falcon_wiring(value), "dropout": value["hidden_dropout"]},
    )


def _falcon_wiring(value: HFConfig) -> Literal["pre", "parallel", "parallel_shared"]:
    if not value["parallel_attn"]:
        return "pre"
    own_norms = value["new_decoder_architecture"] and value["num_ln_in_parallel_attn"] in (None, 2)
    return "parallel" if own_norms else "parallel_shared"


def _falcon_problems(value: HFConfig) -> Iterator[str]:
    norms, new = value["num_ln_in_parallel_attn"], value["new_decoder_architecture"]
    if new and not value["parallel_attn"]:
        yield "config.json: new_decoder_architecture = True needs parallel_attn = True"
    if norms not in ((None, 1, 2) if new else (None, 1)):
        supported = "only 1, or 2 with new_decoder_architecture"
        yield f"config.json: num_ln_in_parallel_attn = {norms!r} is not supported, {supported}"


# Files with two norms side by side name them otherwise than files with norms one after the other.
SIDE_BY_SIDE = names_under("transformer.h.{}.", BLOCK, attention_norm="ln_attn", feedforward_norm="ln_mlp")

FALCON = Family(
    name="falcon",
    spec=_falcon,
    keys=(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_kv_heads",
        "num_ln_in_parallel_attn", "ffn_hidden_size", "activation", "alibi", "bias", "multi_query",
        "new_decoder_architecture", "parallel_attn", "hidden_dropout", "attention_dropout", "classifier_dropout",
        "max_position_embeddings", "layer_norm_epsilon", "initializer_range", "tie_word_embeddings",
    ),
    names=(*SIDE_BY_SIDE, *BLOOM_FALCON),
    trunk_prefix="transformer.",
    tasks=decoder_tasks("Falcon", ALL, classifier=("classifier_dropout", "hidden_dropout")),
    defaults={"classifier_dropout": None},
    by_hand=ROPE_KEYS,
    fixed={"apply_residual_connection_post_layernorm": (False,), "ff_factor": (4,)},
    old_keys={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    interleaved=INTERLEAVED,
    names_from_config=lambda value: SIDE_BY_SIDE if _falcon_wiring(value) == "parallel" else (),
)  # fmt: skip

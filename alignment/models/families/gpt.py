"""GPT-1 (`openai-gpt`), GPT-2, OPT, GPT-NeoX (and Pythia), BLOOM and Falcon: LayerNorm and plain feed-forward.

The first three have learned positions. The others have rotary positions or ALiBi, and files with query, key and value
in one matrix, fused key head by key head.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training"; Radford et al. 2019; Zhang
et al. 2022, arXiv:2205.01068; Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373 (Pythia);
BigScience 2022, arXiv:2211.05100; Almazrouei et al. 2023, arXiv:2311.16867; transformers, `models/FAMILY`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from alignment.errors import UserError, raise_all
from alignment.models.families.decoders import attention_spec, rotary_attention, transformer_spec
from alignment.models.families.family import BLOCK, QUERY_KEY_VALUE, Family, Name, decoder_tasks, names_under
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AlibiSpec,
    AttentionSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, ProjectionSpec, TransformerSpec

KEYS = (
    "vocab_size",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "layer_norm_epsilon",
    "initializer_range",
    "tie_word_embeddings",
)
# Heads read their own keys, and the summary head is none of ours; softmax runs in fp32 here whatever
# reorder_and_upcast_attn says.
HARMLESS = (
    "classifier_dropout",
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
# Dropout costs a preference method its first ratio of 1; whoever wants it writes it into the config.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

LAYER = "transformer.h.{}."
BLOCKS: tuple[Name, ...] = (
    (LAYER + "attn.c_attn", QUERY_KEY_VALUE),
    (LAYER + "attn.c_proj", BLOCK + "attention.output"),
    *names_under(LAYER + "mlp.", BLOCK + "feedforward.", up="c_fc", down="c_proj"),
    *names_under(LAYER, BLOCK, attention_norm="ln_1", feedforward_norm="ln_2"),
)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _gpt2(value: HFConfig) -> TransformerSpec:
    """Norms before each part; scores may shrink from layer to layer."""
    layers = value["n_layer"]
    std = value["initializer_range"]
    attention = attention_spec(value, "n_head", "n_embd", dropout=value["attn_pdrop"])
    scale = attention.scale if value["scale_attn_weights"] else 1.0
    shrinks = value["scale_attn_by_inverse_layer_idx"]
    return _gpt(
        value,
        [replace(attention, scale=scale / (layer + 1) if shrinks else scale) for layer in range(layers)],
        feedforward=PlainFeedForwardSpec(
            value["n_inner"] or 4 * value["n_embd"], value["activation_function"], bias=True
        ),
        block={"dropout": value["resid_pdrop"]},
        init=InitSpec(std, std / math.sqrt(2 * layers)),
    )


def _gpt(value: HFConfig, attention: AttentionSpec | list[AttentionSpec], **more: Any) -> TransformerSpec:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}
    return transformer_spec(
        {**value, **{key: value[name] for key, name in names.items()}},
        attention,
        **{"norm": LayerNormSpec(value["layer_norm_epsilon"]), **more},
        positions=LearnedPositionsSpec(value["n_positions"]),
        embedding_dropout=value["embd_pdrop"],
    )


GPT2 = Family(
    name="gpt2",
    spec=_gpt2,
    keys=(*KEYS, "n_inner", "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    names=(*names_under("transformer.", "trunk.", embed="wte", positions="wpe", norm="ln_f"), *BLOCKS),
    trunk_prefix="transformer.",
    tasks=decoder_tasks(
        "GPT2", ("sequence", "tokens", "span"), language=("LMHeadModel", "lm_head"), classifier=("classifier_dropout",)
    ),
    harmless=HARMLESS,
    transposed=TRANSPOSED,
    ignored_tensors=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, once saved as a buffer
    new_model_config=NO_DROPOUT,
)

ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}  # GPT-1's "gelu" is the tanh form


def _gpt1(value: HFConfig) -> TransformerSpec:
    """GPT-2's sizes, but norms after each sum and none at the end."""
    if value["afn"] not in ACTIVATIONS:
        raise UserError(f"config.json: afn {value['afn']!r} is not one of {', '.join(ACTIVATIONS)}")
    spec = _gpt(
        value,
        attention_spec(value, "n_head", "n_embd", dropout=value["attn_pdrop"]),
        feedforward=PlainFeedForwardSpec(4 * value["n_embd"], ACTIVATIONS[value["afn"]], bias=True),
        block={"dropout": value["resid_pdrop"], "wiring": "post"},
    )
    return replace(spec, norm=NoNormSpec())


OPENAI_GPT = Family(
    name="openai-gpt",
    spec=_gpt1,
    keys=(*KEYS, "afn"),
    names=(*names_under("transformer.", "trunk.", embed="tokens_embed", positions="positions_embed"), *BLOCKS),
    trunk_prefix="transformer.",
    tasks=decoder_tasks("OpenAIGPT", ("sequence",), language=("LMHeadModel", "lm_head")),
    # Special tokens are in vocab_size already.
    harmless=(*HARMLESS, "n_special", "predict_special_tokens"),
    transposed=TRANSPOSED,
    ignored_tensors=(r"(transformer\.)?(h\.\d+\.attn\.bias|position_ids)",),  # once saved as buffers
    new_model_config=NO_DROPOUT,
)


def _opt(value: HFConfig) -> TransformerSpec:
    """GPT-2's shape with ReLU; the 350m model has norms after each sum and a token table narrower than its blocks."""
    width = value["hidden_size"]
    longest = value["max_position_embeddings"]
    bias = value["enable_bias"]
    affine = value["layer_norm_elementwise_affine"]
    before = value["do_layer_norm_before"]
    narrow = None if value["word_embed_proj_dim"] in (None, width) else value["word_embed_proj_dim"]
    spec = transformer_spec(
        {**value, "initializer_range": value["init_std"]},
        attention_spec(value, bias=bias, dropout=value["attention_dropout"]),
        norm=LayerNormSpec(1e-5, bias=affine, weight=affine),  # no key sets the epsilon
        feedforward=PlainFeedForwardSpec(
            value["ffn_dim"], value["activation_function"], bias, value["activation_dropout"]
        ),
        block={"dropout": value["dropout"], "wiring": "pre" if before else "post"},
        positions=LearnedPositionsSpec(longest, first=2),
        projection=None if narrow is None else ProjectionSpec(narrow, bias=False, before_positions=True),
        output_width=narrow,
    )
    return spec if before and not value["_remove_final_layer_norm"] else replace(spec, norm=NoNormSpec())


STEM = "model.decoder."
OPT_NAMES = (
    *names_under(
        STEM,
        "trunk.",
        embed="embed_tokens",
        positions="embed_positions",
        norm="final_layer_norm",
        project_in="project_in",
        project_out="project_out",
    ),
    *names_under(
        STEM + "layers.{}.self_attn.",
        BLOCK + "attention.",
        query="q_proj",
        key="k_proj",
        value="v_proj",
        output="out_proj",
    ),
    *names_under(
        STEM + "layers.{}.", BLOCK, attention_norm="self_attn_layer_norm", feedforward_norm="final_layer_norm"
    ),
    *names_under(STEM + "layers.{}.", BLOCK + "feedforward.", up="fc1", down="fc2"),
)

OPT = Family(
    name="opt",
    spec=_opt,
    keys=(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "ffn_dim",
        "max_position_embeddings",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "layer_norm_elementwise_affine",
        "word_embed_proj_dim",
        "activation_function",
        "enable_bias",
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "init_std",
        "tie_word_embeddings",
    ),
    names=OPT_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("OPT", ("sequence", "span")),
    defaults={"activation_dropout": 0.0},
    fixed={"layerdrop": (0,)},  # whole layers left out in training
    new_model_config={"dropout": 0.0},
)


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
    return transformer_spec(
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
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "attention_bias",
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
        "max_position_embeddings",
        "initializer_range",
        "layer_norm_eps",
        "rotary_pct",
        "rotary_emb_base",
        "tie_word_embeddings",
        "use_parallel_residual",
    ),
    names=(
        ("gpt_neox.embed_in", "trunk.embed"),
        *_layer("gpt_neox.layers.{}.", "attention"),
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
)

BLOOM_FALCON = (
    ("transformer.word_embeddings", "trunk.embed"),
    *_layer("transformer.h.{}.", "self_attention"),
    ("transformer.ln_f", "trunk.norm"),
)


def _bloom(value: HFConfig) -> TransformerSpec:
    """ALiBi instead of positions, and a norm right after the embedding."""
    norm = LayerNormSpec(value["layer_norm_epsilon"])
    residual = value["apply_residual_connection_post_layernorm"]
    return transformer_spec(
        {**value, "num_hidden_layers": value["n_layer"], "max_position_embeddings": UNLIMITED},
        attention_spec(value, "n_head", dropout=value["attention_dropout"], position_bias=AlibiSpec()),
        norm=norm,
        feedforward=PlainFeedForwardSpec(4 * value["hidden_size"], "gelu_new", bias=True),
        block={"dropout": value["hidden_dropout"], "wiring": "residual" if residual else "pre"},
        embedding_norm=norm,
    )


BLOOM = Family(
    name="bloom",
    spec=_bloom,
    keys=(
        "vocab_size",
        "hidden_size",
        "n_layer",
        "n_head",
        "layer_norm_epsilon",
        "initializer_range",
        "apply_residual_connection_post_layernorm",
        "hidden_dropout",
        "attention_dropout",
        "classifier_dropout",
        "tie_word_embeddings",
    ),
    names=(*BLOOM_FALCON, ("transformer.word_embeddings_layernorm", "trunk.embedding_norm")),
    trunk_prefix="transformer.",
    tasks=decoder_tasks("Bloom", ALL, classifier=("classifier_dropout", "hidden_dropout")),
    defaults={"classifier_dropout": None},
    # How the training library split and fused its work; softmax runs in fp32 here whatever they say. A longest document
    # is no part of ALiBi.
    harmless=(
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "pretraining_tp",
        "seq_length",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
    ),
    fixed={"n_inner": (None,)},
    old_keys={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    interleaved=INTERLEAVED,
)


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
    return transformer_spec(
        {**value, "max_position_embeddings": UNLIMITED} if value["alibi"] else value,
        attention,
        norm=LayerNormSpec(value["layer_norm_epsilon"]),
        feedforward=PlainFeedForwardSpec(
            value["ffn_hidden_size"] or 4 * value["hidden_size"], value["activation"], value["bias"]
        ),
        block={"wiring": _falcon_wiring(value), "dropout": value["hidden_dropout"]},
    )


def _falcon_wiring(value: HFConfig) -> Literal["pre", "parallel", "parallel_shared"]:
    if not value["parallel_attn"]:
        return "pre"
    own_norms = value["new_decoder_architecture"] and value["num_ln_in_parallel_attn"] in (None, 2)
    return "parallel" if own_norms else "parallel_shared"


def _falcon_problems(value: HFConfig) -> Iterator[str]:
    norms = value["num_ln_in_parallel_attn"]
    new = value["new_decoder_architecture"]
    if new and not value["parallel_attn"]:
        yield "config.json: new_decoder_architecture = True needs parallel_attn = True"
    if norms not in ((None, 1, 2) if new else (None, 1)):
        yield (
            f"config.json: num_ln_in_parallel_attn = {norms!r} is not supported, only 1, or 2 with "
            "new_decoder_architecture"
        )


# Files with two norms side by side name them otherwise than files with norms one after the other.
SIDE_BY_SIDE = names_under("transformer.h.{}.", BLOCK, attention_norm="ln_attn", feedforward_norm="ln_mlp")

FALCON = Family(
    name="falcon",
    spec=_falcon,
    keys=(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_kv_heads",
        "num_ln_in_parallel_attn",
        "ffn_hidden_size",
        "activation",
        "alibi",
        "bias",
        "multi_query",
        "new_decoder_architecture",
        "parallel_attn",
        "hidden_dropout",
        "attention_dropout",
        "classifier_dropout",
        "max_position_embeddings",
        "layer_norm_epsilon",
        "initializer_range",
        "tie_word_embeddings",
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
)

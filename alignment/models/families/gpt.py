"""GPT-1 (`openai-gpt`), GPT-2 and OPT: learned positions, LayerNorm, plain feed-forward.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training"; Radford et al. 2019; Zhang
et al. 2022, arXiv:2205.01068; transformers, `models/openai`, `models/gpt2`, `models/opt`.
"""

import math
from dataclasses import replace

from alignment.errors import UserError
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import BLOCK, QUERY_KEY_VALUE, Family, Name, decoder_tasks, names_under
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    BlockSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    NormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

KEYS = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "layer_norm_epsilon", "initializer_range", "tie_word_embeddings",
)  # fmt: skip
# Heads read their own keys, and the summary head is none of ours; softmax runs in fp32 here whatever
# reorder_and_upcast_attn says.
HARMLESS = (
    "classifier_dropout", "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
)  # fmt: skip
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
    norm, layers = LayerNormSpec(value["layer_norm_epsilon"]), value["n_layer"]
    attention = attention_spec(value, "n_head", "n_embd", dropout=value["attn_pdrop"])
    scale = attention.scale if value["scale_attn_weights"] else 1.0
    inner = value["n_inner"] or 4 * value["n_embd"]
    feedforward = PlainFeedForwardSpec(inner, value["activation_function"], bias=True)
    block = BlockSpec(replace(attention, scale=scale), feedforward, norm, value["resid_pdrop"])
    blocks = (block,) * layers
    if value["scale_attn_by_inverse_layer_idx"]:
        attentions = [replace(attention, scale=scale / (layer + 1)) for layer in range(layers)]
        blocks = tuple(replace(block, attention=each) for each in attentions)
    std = value["initializer_range"]
    return _decoder(value, blocks, norm, InitSpec(std, std / math.sqrt(2 * layers)))


def _decoder(value: HFConfig, blocks: tuple[BlockSpec, ...], norm: NormSpec, init: InitSpec) -> TransformerSpec:
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=value["n_embd"],
        max_positions=value["n_positions"],
        positions=LearnedPositionsSpec(value["n_positions"]),
        blocks=blocks,
        norm=norm,
        init=init,
        tied_head=value["tie_word_embeddings"],
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
)  # fmt: skip

ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}  # GPT-1's "gelu" is the tanh form


def _gpt1(value: HFConfig) -> TransformerSpec:
    """GPT-2's sizes, but norms after each sum and none at the end."""
    if value["afn"] not in ACTIVATIONS:
        raise UserError(f"config.json: afn {value['afn']!r} is not one of {', '.join(ACTIVATIONS)}")
    attention = attention_spec(value, "n_head", "n_embd", dropout=value["attn_pdrop"])
    feedforward = PlainFeedForwardSpec(4 * value["n_embd"], ACTIVATIONS[value["afn"]], bias=True)
    norm = LayerNormSpec(value["layer_norm_epsilon"])
    block = BlockSpec(attention, feedforward, norm, value["resid_pdrop"], "post")
    init = InitSpec(value["initializer_range"], value["initializer_range"])
    return _decoder(value, (block,) * value["n_layer"], NoNormSpec(), init)


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
)  # fmt: skip


def _opt(value: HFConfig) -> TransformerSpec:
    """GPT-2's shape with ReLU; the 350m model has norms after each sum and a token table narrower than its blocks."""
    width, longest, bias = value["hidden_size"], value["max_position_embeddings"], value["enable_bias"]
    affine, before = value["layer_norm_elementwise_affine"], value["do_layer_norm_before"]
    norm = LayerNormSpec(1e-5, bias=affine, weight=affine)  # no key sets the epsilon
    attention = attention_spec(value, bias=bias, dropout=value["attention_dropout"])
    feedforward = PlainFeedForwardSpec(
        value["ffn_dim"], value["activation_function"], bias, value["activation_dropout"]
    )
    block = BlockSpec(attention, feedforward, norm, value["dropout"], "pre" if before else "post")
    narrow = None if value["word_embed_proj_dim"] in (None, width) else value["word_embed_proj_dim"]
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=longest,
        positions=LearnedPositionsSpec(longest, first=2),
        blocks=(block,) * value["num_hidden_layers"],
        norm=norm if before and not value["_remove_final_layer_norm"] else NoNormSpec(),
        init=InitSpec(value["init_std"], value["init_std"]),
        tied_head=value["tie_word_embeddings"],
        projection=None if narrow is None else ProjectionSpec(narrow, bias=False, before_positions=True),
        output_width=narrow,
    )


STEM = "model.decoder."
OPT_NAMES = (
    *names_under(
        STEM, "trunk.", embed="embed_tokens", positions="embed_positions", norm="final_layer_norm",
        project_in="project_in", project_out="project_out",
    ),
    *names_under(
        STEM + "layers.{}.self_attn.", BLOCK + "attention.",
        query="q_proj", key="k_proj", value="v_proj", output="out_proj",
    ),
    *names_under(STEM + "layers.{}.", BLOCK, attention_norm="self_attn_layer_norm", feedforward_norm="final_layer_norm"),
    *names_under(STEM + "layers.{}.", BLOCK + "feedforward.", up="fc1", down="fc2"),
)  # fmt: skip

OPT = Family(
    name="opt",
    spec=_opt,
    keys=(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "max_position_embeddings",
        "do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine", "word_embed_proj_dim",
        "activation_function", "enable_bias", "dropout", "attention_dropout", "activation_dropout", "init_std",
        "tie_word_embeddings",
    ),
    names=OPT_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("OPT", ("sequence", "span")),
    defaults={"activation_dropout": 0.0},
    fixed={"layerdrop": (0,)},  # whole layers left out in training
    new_model_config={"dropout": 0.0},
)  # fmt: skip

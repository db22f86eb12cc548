"""GPT-1 (`openai-gpt`) and GPT-2: learned positions, LayerNorm, plain feed-forward; query, key and value in one matrix.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training"; Radford et al. 2019;
transformers, `models/openai` and `models/gpt2`.
"""

import math
from dataclasses import replace

from alignment.errors import UserError
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import (
    CLASSIFIER,
    QUERY_KEY_VALUE,
    Family,
    Name,
    Task,
    decoder_tasks,
    token_head,
)
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
from alignment.models.transformer import TransformerSpec

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

BLOCKS: tuple[Name, ...] = (
    # Hugging Face name              ours
    ("transformer.h.{}.ln_1",        "trunk.blocks.{}.attention_norm"),
    ("transformer.h.{}.attn.c_attn", QUERY_KEY_VALUE),
    ("transformer.h.{}.attn.c_proj", "trunk.blocks.{}.attention.output"),
    ("transformer.h.{}.ln_2",        "trunk.blocks.{}.feedforward_norm"),
    ("transformer.h.{}.mlp.c_fc",    "trunk.blocks.{}.feedforward.up"),
    ("transformer.h.{}.mlp.c_proj",  "trunk.blocks.{}.feedforward.down"),
)  # fmt: skip
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _gpt2(value: HFConfig) -> TransformerSpec:
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
    spread = value["initializer_range"]
    return _decoder(value, blocks, norm, InitSpec(spread, spread / math.sqrt(2 * layers)))


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
    names=(
        ("transformer.wte",  "trunk.embed"),
        ("transformer.wpe",  "trunk.positions"),
        *BLOCKS,
        ("transformer.ln_f", "trunk.norm"),
    ),
    trunk_prefix="transformer.",
    tasks={
        **decoder_tasks("GPT2", ("sequence", "span"), language=("LMHeadModel", "lm_head")),
        "tokens": Task("GPT2ForTokenClassification", CLASSIFIER, token_head("classifier_dropout")),
    },
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
    names=(
        ("transformer.tokens_embed",    "trunk.embed"),
        ("transformer.positions_embed", "trunk.positions"),
        *BLOCKS,
    ),
    trunk_prefix="transformer.",
    tasks=decoder_tasks("OpenAIGPT", ("sequence",), language=("LMHeadModel", "lm_head")),
    # Special tokens are in vocab_size already.
    harmless=(*HARMLESS, "n_special", "predict_special_tokens"),
    transposed=TRANSPOSED,
    ignored_tensors=(r"(transformer\.)?(h\.\d+\.attn\.bias|position_ids)",),  # once saved as buffers
    new_model_config=NO_DROPOUT,
)  # fmt: skip

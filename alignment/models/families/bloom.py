"""BLOOM: ALiBi instead of positions, a norm right after the embedding, query, key and value fused head by head.

Source: BigScience 2022, arXiv:2211.05100; transformers, `models/bloom`.
"""

from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import CLASSIFIER, QUERY_KEY_VALUE, Family, Task, decoder_tasks, token_head
from alignment.models.init_weights import InitSpec
from alignment.models.layers import AlibiSpec, BlockSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

NAMES = (  # Hugging Face name                           ours
    ("transformer.word_embeddings",                      "trunk.embed"),
    ("transformer.word_embeddings_layernorm",            "trunk.embedding_norm"),
    ("transformer.h.{}.input_layernorm",                 "trunk.blocks.{}.attention_norm"),
    ("transformer.h.{}.self_attention.query_key_value",  QUERY_KEY_VALUE),
    ("transformer.h.{}.self_attention.dense",            "trunk.blocks.{}.attention.output"),
    ("transformer.h.{}.post_attention_layernorm",        "trunk.blocks.{}.feedforward_norm"),
    ("transformer.h.{}.mlp.dense_h_to_4h",               "trunk.blocks.{}.feedforward.up"),
    ("transformer.h.{}.mlp.dense_4h_to_h",               "trunk.blocks.{}.feedforward.down"),
    ("transformer.ln_f",                                 "trunk.norm"),
)  # fmt: skip


def _spec(value: HFConfig) -> TransformerSpec:
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
    spec=_spec,
    keys=(
        "vocab_size", "hidden_size", "n_layer", "n_head", "layer_norm_epsilon", "initializer_range",
        "apply_residual_connection_post_layernorm", "hidden_dropout", "attention_dropout", "classifier_dropout",
        "tie_word_embeddings",
    ),
    names=NAMES,
    trunk_prefix="transformer.",
    tasks={
        **decoder_tasks("Bloom", ("sequence", "span")),
        "tokens": Task("BloomForTokenClassification", CLASSIFIER, token_head("classifier_dropout", "hidden_dropout")),
    },
    defaults={"classifier_dropout": None},
    # How the training library split and fused its work; softmax runs in fp32 here whatever they say. A longest document
    # is no part of ALiBi.
    harmless=(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "pretraining_tp",
        "seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
    ),
    fixed={"n_inner": (None,)},
    old_keys={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    interleaved=("query_key_value.weight", "query_key_value.bias"),
)  # fmt: skip

"""OPT: GPT-2's shape with ReLU; the 350m model has norms after each sum and a token table narrower than its blocks.

Source: Zhang et al. 2022, arXiv:2205.01068; transformers, `models/opt`.
"""

from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import Family, decoder_tasks
from alignment.models.init_weights import InitSpec
from alignment.models.layers import BlockSpec, LayerNormSpec, LearnedPositionsSpec, NoNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

EPS = 1e-5  # no key sets it

NAMES = (  # Hugging Face name                           ours
    ("model.decoder.embed_tokens",                       "trunk.embed"),
    ("model.decoder.embed_positions",                    "trunk.positions"),
    ("model.decoder.project_in",                         "trunk.project_in"),
    ("model.decoder.layers.{}.self_attn_layer_norm",     "trunk.blocks.{}.attention_norm"),
    ("model.decoder.layers.{}.self_attn.q_proj",         "trunk.blocks.{}.attention.query"),
    ("model.decoder.layers.{}.self_attn.k_proj",         "trunk.blocks.{}.attention.key"),
    ("model.decoder.layers.{}.self_attn.v_proj",         "trunk.blocks.{}.attention.value"),
    ("model.decoder.layers.{}.self_attn.out_proj",       "trunk.blocks.{}.attention.output"),
    ("model.decoder.layers.{}.final_layer_norm",         "trunk.blocks.{}.feedforward_norm"),
    ("model.decoder.layers.{}.fc1",                      "trunk.blocks.{}.feedforward.up"),
    ("model.decoder.layers.{}.fc2",                      "trunk.blocks.{}.feedforward.down"),
    ("model.decoder.final_layer_norm",                   "trunk.norm"),
    ("model.decoder.project_out",                        "trunk.project_out"),
)  # fmt: skip


def _spec(value: HFConfig) -> TransformerSpec:
    width, longest, bias = value["hidden_size"], value["max_position_embeddings"], value["enable_bias"]
    affine, before = value["layer_norm_elementwise_affine"], value["do_layer_norm_before"]
    norm = LayerNormSpec(EPS, bias=affine, weight=affine)
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


OPT = Family(
    name="opt",
    spec=_spec,
    keys=(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "max_position_embeddings",
        "do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine", "word_embed_proj_dim",
        "activation_function", "enable_bias", "dropout", "attention_dropout", "activation_dropout", "init_std",
        "tie_word_embeddings",
    ),
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("OPT", ("sequence", "span")),
    defaults={"activation_dropout": 0.0},
    fixed={"layerdrop": (0,)},  # whole layers left out in training
    new_model_config={"dropout": 0.0},
)  # fmt: skip

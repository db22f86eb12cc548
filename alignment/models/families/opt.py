"""OPT: GPT-2's shape with ReLU; the 350m model has norms after each sum and a token table narrower than its blocks.

Source: Zhang et al. 2022, arXiv:2205.01068; transformers, `models/opt`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems
from alignment.models.families.family import Family, Key, decoder_tasks, divides, read_keys
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

KEYS = {
    "vocab_size": Key(int, 50272, 1),
    "hidden_size": Key(int, 768, 1),
    "num_hidden_layers": Key(int, 12, 1),
    "num_attention_heads": Key(int, 12, 1),
    "ffn_dim": Key(int, 3072, 1),
    "max_position_embeddings": Key(int, 2048, 1),
    "do_layer_norm_before": Key(bool, True),
    "_remove_final_layer_norm": Key(bool, False),
    "layer_norm_elementwise_affine": Key(bool, True),
    "word_embed_proj_dim": Key(int, None, 1),
    "activation_function": Key(str, "relu"),
    "enable_bias": Key(bool, True),
    "dropout": Key(float, 0.1, 0),
    "attention_dropout": Key(float, 0.0, 0),
    "activation_dropout": Key(float, 0.0, 0),
    "init_std": Key(float, 0.02, 0),
    "tie_word_embeddings": Key(bool, True),
}
FIXED = {"layerdrop": (0,)}  # whole layers left out in training
EPS = 1e-5  # no key sets it

NAMES = (  # Hugging Face name                                  ours
    ("model.decoder.embed_tokens.weight",                       "trunk.embed.weight"),
    ("model.decoder.embed_positions.weight",                    "trunk.positions.weight"),
    ("model.decoder.layers.{}.self_attn.q_proj.weight",         "trunk.blocks.{}.attention.query.weight"),
    ("model.decoder.layers.{}.self_attn.k_proj.weight",         "trunk.blocks.{}.attention.key.weight"),
    ("model.decoder.layers.{}.self_attn.v_proj.weight",         "trunk.blocks.{}.attention.value.weight"),
    ("model.decoder.layers.{}.self_attn.out_proj.weight",       "trunk.blocks.{}.attention.output.weight"),
    ("model.decoder.layers.{}.fc1.weight",                      "trunk.blocks.{}.feedforward.up.weight"),
    ("model.decoder.layers.{}.fc2.weight",                      "trunk.blocks.{}.feedforward.down.weight"),
    # with enable_bias
    ("model.decoder.layers.{}.self_attn.q_proj.bias",           "trunk.blocks.{}.attention.query.bias"),
    ("model.decoder.layers.{}.self_attn.k_proj.bias",           "trunk.blocks.{}.attention.key.bias"),
    ("model.decoder.layers.{}.self_attn.v_proj.bias",           "trunk.blocks.{}.attention.value.bias"),
    ("model.decoder.layers.{}.self_attn.out_proj.bias",         "trunk.blocks.{}.attention.output.bias"),
    ("model.decoder.layers.{}.fc1.bias",                        "trunk.blocks.{}.feedforward.up.bias"),
    ("model.decoder.layers.{}.fc2.bias",                        "trunk.blocks.{}.feedforward.down.bias"),
    # with layer_norm_elementwise_affine
    ("model.decoder.layers.{}.self_attn_layer_norm.weight",     "trunk.blocks.{}.attention_norm.weight"),
    ("model.decoder.layers.{}.self_attn_layer_norm.bias",       "trunk.blocks.{}.attention_norm.bias"),
    ("model.decoder.layers.{}.final_layer_norm.weight",         "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.decoder.layers.{}.final_layer_norm.bias",           "trunk.blocks.{}.feedforward_norm.bias"),
    # with do_layer_norm_before besides
    ("model.decoder.final_layer_norm.weight",                   "trunk.norm.weight"),
    ("model.decoder.final_layer_norm.bias",                     "trunk.norm.bias"),
    # where word_embed_proj_dim is not hidden_size
    ("model.decoder.project_in.weight",                         "trunk.project_in.weight"),
    ("model.decoder.project_out.weight",                        "trunk.project_out.weight"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of an OPT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED)
    width, heads = value["hidden_size"], value["num_attention_heads"]
    if not divides(heads, width):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size = {width!r}")
    problems += activation_problems(value["activation_function"], "activation_function")
    raise_all(problems)
    affine, before = value["layer_norm_elementwise_affine"], value["do_layer_norm_before"]
    norm = LayerNormSpec(EPS, bias=affine, weight=affine)
    narrow = None if value["word_embed_proj_dim"] in (None, width) else value["word_embed_proj_dim"]
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=value["max_position_embeddings"],
        positions=LearnedPositionsSpec(value["max_position_embeddings"], first=2),
        blocks=(_block(value, norm),) * value["num_hidden_layers"],
        norm=norm if before and not value["_remove_final_layer_norm"] else NoNormSpec(),
        init=InitSpec(value["init_std"], value["init_std"]),
        tied_head=value["tie_word_embeddings"],
        projection=None if narrow is None else ProjectionSpec(narrow, bias=False, before_positions=True),
        output_width=narrow,
    )


def _block(value: HFConfig, norm: LayerNormSpec) -> BlockSpec:
    heads, bias = value["num_attention_heads"], value["enable_bias"]
    head_dim = value["hidden_size"] // heads
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bias, bias, value["attention_dropout"])
    feedforward = PlainFeedForwardSpec(
        value["ffn_dim"], value["activation_function"], bias, value["activation_dropout"]
    )
    return BlockSpec(attention, feedforward, norm, value["dropout"], "pre" if value["do_layer_norm_before"] else "post")


OPT = Family(
    name="opt",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("OPT", ("sequence", "span")),
    new_model_config={"dropout": 0.0},
)

"""OpenAI GPT (GPT-1): GPT-2's files and sizes, but norms after each sum and none at the end.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training"; transformers,
`models/openai`.
"""

from alignment.errors import raise_all
from alignment.models.families.family import Family, Key, Task, decoder_tasks, divides, read_keys
from alignment.models.families.gpt2 import HARMLESS as SUMMARY
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
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 40478, 1),
    "n_positions": Key(int, 512, 1),
    "n_embd": Key(int, 768, 1),
    "n_layer": Key(int, 12, 1),
    "n_head": Key(int, 12, 1),
    "afn": Key(str, "gelu"),
    "resid_pdrop": Key(float, 0.1, 0),
    "embd_pdrop": Key(float, 0.1, 0),
    "attn_pdrop": Key(float, 0.1, 0),
    "layer_norm_epsilon": Key(float, 1e-5, 0),
    "initializer_range": Key(float, 0.02, 0),
    "tie_word_embeddings": Key(bool, True),
}
# Special tokens are in vocab_size already; the summary head belongs to another task.
HARMLESS = (*SUMMARY, "n_special", "predict_special_tokens")
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}  # its "gelu" is the tanh form

NAMES = (  # Hugging Face name                       ours
    ("transformer.tokens_embed.weight",              "trunk.embed.weight"),
    ("transformer.positions_embed.weight",           "trunk.positions.weight"),
    ("transformer.h.{}.attn.c_attn.weight",         ("trunk.blocks.{}.attention.query.weight",
                                                     "trunk.blocks.{}.attention.key.weight",
                                                     "trunk.blocks.{}.attention.value.weight")),
    ("transformer.h.{}.attn.c_attn.bias",           ("trunk.blocks.{}.attention.query.bias",
                                                     "trunk.blocks.{}.attention.key.bias",
                                                     "trunk.blocks.{}.attention.value.bias")),
    ("transformer.h.{}.attn.c_proj.weight",          "trunk.blocks.{}.attention.output.weight"),
    ("transformer.h.{}.attn.c_proj.bias",            "trunk.blocks.{}.attention.output.bias"),
    ("transformer.h.{}.ln_1.weight",                 "trunk.blocks.{}.attention_norm.weight"),
    ("transformer.h.{}.ln_1.bias",                   "trunk.blocks.{}.attention_norm.bias"),
    ("transformer.h.{}.mlp.c_fc.weight",             "trunk.blocks.{}.feedforward.up.weight"),
    ("transformer.h.{}.mlp.c_fc.bias",               "trunk.blocks.{}.feedforward.up.bias"),
    ("transformer.h.{}.mlp.c_proj.weight",           "trunk.blocks.{}.feedforward.down.weight"),
    ("transformer.h.{}.mlp.c_proj.bias",             "trunk.blocks.{}.feedforward.down.bias"),
    ("transformer.h.{}.ln_2.weight",                 "trunk.blocks.{}.feedforward_norm.weight"),
    ("transformer.h.{}.ln_2.bias",                   "trunk.blocks.{}.feedforward_norm.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of an OpenAI GPT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS)
    width, heads = value["n_embd"], value["n_head"]
    if not divides(heads, width):
        problems.append(f"config.json: n_head = {heads!r} does not divide n_embd = {width!r}")
    if value["afn"] not in ACTIVATIONS:
        problems.append(f"config.json: afn {value['afn']!r} is not one of {', '.join(ACTIVATIONS)}")
    raise_all(problems)
    attention = AttentionSpec(
        heads, heads, width // heads, (width // heads) ** -0.5, bias=True, output_bias=True, dropout=value["attn_pdrop"]
    )
    feedforward = PlainFeedForwardSpec(4 * width, ACTIVATIONS[value["afn"]], bias=True)
    norm = LayerNormSpec(value["layer_norm_epsilon"])
    block = BlockSpec(attention, feedforward, norm, value["resid_pdrop"], "post")
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=value["n_positions"],
        positions=LearnedPositionsSpec(value["n_positions"]),
        blocks=(block,) * value["n_layer"],
        norm=NoNormSpec(),
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
        embedding_dropout=value["embd_pdrop"],
    )


OPENAI_GPT = Family(
    name="openai-gpt",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="transformer.",
    tasks=decoder_tasks("OpenAIGPT", ("sequence",))
    | {"language": Task("OpenAIGPTLMHeadModel", (("lm_head.weight", "head.weight"),))},
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ignored_tensors=(r"(transformer\.)?(h\.\d+\.attn\.bias|position_ids)",),  # once saved as buffers
    new_model_config={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)

"""GPT-NeoX and Pythia: attention and feed-forward side by side, rotary positions on a quarter of each head.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373; transformers, `models/gpt_neox`.
"""

from alignment.models.families.decoders import rotary_attention, rotary_decoder
from alignment.models.families.family import CLASSIFIER, QUERY_KEY_VALUE, Family, Task, decoder_tasks, token_head
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

NAMES = (  # Hugging Face name                           ours
    ("gpt_neox.embed_in",                                "trunk.embed"),
    ("gpt_neox.layers.{}.input_layernorm",               "trunk.blocks.{}.attention_norm"),
    ("gpt_neox.layers.{}.attention.query_key_value",     QUERY_KEY_VALUE),
    ("gpt_neox.layers.{}.attention.dense",               "trunk.blocks.{}.attention.output"),
    ("gpt_neox.layers.{}.post_attention_layernorm",      "trunk.blocks.{}.feedforward_norm"),
    ("gpt_neox.layers.{}.mlp.dense_h_to_4h",             "trunk.blocks.{}.feedforward.up"),
    ("gpt_neox.layers.{}.mlp.dense_4h_to_h",             "trunk.blocks.{}.feedforward.down"),
    ("gpt_neox.final_layer_norm",                        "trunk.norm"),
)  # fmt: skip


def _spec(value: HFConfig) -> TransformerSpec:
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
    spec=_spec,
    keys=(
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "attention_bias", "attention_dropout", "hidden_dropout", "classifier_dropout", "max_position_embeddings",
        "initializer_range", "layer_norm_eps", "rotary_pct", "rotary_emb_base", "tie_word_embeddings",
        "use_parallel_residual",
    ),
    names=NAMES,
    trunk_prefix="gpt_neox.",
    tasks={
        **decoder_tasks("GPTNeoX", ("sequence", "span"), language=("ForCausalLM", "embed_out")),
        "tokens": Task("GPTNeoXForTokenClassification", CLASSIFIER, token_head("classifier_dropout")),
    },
    defaults={"rotary_pct": 0.25, "rotary_emb_base": 10000.0},
    by_hand=ROPE_KEYS,
    # Names of the library GPT-NeoX was trained with, for what is called *_dropout here.
    fixed={"attention_probs_dropout_prob": (0,), "hidden_dropout_prob": (0,), "rope_interleaved": (False,)},
    interleaved=("query_key_value.weight", "query_key_value.bias"),
    # once saved as buffers
    ignored_tensors=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    new_model_config={"classifier_dropout": 0.0},
)  # fmt: skip

"""Gemma: Llama with norms that multiply by 1 + weight, scaled token vectors, a tied head and GeGLU.

Source: Gemma team 2024, arXiv:2403.08295, section 2; transformers, `models/gemma`.
"""

import math

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import GROUPED_KEYS, INV_FREQ
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, GatedFeedForwardSpec, UnitOffsetRMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

TANH_GELU = "gelu_pytorch_tanh"
KEYS = {
    **GROUPED_KEYS,
    "vocab_size": Key(int, 256000, 1),
    "hidden_size": Key(int, 3072, 1),
    "intermediate_size": Key(int, 24576, 1),
    "num_hidden_layers": Key(int, 28, 1),
    "num_attention_heads": Key(int, 16, 1),
    "num_key_value_heads": Key(int, 16, 1),
    "head_dim": Key(int, 256, 2),
    "hidden_act": Key(str, TANH_GELU),
    "max_position_embeddings": Key(int, 8192, 1),
    "tie_word_embeddings": Key(bool, True),
    "attention_bias": Key(bool, False),
}
# Published files name the activation twice. A value that would part from `hidden_act` is refused.
FIXED = {"hidden_activation": (None, TANH_GELU), "use_bidirectional_attention": (None, False)}
HARMLESS = ("cache_implementation",)  # how transformers lays its cache out


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Gemma config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED, by_hand=ROPE_KEYS)
    bias = value["attention_bias"]
    attention, attention_problems = grouped_attention(config, value, bias, bias)
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    # The first files say "gelu" and mean the tanh form, as transformers knows.
    activation = TANH_GELU if value["hidden_act"] == "gelu" else value["hidden_act"]
    norm = UnitOffsetRMSNormSpec(value["rms_norm_eps"])
    block = BlockSpec(attention, GatedFeedForwardSpec(value["intermediate_size"], activation, bias=False), norm)
    blocks = (block,) * value["num_hidden_layers"]
    return llama_like(value, attention, blocks, norm, embedding_scale=math.sqrt(value["hidden_size"]))


GEMMA = Family(
    name="gemma",
    spec_from_config=spec_from_config,
    names=LLAMA_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Gemma"),
    ignored_tensors=(INV_FREQ,),
)

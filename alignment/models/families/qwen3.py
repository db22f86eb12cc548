"""Qwen 3: Qwen 2 with a norm on each head's queries and keys instead of biases, and a head width of its own.

Source: Qwen team 2025, arXiv:2505.09388, section 2; transformers, `models/qwen3`.
"""

from alignment.models.families.decoders import grouped_attention
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import INV_FREQ
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.qwen2 import KEYS as QWEN2_KEYS
from alignment.models.families.qwen2 import windowed_decoder
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {**QWEN2_KEYS, "head_dim": Key(int, 128, 2), "attention_bias": Key(bool, False)}

NAMES = (
    *LLAMA_NAMES,
    ("model.layers.{}.self_attn.q_norm.weight",  "trunk.blocks.{}.attention.query_norm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight",  "trunk.blocks.{}.attention.key_norm.weight"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Qwen 3 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, by_hand=ROPE_KEYS)
    bias, norm = value["attention_bias"], RMSNormSpec(value["rms_norm_eps"])
    attention, attention_problems = grouped_attention(config, value, bias, bias, query_key_norm=norm)
    return windowed_decoder(value, attention, problems + attention_problems)


QWEN3 = Family(
    name="qwen3",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Qwen3", ("sequence", "tokens", "span"), span_prefix="transformer."),
    ignored_tensors=(INV_FREQ,),
)

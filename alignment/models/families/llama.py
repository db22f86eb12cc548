"""Llama: rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/llama`.
"""

from typing import Any

from alignment.errors import raise_all
from alignment.models.families.decoders import (
    GROUPED_KEYS,
    INPUT_NORMS,
    INV_FREQ,
    PROJECTIONS,
    activation_problems,
    grouped_attention,
    llama_like,
)
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.spec import BlockSpec, GatedFeedForwardSpec, RMSNormSpec, TransformerSpec

KEYS = {**GROUPED_KEYS, "attention_bias": Key(bool, False), "mlp_bias": Key(bool, False)}
FIXED = {"pretraining_tp": (1, None), "rope_interleaved": (False,)}

NAMES = (*PROJECTIONS, *INPUT_NORMS)


def spec_from_config(config: dict[str, Any]) -> TransformerSpec:
    """The specification of a Llama config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=("is_llama_config",), fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(config, value, value["attention_bias"], value["attention_bias"])
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], value["mlp_bias"])
    norm = RMSNormSpec(value["rms_norm_eps"])
    return llama_like(value, attention, (BlockSpec(attention, feedforward, norm),) * value["num_hidden_layers"], norm)


LLAMA = Family(
    name="llama",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Llama", ("sequence", "tokens", "span"), span_prefix="transformer."),
    ignored_tensors=(INV_FREQ,),
)

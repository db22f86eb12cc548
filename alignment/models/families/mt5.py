"""mT5: T5 1.1 in many languages; its logits are never scaled, and its files may have a head of their own.

Source: Xue et al. 2021, arXiv:2010.11934; transformers, `models/mt5`.
"""

from collections.abc import Mapping

from alignment.errors import raise_all
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.family import Family, Key, Name
from alignment.models.families.t5 import (
    KEYS,
    T5_IGNORED_TENSORS,
    T5_NAMES,
    T5_NEW_MODEL_CONFIG,
    T5_TIED_COPIES,
    gated_names,
    head_differs,
    read_t5,
    t5_spec,
    t5_tasks,
)
from alignment.models.safetensors_files import HFConfig, StoredTensor

OWN_KEYS = {
    "vocab_size": Key(int, 250112, 1),
    "d_ff": Key(int, 1024, 1),
    "num_layers": Key(int, 8, 1),
    "num_heads": Key(int, 6, 1),
    "feed_forward_proj": Key(str, "gated-gelu"),
}


def spec_from_config(config: HFConfig) -> EncoderDecoderSpec:
    """The specification of an mT5 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_t5(config, {**KEYS, **OWN_KEYS})
    raise_all(problems)
    return t5_spec(value, config, scaled=False)


def _names_from_config(config: HFConfig) -> tuple[Name, ...]:
    return gated_names({"feed_forward_proj": OWN_KEYS["feed_forward_proj"].default, **config})


def _own_head(config: HFConfig, tensors: Mapping[str, StoredTensor]) -> HFConfig:
    return config | {"tie_word_embeddings": False} if head_differs(tensors) else config


MT5 = Family(
    name="mt5",
    spec_from_config=spec_from_config,
    names=T5_NAMES,
    trunk_prefix="transformer.",
    tasks=t5_tasks("MT5"),
    ignored_tensors=T5_IGNORED_TENSORS,
    tied_copies=T5_TIED_COPIES,
    names_from_config=_names_from_config,
    new_model_config=T5_NEW_MODEL_CONFIG,
    config_from_tensors=_own_head,
)

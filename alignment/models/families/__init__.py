"""The families of models that run as our own modules: from config to specification, and tables of weight names.

Read family.py for what a family is, then llama.py up to LLAMA, the shortest; the rest of it and gemma.py say what
differs.
"""

from alignment.errors import UserError
from alignment.models.families.bert import ALBERT, BERT, DISTILBERT, ELECTRA, ROBERTA
from alignment.models.families.config_keys import hint
from alignment.models.families.deberta_v2 import DEBERTA_V2
from alignment.models.families.family import Family
from alignment.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from alignment.models.families.gpt import BLOOM, FALCON, GPT2, GPT_NEOX, OPENAI_GPT, OPT
from alignment.models.families.llama import LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from alignment.models.families.long_encoders import BIG_BIRD, LONGFORMER
from alignment.models.families.modernbert import MODERNBERT
from alignment.models.families.seq2seq import BART, MT5, T5
from alignment.models.safetensors_files import HFConfig

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        ALBERT, BART, BERT, BIG_BIRD, BLOOM, DEBERTA_V2, DISTILBERT, ELECTRA, FALCON, GEMMA, GEMMA2,
        GEMMA3, GPT2, GPT_NEOX, LLAMA, LONGFORMER, MISTRAL, MIXTRAL, MODERNBERT, MT5, OLMO2, OPENAI_GPT,
        OPT, PHI3, QWEN2, QWEN3, ROBERTA, SMOLLM3, T5,
    )
}  # fmt: skip


def family_of(config: HFConfig) -> Family:
    """The family of `config["model_type"]`; UserError where there is none."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"config.json: model_type {name!r} is not one of {', '.join(sorted(FAMILIES))}{hint(str(name), FAMILIES)}"
        )
    return FAMILIES[name]


def is_external_type(config: HFConfig) -> bool:
    """True where `config["model_type"]` names a family that only transformers has."""
    return isinstance(config.get("model_type"), str) and config["model_type"] not in FAMILIES

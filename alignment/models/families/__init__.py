"""The families of models that run as our own modules. Each file: config -> specification, and a table of names."""

from alignment.errors import UserError
from alignment.models.families.albert import ALBERT
from alignment.models.families.bart import BART
from alignment.models.families.bert import BERT
from alignment.models.families.bloom import BLOOM
from alignment.models.families.deberta_v2 import DEBERTA_V2
from alignment.models.families.distilbert import DISTILBERT
from alignment.models.families.electra import ELECTRA
from alignment.models.families.falcon import FALCON
from alignment.models.families.family import Family, hint
from alignment.models.families.gemma import GEMMA
from alignment.models.families.gemma2 import GEMMA2
from alignment.models.families.gemma3 import GEMMA3
from alignment.models.families.gpt2 import GPT2
from alignment.models.families.gpt_neox import GPT_NEOX
from alignment.models.families.llama import LLAMA
from alignment.models.families.mistral import MISTRAL
from alignment.models.families.mixtral import MIXTRAL
from alignment.models.families.modernbert import MODERNBERT
from alignment.models.families.mt5 import MT5
from alignment.models.families.olmo2 import OLMO2
from alignment.models.families.openai_gpt import OPENAI_GPT
from alignment.models.families.opt import OPT
from alignment.models.families.phi3 import PHI3
from alignment.models.families.qwen2 import QWEN2
from alignment.models.families.qwen3 import QWEN3
from alignment.models.families.roberta import ROBERTA
from alignment.models.families.smollm3 import SMOLLM3
from alignment.models.families.t5 import T5
from alignment.models.safetensors_files import HFConfig

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        ALBERT, BART, BERT, BLOOM, DEBERTA_V2, DISTILBERT, ELECTRA, FALCON, GEMMA, GEMMA2,
        GEMMA3, GPT2, GPT_NEOX, LLAMA, MISTRAL, MIXTRAL, MODERNBERT, MT5, OLMO2, OPENAI_GPT,
        OPT, PHI3, QWEN2, QWEN3, ROBERTA, SMOLLM3, T5,
    )
}  # fmt: skip


def family_of(config: HFConfig) -> Family:
    """The family of `config["model_type"]`.

    Raises:
        UserError: there is no such family, or the config asks to run code from the checkpoint.
    """
    if "auto_map" in config or config.get("trust_remote_code"):
        raise UserError(
            "config.json has 'auto_map': the checkpoint asks to run Python code of its own, which is refused; if its "
            f"weights are those of a plain {config.get('model_type')!r}, delete the key, else convert it first"
        )
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"config.json: model_type {name!r} is not one of {', '.join(sorted(FAMILIES))}{hint(str(name), FAMILIES)}"
        )
    return FAMILIES[name]


def is_external_type(config: HFConfig) -> bool:
    """Whether `config["model_type"]` names a family that only transformers has."""
    return isinstance(config.get("model_type"), str) and config["model_type"] not in FAMILIES

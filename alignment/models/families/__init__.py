"""The families with a table of their own. Each file: config -> specification, and a two-column table of names."""

from typing import Any

from alignment.errors import UserError
from alignment.models.families.family import Family, nearest
from alignment.models.families.gpt2 import GPT2
from alignment.models.families.llama import LLAMA

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA)}


def family_of(config: dict[str, Any]) -> Family:
    """The family that `config["model_type"]` names.

    Raises:
        UserError: there is none, or the config asks for code of its own.
    """
    if "auto_map" in config or config.get("trust_remote_code"):
        raise UserError(
            "config.json has 'auto_map': the checkpoint asks to run Python code of its own, which is refused; "
            "convert it to a plain architecture first"
        )
    name = config.get("model_type")
    if name not in FAMILIES:
        hint = nearest(str(name), FAMILIES)
        raise UserError(f"config.json: model_type {name!r} is not one of {', '.join(sorted(FAMILIES))}{hint}")
    return FAMILIES[name]

"""Writes configs/schemas/STAGE.json, the JSON schema of each stage's config, from the dataclasses; run by `make schemas`.

Editors read them; so do `alignment STAGE --help` and `alignment schema STAGE`, which then load no torch. An editor with
the YAML language server checks a config whose first line is `# yaml-language-server: $schema=FILE`, where FILE is one of
these, or what `alignment schema STAGE` printed.
"""

import inspect
import re
from dataclasses import MISSING, fields, is_dataclass

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema

from alignment.config.load import packaged_folder
from alignment.files import write_json
from alignment.pipeline.stages import STAGES, find_stage

NAMES = re.compile(r"    (\w+(?:, \w+)*): (.*)")  # "name: text", or "one, two: text", of an Attributes section


class Described(GenerateJsonSchema):
    """A schema whose keys are described by their entries in the docstring, and which knows no others."""

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        made, texts = super().dataclass_schema(schema), attribute_texts(schema["cls"])
        for each in fields(schema["cls"]):
            value = made["properties"][each.name]
            value.pop("title", None)
            value |= {"description": texts[each.name]} if each.name in texts else {}
            if each.default_factory is not MISSING and not is_dataclass(made_default := each.default_factory()):
                value["default"] = made_default
        summary = inspect.getdoc(schema["cls"]) or ""
        return made | {"description": summary.split("\n\n")[0], "additionalProperties": False}


def schema_of(cls: type) -> JsonSchemaValue:
    """JSON schema (draft 2020-12) of a config class, each key described by its entry in the docstring."""
    return TypeAdapter(cls).json_schema(schema_generator=Described)


def attribute_texts(cls: type) -> dict[str, str]:
    """The text of each attribute in the Attributes sections of a class and its bases."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(each.__dict__.get("__doc__") or "")).partition("\nAttributes:\n")
        names: list[str] = []
        for line in section.partition("\n\n")[0].splitlines():
            if found := NAMES.fullmatch(line):
                names = found[1].split(", ")
                texts |= dict.fromkeys(names, found[2])
            else:
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


if __name__ == "__main__":
    for stage in STAGES:
        write_json(packaged_folder("configs") / "schemas" / f"{stage}.json", schema_of(find_stage(stage)[0]))

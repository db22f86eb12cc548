"""What the config of a stage may hold, for `--help` and `schema`."""

import textwrap

from alignment.config.load import packaged_names
from alignment.config.schema import ConfigKey, config_keys
from alignment.pipeline.stages import find_stage


def describe_keys(stage: str, width: int) -> str:
    """The packaged configs of a stage and all keys of its config, as text of lines at most `width` wide."""
    names = [name for name in packaged_names("configs") if name.startswith(f"{stage}/")]
    packaged = [*_wrapped(f"packaged configs: {', '.join(names)}", width, ""), ""] if names else []
    keys = (line for key in config_keys(find_stage(stage)[0]) for line in _lines(key, width))
    return "\n".join([*packaged, "keys of the config, also as key=value:", "", *keys])


def _lines(key: ConfigKey, width: int) -> list[str]:
    default = "required" if key.default is None else f"default {key.default}"
    return [*_wrapped(f"{key.name}  ({key.type}; {default})", width, "  "), *_wrapped(key.text, width, "      ")]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)

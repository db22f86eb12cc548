"""generation_config.json, which tells other programs where a model stops and how to sample. Our own sampling never reads it."""

from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.files import read_json_object, write_json

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """generation_config.json of a local directory; None where there is none.

    Raises:
        UserError: it is no JSON object.
    """
    path = Path(directory) / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        return read_json_object(path)
    except UserError as error:
        raise UserError(f"{error}; mend it or delete it") from error


def write_generation_config(model: Any, directory: Path) -> None:
    """Write what travels with the model, where anything does."""
    config = generation_config_of(model)
    if config is not None:
        write_json(Path(directory) / GENERATION_CONFIG, config)


def generation_config_of(model: Any) -> dict[str, Any] | None:
    """What travels with a model; None of one that was opened without such a file, or that does not generate."""
    return getattr(model, "generation_config", None)


def set_end_tokens(model: Any, end_ids: list[int], pad_id: int | None) -> None:
    """Let a model that generates tell other programs its end tokens, in both config files.

    Args:
        end_ids: tokens at which responses end; none: what the configs say stays.
        pad_id: the tokenizer's padding, which fills the rows of a batch that have ended.
    """
    if not hasattr(model, "new_cache"):
        return
    config = generation_config_of(model)
    config = _defaults_in(model.config) if config is None else dict(config)
    if end_ids:
        model.config["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
        config["eos_token_id"] = model.config["eos_token_id"]
    if pad_id is not None:
        config["pad_token_id"] = pad_id
    model.generation_config = config


def _defaults_in(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers would take from config.json if there were no generation_config.json."""
    from transformers import GenerationConfig

    keys = [key for key in vars(GenerationConfig()) if not key.startswith("_") and key != "transformers_version"]
    return {key: config[key] for key in keys if config.get(key) is not None}

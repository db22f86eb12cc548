"""generation_config.json: stop tokens and sampling defaults of a model for other programs; our sampling ignores it."""

from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.files import read_json_object, write_json
from alignment.models.model import Model

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """The content of a directory's generation_config.json; None if there is no such file."""
    path = Path(directory) / GENERATION_CONFIG
    try:
        return read_json_object(path) if path.is_file() else None
    except UserError as error:
        raise UserError(f"{error}; mend it or delete it") from error


def write_generation_config(model: Model, directory: Path) -> None:
    """Write the model's generation config, if it has one."""
    if model.generation_config is not None:
        write_json(Path(directory) / GENERATION_CONFIG, model.generation_config)


def set_end_tokens(model: Model, end_ids: list[int], pad_id: int | None) -> None:
    """Set the end tokens (if there are any) and the padding token in both configs of a model that generates."""
    if not hasattr(model, "new_cache"):
        return
    config = model.generation_config
    if config is None:  # transformers takes the same keys of config.json in its place
        from transformers import GenerationConfig

        keys = [key for key in vars(GenerationConfig()) if not key.startswith("_") and key != "transformers_version"]
        config = {key: model.config[key] for key in keys if model.config.get(key) is not None}
    model.generation_config = dict(config)
    if end_ids:
        model.config["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
        model.generation_config["eos_token_id"] = model.config["eos_token_id"]
    if pad_id is not None:
        model.generation_config["pad_token_id"] = pad_id

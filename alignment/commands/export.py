"""The command `alignment export`: a model and its adapter as one plain Hugging Face directory."""

from pathlib import Path

from alignment.adapters import is_adapter, is_scalar_adapter, load_adapter, merge_adapter
from alignment.data.tokenizers.load import save_tokenizer
from alignment.files import atomic_directory
from alignment.loading import find_directory, load_model, load_tokenizer, set_special_tokens
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.models.safetensors_files import read_config
from alignment.reward_model import load_reward_network


def export_model(model: str, adapter: str | None, output: str) -> Path:
    """Write a model with its adapter merged as one plain Hugging Face directory and return that directory.

    Args:
        model: directory or Hub name of a model or an adapter.
        adapter: directory or Hub name of an adapter for it.
        output: directory to write.

    Raises:
        UserError: the adapter cannot be merged (a prefix does not change weights).
    """
    directory = find_directory(model)
    scalar = _is_scalar(find_directory(adapter) if adapter else directory)
    if adapter is None:
        merged = load_reward_network(model) if scalar else load_model(model)
    else:
        base = load_scalar_model(directory, new_head="zero") if scalar else load_language_model(directory)
        merged = load_adapter(base, find_directory(adapter))
    if adapter is not None or is_adapter(directory):
        merged = merge_adapter(merged)
    tokenizer = load_tokenizer(adapter or model)
    set_special_tokens(merged, tokenizer)
    with atomic_directory(Path(output)) as directory:
        save_model(merged, directory)
        save_tokenizer(tokenizer, directory)
    return Path(output)


def _is_scalar(directory: Path) -> bool:
    """Whether a directory holds a reward model or the adapter of one."""
    if is_adapter(directory):
        return is_scalar_adapter(directory)
    architectures = read_config(directory).get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")

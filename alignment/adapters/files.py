"""Parts of adapter directories that several kinds of adapter share."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from alignment.errors import UserError

Spec = TypeVar("Spec")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SPEC = "alignment_adapter.json"  # our own settings, in files that we write


def build_spec(kind: type[Spec], values: dict[str, object], where: str) -> Spec:
    """A spec from JSON values, checked as a run's config is.

    Raises:
        UserError: a key is unknown or a value is impossible.
    """
    from alignment.config.load import build
    from alignment.config.yaml_source import SourcedYaml

    try:
        return build(kind, SourcedYaml(values, {(): where}))
    except UserError as error:
        raise UserError(f"{error}; write the adapter again") from error


def check_size(directory: Path, asked: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse settings that need far more numbers than the file has, before allocating them.

    Raises:
        UserError: `asked` is more than four times what the file holds.
    """
    held = sum(tensor.numel() for tensor in tensors.values())
    if asked > 4 * held:  # a fused matrix has one lora_A in the file where we have three
        raise UserError(
            f"{directory}: its settings (rank, virtual tokens, layers) ask for {asked} numbers, and {WEIGHTS} holds "
            f"{held}; write the adapter again"
        )

"""A directory of an adapter of any kind: its base, its settings and its members."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from alignment.errors import UserError
from alignment.files import check_directory, read_json_object, write_json
from alignment.models.safetensors_files import read_safetensors

Spec = TypeVar("Spec")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MEMBERS = "ensemble.json"
SPEC = "alignment_adapter.json"  # our own settings, in files that we write
BASE = "base"  # in SPEC: the base model's directory relative to the adapter's


def is_adapter(directory: Path) -> bool:
    """True where a directory holds an adapter and not a model."""
    return (Path(directory) / CONFIG).is_file()


def is_scalar_adapter(directory: Path) -> bool:
    """True for the adapter of a reward model, which must contain a score head."""
    return read_adapter_config(directory).get("task_type") == "SEQ_CLS"


def score_rows(directory: Path) -> int:
    """Outputs of the score head in an adapter of a reward model: 1, or one for each member of an ensemble."""
    tensors = read_safetensors(Path(directory) / WEIGHTS) if (Path(directory) / WEIGHTS).is_file() else {}
    return next((len(value) for name, value in tensors.items() if name.endswith("score.weight")), 1)


def read_base(directory: Path) -> str:
    """An adapter's base model: a local directory, also where both were moved together, or a Hub name."""
    base = read_adapter_config(directory).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(
            f"{directory}/{CONFIG}: base_model_name_or_path is empty; write the base model's directory there"
        )
    moved = (read_own_settings(directory) or {}).get(BASE)
    paths = [Path(directory, location) for location in (base, moved) if isinstance(location, str)]
    return next((str(path.resolve()) for path in paths if path.is_dir()), base)


def read_own_settings(directory: Path) -> dict[str, Any] | None:
    """The content of a directory's alignment_adapter.json; None in an adapter that another program wrote."""
    path = Path(directory) / SPEC
    return read_json_object(path) if path.is_file() else None


def read_revision(directory: Path) -> str | None:
    """The base model's commit on the Hub; None for the newest or for a local directory."""
    return read_adapter_config(directory).get("revision")


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The content of a directory's adapter_config.json; UserError where it asks to run code."""
    check_directory(Path(directory))
    config = read_json_object(Path(directory) / CONFIG)
    if "auto_map" in config:
        raise UserError(f"{directory}/{CONFIG}: 'auto_map' asks to run code from the checkpoint, which is refused")
    return config


# Several adapters over one base, the members of an ensemble: a folder each and a list of them


def member_folder(number: int) -> str:
    """The folder of one member's adapter."""
    return f"member_{number}"


def write_members(directory: Path, count: int) -> None:
    """Write the list of the members' folders, last of all files."""
    write_json(directory / MEMBERS, {"members": [member_folder(index) for index in range(count)]})


def read_members(directory: Path) -> list[Path] | None:
    """The folders of an ensemble's members; None where the directory is no ensemble of adapters."""
    path = directory / MEMBERS
    if not path.is_file():
        return None
    names = read_json_object(path).get("members")
    if not isinstance(names, list) or not names or names != [member_folder(index) for index in range(len(names))]:
        raise UserError(
            f"{path}: members must list {member_folder(0)}, {member_folder(1)}, ...; copy the run's file again"
        )
    missing = [name for name in names if not (directory / name).is_dir()]
    if missing:
        raise UserError(f"{directory}: members of the ensemble are missing: {', '.join(missing)}; copy the run again")
    return [directory / name for name in names]


def build_spec(kind: type[Spec], values: dict[str, object], where: str) -> Spec:
    """A spec from JSON values, checked as a run's config is."""
    from alignment.config.load import build
    from alignment.config.yaml_source import SourcedYaml

    try:
        return build(kind, SourcedYaml({key: value for key, value in values.items() if key != BASE}, {(): where}))
    except UserError as error:
        raise UserError(f"{error}; write the adapter again") from error


def check_size(asked: float, tensors: Sequence[Tensor]) -> None:
    """Refuse a rank or a number of virtual tokens that the file's tensors do not have, before any is allocated."""
    held = max(map(len, tensors), default=0)
    if asked > held:
        raise UserError(f"its settings ask for {asked:g} (rank, virtual tokens), and {WEIGHTS} holds {held}")

"""A directory of several adapters over one base, the members of an ensemble: a folder each and a list of them."""

from pathlib import Path

from alignment.errors import UserError
from alignment.files import read_json_object, write_json

MEMBERS = "ensemble.json"


def member_folder(number: int) -> str:
    """The folder of one member's adapter."""
    return f"member_{number}"


def write_members(directory: Path, count: int) -> None:
    """Write the list of the members' folders, last of all files."""
    write_json(directory / MEMBERS, {"members": [member_folder(number) for number in range(count)]})


def read_members(directory: Path) -> list[Path] | None:
    """The folders of an ensemble's members; None where the directory is no ensemble of adapters.

    Raises:
        UserError: the list is damaged, or a folder is missing.
    """
    path = directory / MEMBERS
    if not path.is_file():
        return None
    names = read_json_object(path).get("members")
    if not isinstance(names, list) or not names or names != [member_folder(number) for number in range(len(names))]:
        raise UserError(
            f"{path}: members must list {member_folder(0)}, {member_folder(1)}, ...; copy the run's file again"
        )
    missing = [name for name in names if not (directory / name).is_dir()]
    if missing:
        raise UserError(f"{directory}: members of the ensemble are missing: {', '.join(missing)}; copy the run again")
    return [directory / name for name in names]

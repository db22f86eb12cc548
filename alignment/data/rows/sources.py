"""Sources of rows by name: files, directories, globs and Hub data sets. Their rows are read in files.py."""

import glob
import re
from pathlib import Path
from typing import Any

from alignment.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet", ".txt", ".txt.gz")
SPLIT_WORDS = (  # in names of files, as `datasets` reads them; those of one line mean the same
    ("train", "training"),
    ("validation", "valid", "val", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*")
# owner/name, owner/name[split], owner/name:config[split]
HUB_SOURCE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<config>[^\[\]:/]+))?(\[(?P<split>.+)\])?")

HubName = tuple[str, str | None, str]  # name, config (None: the only one) and split of a Hub data set


def find_rows(source: str, split: str) -> list[Path] | HubName:
    """The files of a source, or the Hub data set that it names; nothing is read."""
    files = source_files(source, split)
    if files is None:
        if (named := hub_source(source, split)) is None:
            raise UserError(f"{source}: no such file")
        return named
    for path in files:
        if not suffix_of(path.name):
            raise UserError(f"{path}: cannot tell the format by its name; expected one of {', '.join(SUFFIXES)}")
    return files


def suffix_of(name: str) -> str:
    """The one of `SUFFIXES` that a name ends with; '' where it has none."""
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def source_files(source: str, split: str = "train") -> list[Path] | None:
    """The files of a source, in order of their names: a file, the files of a directory, or a glob.

    Of a directory these are all files of rows in it and below, without hidden ones. Where some are named after splits
    (train.jsonl, test/0.csv, validation-00000-of-00002.parquet), they are those of one split. None where no file has the
    name.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_split(path, _files_inside(path), split)
    if glob.has_magic(source) and hub_source(source, "") is None:
        files = [Path(each) for each in sorted(glob.glob(source, recursive=True)) if Path(each).is_file()]
        if not files:
            raise UserError(f"{source}: no file matches")
        return files
    return None


def unread_files(source: str, split: str) -> list[str]:
    """Names of the files of a directory that are not read, because they are of another split or of none."""
    path = Path(source)
    files = _files_inside(path) if path.is_dir() else []
    read = set(_files_of_split(path, files, split))
    return [str(each.relative_to(path)) for each in files if each not in read]


def _files_inside(directory: Path) -> list[Path]:
    inside = (each for each in directory.rglob("*") if each.is_file() and each.name.endswith(SUFFIXES))
    files = [each for each in inside if not any(part.startswith(".") for part in each.relative_to(directory).parts)]
    if not files:
        raise UserError(f"{directory}: a directory without files of rows ({', '.join(SUFFIXES)})")
    return sorted(files)


def _files_of_split(directory: Path, files: list[Path], split: str) -> list[Path]:
    """The files of one split; all files where none is named after a split."""
    splits = {path: _split_named(path.relative_to(directory)) for path in files}
    found = set(splits.values()) - {None}
    same = next((words for words in SPLIT_WORDS if split in words), ())
    wanted = {split} if split in found else set(same)
    if found and not found & wanted:
        names = ", ".join(sorted(map(str, found)))
        raise UserError(f"{directory}: there is no split '{split}' among its files; it has {names}")
    return [path for path in files if splits[path] in wanted] if found else files


def _split_named(path: Path) -> str | None:
    """The split that a file is named after, or else a directory that it is in; None where neither is."""
    known = {word for words in SPLIT_WORDS for word in words}
    words = [word for word in re.split(r"[^a-z]+", path.name.lower()) if word in known]
    if words and (shard := SHARD.fullmatch(path.name)):
        return shard["split"]  # train_sft-00000-of-00003.parquet is of the split train_sft
    return (words or [part for part in reversed(path.parts[:-1]) if part in known] or [None])[0]


def hub_source(source: str, split: str) -> HubName | None:
    """The Hub data set that a source names; None where `source` can only be a file.

    A Hub id looks like no path of its own (`./`, `/`, `~`), has no known suffix, and at most one slash.
    """
    found = HUB_SOURCE.fullmatch(source)
    if found is None or found["name"].endswith((*SUFFIXES, ".gz", ".tsv")):
        return None
    return found["name"], found["config"], found["split"] or split


def load_hub(name: str, config: str | None, split: str, *, streaming: bool = False) -> Any:
    """A split of a Hub data set, as `datasets` loads it; streaming: as rows that are fetched one after another."""
    from datasets import load_dataset

    try:
        options = {"streaming": True} if streaming else {}
        return load_dataset(*([name] if config is None else [name, config]), split=split, **options)
    except Exception as error:  # the library raises a dozen unrelated types
        raise UserError(
            f"{name}: no such file, and the Hub gave no data set of that name with split '{split}' "
            f"({type(error).__name__}: {error}); a local file needs its suffix ({', '.join(SUFFIXES)})"
        ) from error

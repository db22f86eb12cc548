"""Data sets and models of the Hub: entries of configs/sources.yaml, and folders of copies, which come first."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from alignment.errors import UserError
from alignment.files import data_folder, packaged_folder

HubName = tuple[str, str | None, str]  # name, config (None: the only one) and split of a Hub data set
Entry = dict[str, Any]  # of configs/sources.yaml
Row = dict[str, Any]  # column -> value
ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined)
EVERY = "*"  # as a config: all that sources.yaml lists, one after another


@cache
def hub_sources() -> dict[str, Entry]:
    """The entries of configs/sources.yaml, which explains their keys, by Hub id."""
    return yaml.safe_load((packaged_folder("configs") / "sources.yaml").read_text(encoding="utf-8"))


def hub_label(name: str, config: str | None, split: str) -> str:
    """A data set as configs name it."""
    return f"{name if config is None else f'{name}:{config}'}[{split}]"


def load_hub(name: str, config: str | None, split: str, *, streaming: bool = False, copies: Path | None = None) -> Any:
    """A split of a Hub data set, as `datasets` loads it; streaming: as rows that are fetched one after another.

    Args:
        copies: a folder that may have a copy; the folder of ALIGNMENT_DATA is the next one, and the Hub the last.

    Raises:
        UserError: no folder has a copy, and the Hub did not give it.
    """
    known = hub_sources().get(name, {})
    revision = known.get("revision")
    try:
        for folder in [data_folder()] if copies is None else [copies, data_folder()]:
            if "/" in name and (folder / name).is_dir():
                return _load(known, str((folder / name).resolve()), config, split, {"streaming": streaming})
            if (dataset := _copy(known, folder, config, split)) is not None:
                return dataset.to_iterable_dataset() if streaming else dataset
        options = {"streaming": streaming, "revision": revision}
        return _load(known, name, config, split, options)
    except Exception as error:  # the library raises a dozen unrelated types
        folder = data_folder() / name
        source = known.get("home", f"hf download {name} --repo-type dataset")
        command = " ".join(filter(None, [source, revision and f"--revision {revision}"]))
        raise UserError(
            f"{name}: no such file, and the Hub gave no data set of that name with split '{split}' ("
            f"{hub_label(name, config, split)}, {type(error).__name__}: {' '.join(str(error).split())}); with a "
            f"network it is fetched by itself, without one put a copy ({command}) into {folder}, "
            f"where ALIGNMENT_DATA names {data_folder()}; a local file needs its suffix, such as .jsonl"
        ) from error


def copied_model(name: str) -> Path | None:
    """The directory in the folder of ALIGNMENT_DATA that is a copy of a model of the Hub; None where there is none."""
    paths = [name, *hub_sources().get(name, {}).get("directories", ())]
    return next((data_folder() / path for path in paths if "/" in name and (data_folder() / path).is_dir()), None)


def hub_text(name: str, config: str | None, split: str, copies: Path | None = None) -> str | None:
    """The running text whose lines are the rows of a data set; None where its rows are no lines."""
    line = hub_sources().get(name, {}).get("line")
    if line is None:
        return None
    return "".join(_row({"line": line}, row)["line"] for row in load_hub(name, config, split, copies=copies))


def _load(known: Entry, place: str, config: str | None, split: str, options: Row) -> Any:
    """By `datasets`, from a folder that is laid out as the Hub's repository, or from the Hub."""
    from datasets import concatenate_datasets, load_dataset

    options = {key: value for key, value in options.items() if value}
    if config == EVERY:
        if "configs" not in known:
            raise ValueError(
                "'*' stands for configs that configs/sources.yaml names, and it names none of this data set"
            )
        streaming = options.pop("streaming", False)
        parts = [(one, _load(known, place, one, split, options)) for one in known["configs"]]
        whole = concatenate_datasets([part.add_column("config", [one] * len(part)) for one, part in parts])
        return whole.to_iterable_dataset() if streaming else whole
    if "files" not in known:
        return load_dataset(*filter(None, (place, config)), split=split, **options)
    base = split.partition("[")[0]
    files = known["files"].format(config=config, split=base)
    if "home" in known and not Path(place).is_dir():
        place = "json"
        files = known["home"] + files
    return load_dataset(place, data_files={base: files}, split=split, **options)


def _copy(known: Entry, folder: Path, config: str | None, split: str) -> Any | None:
    """A copy in files and columns of its own, put into the Hub's columns; None where the folder has none."""
    from datasets import Dataset

    copies = known.get("copies", {})
    name = next((one for one in (config, EVERY) if f"{one}[{split}]" in copies), None)
    paths = [folder / path for path in copies.get(f"{name}[{split}]", ())]
    if not paths or not all(path.is_file() for path in paths):
        return None
    rows = [_row(known["columns"], row) for path in paths for row in _lines(path)]
    if name != config:
        rows = [row for row in rows if row.pop("config") == config]
    return Dataset.from_list(rows)


def _lines(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        if path.name.endswith(".txt.gz"):
            return [{"text": line} for line in file]
        return [json.loads(line) for line in file]


def _row(columns: dict[str, str], row: Row) -> Row:
    """The values of expressions over a row."""
    return {name: _expression(text)(**{**row, "row": row}) for name, text in columns.items()}


@cache
def _expression(text: str) -> Any:
    return ENVIRONMENT.compile_expression(text, undefined_to_none=False)

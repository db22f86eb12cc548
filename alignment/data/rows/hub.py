"""Data sets and models of the Hub: entries of configs/sources.yaml, and folders of copies, which come first."""

import gzip
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from alignment.errors import UserError
from alignment.files import data_folder, packaged_folder, write_atomic

HubName = tuple[str, str | None, str]  # name, config (None: the only one) and split of a Hub data set
Entry = dict[str, Any]  # of configs/sources.yaml
Row = dict[str, Any]  # column -> value
ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined)
EVERY = "*"  # as a config: all that sources.yaml lists, one after another
ANSWER_SECONDS = 10  # in which the Hub, or the address of a file, must begin to answer


@cache
def hub_sources() -> dict[str, Entry]:
    """The entries of configs/sources.yaml, which explains their keys, by Hub id."""
    return yaml.safe_load((packaged_folder("configs") / "sources.yaml").read_text(encoding="utf-8"))


def hub_label(name: str, config: str | None, split: str) -> str:
    """A data set as configs name it."""
    return f"{name if config is None else f'{name}:{config}'}[{split}]"


def load_hub(name: str, config: str | None, split: str, *, streaming: bool = False, copies: Path | None = None) -> Any:
    """A split of a Hub data set, as `datasets` loads it; streaming: as rows that are fetched one after another.

    Of a split such as train[:200] no more is fetched than its rows.

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
        return _load_online(known, name, config, split, options)
    except Exception as error:  # the library raises a dozen unrelated types
        folder = data_folder() / name
        source = f"hf download {name} --repo-type dataset"
        if "home" in known:
            source = (known["home"] + known["files"]).format(config=config, split=split.partition("[")[0])
        command = " ".join(filter(None, [source, revision and f"--revision {revision}"]))
        raise UserError(
            f"{name}: no such file, and the Hub gave no data set of that name with split '{split}' ("
            f"{hub_label(name, config, split)}, {type(error).__name__}: {' '.join(str(error).split())}); with a "
            f"network it is fetched by itself, without one put a copy ({command}) into {folder}, "
            f"where ALIGNMENT_DATA names {data_folder()}; a local file needs its suffix, such as .jsonl"
        ) from error


def copied_model(name: str) -> Path | None:
    """The directory that is a copy of a model of the Hub, in the folder of ALIGNMENT_DATA, or in that of `make bases`
    (ALIGNMENT_BASES, or build/bases); None where there is none.
    """
    paths = [name, *hub_sources().get(name, {}).get("directories", ())]
    folders = [data_folder(), Path(os.environ.get("ALIGNMENT_BASES") or "build/bases")]
    copies = [folder / path for folder in folders for path in paths if "/" in name]
    return next(filter(Path.is_dir, copies), None)


def hub_text(name: str, config: str | None, split: str, copies: Path | None = None) -> str | None:
    """The running text whose lines are the rows of a data set; None where its rows are no lines."""
    line = hub_sources().get(name, {}).get("line")
    if line is None:
        return None
    return "".join(_row({"line": line}, row)["line"] for row in load_hub(name, config, split, copies=copies))


def hub_answers() -> bool:
    """True where the Hub can be reached; asked at once, while its own client tries for 20 s before it gives up."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception:  # of the session's library
        return False
    return True


def _load_online(known: Entry, name: str, config: str | None, split: str, options: Row) -> Any:
    """From the Hub, or where it does not answer, from the cache of `datasets`."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        return _load(known, name, config, split, options)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _load(known: Entry, place: str, config: str | None, split: str, options: Row) -> Any:
    """By `datasets`, from a folder that is laid out as the Hub's repository, or from the Hub."""
    from datasets import Dataset, concatenate_datasets, load_dataset

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
    base, _, part = split.partition("[")
    first = re.fullmatch(r":(\d+)]", part)
    if "files" in known:
        files = known["files"].format(config=config, split=base)
        options["data_files"] = {base: files}
        config = None
        if "home" in known and not Path(place).is_dir():
            place = _fetched(known["home"], place, files)
    arguments = filter(None, (place, config))
    if first is None:
        return load_dataset(*arguments, split=split, **options)
    streaming = options.pop("streaming", False)
    rows = load_dataset(*arguments, split=base, streaming=True, **options).take(int(first[1]))
    return rows if streaming else Dataset.from_list(list(rows), features=rows.features)


def _fetched(home: str, name: str, file: str) -> str:
    """The folder of a set whose address is not the Hub's, with one of its files, which is fetched once.

    `datasets` reads other addresses by packages that it does not install.
    """
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE) / "home" / name
    if not (folder / file).is_file():
        if config.HF_HUB_OFFLINE:
            raise ConnectionError("there is no network, or HF_HUB_OFFLINE is set")
        with urlopen(quote(home + file, safe=":/"), timeout=ANSWER_SECONDS) as answer:
            content = answer.read()
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / file, lambda path: path.write_bytes(content))
    return str(folder)


def _copy(known: Entry, folder: Path, config: str | None, split: str) -> Any | None:
    """A copy in files and columns of its own, put into the Hub's columns; None where the folder has none."""
    from datasets import Dataset

    copies = known.get("copies", {})
    name = next((one for one in (config or "default", EVERY) if f"{one}[{split}]" in copies), None)
    paths = [folder / path for path in copies.get(f"{name}[{split}]", ())]
    if not paths or not all(path.is_file() for path in paths):
        return None
    rows = [_row(known["columns"], row) for path in paths for row in _lines(path)]
    if name == EVERY != config:
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

"""One key for all that prepared rows depend on: the rows' bytes, the tokenizer, the settings and the code that prepares them.

Anything that could change a token is part of it. Settings count unless they are known not to matter, so that a new one
counts from its first day.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.rows.sources import hub_source, load_hub, source_files
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.files import hash_of, sha256

PACKAGES = ("tokenizers", "transformers", "jinja2", "trl")  # their versions may change what a row becomes
# Settings that change no row and no token: the sources have keys of their own, limits are checked on the stored tally.
WITHOUT_EFFECT = frozenset(
    {
        "train", "evaluation", "evaluation_share", "split", "evaluation_split", "columns", "max_rows", "mixing", "mixing_maximum",
        "temperature", "max_lost_share", "processes", "cache", "check", "streaming", "shuffle_buffer",
    }
)  # fmt: skip
WITHOUT_EFFECT_OF_A_SOURCE = frozenset({"name", "weight", "loss_weight", "max_rows"})
UNKNOWN_TO_THE_CLASS = ("name_or_path", "is_local", "local_files_only")  # where a tokenizer came from, not what it is


def table_key(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    name: str,
    max_rows: int | None,
) -> tuple[str, dict[str, Any]]:
    """The key of one source's prepared rows, and what went into it.

    Args:
        name: of the preparation: kind of rows, and the objective for running text.
        max_rows: good rows to read of this source.
    """
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in WITHOUT_EFFECT}
    own = {key: value for key, value in dataclasses.asdict(source).items() if key not in WITHOUT_EFFECT_OF_A_SOURCE}
    parts = {
        "preparation": name,
        "rows": content_of(source),
        "source": own,
        "settings": settings,
        "max_rows": max_rows,
        "tokenizer": tokenizer_hash(tokenizer),
        "code": preparation_code_hash(),
        "packages": package_versions(),
    }
    return hash_of(parts)[:32], parts


def content_of(source: SourceConfig) -> dict[str, str]:
    """Hashes of the files of a source by path; for a Hub data set, the fingerprint that `datasets` gives it."""
    if files := source_files(source.source, str(source.split)):
        return {str(file): sha256(file) for file in files}
    found = hub_source(source.source, str(source.split))
    if found is None:
        return {}  # no such file: reading it says so
    dataset = load_hub(*found)
    return {"fingerprint": getattr(dataset, "_fingerprint", None) or hash_of([dict(row) for row in dataset])}


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of the files that the tokenizer would be saved as: vocabulary, special tokens, chat template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files: dict[str, object] = {}
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            name = str(path.relative_to(folder))
            files[name] = _without_origin(path) if name == "tokenizer_config.json" else sha256(path)
    return hash_of(files)


def _without_origin(path: Path) -> Mapping[str, object]:
    config = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in UNKNOWN_TO_THE_CLASS}


@functools.lru_cache(maxsize=1)
def preparation_code_hash() -> str:
    """Hash of the source of every module that reads or tokenizes rows: all of alignment/data."""
    return hash_code(Path(__file__).parent)


def hash_code(folder: Path) -> str:
    """Hash of all Python files of a folder, by name and content."""
    return hash_of({str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*.py"))})


@functools.lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of the packages that may change what a row becomes."""
    return {name: metadata.version(name) for name in PACKAGES}

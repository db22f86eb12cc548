"""Limits on files that others wrote: nothing is read outside their directory, and nothing larger than such files are.

What the files mean is the reader's matter: models/directory.py, data/tokenizers.py, adapters/files.py.
"""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.errors import UserError, raise_all

MAX_JSON_BYTES = 256 * 2**20  # far above any index of shards or vocabulary
JSON_LIKE = (".json", ".jinja", ".txt", ".model", ".bpe")  # read whole; weights are mapped and may be of any size
TEMPLATES = "additional_chat_templates"  # the one subdirectory that transformers reads


def check_directory(directory: Path) -> None:
    """Refuse a model, tokenizer or adapter directory whose files are not its own.

    A symbolic link may lead to another file of the directory, or into `blobs/` of the Hub's cache, whose snapshots are
    made of such links. A link that leads anywhere else would hand out a file of this machine as part of a model.

    Raises:
        UserError: naming every link that leaves the directory, every device, pipe or socket, and every file that is too
            large for its kind.
    """
    directory = Path(directory)
    try:
        raise_all(_problems(directory))
    except OSError as error:
        raise UserError(f"{directory}: cannot be read: {error.strerror or error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: not readable, larger than `MAX_JSON_BYTES`, no JSON, nested too deeply, or no object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(_too_large(path, size))
        value = json.loads(path.read_text(encoding="utf-8"))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object, got {type(value).__name__}")
    return value


def _problems(directory: Path) -> Iterator[str]:
    roots = _roots(directory)
    for path in [*sorted(directory.iterdir()), *sorted((directory / TEMPLATES).glob("*"))]:
        if path.is_symlink():
            real = Path(os.path.realpath(path))
            if real.exists() and not any(real.is_relative_to(root) for root in roots):
                yield f"{path}: a link to {real}, outside the directory, is not followed; put the file itself there"
                continue
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG  # a dangling link is a missing file
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            yield f"{path}: neither a file nor a directory; remove it"
        elif path.suffix in JSON_LIKE and path.exists() and path.stat().st_size > MAX_JSON_BYTES:
            yield _too_large(path, path.stat().st_size)


def _roots(directory: Path) -> list[Path]:
    """Real directories in which a file of `directory` may lie."""
    own = Path(os.path.realpath(directory))
    blobs = own.parent.parent / "blobs"
    in_cache = own.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink()
    return [own, blobs] if in_cache else [own]


def _too_large(path: Path, size: int) -> str:
    return f"{path}: {size} bytes; files of its kind may have {MAX_JSON_BYTES}"

"""Atomic writes, content hashes, and safe reading of files that others wrote.

A write goes to a hidden file or directory beside the target, locked by the writing process, and is renamed at the end.
The system releases the lock when the process ends, however it ends: a hidden file that can be locked is a leftover, and
the next write to the same target removes it. A file system without locks keeps its leftovers.

    .model.partial-1a2b3c4d     being written, or cut short
    .model.old-1a2b3c4d         the previous version, whole, for the moment in which its successor takes its name
    .model.removed-1a2b3c4d     being deleted

Reading is limited to files that lie in their own directory (or the Hub's cache) and have a size that such files can
have.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from alignment.errors import UserError, raise_all, warn_once

MAX_JSON_BYTES = 256 * 2**20  # far above any index of shards or vocabulary
TOO_LARGE = f"{{path}}: {{size}} bytes; files of its kind may have {MAX_JSON_BYTES}"
READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".bpe")  # weights are mapped instead and may have any size
FULL = (errno.ENOSPC, errno.EDQUOT)
SHORT_WRITE = rf"{os.strerror(errno.ENOSPC)}|\d+ requested and \d+ written"  # of safetensors, and of NumPy
RECORD = "alignment_export.json"  # in an exported directory: the paths of what was written into it
PAGE = "Content-Security-Policy"  # stands in every page that is written here
CARD = "README.md"  # a model's; it is about the model and no part of it
CHAT_TEMPLATE_DIRECTORY = "additional_chat_templates"  # the one subdirectory that transformers reads


def packaged_folder(kind: str) -> Path:
    """Folder of the packaged `configs` or `recipes`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_packaged" / kind
    return installed if installed.is_dir() else package.parent / kind


def data_folder() -> Path:
    """Folder of copies of data sets: ALIGNMENT_DATA, or ../shared/data."""
    return Path(os.environ.get("ALIGNMENT_DATA") or "../shared/data")


def sync(path: Path) -> None:
    """Flush a file or a directory entry to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path` and rename it over `path`, which a full disk leaves as it was."""
    with _neighbor(path, Path.touch) as temporary:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Atomic UTF-8 text file."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """Atomic, indented JSON file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_figures(path: Path, figures: object) -> Path:
    """`write_json` with null for every number that is not finite, for which JSON has no word; the path."""
    write_json(path, json.loads(json.dumps(figures), parse_constant=lambda _: None))
    return path


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Atomic file of one JSON object per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that replaces `path` on success and is deleted on an error.

    `path` is complete at every moment, old or new. Where the system cannot exchange two names in one step, a process
    killed between two renames leaves no `path`: then `remove_leftovers` restores the old one.
    """
    with _neighbor(path, Path.mkdir) as temporary:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        _replace(temporary, path)


@contextmanager
def exported_directory(path: Path) -> Iterator[Path]:
    """`atomic_directory` at a place that a user names; see `refuse_foreign` for what it may replace."""
    refuse_foreign(path)
    with atomic_directory(path) as folder:
        yield folder
        names = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*"))
        write_json(folder / RECORD, {"files": names})
        refuse_foreign(path)  # writing a large model takes time


def refuse_foreign(directory: Path, ours: Collection[str] = ()) -> None:
    """Refuse to write a directory in place of something that the user may want to keep; nothing is changed.

    Free are a name that is not taken, an empty directory, and one that holds nothing but `ours` and what an export
    wrote there and nobody changed since.

    Args:
        ours: paths below the directory that its next version has as well.

    Raises:
        UserError: a file or a link without a target; the current directory, whose name another one would take; a
            directory that holds anything else.
    """
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is there and is not written over; choose another name")
    if os.path.realpath(directory) == os.path.realpath("."):
        raise UserError(f"{directory}: is the current directory, which is not replaced; name a new directory")
    record = directory / RECORD
    listed = read_json_object(record).get("files") if record.is_file() else None
    known = {RECORD, *map(str, listed)} if isinstance(listed, list) else set[str]()
    foreign = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        unchanged = name in known and path.lstat().st_mtime_ns <= record.stat().st_mtime_ns
        if name not in ours and not unchanged:
            foreign.append(name)
        if len(foreign) == 3:  # enough to tell; there may be millions
            break
    if foreign:
        raise UserError(
            f"{directory}: holds {', '.join(foreign)}, which this command has not written or which was changed since. "
            "Nothing was changed. Choose another directory, or delete this one"
        )


def refuse_other_file(path: Path, sign: str) -> None:
    """Refuse to write over a file in which `sign` does not stand, as it does in all files written there."""
    if path.is_file() and sign.encode() not in path.read_bytes():
        raise UserError(f"{path}: is a file of another kind and was not replaced; choose another name, or delete it")


def remove_directory(path: Path) -> None:
    """Delete a directory; it is renamed first, so that a partly deleted one never has its name."""
    hidden = _hidden_name(path, "removed")
    os.rename(path, hidden)
    _delete(hidden)


def remove_leftovers(path: Path) -> None:
    """Delete what dead processes left beside `path`; restore the previous version if its successor is missing."""
    hidden = re.compile(rf"\.{re.escape(path.name)}\.(partial|old|removed)-\w+")
    for left in list(path.parent.iterdir()) if path.parent.is_dir() else []:
        kind = hidden.fullmatch(left.name)
        descriptor = _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB) if kind else None
        if kind is None or descriptor is None:
            continue
        if kind[1] == "old" and not os.path.lexists(path):
            os.rename(left, path)
        else:
            _delete(left)
        os.close(descriptor)


def check_output(path: Path) -> None:
    """Raise UserError where a file of this name cannot be written; to be asked before long work. It leaves nothing."""
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with _neighbor(folder / path.name, Path.touch):
            pass
    except UserError as error:
        raise _unwritable(path, error.__cause__) from error


@contextmanager
def explain_full_disk(path: Path, written: Path) -> Iterator[None]:
    """Turn the system's errors for a full disk, which name no file, into a UserError with `path` and `written`'s bytes.

    Likewise those for a place that may not be written.
    """
    try:
        yield
    except Exception as error:
        for cause in (error, error.__cause__):  # an inner call may have explained it; safetensors has a type of its own
            if getattr(cause, "errno", None) in FULL or re.search(SHORT_WRITE, str(cause)):
                size = sum(file.stat().st_size for file in [written, *written.rglob("*")] if file.is_file())
                free = shutil.disk_usage(path.parent).free
                raise UserError(
                    f"{path}: the disk is full: {size} bytes of it are written, it needs more, and {free} are free. "
                    "What was there before is untouched; make room and run again"
                ) from cause
            if os.strerror(errno.EROFS) in str(cause) or getattr(cause, "filename", None) == str(written):
                raise _unwritable(path, cause) from cause
        raise


def _unwritable(path: Path, error: object) -> UserError:
    return UserError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}); choose another place")


@contextmanager
def _neighbor(path: Path, create: Callable[[Path], object]) -> Iterator[Path]:
    """Yield a new locked hidden file or directory beside `path`, which takes its place inside the block.

    Whatever has the hidden name at the end is deleted.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        while True:
            temporary = _hidden_name(path, "partial")
            create(temporary)
            descriptor = _lock(temporary, fcntl.LOCK_EX)
            if descriptor is not None or temporary.exists():  # otherwise another process removed it as a leftover
                break
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with explain_full_disk(path, temporary):
            yield temporary
            sync(path.parent)
    finally:
        _delete(temporary)
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, operation: int) -> int | None:
    """A descriptor that locks `path`; None if it is locked already, gone, or on a file system without locks."""
    with suppress(OSError), ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, operation)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            stack.pop_all()
            return descriptor
    return None


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`; what was at `path` is afterwards at `new`, or deleted."""
    if not os.path.lexists(path):
        os.rename(new, path)
    elif not exchange(new, path):
        old = _hidden_name(path, "old")
        removed = _hidden_name(path, "removed")
        descriptor = _lock(path, fcntl.LOCK_EX)
        os.rename(path, old)
        os.rename(new, path)
        os.rename(old, removed)  # so that anything named `old` is complete
        _delete(removed)
        if descriptor is not None:
            os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (Linux only); False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    # AT_FDCWD, RENAME_EXCHANGE
    here = -100
    swap = 2
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def _hidden_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _delete(path: Path) -> None:
    """Delete a file, a link or a directory; what the system does not let us delete stays as a leftover."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except PermissionError as error:
        raise UserError(f"{path}: may not be read: permission denied") from error
    return digest.hexdigest()


def cache_directory(named: str | None = None) -> Path:
    """The directory of the cache: the one named, else ALIGNMENT_CACHE, else alignment/data in the user's cache home."""
    chosen = named or os.environ.get("ALIGNMENT_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alignment" / "data"


def hash_of(value: object) -> str:
    """Hex SHA-256 of a JSON-like value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hashes_below(directory: Path, pattern: str = "*") -> dict[str, str]:
    """SHA-256 of every file below a directory whose name matches, by its path from there, without a model's card."""
    files = sorted(file for file in directory.rglob(pattern) if file.is_file() and file.name != CARD)
    return {file.relative_to(directory).as_posix(): sha256(file) for file in files}


def code_hash() -> str:
    """Hash of the package's source: results of other code are not results of this one."""
    return hash_of(hashes_below(Path(__file__).parent, "*.py"))


def check_directory(directory: Path) -> None:
    """Refuse a model, tokenizer or adapter directory with files from outside, special files or oversized files.

    A symbolic link may point to another file of the directory, or into `blobs/` of the Hub's cache, whose snapshots
    consist of such links. A link to anywhere else could make a private file of this machine part of a model.
    """
    directory = Path(directory)
    try:
        raise_all(_file_problems(directory))
    except OSError as error:
        raise UserError(f"{directory}: cannot be read: {error.strerror or error}") from error


def _file_problems(directory: Path) -> Iterator[str]:
    real_directory = Path(os.path.realpath(directory))
    blobs = real_directory.parent.parent / "blobs"
    in_cache = real_directory.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink()
    roots = [real_directory, blobs] if in_cache else [real_directory]
    for path in [*sorted(directory.iterdir()), *sorted((directory / CHAT_TEMPLATE_DIRECTORY).glob("*"))]:
        real = Path(os.path.realpath(path))
        if not path.exists():
            continue  # a dangling link is a missing file
        if path.is_symlink() and not any(real.is_relative_to(root) for root in roots):
            yield f"{path}: a link to {real}, outside the directory, is not followed; put the file itself there"
        elif not (path.is_file() or path.is_dir()):
            yield f"{path}: neither a file nor a directory; remove it"
        elif path.suffix in READ_WHOLE and (size := path.stat().st_size) > MAX_JSON_BYTES:
            yield TOO_LARGE.format(path=path, size=size)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a UserError where it is none, not readable, or larger than `MAX_JSON_BYTES`."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(TOO_LARGE.format(path=path, size=size))
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


def without_foreign_code(config: Mapping[str, object], path: Path) -> dict[str, Any]:
    """A config of a checkpoint without `auto_map`, which names classes in Python files beside it; those are never run.

    Where transformers has classes of all these names, its own are taken, and a note says so.

    Raises:
        UserError: transformers has no class of a name.
    """
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    if not config.get("auto_map"):
        return kept
    import transformers

    known = {name.casefold() for name in dir(transformers)}
    classes = [name for name in re.findall(r"[\w./-]+", str(config["auto_map"])) if "." in name]
    foreign = sorted({name for name in classes if name.rpartition(".")[2].casefold() not in known})
    if foreign or not classes:
        raise UserError(
            f"{path}: auto_map asks to run Python code of the checkpoint ({', '.join(foreign) or config['auto_map']}), "
            "which is refused, and transformers has no class of that name; take a checkpoint that was converted to one"
        )
    warn_once(
        f"{path}: auto_map names code beside the checkpoint, which is not run; transformers' own classes are taken"
    )
    return kept


def byte_count(size: str) -> int:
    """The bytes of a size such as "5GB", "500 MB" or "2GiB"; GB is 10^9, GiB is 2^30. ValueError where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{size!r} is no size; give a number and a unit, such as 5GB or 500MB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))

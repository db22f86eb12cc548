"""The prepared rows that are kept on disk, as a table of text; deleting them is cache.py's."""

import time

from alignment.data.cache import Listed, clear_entries, list_entries
from alignment.files import cache_directory

HEAD = ("key", "kind", "source", "rows", "tokens", "MB", "age", "last used")


def cache_lines(directory: str | None = None, *, clear: bool = False, older_than: float | None = None) -> list[str]:
    """The entries of the cache as lines of a table, and their sum; or, with `clear`, what was deleted.

    Args:
        directory: of the cache; None: the default one.
        clear: delete the entries.
        older_than: only those last used more than so many days ago; None: all.
    """
    cache = cache_directory(directory)
    if clear:
        deleted, left = clear_entries(cache, older_than)
        held = [f"left {entry.key}: a process is preparing it" for entry in left]
        return [*held, f"{cache}: deleted {_sum(deleted)}"]
    entries = list_entries(cache, older_than)
    rows = [HEAD, *map(_cells, entries)] if entries else []
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))] if rows else []
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"{cache}: {_sum(entries)}"]


def _cells(entry: Listed) -> tuple[str, ...]:
    numbers = (f"{entry.rows:,}", f"{entry.tokens:,}", f"{entry.bytes / 1e6:.1f}")
    return entry.key, entry.kind, entry.source, *numbers, _ago(entry.created), _ago(entry.used)


def _sum(entries: list[Listed]) -> str:
    size = sum(entry.bytes for entry in entries) / 1e6
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {size:.1f} MB"


def _ago(moment: float) -> str:
    """How long ago a moment was, in its largest unit."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"

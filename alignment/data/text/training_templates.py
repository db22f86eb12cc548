"""Published chat templates for which trl ships a training variant, which keeps earlier turns as they were.

A template is known by its text. Only files are read; trl itself is not imported.
"""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

SUFFIX = "_training"


def training_template(template: str) -> tuple[str, str] | None:
    """Name and text of the training variant of a published template; None: there is none, or trl is not installed."""
    path = _variants().get(_normalized(template))
    return None if path is None else (path.stem, path.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _variants() -> dict[str, Path]:
    """Published template -> file of its training variant."""
    folder = published_templates()
    found = {} if folder is None else {path: folder / f"{path.stem}{SUFFIX}.jinja" for path in folder.glob("*.jinja")}
    return {
        _normalized(path.read_text(encoding="utf-8")): variant for path, variant in found.items() if variant.is_file()
    }


def published_templates() -> Path | None:
    """The folder of trl's chat templates."""
    spec = find_spec("trl")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    folder = Path(roots[0]) / "chat_templates" if roots else None
    return folder if folder is not None and folder.is_dir() else None


def _normalized(template: str) -> str:
    return template.replace("\r\n", "\n").strip()

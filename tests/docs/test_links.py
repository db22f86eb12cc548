"""Links, anchors and names of files lead somewhere, also for a reader of the repository without the site."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)")
NAMED = re.compile(r"`((?:\.\./)*[\w/-]+\.md(?:#[\w-]+)?)`")
FOLDERS = ("alignment", "configs", "docs", "notebooks", "recipes", "scripts", "tests")
# Files of other projects that docstrings name as their source, and the pattern of a name.
FOREIGN = {"create_pretraining_data.py", "run_squad.py", "expect.py", "FILE.py"}


def texts() -> list[str]:
    """Every page and notebook outside the tests, as paths from the root."""
    tops = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in (*ROOT.glob("*.md"), *tops) if path.suffix in (".md", ".ipynb")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code; of a notebook the cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return FENCE.sub("", text)


@cache
def anchors(page: Path) -> set[str]:
    """The names that a code host gives the headings of a page: small letters, no punctuation, dashes for spaces."""
    names = set[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        names.add(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return names


def lost(page: Path, folders: tuple[Path, ...], target: str) -> bool:
    """Nothing is at a link's target, or the page there has no such heading."""
    path, _, anchor = target.partition("#")
    files = [folder / path for folder in folders if (folder / path).exists()] if path else [page]
    return not files or bool(anchor and files[0].suffix == ".md" and anchor not in anchors(files[0]))


def lost_links(page: Path) -> list[str]:
    """The links of a page, and the pages that it names in backticks, that lead nowhere."""
    links = [link for link in LINK.findall(prose(page)) if lost(page, (page.parent,), link)]
    return links + [name for name in NAMED.findall(prose(page)) if lost(page, (page.parent, ROOT), name)]


@pytest.mark.parametrize("page", texts())
def test_the_links_and_anchors_of_a_page_lead_somewhere(page):
    assert lost_links(ROOT / page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page, notebook = tmp_path / "a.md", tmp_path / "b.ipynb"
    page.write_text(
        "# One, two\n[a](#one-two) [b](#two) [c](no.md) [d](a.md#three) `no/e.md` `a.md`\n```\n[f](f.md)\n```\n"
    )
    cells = [
        {"cell_type": "markdown", "source": ["[a](a.md#one-two)\n", "[b](no.md)"]},
        {"cell_type": "code", "source": []},
    ]
    notebook.write_text(json.dumps({"cells": cells}))
    assert lost_links(page) == ["#two", "no.md", "a.md#three", "no/e.md"]
    assert lost_links(notebook) == ["no.md"]


def comments_and_docstrings(text: str) -> Iterator[str]:
    """The prose of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def test_files_that_comments_and_docstrings_name_exist():
    listed = [f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    wrong = set[tuple[str, str]]()
    for path in sorted((ROOT / "alignment").rglob("*.py")):
        for text in comments_and_docstrings(path.read_text(encoding="utf-8")):
            names = set(re.findall(r"(?<![\w/.-])[\w/]+\.py\b", text)) - FOREIGN
            lost_names = [name for name in names if not any(file.endswith(f"/{name}") for file in listed)]
            wrong |= {(path.relative_to(ROOT).as_posix(), name) for name in lost_names}
    assert wrong == set()

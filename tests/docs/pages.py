"""The pages of the documentation and the blocks of code in them."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {"bash", "yaml", "python", "json", "jsonl", "jinja", "text", "source", "html"}


class Block(NamedTuple):
    """A fenced block of a page; `reason` says why a test does not run it, and is empty where it does."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    @property
    def place(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file that the block is, from its first line `# name.yaml`; empty where it is none."""
        found = re.match(r"# ([\w./-]+\.(?:yaml|py))$", self.text.partition("\n")[0])
        return found[1] if found and self.language in ("yaml", "python") else ""


def pages() -> list[str]:
    """README.md, AGENTS.md and the pages that are written by hand, as paths from the root."""
    return ["README.md", "AGENTS.md", *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page in order, also of admonitions and lists, whose indent is taken off."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    blocks, start, fence = list[Block](), 0, ""
    for number, line in enumerate(lines, 1):
        found = re.match(r"\s*(`{3,}|~{3,})\s*(\w*)", line)
        if found and not fence:
            start, fence, language = number, found[1], found[2]
        elif fence and line.strip() == fence:
            before = re.fullmatch(r"\s*<!-- not run: (.+) -->", lines[start - 2]) if start > 1 else None
            text = textwrap.dedent("\n".join(lines[start : number - 1])) + "\n"
            blocks.append(Block(page, start, language, text, before[1] if before else ""))
            fence = ""
    assert not fence, f"{page}:{start}: the block does not end"
    return blocks

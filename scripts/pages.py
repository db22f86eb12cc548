"""Writes the parts of docs/ that are made from the code: lists, and links from formulas to their code; run by `make pages`.

The site makes its own, fuller form of them at the build; these are for readers of the repository.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
from hooks import ROOT, repository_form

if __name__ == "__main__":
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(repository_form(page), encoding="utf-8")

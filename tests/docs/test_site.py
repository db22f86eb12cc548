"""The site builds without a warning, its links and pictures are there, its pages are short, and it needs no network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from alignment.pipeline.stages import STAGES
from tests.docs.pages import DOCS, ROOT, pages, read_blocks

sys.path.insert(0, str(DOCS))
from hooks import GENERATED, SOURCE, quote, repository_form

WORDS = re.compile(r"\S*\w\S*")  # of a table's row, its bars are none


def build(config: Path, site: Path) -> str:
    """Build a site with warnings as errors; returns the warnings, empty where it was built."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr) if done.returncode else ""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The site: every page is in the navigation, every link and anchor leads somewhere."""
    site = tmp_path_factory.mktemp("site")
    assert build(ROOT / "mkdocs.yml", site) == ""
    return site


def test_links_that_lead_nowhere_stop_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Title\n\n[a](missing.md)\n[b](#nothing)\n![c](missing.svg)\n")
    (tmp_path / "docs/more.md").write_text("# More\n")
    plain = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    plain |= {"theme": "mkdocs", "plugins": [], "hooks": [], "extra_css": [], "watch": [], "nav": ["index.md"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(plain))
    warnings = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    for problem in ("link 'missing.md'", "link '#nothing'", "link 'missing.svg'", "- more.md"):
        assert problem in warnings


class Loaded(HTMLParser):
    """What a page of the site loads by itself, its pictures, and its text outside code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.text, self.inside = "", list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("code", "pre", "script", "style"):
            self.inside.append(tag)
        if tag == "img":
            self.pictures.append(values)
        if tag in ("img", "script", "iframe", "source") or (tag == "link" and values.get("rel") != "canonical"):
            self.addresses.append(values.get("src") or values.get("href") or "")

    def handle_endtag(self, tag: str) -> None:
        if self.inside[-1:] == [tag]:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        self.text += "" if self.inside else data


def test_pages_load_nothing_from_the_network_and_pictures_are_there(built):
    for page in built.rglob("*.html"):
        loaded = Loaded(page)
        assert [each for each in loaded.addresses if re.match(r"(https?:)?//", each)] == [], page
        for picture in loaded.pictures:
            assert (picture.get("alt") or "").strip(), f"{page.name}: {picture}"
            assert (page.parent / (picture["src"] or "")).is_file(), f"{page.name}: {picture}"
    assert "url(http" not in "".join(path.read_text(encoding="utf-8") for path in built.rglob("*.css"))


def test_formulas_and_quoted_code_are_in_the_pages(built):
    pages = {path: path.read_text(encoding="utf-8") for path in built.rglob("*.html")}
    assert sum(text.count("<math ") for text in pages.values()) >= 10
    for path, text in pages.items():
        assert not re.search(r"arithmatex\">\\[(\[]|<!-- (generated|end|places)|language-source", text), path
        assert "$$" not in Loaded(path).text, path


def test_every_stage_has_its_page(built):
    assert {path.stem for path in (built / "reference/configs").glob("*.html")} == {*STAGES, "index"}
    page = (built / "reference/configs/ppo.html").read_text(encoding="utf-8")
    assert page.index("reward_model") < page.index("All keys") < page.index("gae_lambda")


def test_the_commands_and_the_papers_come_from_the_package(built):
    commands = Loaded(built / "reference/commands.html").text
    assert "evaluate winrate" in commands and "--dry-run" in (built / "reference/commands.html").read_text()
    papers = (built / "reference/paper_to_code.html").read_text(encoding="utf-8")
    entry = papers.partition(">2305.18290</a>")[2].partition("<dt>")[0]
    assert "Rafailov et al. 2023" in entry and "alignment/losses/preference.py" in entry and "dpo_loss" in entry


@pytest.mark.parametrize("page", pages())
def test_a_page_is_short(page):
    text = GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    words = len(text.split()) if page == "README.md" else len(WORDS.findall(text))
    assert words <= {"README.md": 1000, "AGENTS.md": 700}.get(page, 1500)


@pytest.mark.parametrize("page", pages())
def test_quoted_names_exist(page):
    for block in read_blocks(page):
        for name in block.text.split() if block.language == "source" else ():
            assert quote(name).code, f"{block.place}: {name}"


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_the_lists_and_places_in_the_repository_are_those_of_the_code(page):
    """`make pages` writes them."""
    assert (ROOT / page).read_text(encoding="utf-8") == repository_form(ROOT / page)


def test_a_page_in_the_repository_leads_from_a_formula_to_its_code(tmp_path):
    page = tmp_path / "docs/a/page.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "# A\n\n```source\nalignment.losses.kl_estimates\n```\n\ntext\n\n"
        "<!-- generated: names alignment.loading.load_model -->\n\n<!-- generated: papers -->\n"
    )
    found = quote("alignment.losses.kl_estimates")
    made = repository_form(page, top=tmp_path)
    assert f"```\n\n[{found.path}:{found.first}–{found.last}](../../{found.path}#L{found.first}-L{found.last})" in made
    assert "* [`load_model`](../../alignment/loading.py): Load a language model" in made
    assert "Rafailov et al. 2023: [alignment/" in made and ":::" not in made
    page.write_text(made)
    assert repository_form(page, top=tmp_path) == made
    assert SOURCE.sub("", made).count("places") == 0 and "load_model`]" not in GENERATED.sub("", made)


def test_a_quotation_is_the_code_without_docstring_with_its_place():
    found = quote("alignment.losses.kl_estimates")
    lines = (ROOT / found.path).read_text(encoding="utf-8").splitlines()
    assert found.path == "alignment/losses/policy.py" and '"""' not in found.code
    assert (
        lines[found.first - 1].startswith("def kl_estimates(")
        and lines[found.last - 1].strip() == found.code.splitlines()[-1].strip()
    )
    assert quote("alignment.pipeline.recipe.Recipe.names").code.startswith("@property\ndef names(")
    assert quote("alignment.config.load.NEEDLESS").code.startswith("NEEDLESS = {")
    for wrong in ("alignment.losses.dpo_los", "alignment.losses", "alignment.settings.Rule.nothing", "nothing.at.all"):
        with pytest.raises(LookupError, match=wrong):
            quote(wrong)


def test_the_site_has_its_pages():
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]  # type: ignore[attr-defined]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed)) >= 60
    written = [page.removeprefix("docs/") for page in pages() if page.startswith("docs/")]
    made = {f"reference/configs/{stage}.md" for stage in STAGES}
    assert sorted(written) == sorted(set(listed) - made)

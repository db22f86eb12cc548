"""Pages of one file that loads nothing else: parts of a page, its templates, table cells. Charts are in charts.py."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from alignment.errors import UserError
from alignment.files import PAGE, refuse_other_file, write_text

TEMPLATES = Path(__file__).parent / "templates"
MARKS = {  # of the words of another text, and of those in their place
    "equal": Markup("{1}"),
    "delete": Markup("<del>{0}</del>"),
    "insert": Markup("<ins>{1}</ins>"),
    "replace": Markup("<del>{0}</del><ins>{1}</ins>"),
}
Row = Mapping[str, object]  # of a table: column -> value, see `format_cell`


@dataclass(frozen=True)
class Chart:
    """A chart with its title and note."""

    title: str
    note: str
    svg: Markup


@dataclass(frozen=True)
class Section:
    """A section of a page; its parts are shown in this order."""

    name: str  # of its anchor
    title: str
    lead: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Sequence[Row]] | Mapping[str, Sequence[Row]] = ()  # with captions, or under the section's title
    notes: Sequence[str] = ()  # such as the reason why a figure is missing
    points: Sequence[str] = ()  # sentences, as a list
    folded: Sequence[Chart] = ()  # charts that open with a click
    # `{prompt, responses: {policy: {text, score, color}}}`; a prompt is text or chat messages
    samples: Sequence[Mapping[str, Any]] = ()
    # headline -> key -> value, that open with a click
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def render_page(path: Path, template: Path = TEMPLATES / "page.html.jinja", **content: object) -> Path:
    """Render a template to a file and return its path. All text is escaped; a name that the content lacks is an error.

    Args:
        content: of the usual template: `kind`, `title`, `summary`, and `sections`, each a `Section`.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": _breakable_cell, "against": mark_differences}
    refuse_other_file(path, PAGE)
    write_text(Path(path), environment.get_template(template.name).render(content))
    return Path(path)


def numbers_of(page: Path) -> Path:
    """The JSON file beside a page of `alignment inspect`; UserError where either name is that of another file."""
    numbers = page.with_suffix(".json")
    if numbers == page:
        raise UserError(f"{page}: the numbers of the page take that name; give the page the ending .html")
    refuse_other_file(page, PAGE)
    refuse_other_file(numbers, '"model":')
    return numbers


def mark_differences(text: str, other: str) -> Markup:
    """A text with the words that another one lacks as <ins>, and the words of the other one that it lacks as <del>.

    Texts that share less than half of their words are left as they are: next to everything would be marked.
    """
    theirs, ours = (re.findall(r"\s*\S+", version) for version in (other, text))
    matcher = SequenceMatcher(None, [word.strip() for word in theirs], [word.strip() for word in ours], autojunk=False)
    changes = matcher.get_opcodes() if matcher.ratio() >= 0.5 else [("equal", 0, 0, 0, len(ours))]
    return Markup("").join(MARKS[kind].format("".join(theirs[i:j]), "".join(ours[k:m])) for kind, i, j, k, m in changes)


def short_path(path: str) -> str:
    """The last two parts of a path, which tell runs and files of a recipe apart."""
    return "/".join(Path(path).parts[-2:])


def table_of(rows: Mapping[str, Mapping[str, object]], heading: str = "") -> list[Row]:
    """A table with a row for each name, which stands under `heading`."""
    return [{heading: name, **dict(cells(figures))} for name, figures in rows.items()]


def cells(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Numbers, rates and values of results by name, those of inner mappings too; texts and lists are left out."""
    for key, value in figures.items():
        if isinstance(value, Mapping) and not {"rate", "value"} & value.keys():
            yield from cells(value, f"{key} ")
        elif not isinstance(value, str | list):
            yield f"{prefix}{key}".replace("_", " "), value


def format_cell(value: object) -> str:
    """A table cell: numbers with three significant digits, rates (rate, low, high) and values (value, low, high)
    with their interval, a dash for nothing."""
    if value is None or value == "":
        return "–"
    if isinstance(value, Mapping) and "rate" in value:
        return format_share(value)
    if isinstance(value, Mapping):
        bounds = [value["low"], value["high"]]
        return format_cell(with_interval(value["value"], None if None in bounds else bounds))
    if isinstance(value, float):
        size = abs(value)
        form = ",.0f" if 1e3 <= size < 1e7 else "#.3g" if size == 0 or size >= 1e-3 else ".2e"
        return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")
    return str(value)


def format_share(rate: Mapping[str, float]) -> str:
    """A share and its interval in percent."""
    return f"{100 * rate['rate']:.1f} % [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"


def with_interval(value: float, interval: Sequence[float] | None) -> float | str:
    """A number and its interval as a cell; the number alone where it has none."""
    return value if interval is None else f"{format_cell(value)} [{', '.join(map(format_cell, interval))}]"


def _breakable_cell(value: object) -> str:
    """A cell; one that ends in an interval breaks only before that, so that a table takes the width of the window."""
    text = format_cell(value)
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}[", " [") if text.endswith("]") else text


def format_duration(seconds: float | None) -> str:
    """Seconds as `1.2 s`, `3 min 04 s` or `1 h 05 min`."""
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

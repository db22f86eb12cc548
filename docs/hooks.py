"""MkDocs hooks: formulas as MathML, functions quoted from the package, and pages made from it.

Everything is made at the build from the code as it is, so that no page of the reference can go stale. The pages in the
repository hold a plainer form of the same, for readers without the site: `repository_form`, written by `make pages`.
"""

import ast
import html
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import griffe
import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the package beside these pages, installed or not
    sys.path.insert(0, str(ROOT))

MATH = re.compile(
    r'<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>|<div class="arithmatex">\\\[(?P<block>.*?)\\\]</div>',
    re.DOTALL,
)
# A function before an argument without parentheses, which MathML sets without a space; not the base of an index.
FUNCTION = re.compile(
    r'(?<!<msub>)(?<!<msup>)(?<!<munder>)<mi>(?:log|exp|ln)</mi>(?!<mo stretchy="false">&#x00028;|</)'
)
# A block of names, and the line of links below it, which is for the repository alone.
SOURCE = re.compile(
    r"(?P<block>^(?P<indent> *)```source\n(?P<names>.*?)^ *```$)(?:\n\n[^\n]* <!-- places -->$)?",
    re.DOTALL | re.MULTILINE,
)
# The place of a list, with the names that it is of, and its plainer form up to the end.
GENERATED = re.compile(
    r"^(?P<head><!-- generated: (?P<list>\w+)(?P<names>(?: [\w.]+)*) -->)$(?:.*?^<!-- end -->$)?",
    re.DOTALL | re.MULTILINE,
)
DEFINITION = re.compile(r"^(`.+|\[.+)\n((?::   .+(?:\n|$))+)", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: ([\w.]+)(?:\n    options: .*)?$", re.MULTILINE)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
# "Rafailov et al. 2023, arXiv:", "Nguyen et al. 2024 (min-p), arXiv:", also over the end of a line
AUTHORS = re.compile(
    r"((?:[A-Z]\w*[.-])*[A-Z][\w’'-]+(?: et al\.| and [A-Z][\w’'-]+)?,? \d{4}(?:, [\w+-]+| \([^)]*\))?),? arXiv:$"
)

VALUES = {str: "TEXT", int: "N", float: "X"}  # of options without a word of their own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for the config of each stage."""
    from alignment.pipeline.stages import STAGES

    for stage in STAGES:
        files.append(File.generated(config, f"reference/configs/{stage}.md", content=config_page(stage)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace blocks of `source` and the places of generated lists."""
    markdown = GENERATED.sub(generated, markdown)
    return SOURCE.sub(lambda found: textwrap.indent(source_blocks(found["names"]), found["indent"]), markdown)


def generated(found: re.Match[str]) -> str:
    """The list that belongs at a place, as the site has it."""
    lists = {
        "commands": command_list, "configs": config_list, "evaluation": evaluation, "losses": losses, "names": directives,
        "papers": paper_list, "stages": stage_list,
    }  # fmt: skip
    return lists[found["list"]](*found["names"].split())


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML."""
    return MATH.sub(math, text)


def math(found: re.Match[str]) -> str:
    """A formula as MathML; one on lines of its own in a box that scrolls."""
    inline = found["inline"] is not None
    made = convert(html.unescape(found["inline"] or found["block"]).strip(), display="inline" if inline else "block")
    spaced = FUNCTION.sub(r'\g<0><mspace width="0.17em"/>', made)
    return spaced if inline else f'<div class="arithmatex">{spaced}</div>'


# Code of the package


class Quote(NamedTuple):
    """The code of a name, without docstrings, and its place in the checkout."""

    path: str
    first: int
    last: int
    code: str


def source_blocks(names: str) -> str:
    """A highlighted block for each dotted name, with its file and lines as the title."""
    quotes = [quote(name) for name in names.split()]
    return "\n\n".join(f'```python title="{q.path}:{q.first}–{q.last}"\n{q.code}\n```' for q in quotes)


# The pages in the repository


def repository_form(page: Path, top: Path = ROOT) -> str:
    """The text of a page with its lists in plain Markdown, and below each block of `source` links to files and lines."""
    root = "../" * len(page.relative_to(top).parent.parts)

    def with_list(found: re.Match[str]) -> str:
        return f"{found['head']}\n\n{plain_list(generated(found), root)}\n\n<!-- end -->"

    def with_places(found: re.Match[str]) -> str:
        quotes = [quote(name) for name in found["names"].split()]
        links = [f"[{q.path}:{q.first}–{q.last}]({root}{q.path}#L{q.first}-L{q.last})" for q in quotes]
        return f"{found['block']}\n\n{found['indent']}{' · '.join(links)} <!-- places -->"

    return SOURCE.sub(with_places, GENERATED.sub(with_list, page.read_text(encoding="utf-8")))


def plain_list(text: str, root: str) -> str:
    """A list of the site in plain Markdown: bullets for definitions and objects, links to files for those to made pages."""

    def described(found: re.Match[str]) -> str:
        return f"* [`{found[1].rpartition('.')[2]}`]({root}{quote(found[1]).path}): {description(found[1])}"

    def defined(found: re.Match[str]) -> str:
        return f"* {found[1]}: {'; '.join(re.findall(r'^:   (.+)$', found[2], re.MULTILINE))}\n"

    text = re.sub(
        r"`(alignment/[\w/]+\.py)`", rf"[\1]({root}\1)", DIRECTIVE.sub(described, DEFINITION.sub(defined, text))
    )
    text = re.sub(r"\((?:configs/)?(\w+)\.md\)", rf"({root}configs/schemas/\1.json)", text)
    return re.sub(r"^(\* .*)\n\n(?=\* )", r"\1\n", text, flags=re.MULTILINE).strip()


def description(name: str) -> str:
    """The first paragraph of the docstring of a dotted name, in one line."""
    module, _, inner = name.rpartition(".")
    return plain(
        " ".join((inspect.getdoc(getattr(importlib.import_module(module), inner)) or "").split("\n\n")[0].split())
    )


def directives(*names: str) -> str:
    """The places of the docstrings of some names."""
    return "\n\n".join(f"::: {name}" for name in names)


def quote(name: str) -> Quote:
    """The code of a function, class, method or constant by its dotted name, also one that a package exports.

    Raises:
        LookupError: nothing has this name.
    """
    parts = name.split(".")
    module, inner = next(
        (module for i in range(len(parts), 0, -1) if (module := _module(parts[:i], parts[i:]))), (None, [])
    )
    if module is None or not inner:
        raise LookupError(f"source block: there is no {name}")
    path = Path(inspect.getsourcefile(module) or "")
    text = path.read_text(encoding="utf-8")
    node = _find(ast.parse(text), inner)
    if node is None:
        raise LookupError(f"source block: there is no {name}; {module.__name__} has no {'.'.join(inner)}")
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    lines, last = text.splitlines(), node.end_lineno or node.lineno
    dropped = {line for each in ast.walk(node) for line in _docstring_lines(each, lines)}
    code = "\n".join(lines[number - 1] for number in range(first, last + 1) if number not in dropped)
    return Quote(path.relative_to(ROOT).as_posix(), first, last, textwrap.dedent(code))


def _module(names: list[str], inner: list[str]) -> tuple[Any, list[str]] | None:
    """The module of the names and what is looked for in it; the defining one where it is imported there."""
    try:
        module = importlib.import_module(".".join(names))
    except ModuleNotFoundError:
        return None
    value = getattr(module, inner[0], None) if inner else None
    home = getattr(value, "__module__", module.__name__) if callable(value) else module.__name__
    if home != module.__name__ and home.startswith("alignment."):
        return importlib.import_module(home), [getattr(value, "__name__", inner[0]), *inner[1:]]
    return module, inner


def _find(node: ast.AST, names: list[str]) -> Any:
    """The statement that defines a name, or a name inside it; None: there is none."""
    for each in ast.walk(node):
        targets = getattr(each, "targets", [getattr(each, "target", None)])
        assigned = (
            [getattr(target, "id", None) for target in targets] if isinstance(each, ast.Assign | ast.AnnAssign) else []
        )
        if names[0] in (getattr(each, "name", None), *assigned) and isinstance(each, ast.stmt):
            return _find(each, names[1:]) if names[1:] else each
    return None


def _docstring_lines(node: ast.AST, lines: list[str]) -> Iterator[int]:
    """Numbers of the lines of a definition's docstring, and of the empty line after it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
        start, end = node.body[0].lineno, node.body[0].end_lineno or 0
        yield from range(start, end + (2 if lines[end : end + 1] == [""] else 1))


class FormulasAsCode(griffe.Extension):
    """Shows the formulas of a docstring, paragraphs that begin with `name = `, as they stand."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence each formula, and put the source, whose lines would be taken for a section, on one line."""
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(self.shown, obj.docstring.value.split("\n\n")))

    @staticmethod
    def shown(paragraph: str) -> str:
        """A paragraph of a docstring as it goes into the page."""
        if paragraph.startswith("Source: "):
            return " ".join(paragraph.split())
        return f"```text\n{paragraph}\n```" if re.match(r"[\w\[\], ()'|]{1,50} = ", paragraph) else paragraph


# Configs


def config_list() -> str:
    """The stages, and what runs each."""
    from alignment.pipeline.stages import STAGES

    rows = [f"| [{stage}]({stage}.md) | {runner(stage)} | {summary(stage)} |" for stage in STAGES]
    return "\n".join(["| stage | run by | settings |", "|---|---|---|", *rows])


def config_page(stage: str) -> str:
    """The keys of a stage's config: the required ones, those that matter first, and all of them."""
    from alignment.config.load import packaged_names
    from alignment.config.schema import FIRST, config_keys, packaged_schema

    keys = config_keys(packaged_schema(stage))
    required = [key for key in keys if key.default is None and key.name.isidentifier()]
    first = [key for key in keys if key.name in {*FIRST[""], *FIRST.get(stage, ())} and key not in required]
    packaged = [f"`{name}`" for name in packaged_names("configs") if name.startswith(f"{stage}/")]
    parts = [f"# {stage}", summary(stage), f"Run by {runner(stage)}."]
    parts += [f"Packaged configs: {', '.join(packaged)}."] if packaged else []
    parts += ["## Required", *map(key_entry, required)] if required else []
    parts += ["## What matters first", *map(key_entry, first)] if first else []
    sections: dict[str, list[Any]] = {}
    for key in keys:
        sections.setdefault(re.split(r"\W", key.name)[0], []).append(key)
    parts += ["## All keys", *(key_entry(each[0]) for each in sections.values() if len(each) == 1)]
    for name, each in sections.items():
        parts += [f"### {name}", *map(key_entry, each)] if len(each) > 1 else []
    return "\n\n".join(parts) + "\n"


def summary(stage: str) -> str:
    """The first paragraph of the docstring of a stage's config, in one line."""
    from alignment.config.schema import packaged_schema

    return plain(" ".join(packaged_schema(stage)["description"].split()))


def runner(stage: str) -> str:
    """The command that runs a stage; `run:` in a recipe where it has none."""
    for words, command in leaf_commands():
        if command.context_settings.get("obj") == stage:
            return f"`alignment {' '.join(words)} CONFIG`"
    return f"`run: {stage}` in a recipe"


def key_entry(key: Any) -> str:
    """A key, its type and default, and below them what it means."""
    default = "required" if key.default is None else f"default `{key.default}`"
    return f"`{key.name}` · {plain(key.type)} · {default}\n:   {plain(key.text) or '–'}"


def plain(text: str) -> str:
    """Text of a docstring as Markdown: nothing but backticks has a meaning."""
    parts = text.split("`")
    return "`".join(part if i % 2 else re.sub(r"([\\*_<>\[\]$|])", r"\\\1", part) for i, part in enumerate(parts))


# Commands


def leaf_commands() -> Iterator[tuple[list[str], Any]]:
    """Each command of the command line: its words after `alignment`, and typer's object."""
    from alignment.cli import app

    def below(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        for name, each in getattr(command, "commands", {}).items():
            yield from below([*words, name], each) if hasattr(each, "commands") else [([*words, name], each)]

    yield from below([], typer.main.get_command(app))


def command_list() -> str:
    """Each command with its usage, its options, and the page of its config; those with the same options together."""
    groups: dict[tuple[object, ...], list[tuple[list[str], Any]]] = {}
    for words, command in leaf_commands():
        own = () if command.context_settings.get("obj") else tuple(words)  # commands of stages go together
        groups.setdefault((own, *filter(None, map(parameter_entry, command.params))), []).append((words, command))
    parts = []
    for (_, *entries), group in groups.items():
        parts += [f"### {', '.join(' '.join(words) for words, _ in group)}"]
        parts += ["\n".join(command_line(words, command) for words, command in group), *map(str, entries)]
    return "\n\n".join(parts)


def command_line(words: list[str], command: Any) -> str:
    """An item of a list: how a command is called, and what it does."""
    arguments = [value_name(each) for each in command.params if each.param_type_name == "argument"]
    stage, text = command.context_settings.get("obj"), plain((command.help or "").split("\n\n")[0])
    keys = f" Keys: [{stage}](configs/{stage}.md)." if stage else ""
    return f"- `{' '.join(['alignment', *words, *arguments])}`: {text}{keys}"


def parameter_entry(parameter: Any) -> str:
    """An option or argument and its help; empty for arguments that need none."""
    text = plain(" ".join((parameter.help or "").split()))
    if parameter.param_type_name == "argument":
        return f"`{value_name(parameter)}`\n:   {text}" if text else ""
    flag = parameter.opts[0] if parameter.is_flag else f"{parameter.opts[0]} {value_name(parameter)}"
    default = "" if parameter.default in (None, False, "") else f" Default `{parameter.default}`."
    return f"`{flag}`\n:   {text}{' Required.' if parameter.required else ''}{default}"


def value_name(parameter: Any) -> str:
    """What a parameter's value is called in the usage: its own word, its choices, or its type."""
    if parameter.metavar:
        return parameter.metavar
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return VALUES[(get_args(annotation) or (annotation,))[0]]


def stage_list() -> str:
    """The functions of `alignment` that run a stage on rows in memory."""
    from alignment import _STAGES
    from alignment.pipeline import in_memory

    rows = []
    for name in _STAGES:
        text = (inspect.getdoc(getattr(in_memory, name)) or "").partition("; the arguments are described")[0]
        stage = "winrate" if name == "evaluate" else name
        rows.append(f"| `alignment.{name}` | {plain(text)} | [{stage}](configs/{stage}.md) |")
    return "\n".join(["| function | gives | keys |", "|---|---|---|", *rows])


def losses() -> str:
    """What `alignment.losses` exports."""
    return exports("alignment.losses")


def evaluation() -> str:
    """What `alignment.evaluation` exports."""
    return exports("alignment.evaluation")


def exports(package: str) -> str:
    """The names that a package exports, by the module that defines each, with the module's own description."""
    modules: dict[str, list[str]] = {}
    for name in importlib.import_module(package).__all__:
        value = getattr(importlib.import_module(package), name)
        if inspect.getdoc(value) and hasattr(value, "__module__"):
            modules.setdefault(value.__module__, []).append(name)
    parts = []
    for module, names in modules.items():
        text = (inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")
        parts += [f"### {module.rpartition('.')[2].replace('_', ' ').capitalize()}", *map(plain, text)]
        parts += [f"::: {module}.{name}\n    options: {{heading_level: 4}}" for name in names]
    return "\n\n".join(parts)


# Papers


def paper_list() -> str:
    """Each arXiv number in a docstring of the package, oldest first, and the code that cites it."""
    cited: dict[str, dict[str, list[str]]] = {}
    named: dict[str, list[str]] = {}
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "alignment").rglob("*.py"))}
    for path, whole in texts.items():
        for name, text in docstrings(ast.parse(whole)) if "arXiv:" in whole else ():
            for found in ARXIV.finditer(text):
                places = cited.setdefault(found[1], {}).setdefault(path.relative_to(ROOT).as_posix(), [])
                places += [name] if name not in places else []
                authors = AUTHORS.search(text[: found.start() + len("arXiv:")])
                named.setdefault(found[1], []).extend([authors[1]] if authors else [])
    entries = []
    for number in sorted(cited):
        names = named[number]
        title = f" · {plain(max(names, key=names.count))}" if names else ""
        code = [f"`{path}`" + "".join(f", `{name}`" for name in inner if name) for path, inner in cited[number].items()]
        entries.append(
            f"[{number}](https://arxiv.org/abs/{number}){title}\n" + "\n".join(f":   {line}" for line in code)
        )
    return "\n\n".join([f"{len(entries)} papers.", *entries])


def docstrings(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of a module's definitions, empty for itself, and their docstrings in one line."""
    if text := ast.get_docstring(node):
        yield name, " ".join(text.split())
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield from docstrings(each, f"{name}.{each.name}".removeprefix("."))

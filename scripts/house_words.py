"""The words of the package: those retired in favor of the field's, and those that a reader of torch does not know.

A retired word is looked for in the names that the package defines (modules, classes, functions, parameters, fields,
variables), and retired parts and phrases in the first line of docstrings too.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from house_code import Module, Package

RETIRED_PARTS = (  # parts of a name, between underscores or capitals
    "sight look looks bearings viewing remembering outgrown packing places place readout filed today recomputed "
    "framed frame frames stretch stretches symbols marks disguise beside ordinary understand understanding "
    "assemble rivals trunks taught improve mine guarded gathered beginning seat showings meant respond bands band "
    "told affair initialise labelled modelling normalise normalised normaliser optimisation optimiser "
    "overoptimisation penalise colour colours judgement stabilised tokenise tokenised summarise centre"
)
RETIRED_NAMES = (  # whole names, underscores at their ends aside
    "Memory Places both_sides head_width spread distances RoundedAlibi WideRMSNorm readers TokenReader "
    "Seq2SeqReader PairCache PairMaps spec_pairs pair_model left_aside initial resize pack pack_together Parts "
    "Draw Draws draw_once cut_head even_parts find_shape OWN_CHANCE pipelines raw_tokenizers Pieces Counts "
    "room_for ViewsBatch ViewsExample LanguageBeside Reading fit_once hold off_is_start pair_loss text_loss "
    "fitting read_all bare Idle FREE_KEYS Replicated Sharded Sums World Zero in_step join_world keep_checkpoints "
    "min_learning_rate_share NOTHING Past any_rule begin follow_rules Document writer_of"
)
RETIRED_TEXT = (  # a word or phrase of a docstring's first line
    "sight", "look at", "looks", "bearings", "places", "readout", "filed", "framed", "stretches", "draws", "disguise",
    "rivals", "trunks", "told", "affair", "affairs", "'s matter", "the same of", "the same, if", "those of", "see there",
    "meant", "of today",
)  # fmt: skip
EXCEPTIONS = {  # a name in one file that may keep a retired part -> why
    "cli.py:frame": "the stack frame that a signal handler gets",
    "directory.py:frame": "the stack frame that a signal handler gets",
    "metrics.py:spread": "the spread of numbers around their mean",
    "ppo.py:spread": "the spread of numbers around their mean",
}

OUR_OWN = {"ragged", "term", "gold", "labelers", "lineage"}  # explained in the glossary
METHODS = (  # names of methods and of those who gave them
    "apo bco discopop exo gsm ipo kupper luce nca odpo plackett prm rao rdpo remax simpo sppo wilson"
)
FIELD = (  # words of papers and tools that the libraries' names lack
    "advantages alpaca bradley coef confusion corrupt corruption critic desirability dialogue distilbert distill "
    "doctor finetune gae hacking held hypotheses infill infilling judge loopback manifest matthews minibatch "
    "modernbert momentum neox overoptimization penalize png ppo prefill rectangle reliability robust sandbox "
    "sandwich smollm spike terry unpad varlen whiten winrate yaml"
)
PLAIN = (  # plain English in its plain meaning
    "agreement claim earlier endless examine explained gigabytes grammar hotel inspection lost megabytes opening "
    "own panel panic picture preferred relaunch rounded say seen sheet shown tally topic verb"
)
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors")
IN_TEXT = re.compile(rf"(?<![\w`])(?:{'|'.join(RETIRED_TEXT)})\b", re.IGNORECASE)
PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def parts_of(name: str) -> list[str]:
    """`RaggedBatch_of` -> ragged, batch, of."""
    return [part.lower() for part in PARTS.findall(name)]


def retired(package: Package) -> list[str]:
    """Names and first lines of docstrings with a retired word."""
    found = []
    for module in package.modules.values():
        where = module.path.relative_to(package.directory)
        for line, name in sorted({*defined_names(module)}):
            if is_retired(name) and f"{module.path.name}:{name}" not in EXCEPTIONS:
                found.append(f"{where}:{line}: {name}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if words := IN_TEXT.findall(first):
                    found.append(f"{where}:{getattr(node, 'lineno', 1)}: docstring ({', '.join(words)})")
    return found


def is_retired(name: str) -> bool:
    """True where a name is retired or has a retired part."""
    plain = name.strip("_")
    return plain in RETIRED_NAMES.split() or not set(RETIRED_PARTS.split()).isdisjoint(parts_of(plain))


def defined_names(module: Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module names: itself, classes, functions, parameters, variables, fields."""
    yield 1, module.name.split(".")[-1]
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.lineno, name


def unknown_words(package: Package) -> list[str]:
    """Parts of public names that are retired, or that no library and no list here has; with names."""
    known = library_words() | OUR_OWN | set(METHODS.split()) | set(FIELD.split()) | set(PLAIN.split())
    found: dict[str, set[str]] = {}
    for name in public_names(package):
        if is_retired(name):
            found[name] = {name}
        for part in parts_of(name):
            if len(part) > 2 and not known & set(stems(part)):
                found.setdefault(part, set()).add(name)
    return [f"{part}: {', '.join(sorted(names)[:4])}" for part, names in sorted(found.items())]


def public_names(package: Package) -> set[str]:
    """Names of modules, and of classes, functions and methods without an underscore at their start."""
    found = {module.split(".")[-1] for module in package.modules}
    for name, function in package.functions.items():
        if function.outer is None and not any(part.startswith("_") for part in name.split(":")[1].split(".")):
            found.add(function.node.name)
    return found | {known.node.name for known in package.classes.values() if not known.node.name.startswith("_")}


def stems(word: str) -> Iterator[str]:
    """The word and what it may be an inflection of: `padded` of `pad`, `queries` of `query`."""
    yield word
    for ending in ("s", "es", "d", "ed", "r", "er", "ers", "ing", "ings", "ly"):
        if word.endswith(ending) and len(word) - len(ending) > 2:
            base = word.removesuffix(ending)
            yield from (base, f"{base}e", f"{base}s")
            if base[-1] == base[-2]:
                yield base[:-1]
    if word.endswith(("ies", "ied")):
        yield word[:-3] + "y"
    yield from (word.removeprefix(start) for start in ("un", "re") if word.startswith(start) and len(word) > 5)


def library_words() -> set[str]:
    """Parts of the names of functions and classes that the installed libraries of the field define."""
    words: set[str] = set()
    named = re.compile(r"^\s*(?:async )?(?:def|class)\s+(\w+)", re.MULTILINE)
    for library in LIBRARIES:
        found = importlib.util.find_spec(library)
        for folder in (found.submodule_search_locations or []) if found else []:
            for path in Path(folder).rglob("*.py"):
                for name in set(named.findall(path.read_text(encoding="utf-8", errors="replace"))):
                    words.update(parts_of(name))
    return words

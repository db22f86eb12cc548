"""Words in the public names of the package that a reader of torch does not know."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from house_code import Package

OUR_OWN = {"ragged", "term", "gold", "labelers", "lineage"}  # explained in the glossary
METHODS = (  # names of methods and of those who gave them
    "apo bco cohen discopop elo exo fleiss gsm holm ipo krippendorff kupper luce nca odpo plackett prm rao rdpo remax "
    "simpo sppo wilson rouge bleu"
)
FIELD = (  # words of papers and tools that the libraries' names lack
    "advantages alpaca argilla attribution battle bradley coef collinear confusion corrupt corruption critic desirability "
    "dialogue distilbert distill doctor finetune gae hacking held hypotheses infill infilling judge judgment loglikelihood "
    "loopback manifest matthews minibatch modernbert momentum neox overoptimization penalize png ppo prefill rectangle "
    "refusal reliability robust rubric sandbox sandwich smollm spike studio terry tournament toxicity unpad varlen verdict "
    "whiten winrate yaml"
)
PLAIN = (  # plain English in its plain meaning
    "agreement alike alternatives claim contestant detectable earlier endless examine explained gigabytes grammar hotel "
    "inspection lost megabytes opening own panel panic people picture play preferred relaunch rounded say seen sheet "
    "shown tally topic torn verb"
)
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors")
PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def parts_of(name: str) -> list[str]:
    """`RaggedBatch_of` -> ragged, batch, of."""
    return [part.lower() for part in PARTS.findall(name)]


def unknown_words(package: Package) -> list[str]:
    """Parts of public names that no library and no list here has; with names."""
    known = library_words() | OUR_OWN | set(METHODS.split()) | set(FIELD.split()) | set(PLAIN.split())
    found: dict[str, set[str]] = {}
    for name in public_names(package):
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

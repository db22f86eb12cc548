"""A small tokenizer with the control tokens of every chat template that trl ships."""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from alignment.data.tokenizers.train import train_bpe

CONTROL = re.compile(
    r"<\|[^|<>{}\n]+\|>|<｜[^｜<>\n]+｜>|<(?:start|end)_of_turn>|<end_of_utterance>|\[gMASK\]|<sop>|\[/?INST\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>"
)
SUFFIX = "_training"
FOLDER = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith(SUFFIX))
SPECIAL = {"deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")}


def text_of(name):
    return (FOLDER / f"{name}.jinja").read_text()


def has_variant(name):
    return (FOLDER / f"{name}{SUFFIX}.jinja").is_file()


@lru_cache(maxsize=1)
def controls():
    return sorted({string for path in FOLDER.glob("*.jinja") for string in CONTROL.findall(path.read_text())})


def tokenizer_of(name):
    """A tokenizer with the published template `name`."""
    words = ["first second third question answer user assistant system think get_weather city Paris"] * 5
    bos, eos = next((ends for start, ends in SPECIAL.items() if name.startswith(start)), ("<s>", "</s>"))
    tokenizer = train_bpe(words, 420, tuple(dict.fromkeys(("<s>", "</s>", "<pad>", *controls()))))
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template, tokenizer.name_or_path = text_of(name), name
    return tokenizer


def spans(tokenizer, ids, mask):
    """Decoded texts of the unbroken runs that count."""
    runs, current = [], []
    for index, counts in zip([*ids, None], [*mask, False], strict=True):
        if counts:
            current.append(index)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs

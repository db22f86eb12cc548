"""Texts of the hotel data set with a label that is not in their words: rows for linear probes. A stage of recipes, `hotel_probe`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from alignment.files import write_text
from alignment.hotel_world.datasets import FOLDS, generate_rows
from alignment.hotel_world.grammar import CLAIM, find_claims, fold

FIT_FOLDS = range(60, 63)  # of the folds of held-out pretraining text; the others are of the rows that are judged


@dataclass(frozen=True)
class HotelProbeConfig:
    """Settings of the probe's rows.

    Attributes:
        output: directory of `train.jsonl` and `heldout.jsonl`.
        seed: of all random choices; the texts are those of held-out pretraining text with this seed.
        rows, heldout: rows of each file.
    """

    output: str
    seed: int = 0
    rows: int = 1500
    heldout: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("rows", 1), ("heldout", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def run(config: HotelProbeConfig) -> Path:
    """Write both files, which share no fact sheet with each other or with anything that is trained on; return the directory."""
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    sizes = {"train": config.rows, "heldout": config.heldout}
    for row in generate_rows("pretrain_heldout", seed=config.seed, count=sys.maxsize):
        if "\nGuest " in row["text"]:  # a dialogue, which SFT and PPO learn as well
            continue
        facts = tuple(dict(find_claims(row["text"])).items())
        part = "train" if fold(facts, FOLDS) in FIT_FOLDS else "heldout"
        if len(found[part]) < sizes[part]:
            found[part].append(json.dumps(unfinished_text(row["text"])))
        elif all(len(lines) == sizes[name] for name, lines in found.items()):
            break
    for part, lines in found.items():
        write_text(Path(config.output) / f"{part}.jsonl", "\n".join(lines) + "\n")
    return Path(config.output)


def unfinished_text(text: str) -> dict[str, str]:
    """A letter or a guide's entry up to its last sentence about a fact, and as the label the topic of that sentence.

    The facts stand there a second time (in an entry a third time), in another order; the last one is the one that has
    not come again yet, so that the label follows from all that was said, and from no single word.
    """
    last = list(CLAIM.finditer(text))[-1]
    topic, _ = find_claims(text[last.start() :])[0]
    return {"text": text[: last.start()].removesuffix("The ").rstrip(), "label": topic}

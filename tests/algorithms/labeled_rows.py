"""Labeled rows of each task that a very small model can learn; `python labeled_rows.py DIRECTORY` writes tiny_data's.

Held-out rows are drawn as training rows are, from other seeds; a few may be equal.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACES = ["spa", "pool", "bus", "garden", "bar", "kitchen", "lift", "lobby"]
GOOD, BAD = ["lovely", "quiet", "clean", "warm"], ["awful", "noisy", "dirty", "cold"]
TOWNS = ["Rome", "Oslo", "Bern", "Riga"]
PEOPLE = ["Hugo", "Karin", "Ines", "Olaf"]


def classification(rng: random.Random) -> dict[str, Any]:
    """What is thought of two places."""
    label, words = rng.choice([("good", GOOD), ("bad", BAD)])
    return {"text": " and ".join(f"the {rng.choice(PLACES)} is {rng.choice(words)}" for _ in range(2)), "label": label}


def pair_classification(rng: random.Random) -> dict[str, Any]:
    """Whether the second text says that the first is right to complain."""
    label, words = rng.choice([("agrees", BAD), ("objects", GOOD)])
    place, other = rng.sample(PLACES, 2)
    return {
        "text": f"Visitor: is the {place} bad, or the {other}?",
        "pair": f"The {place} is {rng.choice(words)}.",
        "label": label,
    }


def token_classification(rng: random.Random) -> dict[str, Any]:
    """Persons and towns in a sentence."""
    person, town = rng.choice(PEOPLE), rng.choice(TOWNS)
    words = ["the", "guest", person, "came", "from", "New", town, "by", rng.choice(["bus", "train"])]
    labels = ["O", "O", "B-person", "O", "O", "B-town", "I-town", "O", "O"]
    cut = rng.randrange(2)  # so that places alone say nothing
    return {"words": words[cut:], "labels": labels[cut:]}


def question_answering(rng: random.Random) -> dict[str, Any]:
    """Who came, in a sentence that begins in different ways."""
    person, start = rng.choice(PEOPLE), " ".join(rng.sample(PLACES, rng.randint(1, 3)))
    context = f"{start}: {person} came by {rng.choice(['bus', 'train'])}."
    answers = [{"text": person, "answer_start": context.index(person)}]
    return {"question": "Who came?", "context": context, "answers": answers}


def regression(rng: random.Random) -> dict[str, Any]:
    """How many of two guests liked it, 0 to 2."""
    first, second = rng.choice(("both", "one", "neither")), rng.choice(PLACES)
    label = {"both": 2.0, "one": 1.0, "neither": 0.0}[first]
    return {"text": f"Of the guests {first} liked it.", "pair": f"They spoke of the {second}.", "label": label}


def multiple_choice(rng: random.Random) -> dict[str, Any]:
    """The good one among three ways to go on."""
    label = rng.randrange(3)
    words = [rng.choice(GOOD if number == label else BAD) for number in range(3)]
    return {"context": f"What we liked about the {rng.choice(PLACES)}:", "choices": words, "label": label}


TASKS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "classification": classification,
    "pair_classification": pair_classification,
    "token_classification": token_classification,
    "question_answering": question_answering,
    "multiple_choice": multiple_choice,
    "regression": regression,
}


def write_rows(directory: Path, task: str, count: int, seed: int, name: str) -> str:
    """Write `count` rows of a task and return the file's name."""
    rng, path = random.Random(seed), Path(directory) / name
    path.write_text("".join(json.dumps(TASKS[task](rng)) + "\n" for _ in range(count)), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    for each in TASKS.keys() - {"regression"}:  # the tasks with a packaged config
        write_rows(Path(sys.argv[1]), each, 96, 0, f"finetune_{each}.jsonl")
        write_rows(Path(sys.argv[1]), each, 32, 1, f"finetune_{each}_heldout.jsonl")

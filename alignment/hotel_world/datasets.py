"""The hotel data set's files, one per stage, generated from a seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from alignment.files import atomic_directory, refuse_foreign
from alignment.hotel_world import grammar
from alignment.hotel_world.gold import prefers_first
from alignment.settings import NonNegativeInt, PositiveInt, Settings

FOLDS = 100  # of fact sheets, by their facts; each file has a range of its own
RANGES = {
    "pretrain": range(0, 60),
    "pretrain_heldout": range(60, 65),
    "demonstrations": range(65, 75),
    "comparisons": range(75, 85),
    "comparisons_heldout": range(85, 90),
    "prompts": range(90, 95),
    "prompts_eval": range(95, 100),
}


@dataclass(frozen=True)
class RowCounts(Settings):
    """Rows per file.

    Attributes:
        pretrain, pretrain_heldout: texts.
        demonstrations: prompts with a good response.
        comparisons, comparisons_heldout: pairs of responses, labeled by the true reward.
        prompts, prompts_eval: without a response, to sample from and to evaluate on.
    """

    pretrain: PositiveInt = 14_000
    pretrain_heldout: PositiveInt = 300
    demonstrations: PositiveInt = 2_500
    comparisons: PositiveInt = 8_000
    comparisons_heldout: PositiveInt = 500
    prompts: PositiveInt = 2_000
    prompts_eval: PositiveInt = 300


@dataclass(frozen=True)
class HotelWorldConfig(Settings):
    """Settings of the data set.

    Attributes:
        output: the stage's directory; the files go into its `data`.
        seed: of all random choices.
    """

    output: str
    seed: NonNegativeInt = 0
    rows: RowCounts = field(default_factory=RowCounts)


def run(config: HotelWorldConfig) -> Path:
    """Write the data set's files into `output/data` and return that directory."""
    directory = Path(config.output) / "data"
    write_world(directory, seed=config.seed, sizes=config.rows)
    return directory


def write_world(directory: Path | str, *, seed: int = 0, sizes: RowCounts | None = None) -> dict[str, Path]:
    """Write all files of the data set and return their paths by name; the same seed and sizes give the same bytes.

    The directory appears whole or not at all; one that holds other files is refused. The size of one file does not
    change another's rows.
    """
    directory = Path(directory)
    sizes = sizes or RowCounts()
    refuse_foreign(directory, [f"{name}.jsonl" for name in RANGES])
    with atomic_directory(directory) as temporary:
        for name in RANGES:
            rows = generate_rows(name, seed=seed, count=getattr(sizes, name))
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: directory / f"{name}.jsonl" for name in RANGES}


def generate_rows(name: str, *, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The rows of one file (a key of `RANGES`), one at a time."""
    rng = Random(f"{seed}/{name}")
    for _ in range(count):
        sheet = grammar.sample_sheet(rng)
        while grammar.fold(sheet.facts, FOLDS) not in RANGES[name]:
            sheet = grammar.sample_sheet(rng)
        if name.startswith("pretrain"):  # dialogues at a hotel's desk, a letter, or a guide's entry
            yield {"text": rng.choices((_dialogues, _letter, _guide), (0.5, 0.2, 0.3))[0](rng, sheet)}
            continue
        request = grammar.sample_request(rng, sheet)
        prompt = grammar.write_prompt(sheet, request)
        if name == "demonstrations":
            yield {"prompt": prompt, "completion": _reply(rng, prompt)}
        elif name.startswith("comparisons"):
            yield _comparison(rng, prompt)
        else:
            yield {"prompt": prompt, "facts": dict(sheet.facts), "asked": list(request.asked)}


def _reply(rng: Random, prompt: str) -> str:
    """A random writer's reply."""
    return grammar.write_reply(rng, grammar.parse_prompt(prompt), grammar.sample_writer(rng))


def _comparison(rng: Random, prompt: str) -> dict[str, Any]:
    """Two replies by random writers to one prompt, in the order one labeler prefers."""
    first = second = _reply(rng, prompt)
    while second == first:
        second = _reply(rng, prompt)
    if not prefers_first(rng, prompt, first, second):
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}


def _dialogues(rng: Random, sheet: grammar.Sheet) -> str:
    """One or two guests at the desk of one hotel, answered by concierges of mixed skill."""
    text = grammar.write_sheet(sheet)
    for _ in range(rng.choice((1, 2))):
        text += grammar.write_request(grammar.sample_request(rng, sheet))
        text += _reply(rng, text)
    return text


def _letter(rng: Random, sheet: grammar.Sheet) -> str:
    """A letter about a stay that repeats the facts."""
    writer, friend = rng.sample(grammar.GUESTS, 2)
    facts = " and ".join(grammar.claim(*fact) for fact in sheet.facts)
    again = " ".join(grammar.sentence(grammar.claim(*fact)) for fact in rng.sample(sheet.facts, len(sheet.facts)))
    mood = rng.choice(
        ("we loved our week by the sea.", "we had some rain but a good time.", "the children did not want to leave.")
    )
    return f"Dear {friend}, {mood} At the Hotel {sheet.hotel} {facts}. Do not forget. {again} Yours, {writer}"


def _guide(rng: Random, sheet: grammar.Sheet) -> str:
    """A guide's entry, confirmed by two visitors who each give the facts in another order."""
    facts = [grammar.sentence(grammar.claim(*fact)) for fact in sheet.facts]
    guests = rng.sample(grammar.GUESTS, 2)
    visits = [f"\nVisitor {guest}: {' '.join(rng.sample(facts, len(facts)))}" for guest in guests]
    verdict = rng.choice(
        ("It is good for families.", "It is quiet at night.", "The staff is friendly.", "It is near the station.")
    )
    return f"{grammar.write_sheet(sheet)} {verdict}{''.join(visits)}"

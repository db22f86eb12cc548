"""Sums worked out column by column by pupils, some of whom forget to carry: generated rows with answers that can be checked.

No judge is here: the column `answer` of the prompts holds the true sum, which a reward or an evaluation compares with.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

from annotated_types import Interval

from alignment.files import atomic_directory, refuse_foreign
from alignment.settings import NonNegativeInt, PositiveInt, Settings, Share

FOLDS = 100  # of pairs of numbers; each file has a range of its own
RANGES = {
    "pretrain": range(0, 50),
    "pretrain_heldout": range(50, 55),
    "demonstrations": range(55, 75),
    "prompts": range(75, 90),
    "prompts_eval": range(90, 100),
}
PAGE = 4  # sums of one pupil in a text


@dataclass(frozen=True)
class SumCounts(Settings):
    """Rows per file.

    Attributes:
        pretrain, pretrain_heldout: texts, a page of sums by one pupil each.
        demonstrations: prompts with a pupil's work.
        prompts, prompts_eval: prompts with the true `answer`, to sample from and to evaluate on.
    """

    pretrain: PositiveInt = 12_000
    pretrain_heldout: PositiveInt = 200
    demonstrations: PositiveInt = 3_000
    prompts: PositiveInt = 2_000
    prompts_eval: PositiveInt = 500


@dataclass(frozen=True)
class SumsConfig(Settings):
    """Settings of the sums.

    Attributes:
        output: the stage's directory; the files go into its `data`.
        seed: of all random choices.
        digits: of each of the two numbers, 2 to 6.
        careless: share of the pupils who forget every carry.
        slips: probability that any pupil is off by one in a column.
        rows: rows per file.
    """

    output: str
    seed: NonNegativeInt = 0  # Python's generator takes -3 for 3
    digits: Annotated[int, Interval(ge=2, le=6)] = 3
    careless: Share = 0.6
    slips: Share = 0.05
    rows: SumCounts = field(default_factory=SumCounts)


def run(config: SumsConfig) -> Path:
    """Write the files into `output/data` and return that directory; no pair of numbers is in two of them."""
    directory = Path(config.output) / "data"
    refuse_foreign(directory, [f"{name}.jsonl" for name in RANGES])
    with atomic_directory(directory) as temporary:
        for name in RANGES:
            lines = (json.dumps(row) + "\n" for row in sum_rows(name, config))
            (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return directory


def sum_rows(name: str, config: SumsConfig) -> Iterator[dict[str, str]]:
    """The rows of one file (a key of `RANGES`), one at a time; each file has a generator of its own."""
    rng = Random(f"{config.seed}/sums/{name}")
    for _ in range(getattr(config.rows, name)):
        if name.startswith("pretrain"):
            careless = rng.random() < config.careless
            pairs = (_numbers(rng, config, name) for _ in range(PAGE))
            yield {
                "text": "".join(f"{write_sum(*pair)}{work_out(rng, config.slips, careless, *pair)}\n" for pair in pairs)
            }
        elif name == "demonstrations":
            pair = _numbers(rng, config, name)
            yield {
                "prompt": write_sum(*pair),
                "completion": work_out(rng, config.slips, rng.random() < config.careless, *pair),
            }
        else:
            first, second = _numbers(rng, config, name)
            yield {"prompt": write_sum(first, second), "answer": str(first + second)}


def write_sum(first: int, second: int) -> str:
    """The prompt of a sum, such as "482+379:"."""
    return f"{first}+{second}:"


def work_out(rng: Random, slips: float, careless: bool, first: int, second: int) -> str:
    """A pupil's work from the last column to the first, and after #### the answer: " 2+9=11 8+7+1=16 4+3+1=8 #### 861"."""
    columns, digits, carry = [], "", 0
    for one, two in zip(reversed(str(first)), reversed(str(second)), strict=True):
        carried = 0 if careless else carry
        total = int(one) + int(two) + carried
        if rng.random() < slips:
            total += 1 if total == 0 or rng.random() < 0.5 else -1
        columns.append(f"{one}+{two}{'+1' if carried else ''}={total}")
        carry, digits = total // 10, f"{total % 10}{digits}"
    return f" {' '.join(columns)} #### {carry or ''}{digits}"


def fold_of(first: int, second: int) -> int:
    """Number in [0, FOLDS) that depends on the two numbers alone, in either order."""
    return zlib.crc32(repr(sorted((first, second))).encode()) % FOLDS


def _numbers(rng: Random, config: SumsConfig, name: str) -> tuple[int, int]:
    """Two numbers that belong to a file."""
    low, high = 10 ** (config.digits - 1), 10**config.digits
    pair = rng.randrange(low, high), rng.randrange(low, high)
    while fold_of(*pair) not in RANGES[name]:
        pair = rng.randrange(low, high), rng.randrange(low, high)
    return pair

"""Simulated labelers, each with a taste, and comparisons that they label: a stage of this recipe.

Source: Ouyang et al. 2022, arXiv:2203.02155, sections 3.4 and 4.1: labelers who passed a screening compare responses for
the reward model and judge the policies; held-out labelers, who passed none and labeled nothing, judge them too.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple, cast

from alignment.data.rows.files import read_raw
from alignment.errors import UserError
from alignment.files import write_json, write_text
from alignment.hotel_world import grammar
from alignment.hotel_world.gold import LENGTH_TASTE, TEMPERATURE, score
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Settings


@dataclass(frozen=True)
class PanelConfig(Settings):
    """Labelers drawn at random around the hotel world's one labeler.

    Attributes:
        count: of labelers.
        spread: deviation of the logarithm of what each part of the gold score weighs to a labeler, and of their
            temperature; 0: all like what the gold score says.
        length_spread: deviation of their taste for length, nats per word.
        seed: of the draw; another one gives other labelers.
    """

    count: PositiveInt
    spread: NonNegativeFloat
    length_spread: NonNegativeFloat
    seed: NonNegativeInt


class Labeler(NamedTuple):
    """One person's taste."""

    weights: Sequence[float]  # of helpful, honest, harmless and brief
    temperature: float  # weighted gold points per nat
    length: float  # nats per word by which a longer reply is liked better

    def preference(self, first: "Reply", second: "Reply") -> float:
        """Probability that this labeler prefers `first`; sigmoid(sum of weight * part / temperature + length * words)."""
        lead = sum(w * (a - b) for w, a, b in zip(self.weights, first.parts, second.parts, strict=True))
        return 1 / (1 + math.exp(-lead / self.temperature - self.length * (first.words - second.words)))


class Reply(NamedTuple):
    """All that labelers look at in a response."""

    parts: Sequence[float]  # helpful, honest, harmless, brief
    words: int


def read_reply(prompt: str, response: str) -> Reply:
    """The gold score's parts and the words of a response."""
    gold = score(prompt, response)
    return Reply((gold.helpful, gold.honest, gold.harmless, gold.brief), len(response.split()))


def draw_labelers(panel: PanelConfig) -> list[Labeler]:
    """The labelers of a panel."""
    rng = Random(f"{panel.seed}/labelers")

    def around(center: float) -> float:
        return center * math.exp(rng.gauss(0, panel.spread))

    return [
        Labeler([around(1.0) for _ in range(4)], around(TEMPERATURE), rng.gauss(LENGTH_TASTE, panel.length_spread))
        for _ in range(panel.count)
    ]


@dataclass(frozen=True)
class LabelConfig(Settings):
    """Settings of the comparisons.

    Attributes:
        sources: name -> comparisons of the hotel world, whose labels are replaced: `output/NAME.jsonl`.
        panels: name -> labelers. Of the first panel one labeler, at random, labels each pair; the others label nothing.
        output: directory of the comparisons, of `panels.json`, the taste of every labeler, and of `results.json`: how often two
            labelers of a panel agree on those pairs.
        seed: of the choices.
    """

    sources: dict[str, str]
    panels: dict[str, PanelConfig]
    output: str
    seed: NonNegativeInt = 0

    RULES = (Rule("panels", lambda c: not c.panels, "must hold one panel at least, which labels"),)


def label(config: LabelConfig) -> Path:
    """Write the comparisons, each labeled anew, and return the directory."""
    output, results = Path(config.output), {}
    panels = {name: draw_labelers(panel) for name, panel in config.panels.items()}
    labelers = next(iter(panels.values()))
    for name, source in config.sources.items():
        rng, rows, pairs = Random(f"{config.seed}/{name}"), [], []
        for prompt, *texts in read_pairs(source):
            texts.sort()  # the order of the file says who was preferred before
            first, second = (read_reply(prompt, text) for text in texts)
            number = rng.randrange(len(labelers))
            chosen, rejected = texts if rng.random() < labelers[number].preference(first, second) else texts[::-1]
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "labeler": number})
            pairs.append((first, second))
        write_text(output / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        results[name] = {"comparisons": len(rows)} | {
            panel: fmean(agreement([each.preference(*pair) for each in people]) for pair in pairs)
            for panel, people in panels.items()
        }
    write_json(output / "panels.json", {panel: [each._asdict() for each in people] for panel, people in panels.items()})
    write_json(output / "results.json", results)
    return output


def read_pairs(source: str) -> Iterator[tuple[str, str, str]]:
    """Prompt and both responses of each comparison in a file; a row that is no comparison of the hotel world is refused."""
    for row in read_raw(source):
        values = row.values or {}
        found = tuple(values.get(key) for key in ("prompt", "chosen", "rejected"))
        if not grammar.is_prompt(found[0]) or not all(isinstance(text, str) for text in found):
            raise UserError(f"{row.location}: is no comparison of the generated hotel world")
        yield cast("tuple[str, str, str]", found)


def agreement(preferences: Sequence[float]) -> float:
    """Expected share of pairs of labelers who choose alike, of their probabilities for the first response."""
    pairs = list(combinations(preferences, 2))
    return fmean(p * q + (1 - p) * (1 - q) for p, q in pairs) if pairs else 1.0

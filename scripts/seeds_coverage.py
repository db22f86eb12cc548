"""How often the interval over prompts and seeds holds the true win rate, by simulation.

    python scripts/seeds_coverage.py [--draws 2000] [--seeds 3 5 10] [--least-width 0.6] [--satterthwaite]

Seed s wins prompt p where mu + a_s + b_p + noise > 0, all three normal, the noise of variance 1. mu and the variance of a are
those that give the win rate and the standard deviation of the seeds' rates. The strength of prompts is the standard deviation
of b: at 0 prompts are alike, at 1 they are half and at 2 four fifths of the variance within a seed.

Prints Markdown: the smallest and the largest coverage over the numbers of prompts and their strengths, in percent, for each
number of seeds, rate and deviation; then every cell outside 93.5 to 96.5 %. `--least-width` and `--satterthwaite` are for
the rules that were not taken.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit, ndtr, ndtri, stdtrit

from alignment.statistics import seeds

SEEDS = (3, 5, 10)
PROMPTS = (100, 300, 1000)
RATES = (0.5, 0.7, 0.9)
DEVIATIONS = (0.0, 0.02, 0.05, 0.1)
STRENGTHS = (0.0, 1.0, 2.0)
BAND = (0.935, 0.965)
VALUES_AT_ONCE = 200_000  # fits the cache
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)


class Cell(NamedTuple):
    """What is true in a simulation."""

    seeds: int
    prompts: int
    rate: float
    deviation: float  # of the seeds' rates
    strength: float  # of prompts


def main() -> None:
    """Simulate every cell and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="of each cell")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="numbers of seeds")
    parser.add_argument("--least-width", type=float, default=seeds.LEAST_WIDTH, help="of that over prompts alone")
    parser.add_argument("--satterthwaite", action="store_true", help="his degrees of freedom")
    arguments = parser.parse_args()
    seeds.LEAST_WIDTH = arguments.least_width
    interval = satterthwaite_interval if arguments.satterthwaite else seeds.crossed_interval
    random = np.random.default_rng(0)
    cells = [Cell(*values) for values in product(arguments.seeds, PROMPTS, RATES, DEVIATIONS, STRENGTHS)]
    for line in table({cell: coverage(cell, arguments.draws, random, interval) for cell in cells}):
        print(line)


def latent_effect(cell: Cell) -> tuple[float, float]:
    """mu and the standard deviation of a that give a cell's rate and the deviation of its seeds' rates."""

    def mean_of(spread: float) -> float:
        return float(ndtri(cell.rate) * np.sqrt(1 + cell.strength**2 + spread**2))

    def deviation_of(spread: float) -> float:
        rates = ndtr((mean_of(spread) + spread * NODES) / np.sqrt(1 + cell.strength**2))
        mean = np.average(rates, weights=WEIGHTS)
        return float(np.sqrt(np.average((rates - mean) ** 2, weights=WEIGHTS)))

    spread = 0.0
    if cell.deviation:
        spread = float(brentq(lambda value: deviation_of(value) - cell.deviation, 0, 30))
    return mean_of(spread), spread


def coverage(
    cell: Cell, draws: int, random: np.random.Generator, interval: Callable[..., np.ndarray] = seeds.crossed_interval
) -> float:
    """Share of the draws whose interval holds the true rate; a draw whose outcomes are all alike counts as a miss."""
    mean, spread = latent_effect(cell)
    held = 0
    at_once = max(1, VALUES_AT_ONCE // (cell.seeds * cell.prompts))
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        seed_effect = spread * random.standard_normal((count, cell.seeds, 1), dtype=np.float32)
        prompt_effect = cell.strength * random.standard_normal((count, 1, cell.prompts), dtype=np.float32)
        noise = random.standard_normal((count, cell.seeds, cell.prompts), dtype=np.float32)
        wins = (mean + seed_effect + prompt_effect + noise > 0).astype(float)
        parts = mean_squares(wins) / (cell.seeds * cell.prompts)
        low, high, *_ = interval(wins.mean((1, 2)), parts, (cell.seeds, cell.prompts))
        held += int(((low <= cell.rate) & (cell.rate <= high)).sum())
    return held / draws


def satterthwaite_interval(rate: np.ndarray, parts: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """`crossed_interval` with Satterthwaite's degrees of freedom, without a least width: low and high, [2, ...]."""
    of_seeds, of_prompts, of_rest = parts
    variance = np.maximum(of_seeds + of_prompts - of_rest, 1e-90)
    freedom = (shape[0] - 1, shape[1] - 1, (shape[0] - 1) * (shape[1] - 1))
    squared = sum(part**2 / own for part, own in zip(parts, freedom, strict=True))
    degrees = variance**2 / np.maximum(squared, 1e-190)
    side = stdtrit(np.maximum(degrees, 1), 0.975) * np.sqrt(variance) / np.maximum(rate * (1 - rate), 1e-99)
    return np.stack([expit(logit(rate) - side), expit(logit(rate) + side)])


def mean_squares(cells: np.ndarray) -> np.ndarray:
    """Mean squares of seeds, of prompts and of the residual, [3, ...], of each table [S, P] in `cells`, [..., S, P]."""
    rows, columns = cells.shape[-2:]
    centered = cells - cells.mean((-2, -1), keepdims=True)
    by_seed = centered.mean(-1, keepdims=True)
    by_prompt = centered.mean(-2, keepdims=True)
    residual = ((centered - by_seed - by_prompt) ** 2).sum((-2, -1))
    return np.stack([
        columns * (by_seed**2).sum((-2, -1)) / (rows - 1),
        rows * (by_prompt**2).sum((-2, -1)) / (columns - 1),
        residual / ((rows - 1) * (columns - 1)),
    ])  # fmt: skip


def table(found: dict[Cell, float]) -> Iterator[str]:
    """Markdown: coverage by seeds, rate and deviation, and the cells outside the band."""
    yield f"| seeds | rate | {' | '.join(f'deviation {deviation:g}' for deviation in DEVIATIONS)} |"
    yield f"|{'---|' * (2 + len(DEVIATIONS))}"
    for number, rate in product(sorted({cell.seeds for cell in found}), RATES):
        cells = []
        for deviation in DEVIATIONS:
            shares = [value for cell, value in found.items() if (cell.seeds, *cell[2:4]) == (number, rate, deviation)]
            cells.append(f"{100 * min(shares):.1f} to {100 * max(shares):.1f}")
        yield f"| {number} | {rate:g} | {' | '.join(cells)} |"
    outside = {cell: share for cell, share in found.items() if not BAND[0] <= share <= BAND[1]}
    yield f"\n{len(outside)} of {len(found)} cells are outside {100 * BAND[0]:g} to {100 * BAND[1]:g} %:\n"
    for cell, share in outside.items():
        yield f"- {100 * share:.1f} %: {', '.join(f'{name} {value:g}' for name, value in cell._asdict().items())}"


if __name__ == "__main__":
    main()

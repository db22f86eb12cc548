"""The score of a response from several rewards: each normalized, clipped and weighed, and their sum.

Penalties of responses that did not end are taken off later, by the algorithm.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from alignment.data.batches import Example
from alignment.errors import UserError
from alignment.ragged import on_float64_device

if TYPE_CHECKING:
    from alignment.data.rows.records import Messages

MOST_UNSCORED = 0.5  # share of responses without a score, above which a reward does not fit its prompts
SHOWN = 3  # reasons of failures in a message

Reduce = Callable[[Tensor], Tensor]  # adds a tensor over all ranks; every rank has to call


@dataclass(frozen=True)
class SampledTexts:
    """N responses and what belongs to each."""

    prompts: "Sequence[str | Messages]"  # text or messages, as they were read
    responses: Sequence[str]  # texts without their end token
    columns: Sequence[Mapping[str, object]] = ()  # the further columns of each prompt's row
    lengths: Sequence[int] = ()  # tokens of each response, its end token included
    # why responses got no number, with counts; a reward that fails to give one adds its reason
    failures: Counter[str] = field(default_factory=Counter)

    def column(self, name: str) -> list[object]:
        """A column of all rows; None where a row lacks it."""
        return [row.get(name) for row in self.columns]


# Sampled texts -> one number for each; None: the reward does not apply to this response, or could not be given.
TextReward = Callable[[SampledTexts], Sequence[float | None]]
# Prompts, token ids of the responses, True where a response ended by itself -> scores [B]; not a number: no score.
Scorer = Callable[[Sequence[Example], Sequence[Sequence[int]], Sequence[bool]], Tensor]


@dataclass(frozen=True)
class Scores:
    """Scores of B responses."""

    # the score that is logged, before normalization, clipping and penalties, [B]: the sum of weight * part. Not a
    # number: there is no score, and nothing is learned from the response; see `Rewards.without_score`.
    total: Tensor
    # the number of each reward by its name, as it was given, [B]; not a number where a reward does not apply
    parts: dict[str, Tensor] = field(default_factory=dict)
    # the score to learn from: the sum of weight * clip(normalize(part)), [B], not a number as `total`; None: `total`,
    # under the algorithm's own normalization of scores
    shaped: Tensor | None = None
    fixed_deviation: float | None = None  # of the score to learn from, where normalization fixes it; None: nothing does

    def std(self, reduce: Reduce) -> float:
        """`fixed_deviation`, or the deviation of all ranks' scores that are learned from; 0 where they are equal."""
        learned = self.total if self.shaped is None else self.shaped
        return mean_and_std(learned, reduce)[2] if self.fixed_deviation is None else self.fixed_deviation


# As `Scorer`, with the parts of the score; a tensor [B] alone is a total without parts.
ScoreFunction = Callable[[Sequence[Example], Sequence[Sequence[int]], Sequence[bool]], Tensor | Scores]


def as_scores(given: Tensor | Scores) -> Scores:
    """A score function's result as `Scores`."""
    return given if isinstance(given, Scores) else Scores(given)


# Normalization


def _moments(values: Tensor, reduce: Reduce) -> tuple[float, float, float]:
    """Number, mean and sum of squared distances from it of the values of all ranks that are numbers, in float64."""
    values = values[~values.isnan()].double()
    count, total = reduce(torch.stack([torch.ones_like(values).sum(), values.sum()])).tolist()
    mean = total / max(1.0, count)
    return count, mean, reduce(((values - mean) ** 2).sum()).item()


def mean_and_std(values: Tensor, reduce: Reduce) -> tuple[float, float, float]:
    """Number, mean and deviation (divided by n) of the values of all ranks that are numbers; 0 without any."""
    count, mean, squares = _moments(values, reduce)
    return count, mean, (squares / max(1.0, count)) ** 0.5


@dataclass
class PartNormalizer:
    """Shifts and scales the numbers of one reward to mean 0 and deviation 1.

    `first`: mean and deviation of the first samples count for the whole run; `running`: those of all samples so far,
    the newest included.

    Source: first: Ziegler et al. 2019, arXiv:1909.08593, section 2.2; means and squares of parts are joined as in Chan,
        Golub and LeVeque 1983, eq. 2.1.
    """

    mode: Literal["first", "running"]
    name: str = "reward"  # for messages
    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean

    def take_in(self, values: Tensor, reduce: Reduce) -> None:
        """Let the statistics take in samples of all ranks, [B], not a number where the reward does not apply."""
        count, mean, squares = _moments(values, reduce)
        if not count or (self.mode == "first" and self.squares):
            return
        before = self.count
        distance = mean - self.mean
        self.count += count
        self.squares += squares + (distance**2 * before * count / self.count if before else 0.0)
        self.mean += distance * (count / self.count)  # exactly the mean of the first samples
        if self.mode == "first" and not self.squares:
            raise UserError(
                f"rewards: {self.name} cannot be normalized by {no_std_reason(self.count)}, or set normalize: none for "
                "it"
            )

    def __call__(self, values: Tensor) -> Tensor:
        """The values [B] normalized by the statistics so far; 0 where all samples are equal so far."""
        deviation = (self.squares / max(1.0, self.count)) ** 0.5
        scale = 1 / deviation if deviation else 1.0
        return scale * values - self.mean * scale


def no_std_reason(count: float) -> str:
    """The reason why `count` numbers have no deviation to divide by, and the way out, for messages."""
    if count == 1:
        return "a single number, that of one response; raise training.batch_size or responses_per_prompt"
    return f"the same number for all of {count:.0f} responses; check what gives it"


# The sum


@dataclass(frozen=True)
class RewardPart:
    """One reward and how it is shaped."""

    name: str  # in metrics
    score: Scorer
    weight: float = 1.0  # factor in the sum
    clip: tuple[float, float] | None = None  # bounds after normalization; None: none
    normalizer: PartNormalizer | None = None  # None: numbers stay as they are
    # of responses without a number in one iteration; None: a reward that need not apply, any share
    max_failed_share: float | None = None
    scaled: bool = False  # the numbers have a deviation of 1 by the files of their reward model
    # reasons of the last call's missing numbers on this rank, with counts; for messages
    failures: Counter[str] = field(default_factory=Counter)

    def shaped(self, values: Tensor) -> Tensor:
        """clip(normalize(values)), [B]."""
        values = values if self.normalizer is None else self.normalizer(values)
        return values if self.clip is None else values.clamp(*self.clip)


class Rewards:
    """A score function of several rewards, with the statistics of those that are normalized.

    Calling it takes the responses into the statistics: it is called once for each rollout that is learned from, by
    every rank. `judge` scores other responses to the same prompts by the statistics so far and changes nothing.
    """

    def __init__(self, parts: Sequence[RewardPart], reduce: Reduce):
        self.parts = tuple(parts)
        self.reduce = reduce
        self._normalizers = {part.name: part.normalizer for part in parts if part.normalizer is not None}

    def __call__(self, prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Scores:
        """Total, parts and shaped scores of this rank's responses."""
        return self._bounded(self.shape(self.part_scores(prompts, responses, ended), prompts))

    def judge(self, prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Scores:
        """As a call, with statistics that do not take these responses in."""
        return self._bounded(self._sum(self.part_scores(prompts, responses, ended), prompts))

    def part_scores(
        self, prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]
    ) -> dict[str, Tensor]:
        """The numbers of each reward, not shaped, [B] float32 on the CPU; not a number where it does not apply."""
        given = {part.name: part.score(prompts, responses, ended).float().cpu() for part in self.parts}
        for part in self.parts:
            if part.max_failed_share is None:
                continue
            missing, count = self._missing(given[part.name])
            if missing > part.max_failed_share * count:
                raise UserError(
                    f"rewards: {part.name} gave no score for {missing:.0f} of {count:.0f} responses; at most "
                    f"{part.max_failed_share:.0%} may fail, since failures are seldom a fair sample"
                    + "".join(f"; {times} x {why}" for why, times in part.failures.most_common(SHOWN))
                )
        return given

    def shape(self, given: dict[str, Tensor], prompts: Sequence[Example]) -> Scores:
        """Scores of the numbers that `part_scores` gave, which the statistics take in first."""
        for name, normalizer in self._normalizers.items():
            normalizer.take_in(given[name], self.reduce)
        return self._sum(given, prompts)

    def _sum(self, given: dict[str, Tensor], prompts: Sequence[Example]) -> Scores:
        total = torch.zeros(len(prompts))
        shaped = torch.zeros(len(prompts))
        for part in self.parts:
            total = total + part.weight * given[part.name].nan_to_num()
            shaped = shaped + part.weight * part.shaped(given[part.name]).nan_to_num()
        unscored = self.without_score(given, prompts)
        fixed = len(self.parts) == 1 and (self.parts[0].scaled or bool(self._normalizers))
        return Scores(
            total.masked_fill(unscored, math.nan),
            given,
            shaped.masked_fill(unscored, math.nan),
            fixed_deviation=abs(self.parts[0].weight) if fixed else None,
        )

    def without_score(self, given: dict[str, Tensor], prompts: Sequence[Example]) -> Tensor:
        """True where no score follows from the numbers that were given, bool, [B].

        That is where no reward gave a number, where a judge failed, and where a reward whose numbers are not normalized
        gave none although it gave one for another response to the prompt: it does apply, and 0 may be better or worse
        than all that it gives. A reward that applies to no response to a prompt, or is normalized, adds 0 to the
        others. Responses to one prompt stand side by side.
        """
        missing = torch.stack([given[part.name].isnan() for part in self.parts])  # [parts, B]
        changes = (one.row_id != other.row_id for one, other in pairwise(prompts))
        groups = torch.tensor([False, *changes]).cumsum(0)
        applies = torch.zeros(missing.shape).index_add_(1, groups, (~missing).float())[:, groups] > 0
        judges = torch.tensor([[part.max_failed_share is not None] for part in self.parts])
        raw = torch.tensor([[part.normalizer is None] for part in self.parts])
        return missing.all(0) | (missing & (judges | (raw & applies))).any(0)

    def _bounded(self, scores: Scores) -> Scores:
        """The scores, of which `MOST_UNSCORED` may be missing, or the share that a judge allows."""
        most = max([MOST_UNSCORED, *(part.max_failed_share or 0.0 for part in self.parts)])
        missing, count = self._missing(scores.total)
        if missing > most * count:
            failed = {name: self._missing(values)[0] for name, values in scores.parts.items()}
            named = ", ".join(f"{name} {unscored:.0f} times" for name, unscored in failed.items() if unscored)
            raise UserError(
                f"rewards: {missing:.0f} of {count:.0f} responses have no score (None: {named}), and at most "
                f"{most:.0%} may; leave out the prompts that no reward applies to, or give a number for every response"
            )
        return scores

    def _missing(self, values: Tensor) -> list[float]:
        """The number of values of all ranks that are not a number, and of all values."""
        return self.reduce(torch.stack([values.isnan().sum(), torch.tensor(len(values))]).double()).tolist()

    def state(self) -> dict[str, list[float]]:
        """Statistics of the normalized parts by name, to be saved."""
        return {
            name: [normalizer.count, normalizer.mean, normalizer.squares]
            for name, normalizer in self._normalizers.items()
        }

    def load(self, state: dict[str, list[float]]) -> None:
        """Take the statistics of a checkpoint; a UserError where they are of other rewards."""
        if set(state) != set(self._normalizers):
            raise UserError(
                f"rewards: the checkpoint holds statistics of {', '.join(state) or 'none'}, and the config normalizes "
                f"{', '.join(self._normalizers) or 'none'}; keep the rewards of the run, or start a new one"
            )
        for name, normalizer in self._normalizers.items():
            normalizer.count, normalizer.mean, normalizer.squares = state[name]


def part_metrics(parts: dict[str, Tensor], reduce: Reduce) -> dict[str, float]:
    """Mean of each reward, and the share of responses without it, from the numbers of each reward on this rank, [B].

    `score/NAME` is the mean over all ranks' responses to which the reward applies, 0 where it applies to none;
    `unscored_share/NAME` is the share of the others.
    """
    if not parts:
        return {}
    values = torch.stack([on_float64_device(part).double() for part in parts.values()])  # [parts, B]
    given = ~values.isnan()
    sums = reduce(torch.stack([values.nan_to_num().sum(1), given.double().sum(1), (~given).double().sum(1)]))
    metrics: dict[str, float] = {}
    for name, total, count, missing in zip(parts, *sums.tolist(), strict=True):
        metrics[f"score/{name}"] = total / max(1.0, count)
        metrics[f"unscored_share/{name}"] = missing / (count + missing)
    return metrics

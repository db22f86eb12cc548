"""Normalization of one part of the score: mean 0 and deviation 1, on the first samples or on all so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from alignment.errors import UserError


def mean_and_deviation(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
    """Number, mean and deviation (divided by n) of the values of all ranks that are numbers, in float64; 0 without any.

    Args:
        values: of this rank, [B].
        reduce: adds a tensor over all ranks.
    """
    values = values[~values.isnan()].double()
    count, total = reduce(torch.stack([torch.ones_like(values).sum(), values.sum()])).tolist()
    mean = total / max(1.0, count)
    return count, mean, (reduce(((values - mean) ** 2).sum()).item() / max(1.0, count)) ** 0.5


@dataclass
class PartNormalizer:
    """Shifts and scales the numbers of one reward, for each data source by itself or for all together.

    Attributes:
        mode: first: mean and deviation of the first samples count for the whole run. running: those of all samples so far,
            the newest included.
        sources: number of data sources told apart; 1: none.
        name: of the reward, for messages.
        counts, means, squares: of the samples of each source: number, mean, and sum of the squared distances from the
            mean. With `counts`, the whole state.

    Source: first: Ziegler et al. 2019, arXiv:1909.08593, section 2.2; means and squares of parts are joined as in Chan,
        Golub and LeVeque 1983, eq. 2.1.
    """

    mode: Literal["first", "running"]
    sources: int = 1
    name: str = "reward"
    counts: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for column in (self.counts, self.means, self.squares):
            column.extend([0.0] * (self.sources - len(column)))

    def take_in(self, values: Tensor, sources: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
        """Let the statistics take in samples of all ranks.

        Args:
            values: of this rank's samples, [B]; not a number where the reward does not apply.
            sources: data source of each, [B]; not read where none are told apart.
            reduce: adds a tensor over all ranks; every rank has to call.

        Raises:
            UserError: `first` without sources, and all samples are equal.
        """
        sources = sources if self.sources > 1 else torch.zeros_like(sources)
        self._join(values.double(), sources, reduce)
        if self.mode == "first" and self.sources == 1 and self.counts[0] and not self.squares[0]:
            raise UserError(
                f"rewards: {self.name} cannot be normalized by {no_deviation(self.counts[0])}, or set normalize: none for it"
            )

    def __call__(self, values: Tensor, sources: Tensor) -> Tensor:
        """The values normalized by the statistics so far, [B]; 0 where all samples of their source are equal so far.

        Args:
            values: [B]; not a number stays as it is.
            sources: data source of each, [B].
        """
        scales = [self._scale(source) for source in range(self.sources)]
        shifts = [-mean * scale for mean, scale in zip(self.means, scales, strict=True)]
        if self.sources == 1:
            return scales[0] * values + shifts[0]
        return values.new_tensor(scales)[sources] * values + values.new_tensor(shifts)[sources]

    def _join(self, values: Tensor, sources: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
        """Join the samples of all ranks to the statistics of their sources; `first` joins none where it has some."""
        member = torch.nn.functional.one_hot(sources, self.sources).double() * (~values.isnan()).double().unsqueeze(1)
        values = values.nan_to_num().unsqueeze(1)
        counts, sums = reduce(torch.stack([member.sum(0), (member * values).sum(0)])).cpu()
        means = sums / counts.clamp(min=1)
        squares = reduce((member * (values - means) ** 2).sum(0)).cpu()
        for source, (count, mean, square) in enumerate(
            zip(counts.tolist(), means.tolist(), squares.tolist(), strict=True)
        ):
            if not count or (self.mode == "first" and self.squares[source]):
                continue
            total, distance = self.counts[source] + count, mean - self.means[source]
            before = self.counts[source]
            self.squares[source] += square + (distance**2 * before * count / total if before else 0.0)
            self.means[source] += distance * (count / total)  # exactly the mean of the first samples
            self.counts[source] = total

    def _scale(self, source: int) -> float:
        """1 / deviation of a source; 1 where its samples do not differ."""
        deviation = (self.squares[source] / max(1.0, self.counts[source])) ** 0.5
        return 1 / deviation if deviation else 1.0

    def state(self) -> dict[str, list[float]]:
        """The statistics, to be saved."""
        return {"counts": list(self.counts), "means": list(self.means), "squares": list(self.squares)}

    def load(self, state: dict[str, list[float]]) -> None:
        """Take saved statistics.

        Raises:
            UserError: they are of another number of sources.
        """
        if len(state["counts"]) != self.sources:
            raise UserError(
                f"rewards: the checkpoint's statistics of {self.name} are of {len(state['counts'])} data sources, and there "
                f"are {self.sources} now; start a new run"
            )
        self.counts, self.means, self.squares = (list(state[key]) for key in ("counts", "means", "squares"))


def no_deviation(count: float) -> str:
    """The reason why `count` numbers have no deviation to divide by, and the way out, for messages."""
    if count == 1:
        return "a single number, that of one response; raise training.batch_size or responses_per_prompt"
    return f"the same number for all of {count:.0f} responses; check what gives it"

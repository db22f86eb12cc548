"""The engine owns one optimizer step and nothing else: no data order, no logging, no files but its own state.

Micro-batch size, accumulation and number of ranks are memory settings: the weights after an update do not depend on
them, up to rounding.
"""

import math
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.training.backends.base import Backend, ReplicatedBackend
from alignment.training.distributed import ProcessGroup, init_distributed
from alignment.training.optim import OptimConfig, learning_rate_at
from alignment.training.run.random_state import rank_seed
from alignment.training.settings import TrainingConfig
from alignment.training.sums import MetricSums, layout
from alignment.training.terms import Term, ZeroWeightBatch, contents, row_ids, token_count


class NonFiniteError(RuntimeError):
    """A loss or a gradient is not finite. The weights are those before the update; the engine is not to be used on."""


class Engine:
    """A model, its optimizer and the processes they live in.

    Call `engine.model`, never the bare module, in loss functions. Several engines may live in one process.
    A trainable parameter that gets no gradient in an update is left as it is in that update; one that gets none in the
    first update is warned about in `untrained`.

    Attributes:
        step: updates done.
        untrained: trainable parameters that the first update did not reach; empty before it.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, training: TrainingConfig, *, total_steps: int):
        """Prepare `model` for training where it was launched.

        Args:
            model: float32 weights; frozen parameters may have any type.
            total_steps: updates of the whole run, over which the learning rate is laid out.

        Raises:
            UserError: the launch configuration or gradient checkpointing does not go with this model.
        """
        self.config, self.total_steps = config, total_steps
        self.step = 0
        self.untrained: list[str] = []
        if training.gradient_checkpointing:
            checkpoint_activations(model, training.keep_activations)
        self.world = init_distributed()
        self.backend = build_backend(model, config, self.world, training.precision)
        if self.world.size > 1:  # the weights are agreed on; dropout must differ from rank to rank
            torch.manual_seed(rank_seed(training.seed, self.world.rank))

    @property
    def model(self) -> Any:
        """The module to call in training; its calls run in the precision of the run."""
        return self.backend.model

    @property
    def unwrapped(self) -> Any:
        """The module as it was handed in; whole only inside `full_parameters()`."""
        return self.backend.unwrapped

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.world.device

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self.world.sum(values)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise."""
        return self.world.max(values)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.world.rank == 0

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.world.barrier()

    def autocast(self) -> AbstractContextManager[Any]:
        """While open, matrix products run in the run's precision, those of other models too."""
        return self.backend.autocast()

    def full_parameters(self) -> AbstractContextManager[None]:
        """While open, every rank holds whole weights, computes in the run's precision and need not keep in step.

        Every rank must open and close it; see `Backend.gathered`.
        """
        return self.backend.full_parameters()

    def full_state(self) -> dict[str, Tensor]:
        """Whole float32 state dict on rank 0's CPU, {} elsewhere; every rank must call it."""
        return self.backend.full_state()

    def state(self) -> dict[str, int]:
        """What, beside weights and optimizer, makes the next update."""
        return {"step": self.step}

    def load_state(self, state: dict[str, int]) -> None:
        """Put back what `state` gave."""
        self.step = int(state["step"])

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into an existing directory; every rank must call it."""
        self.backend.save(directory)

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote; every rank must call it.

        Raises:
            UserError: a file or tensor is missing or does not fit; it is named.
        """
        self.backend.load(directory)

    def update(self, *terms: Term) -> dict[str, float]:
        """One optimizer step on the sum of `terms`, each averaged over its own global weight.

        loss = sum over terms of coef * (sum of totals over all micro-batches and ranks) / (sum of weights likewise)

        Args:
            terms: the same ones in the same order on every rank; their micro-batches may differ in number.

        Returns:
            `loss`, `grad_norm` (global, before clipping), `learning_rate` (the one used), `tokens` (of all ranks), and
            each metric of the loss functions divided by its term's global weight.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; weights and optimizer are untouched.
            UserError: the device ran out of memory.
            ValueError: a term without micro-batches on some rank, or with weight 0 over all.
        """
        number = self.step + 1
        weights, rounds, tokens = self._agree(terms)
        sums = [MetricSums() for _ in terms]
        for position, (term, weight, wanted) in enumerate(zip(terms, weights, rounds, strict=True)):
            last_term = position == len(terms) - 1
            for index, batch in enumerate(self._fill(term, wanted)):
                last = last_term and index == wanted - 1
                self._add(sums[position], term, batch, term.coef / weight, last, number)
        rate = learning_rate_at(number, self.config, self.total_steps)
        names, values = layout(terms, sums, self.device)
        numbers, grad_norm = self.backend.step(rate, self.world.sum(values), guarded=len(terms))
        self._check(number, terms, sums, numbers[: len(terms)], grad_norm)
        self.step = number
        if number == 1:
            self._warn_of_untrained()
        losses = [total / weight for total, weight in zip(numbers, weights, strict=False)]
        metrics = {"loss": sum(term.coef * loss for term, loss in zip(terms, losses, strict=True))}
        metrics |= {"grad_norm": grad_norm, "learning_rate": rate, "tokens": tokens}
        metrics |= {term.key("loss"): loss for term, loss in zip(terms, losses, strict=True) if term.name}
        for (position, name), total in zip(names, numbers[len(terms) :], strict=True):
            metrics[terms[position].key(name)] = total / weights[position]
        return metrics

    def _warn_of_untrained(self) -> None:
        """A tensor that the first update does not reach is mostly a mistake: a wrong target, a cut graph."""
        self.untrained = self.backend.without_gradient()
        if self.untrained:
            names = _names(tuple(self.untrained))
            warnings.warn(f"trainable parameters without a gradient in the first update: {names}", stacklevel=3)

    def _agree(self, terms: tuple[Term, ...]) -> tuple[list[float], list[int], float]:
        """Global weight and largest number of micro-batches of each term, and tokens of the update."""
        if not terms:
            raise ValueError("an update needs at least one term")
        weights = [sum((float(batch.weight) for batch in term.micro_batches), 0.0) for term in terms]
        counts = [float(len(term.micro_batches)) for term in terms]
        tokens = sum(
            token_count(batch)
            for term in terms
            for batch in term.micro_batches
            if not isinstance(batch, ZeroWeightBatch)
        )
        everyone = self.world.gather([*weights, *counts, float(tokens)])
        columns = list(zip(*everyone, strict=True))
        totals = [math.fsum(column) for column in columns]
        for position, term in enumerate(terms):
            label = f"term {position} ({term.name or 'unnamed'}) of update {self.step + 1}"
            if min(columns[len(terms) + position]) == 0:
                raise ValueError(f"{label} has no micro-batch on some rank; `share` lends one to a rank without rows")
            if not totals[position] > 0:
                raise ValueError(f"{label} has a global weight of {totals[position]}: nothing counts in it")
        rounds = [int(max(columns[len(terms) + position])) for position in range(len(terms))]
        return totals[: len(terms)], rounds, totals[-1]

    def _fill(self, term: Term, wanted: int) -> list[Any]:
        """The term's batches; where ranks must keep in step, the last one again at weight 0 until there are enough."""
        batches = list(term.micro_batches)
        if not self.backend.collective_forward:
            return batches
        return batches + [ZeroWeightBatch(contents(batches[-1]))] * (wanted - len(batches))

    def _add(self, sums: MetricSums, term: Term, batch: Any, factor: float, last: bool, number: int) -> None:
        """Forward and backward of one micro-batch; one of weight 0 runs too: all ranks know the same metrics."""
        counts = float(batch.weight) > 0
        try:
            loss = term.loss_fn(contents(batch.to(self.device)))
            self.backend.backward(loss.total * (factor if counts else 0.0), last)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory in update {number}, on a micro-batch of {token_count(batch)} tokens (rows "
                f"{_names(row_ids(batch))}): lower training.micro_batch_tokens, which changes no result, or set "
                "training.gradient_checkpointing=true"
            ) from error
        sums.add(loss, batch, counts)

    def _check(
        self, number: int, terms: tuple[Term, ...], sums: list[MetricSums], losses: list[float], grad_norm: float
    ) -> None:
        """Raise where a loss or the gradient norm is not finite; every rank comes to the same answer."""
        if all(math.isfinite(value) for value in (*losses, grad_norm)):
            return
        culprits = [
            f"{term.name or f'term {position}'}: loss {float(total)} on rows {_names(row_ids(batch))}"
            for position, (term, part) in enumerate(zip(terms, sums, strict=True))
            for total, batch in zip(part.totals, part.batches, strict=True)
            if not math.isfinite(float(total))
        ]
        culprits = [line for lines in self.world.gather_objects(culprits) for line in lines]
        if not culprits:
            rows = [name for part in sums for batch in part.batches for name in row_ids(batch)]
            rows = [name for names in self.world.gather_objects(rows) for name in names]
            culprits = [f"the gradient norm is {grad_norm} although every loss is finite; rows {_names(tuple(rows))}"]
        raise NonFiniteError(
            f"update {number} is not finite and was not applied: {'; '.join(culprits)}. The weights are those after "
            f"update {number - 1}. Check these rows, or lower optim.learning_rate"
        )


def build_backend(model: nn.Module, config: OptimConfig, world: ProcessGroup, precision: str) -> Backend:
    """The backend that the launch configuration asked for."""
    if world.kind == "zero":
        from alignment.training.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(model, config, world, precision)
    if world.kind == "fsdp2":
        from alignment.training.backends.fsdp2 import FSDP2Backend

        return FSDP2Backend(model, config, world, precision)
    return ReplicatedBackend(model, config, world, precision)


def checkpoint_activations(model: nn.Module, keep: str = "nothing") -> None:
    """Switch on recomputation of activations.

    Raises:
        UserError: the model has no such switch.
    """
    switch = getattr(model, "checkpoint_activations", None)
    if switch is None:
        raise UserError(f"training.gradient_checkpointing: {type(model).__name__} does not support it; set it to false")
    switch(True, keep)


def _names(rows: tuple[str, ...], cap: int = 20) -> str:
    """Row names for a message."""
    if not rows:
        return "(unnamed)"
    return ", ".join(rows[:cap]) + (f" and {len(rows) - cap} more" if len(rows) > cap else "")

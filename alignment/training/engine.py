"""The engine owns one optimizer step and nothing else: no data order, no logging, no files but its own state.

Micro-batch size, accumulation and number of ranks are memory settings: the weights after an update do not depend on
them, up to rounding.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from alignment.errors import UserError
from alignment.training.backends.base import Backend, ReplicatedBackend
from alignment.training.backends.state_files import local_tensor, read_into, write
from alignment.training.distributed import ProcessGroup, init_distributed
from alignment.training.optim import OptimConfig, check_optimizer, learning_rate_at
from alignment.training.settings import TrainingConfig
from alignment.training.terms import MetricSums, Term, ZeroWeightBatch, averages, flatten_sums, unwrap_batch

SHOWN_NAMES = 20  # of a message


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite. The weights are those before the update; the engine must not be used again."""


class MovingAverage:
    """The average of a model's trained weights, in float32 on their device and sharded as they are.

    average <- decay * average + (1 - decay) * weight, after every update; it begins with the starting weights.

    Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv:1703.01780 (their alpha is decay).
    """

    def __init__(self, backend: Backend, decay: float):
        self._backend = backend
        self._decay = decay
        self._average = {name: weight.clone() for name, weight in backend.trained_weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, weight in self._backend.trained_weights().items():
            local_tensor(self._average[name]).lerp_(local_tensor(weight), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._backend.trained_weights().items():
            kept = weight.clone()  # one tensor at a time: no second copy of the model
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)

    def save(self, directory: Path) -> None:
        write("average", self._average, directory, rank=self._backend.process_group.rank)

    def load(self, directory: Path) -> None:
        read_into("average", self._average, directory)


class Engine:
    """A model with its optimizer, trained by the process group it was launched in.

    Loss functions call `engine.model`, never the bare module. Several engines may live in one process.
    A trainable parameter that gets no gradient in an update is not changed by it; one that gets none in the first
    update is listed in `untrained`, with a warning.

    Attributes:
        model: the module to call in training; its calls run in the precision of the run.
        backend: how the model is spread over processes; holds the unwrapped module, its state and its optimizer.
        step: updates done.
        untrained: trainable parameters that the first update did not reach; empty before it.
        average: the moving average of the trained weights; None where `training.ema_decay` is not set.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, training: TrainingConfig, *, total_steps: int):
        """Prepare `model` for `total_steps` updates in the processes that were launched; what it trains is float32."""
        self.config = config
        self.total_steps = total_steps
        self.step = 0
        self.untrained: list[str] = []
        if training.gradient_checkpointing:
            switch_on(model, "checkpoint_activations", "gradient_checkpointing", True, training.keep_activations)
        if training.compile:
            switch_on(model, "compile_blocks", "compile")
        self.process_group = init_distributed()
        self.backend = build_backend(model, config, self.process_group, training.precision)
        self.model: Any = self.backend.model
        decay = training.ema_decay
        self.average = None if decay is None else MovingAverage(self.backend, decay)
        if self.process_group.size > 1:  # weights are equal on all ranks by now; dropout must differ between them
            seed_sequence = np.random.SeedSequence([training.seed, self.process_group.rank])
            torch.manual_seed(int(seed_sequence.generate_state(1, np.uint64)[0]))

    def update(self, *terms: Term) -> dict[str, float]:
        """One optimizer step on the sum of `terms`, each averaged over its own global weight.

        loss = sum over terms of coef * (sum of totals over all micro-batches and ranks) / (sum of weights over them)

        Args:
            terms: equal on every rank, in the same order; only their micro-batches may differ, in number too.

        Returns:
            `loss`, `grad_norm` (global, before clipping), `learning_rate` (the one used), `tokens` (of all ranks), and
            each metric of the loss functions divided by its term's global weight.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; weights and optimizer are untouched.
        """
        step = self.step + 1
        device = self.process_group.device
        weights, counts, tokens = self._global_weights(terms)
        sums = [MetricSums() for _ in terms]
        for term, term_sums, weight, count in zip(terms, sums, weights, counts, strict=True):
            batches = list(term.micro_batches)
            if self.backend.collective_forward:  # the last one again at weight 0, until all ranks have equally many
                batches += [ZeroWeightBatch(unwrap_batch(batches[-1]))] * (count - len(batches))
            for index, batch in enumerate(batches):
                factor = term.coef / weight if float(batch.weight) > 0 else 0.0
                last = term_sums is sums[-1] and index == len(batches) - 1
                try:
                    loss = term.loss_fn(unwrap_batch(batch.to(device)))
                    self.backend.backward(loss.total * factor, last)
                except torch.OutOfMemoryError as error:
                    raise UserError(
                        f"out of memory in update {step}, on a micro-batch of {sum(batch.lengths)} tokens (rows "
                        f"{_join_names(batch.row_ids)}): lower training.micro_batch_tokens, which changes no result, "
                        "or set training.gradient_checkpointing=true"
                    ) from error
                term_sums.add(loss, batch)
        rate = learning_rate_at(step, self.config, self.total_steps)
        names, local_sums = flatten_sums(sums, device)
        values, grad_norm = self.backend.step(rate, self.process_group.sum(local_sums), num_losses=len(terms))
        totals = values[: len(terms)]
        metric_totals = values[len(terms) :]
        if not all(math.isfinite(value) for value in (*totals, grad_norm)):
            raise self._non_finite(terms, sums, grad_norm)
        self.step = step
        if self.average is not None:
            self.average.update()
        if step == 1 and (missing := self.backend.without_gradient()):  # a wrong target, or a graph that was cut
            self.untrained = missing
            names_missing = _join_names(missing)
            warnings.warn(f"trainable parameters without a gradient in the first update: {names_missing}", stacklevel=2)
        losses = [total / weight for total, weight in zip(totals, weights, strict=True)]
        metrics = {"loss": sum(term.coef * loss for term, loss in zip(terms, losses, strict=True))}
        metrics |= {"grad_norm": grad_norm, "learning_rate": rate, "tokens": tokens}
        metrics |= {term.key("loss"): loss for term, loss in zip(terms, losses, strict=True) if term.name}
        for position, (term, weight) in enumerate(zip(terms, weights, strict=True)):
            named_sums = {name: total for (of, name), total in zip(names, metric_totals, strict=True) if of == position}
            metrics |= {term.key(name): value for name, value in averages(named_sums, weight).items()}
        return metrics

    def averaged_weights(self) -> AbstractContextManager[None]:
        """While open, the model has the moving average of its weights, where there is one."""
        return nullcontext() if self.average is None else self.average.swapped()

    def save(self, directory: Path) -> None:
        """Write weights, their moving average and the optimizer's state; a collective operation."""
        self.backend.save(directory)
        if self.average is not None:
            self.average.save(directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; a collective operation."""
        self.backend.load(directory)
        if self.average is not None:
            self.average.load(directory)

    def _global_weights(self, terms: tuple[Term, ...]) -> tuple[list[float], list[int], float]:
        """Weight of each term over all ranks, its largest number of micro-batches on any rank, and all tokens."""
        if not terms:
            raise ValueError("an update needs at least one term")
        weights = [sum((float(batch.weight) for batch in term.micro_batches), 0.0) for term in terms]
        counts = [float(len(term.micro_batches)) for term in terms]
        tokens = sum(
            sum(batch.lengths)
            for term in terms
            for batch in term.micro_batches
            if not isinstance(batch, ZeroWeightBatch)
        )
        by_rank = self.process_group.gather([*weights, *counts, float(tokens)])
        columns = list(zip(*by_rank, strict=True))
        totals = [math.fsum(column) for column in columns]
        for position, term in enumerate(terms):
            label = f"term {position} ({term.name or 'unnamed'}) of update {self.step + 1}"
            if min(columns[len(terms) + position]) == 0:
                raise ValueError(
                    f"{label} has no micro-batch on some rank; `shard_rows` gives a rank without rows one of weight 0"
                )
            if not totals[position] > 0:
                raise ValueError(f"{label} has a global weight of {totals[position]}: nothing counts in it")
        largest = [int(max(columns[len(terms) + position])) for position in range(len(terms))]
        return totals[: len(terms)], largest, totals[-1]

    def _non_finite(self, terms: tuple[Term, ...], sums: list[MetricSums], grad_norm: float) -> NonFiniteError:
        """The error of an update that is not finite, naming the rows of all ranks that cause it."""
        culprits = [
            f"{term.name or f'term {position}'}: loss {float(total)} on rows {_join_names(batch.row_ids)}"
            for position, (term, part) in enumerate(zip(terms, sums, strict=True))
            for total, batch in zip(part.totals, part.batches, strict=True)
            if not math.isfinite(float(total))
        ]
        culprits = [line for lines in self.process_group.gather_objects(culprits) for line in lines]
        if not culprits:
            rows = [name for part in sums for batch in part.batches for name in batch.row_ids]
            rows = [name for names in self.process_group.gather_objects(rows) for name in names]
            culprits = [f"the gradient norm is {grad_norm} although every loss is finite; rows {_join_names(rows)}"]
        return NonFiniteError(
            f"update {self.step + 1} is not finite and was not applied: {'; '.join(culprits)}. The weights are those "
            f"after update {self.step}. Check these rows, or lower optim.learning_rate"
        )


def build_backend(model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str) -> Backend:
    """The backend that the launch configuration asked for."""
    check_optimizer(config, process_group.kind)
    if process_group.kind == "deepspeed":
        from alignment.training.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(model, config, process_group, precision)
    if process_group.kind == "fsdp2":
        from alignment.training.backends.fsdp2 import FSDP2Backend

        return FSDP2Backend(model, config, process_group, precision)
    return ReplicatedBackend(model, config, process_group, precision)


def switch_on(model: nn.Module, method: str, setting: str, *arguments: object) -> None:
    """Call a method of the model that changes how it runs."""
    if not hasattr(model, method):
        raise UserError(f"training.{setting}: {type(model).__name__} does not support it; set it to false")
    getattr(model, method)(*arguments)


def _join_names(names: Sequence[str]) -> str:
    """At most `SHOWN_NAMES` names, for a message."""
    if not names:
        return "(unnamed)"
    return ", ".join(names[:SHOWN_NAMES]) + (
        f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    )

"""The plain loop: rows in order, one update after another, with logs, evaluation, checkpoints and resumption.

PPO has a loop of its own, and shares `load_run_state` and `save_run_state`. The bounds of healthy training are here
too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.ragged import Batch
from alignment.training.engine import Engine
from alignment.training.result import Result
from alignment.training.run.checkpoints import (
    Engines,
    check_disk_space,
    checkpoints,
    generator_states,
    latest_checkpoint,
    process_group_of,
    restore_checkpoint,
    save_checkpoint,
    unchanged_random_state,
)
from alignment.training.run.directory import Run, read_log
from alignment.training.settings import TrainingConfig
from alignment.training.terms import Collate, LossFn, Term, averages, shard_rows

# Of `save_every_steps: auto`; see `is_save_due`.
MOST_SECONDS = 600.0  # between two saves
LEAST_SECONDS = 10.0
SAVE_FACTOR = 50  # times as long as the last save took
# Of what a stage logs of its own samples, beyond which the run goes wrong: of alarms while it runs, of a diagnosis
# after.
ENTROPY_LEFT = 0.3  # of the first entropy: a third of the nats per token leaves one way to say each thing
DISTINCT_LEFT = 0.5  # of the first share of distinct responses
REPETITION = 0.2  # share of repeated n-grams; fluent text has a few percent
ENDED = 0.7  # share of responses; below, a third of what the reward model scores is cut off in mid-sentence
EQUAL = 1e-6  # relative difference of scores that is none


class RowStream(Protocol):
    """Global batches of rows by number, from 0; `data.stream.Stream` is one."""

    def rows_at(self, step: int) -> Sequence[Any]: ...


@runtime_checkable
class Stateful(Protocol):
    """An object with a JSON-like state that later updates depend on; None: the start."""

    def state(self) -> object: ...
    def restore(self, state: object, /) -> None: ...


def fit(
    engine: Engine,
    stream: RowStream,
    collate: Collate,
    loss_fn: LossFn,
    *,
    training: TrainingConfig,
    run: Run,
    held_out: Sequence[Any] = (),
    update: Callable[[int, Sequence[Any]], dict[str, float]] | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    save: Callable[[], object] | None = None,
    observe: Callable[[int], object] | None = None,
    remembers: Stateful | None = None,
) -> None:
    """Train from the newest checkpoint, or from the start, to `engine.total_steps` or to an early stop.

    A signal that asks the run to stop takes effect at the end of an update, when its evaluation is done and logged:
    then SystemExit (143 or 130), a checkpoint being saved.

    Args:
        stream: row order as a pure function of the step, the same on every rank.
        loss_fn: micro-batch -> sums; it calls `engine.model`.
        held_out: rows of the means that are logged after every `evaluate_every_steps`-th update and the last one.
        update: one update of the engine on the rows of a global batch, given the batch's number from 0 too, in place of
            one term of `loss_fn` over them; returns the metrics to log.
        evaluate: metrics to log in place of those means; it may draw random numbers without changing the training.
        save: writes the trained model, right after the last update (the best weights after the last evaluation): an
            error in the last evaluation does not lose it, and a signal that comes meanwhile waits for it.
        observe: called with the update's number at every evaluation, such as to write samples.
        remembers: what `update` knows of the updates before, for checkpoints.
    """
    run.show_first_rows(stream.rows_at)
    note_warmup(run, [engine])
    to_batches = partial(collate, micro_batch_tokens=training.tokens_per_forward)
    if held_out and evaluate is None:
        evaluate = partial(held_out_metrics, engine, to_batches(held_out), loss_fn)
    result = Result(run, engine, training, save, evaluated=evaluate is not None)
    state = resume(result, stream, run, engine, training, remembers=remembers)
    own_share = partial(shard_rows, rank=engine.process_group.rank, world_size=engine.process_group.size)
    take_update = update or (lambda _, rows: engine.update(Term(own_share(rows, to_batches), loss_fn)))
    if (last := result.last_step) == engine.step:  # a finished run again: its model may be gone
        result.write()
    for step in run.steps(engine.step, last):
        metrics = take_update(step, stream.rows_at(step))
        if step + 1 == last and result.best is None:
            result.write()
        if is_due(step + 1, training.evaluate_every_steps, last):
            metrics |= evaluate_model(engine, evaluate, observe, step + 1)
            metrics |= result.add(step + 1, metrics)
        run.total = result.last_step
        run.log(step + 1, metrics)
        save_run_state(run, engine, training, step + 1, state())
        if step + 1 == run.total and result.best is not None:
            result.write()


def note_warmup(run: Run, engines: Iterable[Engine]) -> None:
    """Note a warm-up that lasts beyond the end of the run, so that the learning rate never arrives at its peak."""
    for warmup, total in sorted({(engine.config.warmup_steps, engine.total_steps) for engine in engines}):
        if 0 < total <= warmup:
            run.note(
                f"optim.warmup_steps: {warmup} updates of warm-up in a run of {total}: the learning rate ends at "
                f"{(total - 1) / warmup:.3g} of its peak; lower it, or set optim.warmup_ratio in its place"
            )


def resume(
    result: Result,
    stream: RowStream,
    run: Run,
    engine: Engine,
    training: TrainingConfig,
    *,
    remembers: Stateful | None = None,
) -> Callable[[], dict[str, Any]]:
    """Go on from the run's newest checkpoint, if any; returns a function that gives the state for the next one."""
    saved = load_run_state(run, engine, training)
    result.restore(saved)
    parts = {name: part for name, part in (("stream", stream), ("updates", remembers)) if isinstance(part, Stateful)}
    for name, part in parts.items():
        if saved is not None:
            part.restore(saved.get(name))
    return lambda: result.state() | {name: state for name, part in parts.items() if (state := part.state()) is not None}


def evaluate_model(
    engine: Engine,
    evaluate: Callable[[], dict[str, float]] | None,
    observe: Callable[[int], object] | None,
    step: int,
) -> dict[str, float]:
    """The metrics of the model after update `step`, with its averaged weights where it has them."""
    if evaluate is None and observe is None:
        return {}
    with unchanged_random_state(), engine.averaged_weights():
        metrics = {} if evaluate is None else evaluate()
        if observe is not None:
            observe(step)
    return metrics


@torch.no_grad()
def held_out_metrics(engine: Engine, batches: Sequence[Batch], loss_fn: LossFn) -> dict[str, float]:
    """Mean loss and metrics over held-out batches, in eval mode, keys prefixed `held_out_`; each rank reads all."""
    was_training = engine.backend.unwrapped.training  # DeepSpeed's wrapper always says True
    engine.model.eval()
    sums: dict[tuple[str, str], Tensor] = {}
    with engine.backend.autocast():
        for batch in batches:
            result = loss_fn(batch.to(engine.process_group.device))
            for key, value in {("loss", ""): result.total, **result.named_sums()}.items():
                sums[key] = sums.get(key, torch.zeros((), device=engine.process_group.device)) + value.float()
    engine.model.train(was_training)
    weight = sum(batch.weight for batch in batches)
    means = averages({key: float(value) for key, value in sums.items()}, weight)
    return {f"held_out_{key}": value for key, value in means.items()}


def is_due(step: int, every: int, total: int) -> bool:
    """True where something done every `every` steps and after the last one is due; `every` 0: only after the last."""
    return step == total or (every > 0 and step % every == 0)


def load_run_state(run: Run, engines: Engines, training: TrainingConfig) -> dict[str, Any] | None:
    """Resume engines and random states from the run's newest checkpoint; returns the saved state and its `step`."""
    process_group = process_group_of(engines)
    run.random_start = generator_states()

    def newest() -> Path | None:
        if not training.resume and any(checkpoints(run.checkpoints)):
            why = f"training.resume is off, and {run.checkpoints} holds checkpoints"
            raise UserError(f"{why}; remove them, or choose another output")
        return latest_checkpoint(run.checkpoints)

    if (path := process_group.on_main(newest)) is None:
        if run.is_main and (lines := read_log(run.output / "metrics.jsonl")[0]):
            run.note(f"{lines[-1][0]} updates of an earlier start are lost: there is no checkpoint to go on from")
        return None
    identity = process_group.broadcast_object(run.identity)
    state = restore_checkpoint(path, engines, identity)
    run.note(f"resumed from {path}")
    if run.other_source:
        run.note(
            f"warning: {path} was made by another version of this library (source {run.other_source[:16]}); the run "
            "may end otherwise than with one version"
        )
    if state["extended"]:
        run.note(
            f"the run was finished after step {state['step']} and goes on; rows that its last batch left of an epoch "
            "are passed over, and a learning rate whose schedule depends on the length followed that of the shorter "
            "run until here: then the result is not that of a run of this length from the start"
        )
    return state


def save_run_state(
    run: Run, engines: Engines, training: TrainingConfig, step: int, state: dict[str, Any] | None = None
) -> None:
    """Save a checkpoint with this JSON-like state, if one is due or a signal asks to stop; a collective operation."""
    process_group = process_group_of(engines)
    asked = torch.tensor([max(run.requested, default=0), is_save_due(run, engines, training, step)])
    if process_group.size > 1:  # ranks get a signal at different times, and must stop after the same step
        asked = process_group.max(asked)
    signal, due = asked.tolist()
    if signal or due:
        began = time.monotonic()
        drawn = any(process_group.gather_objects(generator_states() != run.random_start))
        last = training.save_every_steps == "auto" and step == run.total
        save_checkpoint(
            run.checkpoints,
            step,
            engines,
            state or {},
            run.identity,
            keep=1 if last else training.keep_last_checkpoints,
            drawn=drawn,
        )
        run.last_save = (now := time.monotonic(), now - began)
    run.stopped = signal


def is_save_due(run: Run, engines: Engines, training: TrainingConfig, step: int) -> bool:
    """True where a checkpoint is due after `step`. Of `save_every_steps: auto`, rank 0's clock decides.

    auto: after each tenth of the run and after ten minutes, but not before 50 times as long as a save takes, so that
    about 2 % of the time goes into it; at the end, that counts from the start. What the disk has no space for is not
    due.
    """
    every = training.save_every_steps
    last = step == run.total
    # The average is the result, so that only a checkpoint has the weights themselves.
    if last and training.ema_decay is not None:
        return True
    if every != "auto":
        return every > 0 and is_due(step, every, run.total)
    when, seconds = run.last_save
    waited = time.monotonic() - (run.began if last else when)
    is_tenth = is_due(step, math.ceil(run.total / 10), run.total)
    if (
        not run.is_main
        or waited < max(SAVE_FACTOR * seconds, LEAST_SECONDS)
        or not (is_tenth or waited >= MOST_SECONDS)
    ):
        return False
    try:
        check_disk_space(run.checkpoints, engines)
    except UserError as error:
        run.last_save = (time.monotonic(), seconds)
        run.note(f"no checkpoint after step {step}: {error}")
        return False
    return True


# Bounds of what a stage logs of its own samples


def repeats(share: float, first: float) -> bool:
    """True where this share of repeated n-grams is too large, after `first` at the start."""
    return share > max(REPETITION, 2 * first)


def least_kl(kl_k3: float, responses: float) -> float:
    """The lowest mean of the signed estimate k1 that noise explains, nats; below it the samples are not the policy's.

    The k1 estimate of a small KL has a variance of 2 KL per response; k3, never negative, says how large the KL is.
    """
    return -max(0.02, 3 * (2 * max(kl_k3, 1e-4) / responses) ** 0.5)


def all_equal(scores: Sequence[float]) -> bool:
    """True where the scores are the same but for rounding, so that they tell nothing apart."""
    return max(scores) - min(scores) <= EQUAL * max(1.0, abs(scores[-1]))

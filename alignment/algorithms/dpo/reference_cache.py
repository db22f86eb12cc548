"""The reference's log-probabilities, computed once before training and kept on disk, so that its weights can go.

A file is named by a hash of everything that its numbers depend on: the weights' content, the rows' tokens and masks, the
type of computation, and the version of this computation. Any change of data, template or weights is another file. A few
rows are computed again at every start, and a difference ends the run. A damaged file is computed again, and the run notes it.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment.adapters.files import is_adapter
from alignment.algorithms.dpo.config import DPOConfig
from alignment.algorithms.dpo.global_inputs import Collate, joint_batches
from alignment.algorithms.language import LogProbModel, sequence_log_probs
from alignment.algorithms.policies import Policy, reference_of
from alignment.data.batches import collate
from alignment.data.examples import Example, RowSequence
from alignment.data.stream import Stream
from alignment.errors import UserError
from alignment.files import hash_of, write_atomic
from alignment.loading import find_base, find_directory
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig
from alignment.training import Engine, Run
from alignment.training.loop import RowStream
from alignment.training.run.checkpoints import rename_damaged
from alignment.training.run.lineage import directory_hash
from alignment.training.terms import ZeroWeightBatch, shard_rows, unwrap_batch

VERSION = 1  # of what is computed: raised when the same weights and rows would give other numbers
CHECKED_ROWS = 8
CACHED_ROWS = 256  # of each rank, whose log-probabilities are computed between two messages among the ranks
# How far two computations of one number may lie apart, in nats and as a share of it: batches of other rows round otherwise.
TOLERANCE = {"fp32": (1e-3, 1e-4), "bf16": (0.5, 2e-2)}


@dataclass(frozen=True)
class ReferencedRows(RowSequence[Any]):
    """Rows whose responses know their log-probability under the reference.

    Attributes:
        rows: as they were prepared.
        values: log-probabilities of all rows' responses, nats, float32, in their order.
        starts: index of each row's first response in `values`, then their number.
    """

    rows: Sequence[Any]
    values: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def row_at(self, index: int) -> Any:
        number = range(len(self))[index]
        row, values = self.rows[number], self.values[self.starts[number] : self.starts[number + 1]]
        return replace(row, values={**row.values, "reference": values.tolist()})


@dataclass(frozen=True)
class ReferencedStream:
    """The rows of a stream in its order, with the reference's log-probabilities."""

    order: Stream[Any]
    rows: Sequence[Any]

    def rows_at(self, step: int) -> list[Any]:
        """The rows of batch `step`."""
        return [self.rows[position] for position in self.order.positions_at(step)]


def cached_reference(
    config: DPOConfig,
    policy: Policy,
    engine: Engine,
    stream: RowStream,
    held_out: Sequence[Example],
    *,
    run: Run,
) -> tuple[ReferencedStream, Sequence[Any]]:
    """Training and held-out rows with the log-probabilities of the config's reference, whose weights are freed again.

    While they are computed or verified, the reference's weights are in memory beside the policy's, which has neither
    gradients nor optimizer state yet.

    Raises:
        UserError: as `ReferenceCache.attach`.
    """
    assert isinstance(stream, Stream)  # streamed rows are refused with the config
    group = engine.process_group
    cache = ReferenceCache(
        reference_of(policy, config.reference, engine, bases=SharedWeights(config.weights, shared=False)),
        engine,
        partial(collate, micro_batch_tokens=config.training.tokens_per_forward),
        Path(config.reference_cache or Path(config.output) / "reference_log_probs"),
        group.broadcast_object(
            weights_key(config.reference or config.policy, config.weights) if group.is_main else None
        ),
        config.training.precision,
        run,
    )
    return ReferencedStream(stream, cache.attach(stream.rows, "training")), cache.attach(held_out, "held-out")


def weights_key(source: str, weights: WeightsConfig) -> str:
    """A hash of how weights are held and of the files of a checkpoint, and of the models under its adapters."""
    directories = [find_directory(source)]
    while is_adapter(directories[-1]):
        directories.append(find_base(directories[-1]))
    return hash_of([[directory_hash(directory) for directory in directories], asdict(weights)])


@dataclass(frozen=True)
class ReferenceCache:
    """Reads, computes and verifies the log-probabilities of a reference.

    Attributes:
        reference: the network.
        engine: the policy's, whose process group computes them together.
        collate: one row per document -> micro-batches of documents.
        folder: where the files are.
        weights: hash of everything that the network's weights depend on.
        precision: of the run, fp32 or bf16.
        run: notes where the numbers come from.
    """

    reference: LogProbModel
    engine: Engine
    collate: Collate
    folder: Path
    weights: str
    precision: str
    run: Run

    def attach(self, rows: Sequence[Example], name: str) -> Sequence[Any]:
        """The rows, all of one kind, with the reference's log-probabilities, from disk or computed now; collective.

        Raises:
            UserError: the numbers on disk are not those that the reference gives.
        """
        if not rows:
            return rows
        key, starts = rows_key(rows)
        path = self.folder / f"{hash_of([VERSION, self.weights, key, self.precision])[:32]}.npy"
        group = self.engine.process_group
        found = group.broadcast_object(_read(path, int(starts[-1])) if group.is_main else None)
        if isinstance(found, np.ndarray):
            self.run.note(f"reference: log-probabilities of {len(rows):,} {name} rows are read from {path}")
            known = ReferencedRows(rows, found, starts)
            self._verify(known, path)
            return known
        if isinstance(found, str):
            self.run.note(f"reference: {found}; it is computed again")
            if group.is_main and path.is_dir():
                rename_damaged(path)
        values = self._compute(rows, starts)
        if group.is_main:
            write_atomic(path, lambda temporary: _write(temporary, values))
        group.barrier()
        self.run.note(f"reference: log-probabilities of {len(rows):,} {name} rows are computed, and kept in {path}")
        return ReferencedRows(rows, values, starts)

    def _compute(self, rows: Sequence[Example], starts: np.ndarray) -> np.ndarray:
        """Log-probabilities of all rows' responses, each rank computing its share; float32, in their order."""
        values = np.full(int(starts[-1]), np.nan, np.float32)
        group, step = self.engine.process_group, CACHED_ROWS * self.engine.process_group.size
        for first in range(0, len(rows), step):  # few rows of a table are in memory at a time
            numbers = range(first, min(first + step, len(rows)))
            for part in group.gather_objects(dict(self._log_probs(rows, numbers, starts))):
                values[list(part.keys())] = list(part.values())
        if (bad := np.flatnonzero(~np.isfinite(values))).size:
            row = rows[_row_of(bad[0], starts)]
            raise UserError(f"reference: its log-probability of {row.row_id} is not finite; check its weights")
        return values

    @torch.no_grad()
    def _log_probs(
        self, rows: Sequence[Example], numbers: Sequence[int], starts: np.ndarray
    ) -> Iterator[tuple[int, float]]:
        """(index among all responses, log-probability) of this rank's share of these rows."""
        documents = [
            Example.single(ids, mask, str(offset), rows[number].source)
            for number in numbers
            for offset, (ids, mask) in enumerate(
                zip(rows[number].documents, rows[number].masks, strict=True), int(starts[number])
            )
        ]
        group = self.engine.process_group
        for batch in joint_batches(shard_rows(documents, self.collate, group.rank, group.size), self.engine):
            moved: Any = unwrap_batch(batch.to(group.device))
            values = sequence_log_probs(self.reference, moved).float().tolist()
            if not isinstance(batch, ZeroWeightBatch):
                yield from zip(map(int, batch.row_ids), values, strict=True)

    def _verify(self, known: ReferencedRows, path: Path) -> None:
        """Compare a few rows with what the reference gives now; a collective operation."""
        even = np.linspace(0, len(known) - 1, min(CHECKED_ROWS, len(known)))
        numbers = sorted({round(position) for position in even})
        absolute, relative = TOLERANCE[self.precision]
        wrong = [
            f"{known.rows[_row_of(position, known.starts)].row_id}: {known.values[position]:.4f} on disk, {value:.4f} now"
            for position, value in sorted(self._log_probs(known.rows, numbers, known.starts))
            if not abs(known.values[position] - value) <= absolute + relative * abs(value)
        ]
        wrong = [line for lines in self.engine.process_group.gather_objects(wrong) for line in lines]
        if wrong:
            raise UserError(
                f"{path}: the reference gives other log-probabilities: {'; '.join(wrong[:4])}. Delete the file, "
                "and they are computed again"
            )


def _row_of(position: int, starts: np.ndarray) -> int:
    return int(np.searchsorted(starts, position, side="right")) - 1


def rows_key(rows: Sequence[Example]) -> tuple[str, np.ndarray]:
    """A hash of the tokens and masks of all rows' responses, and the index of each row's first response, then their number."""
    digest, starts = hashlib.sha256(), np.zeros(len(rows) + 1, np.int64)
    for number in range(len(rows)):
        row = rows[number]
        starts[number + 1] = starts[number] + len(row.documents)
        for ids, mask in zip(row.documents, row.masks, strict=True):
            digest.update(np.array([len(ids), *ids], np.int32).tobytes())
            digest.update(np.array(mask, np.bool_).tobytes())
    return digest.hexdigest(), starts


def _write(path: Path, values: np.ndarray) -> None:
    """Write the numbers, and behind them their SHA-256."""
    with open(path, "wb") as file:
        np.save(file, values)
        file.write(hashlib.sha256(values.tobytes()).digest())


def _read(path: Path, count: int) -> np.ndarray | str | None:
    """The numbers of a file; None where there is none, a message where it is damaged."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        return f"{path}: is no file"
    try:
        with open(path, "rb") as file:
            values = np.load(file, allow_pickle=False)
            whole = file.read() == hashlib.sha256(values.tobytes()).digest()
    except (OSError, ValueError, EOFError, MemoryError, OverflowError) as error:
        return f"{path}: cannot be read ({error})"
    return values if whole and values.shape == (count,) else f"{path}: its content is not what was written"

"""The reference's log-probabilities, computed once before training and kept on disk, so that its weights can go.

A file is named by a hash of everything that its numbers depend on: the weights' content, the rows' tokens and masks,
the type of computation, and the version of this computation. Any change of data, template or weights is another file. A
damaged file is computed again, and the run notes it.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from alignment.adapters.files import is_adapter
from alignment.algorithms.dpo.config import DPOConfig
from alignment.algorithms.dpo.global_inputs import joint_batches
from alignment.algorithms.dpo.responses import sequence_log_probs
from alignment.algorithms.policies import Policy, reference_of
from alignment.algorithms.runs import collate_for
from alignment.data.batches import Example, RowSequence, collate
from alignment.data.stream import Stream
from alignment.errors import UserError
from alignment.files import hash_of, write_atomic
from alignment.loading import find_base, find_directory
from alignment.models.outputs import LogProbModel
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Batch
from alignment.training import Engine, Run
from alignment.training.loop import RowStream
from alignment.training.run.checkpoints import rename_corrupt
from alignment.training.run.lineage import directory_hash
from alignment.training.terms import ZeroWeightBatch, shard_rows, unwrap_batch

VERSION = 2  # of what is computed: raised when the same weights and rows would give other numbers
CACHED_ROWS = 256  # of each rank, whose log-probabilities are computed between two messages among the ranks


@dataclass(frozen=True)
class ReferencedRows(RowSequence[Any]):
    """Rows whose responses know their log-probability under the reference."""

    rows: Sequence[Any]  # as they were prepared
    values: np.ndarray  # log-probabilities of all rows' responses, nats, float32, in their order
    starts: np.ndarray  # index of each row's first response in `values`, then their number

    def __len__(self) -> int:
        return len(self.rows)

    def row_at(self, index: int) -> Any:
        position = range(len(self))[index]
        row = self.rows[position]
        values = self.values[self.starts[position] : self.starts[position + 1]]
        return replace(row, values={**row.values, "reference": values.tolist()})


def cached_reference(
    config: DPOConfig,
    policy: Policy,
    engine: Engine,
    stream: RowStream,
    held_out: Sequence[Example],
    *,
    run: Run,
) -> tuple[RowStream, Sequence[Any]]:
    """Training and held-out rows with the log-probabilities of the config's reference, from disk or computed now.

    The reference is loaded where numbers are missing, before the policy has gradients or optimizer state, and freed
    again.
    """
    assert isinstance(stream, Stream)  # streamed rows are refused with the config
    group = engine.process_group
    precision = config.training.precision
    folder = Path(config.reference_cache or Path(config.output) / "reference_log_probs")
    weights = weights_key(config.reference or config.policy, config.weights) if group.is_main else None
    weights = group.broadcast_object(weights)

    @cache
    def reference() -> LogProbModel:
        return reference_of(policy, config.reference, engine, bases=SharedWeights(config.weights, shared=False))

    def referenced(rows: Sequence[Example], name: str) -> Sequence[Any]:
        if not rows:
            return rows
        key, starts = rows_key(rows)
        path = folder / f"{hash_of([VERSION, weights, key, precision])[:32]}.npz"
        values = group.broadcast_object(_read(path, int(starts[-1])) if group.is_main else None)
        if isinstance(values, np.ndarray):
            run.note(f"reference: log-probabilities of {len(rows):,} {name} rows are read from {path}")
            return ReferencedRows(rows, values, starts)
        if values is not None:
            run.note(f"reference: {values}; it is computed again")
            if group.is_main and path.is_dir():
                rename_corrupt(path)
        to_batches = partial(collate_for(policy.model, collate), micro_batch_tokens=config.training.tokens_per_forward)
        values = compute_log_probs(reference(), engine, rows, starts, to_batches)
        if group.is_main:
            write_atomic(path, partial(_write, values))
        group.barrier()
        run.note(f"reference: log-probabilities of {len(rows):,} {name} rows are computed, and kept in {path}")
        return ReferencedRows(rows, values, starts)

    known = copy(stream)
    known.rows = referenced(stream.rows, "training")
    return known, referenced(held_out, "held-out")


def weights_key(source: str, weights: WeightsConfig) -> str:
    """A hash of how weights are held and of the files of a checkpoint, and of the models under its adapters."""
    directories = [find_directory(source)]
    while is_adapter(directories[-1]):
        directories.append(find_base(directories[-1]))
    return hash_of([[directory_hash(directory) for directory in directories], asdict(weights)])


def rows_key(rows: Sequence[Example]) -> tuple[str, np.ndarray]:
    """Hash of all responses' tokens and masks; the index of each row's first response, then the number of responses."""
    digest = hashlib.sha256()
    starts = np.zeros(len(rows) + 1, np.int64)
    for index in range(len(rows)):
        row = rows[index]
        starts[index + 1] = starts[index] + len(row.documents)
        for ids, mask in zip(row.documents, row.masks, strict=True):
            digest.update(np.array([len(ids), *ids], np.int32).tobytes())
            digest.update(np.array(mask, np.bool_).tobytes())
    return digest.hexdigest(), starts


def compute_log_probs(
    reference: LogProbModel,
    engine: Engine,
    rows: Sequence[Example],
    starts: np.ndarray,
    to_batches: Callable[[Sequence[Example]], Sequence[Batch]],
) -> np.ndarray:
    """Log-probabilities of all rows' responses, each rank computing its share; float32, in their order."""
    values = np.full(int(starts[-1]), np.nan, np.float32)
    group = engine.process_group

    @torch.no_grad()
    def own_share(documents: Sequence[Example]) -> Iterator[tuple[int, float]]:
        for batch in joint_batches(shard_rows(documents, to_batches, group.rank, group.size), engine):
            moved: Any = unwrap_batch(batch.to(group.device))
            log_probs = sequence_log_probs(reference, moved).float().tolist()
            if not isinstance(batch, ZeroWeightBatch):
                yield from zip(map(int, batch.row_ids), log_probs, strict=True)

    step = CACHED_ROWS * group.size
    for first in range(0, len(rows), step):  # few rows of a table are in memory at a time
        documents = [
            Example.single(ids, mask, str(position), row.source)
            for index, row in enumerate(rows[first : first + step], first)
            for position, (ids, mask) in enumerate(zip(row.documents, row.masks, strict=True), int(starts[index]))
        ]
        for part in group.gather_objects(dict(own_share(documents))):
            values[list(part.keys())] = list(part.values())
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        row = rows[int(np.searchsorted(starts, bad[0], side="right")) - 1]
        raise UserError(f"reference: its log-probability of {row.row_id} is not finite; check its weights")
    return values


def _write(values: np.ndarray, path: Path) -> None:
    with open(path, "wb") as file:  # a zip file, which has a checksum
        np.savez(file, values=values)


def _read(path: Path, count: int) -> np.ndarray | str | None:
    """The numbers of a file; None where there is none, a message where it is damaged."""
    if not os.path.lexists(path):
        return None
    try:
        values = np.load(path, allow_pickle=False)["values"]
    except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile, MemoryError, OverflowError) as error:
        return f"{path}: cannot be read ({error})"
    return values if values.shape == (count,) else f"{path}: it holds other numbers"

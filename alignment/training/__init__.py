"""Training: the optimizer step, its backends, the loop around it and the files of a run. No losses here."""

from alignment.training.engine import Engine, NonFiniteError
from alignment.training.loop import fit, held_out_metrics, load_run_state, save_run_state
from alignment.training.optim import OptimConfig, learning_rate_at
from alignment.training.run.checkpoints import latest_checkpoint, restore_checkpoint, save_checkpoint
from alignment.training.run.directory import Run
from alignment.training.settings import TrainingConfig
from alignment.training.terms import Collate, LossFn, LossSum, Term, ZeroWeightBatch, shard_rows

__all__ = [
    "Collate",
    "Engine",
    "LossFn",
    "LossSum",
    "NonFiniteError",
    "OptimConfig",
    "Run",
    "Term",
    "TrainingConfig",
    "ZeroWeightBatch",
    "fit",
    "held_out_metrics",
    "latest_checkpoint",
    "learning_rate_at",
    "load_run_state",
    "restore_checkpoint",
    "save_checkpoint",
    "save_run_state",
    "shard_rows",
]

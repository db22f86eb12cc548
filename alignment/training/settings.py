"""Settings of every training loop. The optimizer's settings are in optim.py."""

import math
from dataclasses import dataclass, field
from typing import Literal

from alignment.files import byte_count
from alignment.training.early_stopping import EarlyStopping, is_lower_better

MOST_EPOCHS = 1_000_000
MOST_ROWS = 10_000_000


@dataclass(frozen=True)
class TrackingConfig:
    """The project, name, group and tags under which trackers file a run.

    Attributes:
        project: None: the tracker's own variable (WANDB_PROJECT), else alignment. mlflow and aim call it an experiment.
        name: of the run; None: WANDB_NAME or its like, else stage and output directory, such as sft-tiny.
        group: of runs, with wandb.
        tags: with wandb and clearml.
    """

    project: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch size, precision, memory, checkpoints and logs of a run.

    Attributes:
        epochs: passes over the rows; ignored where max_steps is set.
        max_steps: updates of the whole run.
        batch_size: rows per update over all ranks.
        micro_batch_tokens: tokens per forward on one rank; a memory setting that changes no result. auto: the largest
            number that fits, found at the start of the run, whose config.yaml then holds it.
        seed: of data order, initialization and dropout.
        precision: of the computation; weights and optimizer state are float32 with both.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        keep_activations: what is not recomputed even so: nothing (least memory), attention's outputs, or those of all
            matrix products too (least recomputation).
        share_prompts: compute the prompt of a pair, or of several responses, once for all of them; a matter of speed, which
            changes no result but for rounding. Where dropout acts, the responses share what it drops from the prompt.
        compile: run the model's blocks through torch.compile, in training and in PPO's sampling; the first update waits for
            the compiler.
        save_every_steps: updates between two checkpoints. auto: a tenth of the run, or ten minutes where those are sooner,
            but ten seconds or 50 times as long as a save takes apart. 0 saves one only when a signal stops the run. A
            checkpoint takes 12 bytes for each trained weight: 96 GB for 8 billion.
        keep_last_checkpoints: number of newest checkpoints that stay on disk; with save_every_steps: auto, a finished run
            keeps that of its end alone.
        max_shard_size: of a file of the finished model, such as 5GB; a larger model is written in several, with an index.
        evaluate_every_steps: 0 evaluates only after the last update.
        keep_best: metric of the evaluation, such as held_out_loss or held_out_accuracy, by which the best weights are kept
            as a checkpoint of their own; model/ then holds them in place of the last ones. None: the metric of
            early_stopping where that is set, else the last weights are the result.
        early_stopping: end the run where the evaluation no longer improves; None runs to the end.
        ema_decay: keep an exponential moving average of the trained weights with this decay, such as 0.999; it is what is
            evaluated and written to model/. It takes the memory of another copy of the trained weights.
        resume: continue from the newest complete checkpoint in the run's directory. A finished run goes on where epochs or
            max_steps has grown and it kept the checkpoint of its end.
        again: repeat a run that is finished, or was stopped, from the beginning; its checkpoints and logs are deleted.
        trackers: further trackers known to Accelerate, such as wandb, mlflow or trackio.
        tracking: where these trackers file the run.
    """

    epochs: float | None = 1
    max_steps: int | None = None
    batch_size: int = 32
    micro_batch_tokens: int | Literal["auto"] = 8192
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_checkpointing: bool = False
    keep_activations: Literal["nothing", "attention", "products"] = "nothing"
    share_prompts: bool = True
    compile: bool = False
    save_every_steps: int | Literal["auto"] = "auto"
    keep_last_checkpoints: int = 2
    max_shard_size: str = "5GB"
    evaluate_every_steps: int = 0
    keep_best: str | None = None
    early_stopping: EarlyStopping | None = None
    ema_decay: float | None = None
    resume: bool = True
    again: bool = False
    trackers: list[str] = field(default_factory=list)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("set epochs or max_steps: with neither the run has no end")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.epochs is not None and self.epochs <= 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs must be at most {MOST_EPOCHS:,}, got {self.epochs}; max_steps counts updates")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2**63, got {self.seed}")
        for name, least in (("batch_size", 1), ("micro_batch_tokens", 1), ("keep_last_checkpoints", 1)):
            if getattr(self, name) != "auto" and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.batch_size > MOST_ROWS:  # rows of a batch are listed, also where they come from several epochs
            raise ValueError(f"batch_size must be at most {MOST_ROWS:,} rows, got {self.batch_size}")
        if self.compile and self.gradient_checkpointing and self.keep_activations == "products":
            raise ValueError(
                "keep_activations: products cannot see the products inside the graphs of compile; set it to attention or "
                "nothing, or compile to false"
            )
        try:
            byte_count(self.max_shard_size)
        except ValueError as error:
            raise ValueError(f"max_shard_size: {error}") from error
        for name in ("save_every_steps", "evaluate_every_steps"):
            if getattr(self, name) != "auto" and getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}; 0 is off")
        self._check_selection()

    def _check_selection(self) -> None:
        """Refuse settings of the evaluation that leave it without effect."""
        if self.keep_best is not None:
            is_lower_better(self.keep_best)
        if self.best_metric is not None and not self.evaluate_every_steps:
            name = "early_stopping" if self.early_stopping is not None else "keep_best"
            raise ValueError(f"{name} needs evaluations during the run: set evaluate_every_steps, such as 50")
        if self.early_stopping is not None and self.keep_best not in (None, self.early_stopping.metric):
            raise ValueError(
                f"keep_best ({self.keep_best}) and early_stopping.metric ({self.early_stopping.metric}) must be the same; "
                "leave keep_best out"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be above 0 and below 1, got {self.ema_decay}; 0.999 is usual")

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best weights are chosen; None: the last ones are the result."""
        return self.early_stopping.metric if self.early_stopping is not None else self.keep_best

    @property
    def tokens_per_forward(self) -> int:
        """`micro_batch_tokens` as a number.

        Raises:
            ValueError: it is still auto: `alignment.planning.resolve.resolve_micro_batch` has not been called.
        """
        if self.micro_batch_tokens == "auto":
            raise ValueError(
                "training.micro_batch_tokens is auto: the commands resolve it; from Python, pass the config through "
                "alignment.planning.resolve.resolve_micro_batch first"
            )
        return self.micro_batch_tokens

    def steps(self, rows: int) -> int:
        """Updates of the whole run over `rows` rows; batches run across the ends of epochs."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(max(1, round(rows * (self.epochs or 0))) / self.batch_size)

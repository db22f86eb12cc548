"""Settings of every training loop. The optimizer's settings are in optim.py."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Interval

from alignment.files import byte_count
from alignment.ragged import has_apple_gpu, has_bfloat16
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Settings, refusal

Precision = Literal["fp32", "tf32", "bf16", "auto"]
MOST_EPOCHS = 1_000_000  # more are counted by max_steps
MOST_ROWS = 10_000_000  # of a batch: they are listed, also where they come from several epochs
# The words of metric names that say which direction is better; none is in both.
LOWER = frozenset({"loss", "nll", "perplexity", "error"})
HIGHER = frozenset({"accuracy", "score", "rate", "f1", "match", "matthews", "precision", "recall", "margin", "reward"})


@dataclass(frozen=True)
class EarlyStopping(Settings):
    """When a run ends before its last update.

    Attributes:
        metric: of the evaluation during the run, such as held_out_loss or held_out_accuracy. Losses, perplexities and
            errors are better lower; accuracies, rates, scores, rewards and margins higher.
        patience: evaluations in a row without an improvement after which the run ends.
        min_delta: an improvement is more than this.
    """

    metric: str = "held_out_loss"
    patience: PositiveInt = 3
    min_delta: NonNegativeFloat = 0.0

    RULES = (Rule("metric", lambda c: refusal(is_lower_better, c.metric)),)


def is_lower_better(metric: str) -> bool:
    """True where a smaller value of a metric is better, by the words of its name; a source may follow after a /."""
    words = set(metric.split("/")[0].split("_"))
    if bool(words & LOWER) == bool(words & HIGHER):
        raise ValueError(
            f"{metric!r} does not say whether lower or higher is better; its name must have one of the words "
            f"{', '.join(sorted(LOWER))} (lower) or {', '.join(sorted(HIGHER))} (higher), such as held_out_loss"
        )
    return bool(words & LOWER)


@dataclass(frozen=True)
class TrackingConfig(Settings):
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


def fast_precision() -> Precision:
    """bf16 where this machine's GPU or CPU has instructions for it, else fp32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32"
    return "bf16" if has_bfloat16() and not has_apple_gpu() else "fp32"


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """Length, batch size, precision, memory, checkpoints and logs of a run.

    Attributes:
        epochs: passes over the rows; ignored where max_steps is set.
        max_steps: updates of the whole run.
        batch_size: rows per update over all ranks.
        micro_batch_tokens: tokens per forward on one rank; a memory setting that changes no result, but for the
            load-balancing loss of a mixture of experts, which is that of each forward. auto: the largest number that
            fits, found at the start of the run, whose config.yaml then holds it.
        seed: of data order, initialization and dropout.
        precision: of the computation; weights and optimizer state are float32 with each. tf32: float32 whose products a
            GPU from Ampere on rounds to 10 bits, many times as fast. auto: bf16 where the GPU or CPU here has
            instructions for it, else fp32; config.yaml then holds which.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        keep_activations: what is not recomputed even so: nothing (least memory), attention's outputs, or those of all
            matrix products too (least recomputation).
        share_prompts: compute the prompt of a pair, or of several responses, once for all of them; a matter of speed,
            which changes no result but for rounding. Where dropout acts, the responses share what it drops from the
            prompt.
        compile: run the model's blocks through torch.compile, in training and in PPO's sampling; the first update waits
            for the compiler.
        save_every_steps: updates between two checkpoints. auto: a tenth of the run, or ten minutes where those are
            sooner, but ten seconds or 50 times as long as the last save took apart. 0 saves one only when a signal
            stops the run. A checkpoint takes 12 bytes for each trained weight: 96 GB for 8 billion.
        keep_last_checkpoints: number of newest checkpoints that stay on disk; with save_every_steps: auto, a finished
            run keeps that of its end alone.
        max_shard_size: of a file of the finished model, such as 5GB; a larger model is written in several, with an
            index.
        evaluate_every_steps: 0 evaluates only after the last update.
        keep_best: metric of the evaluation, such as held_out_loss or held_out_accuracy, by which the best weights are
            kept as a checkpoint of their own; model/ then holds them in place of the last ones. None: the metric of
            early_stopping where that is set, else the last weights are the result.
        early_stopping: end the run where the evaluation no longer improves; None runs to the end.
        ema_decay: keep an exponential moving average of the trained weights with this decay, such as 0.999; it is what
            is evaluated and written to model/. It takes the memory of another copy of the trained weights.
        resume: continue from the newest complete checkpoint in the run's directory. A finished run goes on where epochs
            or max_steps has grown and it kept the checkpoint of its end.
        again: repeat a run that is finished, or was stopped, from the beginning; its checkpoints and logs are deleted.
        trackers: further trackers known to Accelerate, such as wandb, mlflow or trackio.
        tracking: where these trackers file the run.
    """

    epochs: Annotated[float, Interval(gt=0, le=MOST_EPOCHS)] | None = 1
    max_steps: PositiveInt | None = None
    batch_size: Annotated[int, Interval(ge=1, le=MOST_ROWS)] = 32
    micro_batch_tokens: PositiveInt | Literal["auto"] = 8192
    seed: Annotated[int, Interval(ge=0, lt=2**63)] = 0
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    keep_activations: Literal["nothing", "attention", "products"] = "nothing"
    share_prompts: bool = True
    compile: bool = False
    save_every_steps: NonNegativeInt | Literal["auto"] = "auto"
    keep_last_checkpoints: PositiveInt = 2
    max_shard_size: str = "5GB"
    evaluate_every_steps: NonNegativeInt = 0
    keep_best: str | None = None
    early_stopping: EarlyStopping | None = None
    ema_decay: Annotated[float, Interval(gt=0, lt=1)] | None = None
    resume: bool = True
    again: bool = False
    trackers: list[str] = field(default_factory=list)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    RULES = (
        Rule(
            "max_steps", lambda c: c.epochs is None and c.max_steps is None, "or epochs must be set: the run has no end"
        ),
        Rule(
            "keep_activations",
            lambda c: c.keep_activations == "products" and c.compile and c.gradient_checkpointing,
            "products cannot see the products inside the graphs of compile; set it to attention or nothing",
        ),
        Rule("max_shard_size", lambda c: refusal(byte_count, c.max_shard_size)),
        Rule("keep_best", lambda c: c.keep_best is not None and refusal(is_lower_better, c.keep_best)),
        Rule(
            "evaluate_every_steps",
            lambda c: c.best_metric is not None and not c.evaluate_every_steps,
            "is 0, and keep_best and early_stopping need evaluations during the run; set it, such as 50",
        ),
        Rule(
            "keep_best",
            lambda c: c.early_stopping is not None and c.keep_best not in (None, c.early_stopping.metric),
            "({self.keep_best}) and early_stopping.metric ({self.early_stopping.metric}) must be the same; leave it "
            "out",
        ),
    )

    def __post_init__(self) -> None:
        if self.precision == "auto":
            object.__setattr__(self, "precision", fast_precision())
        super().__post_init__()

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best weights are chosen; None: the last ones are the result."""
        return self.early_stopping.metric if self.early_stopping is not None else self.keep_best

    @property
    def tokens_per_forward(self) -> int:
        """`micro_batch_tokens` as a number.

        Raises:
            ValueError: it is still auto: `alignment.planning.plan.resolve_micro_batch` has not been called.
        """
        if self.micro_batch_tokens == "auto":
            raise ValueError(
                "training.micro_batch_tokens is auto: the commands resolve it; from Python, pass the config through "
                "alignment.planning.plan.resolve_micro_batch first"
            )
        return self.micro_batch_tokens

    def steps(self, rows: int) -> int:
        """Updates of the whole run over `rows` rows; batches run across the ends of epochs."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(max(1, round(rows * (self.epochs or 0))) / self.batch_size)

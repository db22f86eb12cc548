"""One training run of ours or of trl in a process of its own, for bench.py: prints one JSON line with what it took.

    python scripts/bench_trainers.py alignment sft CHECKPOINT ROWS --steps 12
    python scripts/bench_trainers.py trl dpo CHECKPOINT ROWS --setting precompute_ref_log_probs=true

Both read the same rows from the same checkpoint, batch 32 rows (or --batch) per update and use AdamW in one micro-batch
size each; a warm-up of two updates is left out of the speed. Seconds to the first update count from the start of Python.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

WARM_UP = 2  # updates


def main() -> None:
    """Train, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("impl", choices=["alignment", "trl"])
    parser.add_argument("kind", choices=["sft", "reward", "dpo"])
    parser.add_argument("checkpoint")
    parser.add_argument("rows", type=Path, help="a .jsonl of demonstrations or comparisons")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="rows of an update")
    parser.add_argument("--micro-batch", type=int, default=0, help="rows (trl) of a forward; 0: all of the update's")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--setting", action="append", default=[], help="KEY=JSON of the run's config")
    arguments = parser.parse_args()
    run = {"alignment": run_ours, "trl": run_trl}[arguments.impl]
    with tempfile.TemporaryDirectory() as folder:
        clock = run(arguments, Path(folder))
    print(json.dumps(clock.figures()))


class Clock:
    """Notes the end of each update and what was trained in it."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[float] = []
        self.rows: list[float] = []

    def note(self, tokens: float, rows: float) -> None:
        """An update has ended."""
        self.ends.append(time.time())
        self.tokens.append(tokens)
        self.rows.append(rows)

    def figures(self) -> dict[str, float]:
        """Speed after the warm-up, seconds to the first update, peak memory of the process in MB."""
        seconds = self.ends[-1] - self.ends[WARM_UP - 1]
        return {
            "seconds": seconds,
            "tokens_per_second": sum(self.tokens[WARM_UP:]) / seconds,
            "rows_per_second": sum(self.rows[WARM_UP:]) / seconds,
            "first_step_seconds": self.ends[0] - psutil.Process().create_time(),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def run_ours(arguments: argparse.Namespace, folder: Path) -> Clock:
    """A run of the library's own command."""
    from alignment.algorithms import dpo, reward, sft
    from alignment.data.config import DataConfig
    from alignment.training import Engine, OptimConfig, TrainingConfig

    clock, update = Clock(), Engine.update

    def timed(engine: Engine, *terms: Any) -> dict[str, float]:
        metrics = update(engine, *terms)
        clock.note(sum(sum(batch.lengths) for term in terms for batch in term.micro_batches), arguments.batch)
        return metrics

    module, config = {
        "sft": (sft, sft.SFTConfig),
        "reward": (reward, reward.RewardConfig),
        "dpo": (dpo, dpo.DPOConfig),
    }[arguments.kind]
    training = TrainingConfig(
        max_steps=arguments.steps, save_every_steps=0, batch_size=arguments.batch, precision=arguments.precision
    )
    with patch.object(Engine, "update", timed):
        module.run(
            config(
                policy=arguments.checkpoint, data=DataConfig(train=str(arguments.rows), max_length=arguments.max_length),
                output=str(folder / "run"), training=training, optim=OptimConfig(learning_rate=1e-5), **settings_of(arguments),
            )
        )  # fmt: skip
    return clock


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line."""
    return {key: json.loads(value) for key, value in (setting.split("=", 1) for setting in arguments.setting)}


def run_trl(arguments: argparse.Namespace, folder: Path) -> Clock:
    """The same run in trl."""
    import datasets
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    trainer_class, config_class = {
        "sft": (SFTTrainer, SFTConfig),
        "reward": (RewardTrainer, RewardConfig),
        "dpo": (DPOTrainer, DPOConfig),
    }[arguments.kind]
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    columns = ("prompt", "completion", "chosen", "rejected")
    data = datasets.Dataset.from_list([{key: row[key] for key in row if key in columns} for row in rows])
    micro = arguments.micro_batch or arguments.batch
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": micro, "max_steps": arguments.steps,
        "gradient_accumulation_steps": arguments.batch // micro, "learning_rate": 1e-5, "report_to": [],
        "logging_steps": 1000, "save_strategy": "no", "bf16": arguments.precision == "bf16",
        "use_cpu": not torch.cuda.is_available(), "gradient_checkpointing": False,
        "max_length": arguments.max_length, "disable_tqdm": True,
    }  # fmt: skip
    settings |= settings_of(arguments)
    model: Any = arguments.checkpoint
    if arguments.kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    clock, seen = Clock(), {"tokens": 0.0, "rows": 0.0}

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note(seen["tokens"], seen["rows"])
            seen.update(tokens=0.0, rows=0.0)

    class Counting(trainer_class):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            ids = inputs["input_ids"]
            seen["tokens"] += float(ids.numel() if mask is None else mask.sum())
            seen["rows"] += len(ids) / (1 if arguments.kind == "sft" else 2)
            return super().compute_loss(model, inputs, *more, **named)

    trainer = Counting(
        model=model, args=config_class(**settings), train_dataset=data, callbacks=[Ends()],
        processing_class=AutoTokenizer.from_pretrained(arguments.checkpoint),
    )  # fmt: skip
    trainer.train()
    return clock


if __name__ == "__main__":
    main()

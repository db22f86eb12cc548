"""Speed of training beside trl, on the same weights, rows, machine and run; JSON lines on standard output.

    python scripts/bench.py [--only sft reward dpo] [--sizes nano micro gpt2] [--rows world|hh] [--rounds N]

Runs in processes of their own take turns: ours, trl as it comes, and trl at each setting that could make it faster (packing,
rows grouped by length, reference log-probabilities computed beforehand, as ours can too). Both read the same rows from the
same checkpoint, 32 rows an update. Figures are medians over rounds, with the lowest and the highest: tokens and rows (pairs)
per second after two updates, seconds from the start of Python to the end of the first update (prepared data lies in ours'
cache from a round that is not counted), peak memory, and MFU: 6 operations per weight of a matrix product and token, 2 more
for DPO's reference where it runs beside the policy, over what a large product reaches in the same run. Tokens are real ones:
padding earns nothing, and a prompt that we compute once for both sides of a pair counts twice. Forward, backward and
decoding beside transformers are in bench_model.py. `ratios` above 1: ours is faster, or takes more seconds and memory.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "micro": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    "gpt2": {  # GPT-2 small; its vocabulary is what the rows give of 50,257
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocabulary": 8192,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0
    },
    "1b": {  # for a GPU
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32
    },
}  # fmt: skip


KINDS = ("sft", "reward", "dpo")
WARM_UP = 2  # updates
BATCH, MAX_LENGTH = 32, 512  # rows of an update, tokens of a row
SHORT = 1000  # characters; below 512 tokens of the small vocabularies here
KEYS = ("tokens_per_second", "rows_per_second", "first_step_seconds", "peak_mb")
PACKING = {"packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 4}
MICRO_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
BEST: dict[str, dict[str, dict[str, Any]]] = {  # trl's settings that could make it faster
    "sft": {"packing": PACKING, "grouped by length": {"train_sampling_strategy": "group_by_length"}},
    "reward": {"micro-batch 8": MICRO_BATCH},
    "dpo": {"reference precomputed": {"precompute_ref_log_probs": True}},
}
OURS = {"sft": {}, "reward": {}, "dpo": {"reference precomputed": {"reference_log_probs": "cache"}}}


def main() -> None:
    """Run the chosen benchmarks."""
    from bench_model import matrix_rate

    from alignment.hotel_world.datasets import RowCounts, write_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano"])
    parser.add_argument("--rows", choices=["world", "hh"], default="world")
    parser.add_argument("--hh-rows", type=int, default=1200, help="how many; all have a reference computed")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="ours and trl's")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in a process of its own: the settings of one run, as JSON
    options = parser.parse_args()
    if options.run:
        settings = json.loads(options.run)
        with tempfile.TemporaryDirectory() as folder:
            print(
                json.dumps({"alignment": run_ours, "trl": run_trl}[settings["impl"]](settings, Path(folder)).figures())
            )
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = matrix_rate(device, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ALIGNMENT_CACHE"] = str(folder / "cache")
        files = write_world(folder / "world", sizes=RowCounts(pretrain=800, demonstrations=600, comparisons=600))
        rows = {kind: files["demonstrations" if kind == "sft" else "comparisons"] for kind in KINDS}
        text = files["pretrain"]
        if options.rows == "hh":
            rows = {kind: hh_rows(kind, folder, options.hh_rows) for kind in KINDS}
            text = rows["sft"]
        for size in options.sizes:
            checkpoint = make_checkpoint(folder / size, text, size)
            for kind in options.only:
                bench_trainers(kind, size, checkpoint, rows[kind], options, rate)


def make_checkpoint(directory: Path, text: Path, size: str) -> Path:
    """A random model of this size with a byte-level BPE of the texts in a file of rows."""
    from alignment.data.tokenizers.load import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe
    from alignment.models.build import build_language_model
    from alignment.models.huggingface.checkpoint import save_model

    rows = [json.loads(line) for line in text.read_text().splitlines()]
    shape = SIZES[size]
    tokenizer = train_bpe((" ".join(map(str, row.values())) for row in rows), shape.get("vocabulary", 640))
    config = {key: value for key, value in shape.items() if key != "vocabulary"}
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **config}
    if config["model_type"] == "llama":
        config |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
        config |= {"num_key_value_heads": config["num_attention_heads"]}
    torch.manual_seed(0)
    directory.mkdir(parents=True)
    save_model(build_language_model(config), directory)
    save_tokenizer(tokenizer, directory)
    return directory


def bench_trainers(
    kind: str, size: str, checkpoint: Path, rows: Path, options: argparse.Namespace, rate: float
) -> None:
    """Runs of ours and of trl by turns, in processes of their own; a line of figures for each."""
    runs: dict[str, dict[str, Any]] = {"alignment": {}, "trl": {}}
    runs |= {f"trl {name}": settings for name, settings in BEST[kind].items()}
    runs |= {f"alignment {name}": settings for name, settings in OURS[kind].items()}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    common = {"kind": kind, "checkpoint": str(checkpoint), "rows": str(rows), "steps": options.steps}
    for number in range(options.rounds + 1):
        for name, own in runs.items():
            impl = name.split()[0]
            if number == 0 and impl == "trl":
                continue  # the round that is not counted only fills our cache of prepared rows (and of the reference)
            measured = in_process({**common, "impl": impl, "precision": options.precision, "own": own})
            if number:
                figures[name].append(measured)
    weights = matrix_weights(checkpoint)
    for name, measured in figures.items():
        row: dict[str, Any] = {"bench": kind, "impl": name, "size": size, "rows": options.rows}
        row |= {"threads": torch.get_num_threads(), "precision": options.precision, "rounds": len(measured)}
        for key in KEYS:
            values = [one[key] for one in measured]
            row[key] = round(statistics.median(values), 2)
            row[f"{key}_spread"] = [round(min(values), 2), round(max(values), 2)]
        operations = weights * (8 if kind == "dpo" and "precomputed" not in name else 6)
        row["mfu"] = round(row["tokens_per_second"] * operations / rate, 3)
        if name.startswith("trl"):  # beside our own run with the same idea, where there is one
            ours = name.replace("trl", "alignment", 1)
            row["ratios"] = ratios(figures.get(ours, figures["alignment"]), measured)
        print(json.dumps(row), flush=True)


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds of ours over theirs."""
    pairs = list(zip(ours, theirs, strict=True))
    return {key: round(statistics.median(a[key] / b[key] for a, b in pairs), 3) for key in KEYS}


def in_process(settings: dict[str, Any]) -> dict[str, float]:
    """Figures of one run in a process of its own."""
    command = [sys.executable, __file__, "--run", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def matrix_weights(checkpoint: Path) -> int:
    """Numbers in the matrices that every token is multiplied with; the embedding counts once, as the head."""
    from alignment.models.huggingface.checkpoint import load_language_model

    model = load_language_model(checkpoint)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def hh_rows(kind: str, folder: Path, count: int) -> Path:
    """Rows of HH-RLHF under ALIGNMENT_DATA that are short enough to be read whole: pairs, or the chosen side of each."""
    from alignment.data.rows.read import read_rows

    source = Path(os.environ.get("ALIGNMENT_DATA", "../shared/data")) / "hh_rlhf"
    files = sorted(source.rglob("*helpful-base*.jsonl.gz")) or sorted(source.rglob("*.jsonl.gz"))
    if not files:
        raise SystemExit(f"{source}: no HH-RLHF rows here; set ALIGNMENT_DATA, or take --rows world")
    target = folder / f"hh_{kind}.jsonl"
    with target.open("w") as file:
        pairs = read_rows(str(files[0]), "comparisons", on_bad_row="skip")[0]
        short = (row for row in pairs if len(row.prompt) + max(len(row.chosen), len(row.rejected)) < SHORT)
        for row in islice(short, count):
            pair = {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}
            demonstration = {"prompt": row.prompt, "completion": row.chosen}
            file.write(json.dumps(demonstration if kind == "sft" else pair) + "\n")
    return target


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


def run_ours(settings: dict[str, Any], folder: Path) -> Clock:
    """A run of the library's own command."""
    from alignment.algorithms import dpo, reward, sft
    from alignment.data.config import DataConfig
    from alignment.training import Engine, OptimConfig, TrainingConfig

    clock, update = Clock(), Engine.update

    def timed(engine: Engine, *terms: Any) -> dict[str, float]:
        metrics = update(engine, *terms)
        clock.note(sum(sum(batch.lengths) for term in terms for batch in term.micro_batches), BATCH)
        return metrics

    configs = {"sft": (sft, sft.SFTConfig), "reward": (reward, reward.RewardConfig), "dpo": (dpo, dpo.DPOConfig)}
    module, config = configs[settings["kind"]]
    training = TrainingConfig(
        max_steps=settings["steps"], save_every_steps=0, batch_size=BATCH, precision=settings["precision"]
    )
    with patch.object(Engine, "update", timed):
        module.run(
            config(
                policy=settings["checkpoint"], data=DataConfig(train=settings["rows"], max_length=MAX_LENGTH),
                output=str(folder / "run"), training=training, optim=OptimConfig(learning_rate=1e-5), **settings["own"]
            )
        )  # fmt: skip
    return clock


def run_trl(settings: dict[str, Any], folder: Path) -> Clock:
    """The same run in trl."""
    import datasets
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    kind, model = settings["kind"], settings["checkpoint"]
    trainer_class, config_class = {
        "sft": (SFTTrainer, SFTConfig),
        "reward": (RewardTrainer, RewardConfig),
        "dpo": (DPOTrainer, DPOConfig),
    }[kind]
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    columns = ("prompt", "completion", "chosen", "rejected")
    data = datasets.Dataset.from_list([{key: row[key] for key in row if key in columns} for row in rows])
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": settings["steps"],
        "learning_rate": 1e-5, "report_to": [], "logging_steps": 1000, "save_strategy": "no",
        "bf16": settings["precision"] == "bf16", "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False, "max_length": MAX_LENGTH, "disable_tqdm": True, **settings["own"],
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    if kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    clock, seen = Clock(), {"tokens": 0.0, "rows": 0.0}

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note(seen["tokens"], seen["rows"])
            seen.update(tokens=0.0, rows=0.0)

    class Counting(trainer_class):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
            seen["tokens"] += float(ids.numel() if mask is None else mask.sum())
            seen["rows"] += len(ids) / (1 if kind == "sft" else 2)
            return super().compute_loss(model, inputs, *more, **named)

    arguments: dict[str, Any] = {"args": config_class(**options), "train_dataset": data, "processing_class": tokenizer}
    Counting(model=model, callbacks=[Ends()], **arguments).train()
    return clock


if __name__ == "__main__":
    main()

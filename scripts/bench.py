"""Speed of training beside trl, on the same weights, rows, machine and run; JSON lines on standard output.

    python scripts/bench.py [--only sft reward dpo] [--sizes nano micro gpt2] [--rows world|hh] [--rounds N]
    python scripts/bench.py --policy build/bases/smollm2 --adapters lora none --precision fp32 bf16 --rows filled \
        --batch 4 --steps 5 --rounds 1 --plain

Runs in processes of their own take turns: ours, trl as it comes, and trl at each setting that could make it faster (packing,
rows grouped by length, reference log-probabilities computed beforehand, as ours can too); --plain leaves these settings out.
Both read the same rows from the same checkpoint, 32 rows an update or --batch. --policy is the directory of a real model; of
several --precision all take turns in one run; `filled` rows are all about 450 tokens long. Figures are medians over rounds,
with the lowest and the highest: tokens and rows (pairs) per second after two updates, by the clock, and by the process's time
of the processor, all threads together, which other work on the machine moves less; seconds from the start of Python to the
end of the first update (without --plain, prepared data lies in ours' cache from a round that is not counted), peak memory,
and MFU, on a CPU by the processor's time of one thread: 6 operations per weight of a matrix product and token, 4 under LoRA,
2 more for DPO's reference where it runs beside the policy, over what a large product reaches in the same run, precision and
threads. Tokens are real ones: padding earns nothing, and a prompt that we compute once for both sides of a pair counts twice.
Forward, backward and decoding beside transformers are in bench_model.py. `ratios` above 1: ours is faster, or takes more
seconds and memory.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measuring
import psutil
import torch

LLAMA = {"model_type": "llama", "max_position_embeddings": 512, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "nano": LLAMA | {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "micro": LLAMA | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    "gpt2": {  # GPT-2 small; its vocabulary is what the rows give of 50,257
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "1b": LLAMA | {  # for a GPU
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    },
}  # fmt: skip
WARM_UP = 2  # updates
BATCH, MAX_LENGTH = 32, 512  # rows of an update, tokens of a row
PAIR = ("prompt", "chosen", "rejected")
HH_ROWS = 1200  # all have a reference computed
SHORT = 1000  # characters; below 512 tokens of the small vocabularies here
FILLED = 1500  # characters; 450 tokens or so of a real model's vocabulary
RANK, ALPHA = 16, 32  # of LoRA on all linear layers of the blocks
KEYS = ("tokens_per_second", "tokens_per_cpu_second", "rows_per_second", "first_step_seconds", "peak_mb")
PACKING = {"packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 4}
MICRO_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
RUNS: dict[str, dict[str, dict[str, Any]]] = {  # with the settings of each that could make it faster
    "sft": {
        "alignment": {}, "trl": {}, "trl packing": PACKING,
        "trl grouped by length": {"train_sampling_strategy": "group_by_length"},
    },
    "reward": {"alignment": {}, "trl": {}, "trl micro-batch 8": MICRO_BATCH},
    "dpo": {
        "alignment": {}, "trl": {}, "trl reference precomputed": {"precompute_ref_log_probs": True},
        "alignment reference precomputed": {"reference_log_probs": "cache"},
    },
}  # fmt: skip


def main() -> None:
    """Run the chosen benchmarks."""
    from alignment.hotel_world.datasets import RowCounts, write_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano"])
    parser.add_argument("--policy", help="directory of a model, in place of --sizes")
    parser.add_argument("--adapters", nargs="+", choices=["none", "lora"], default=["none"])
    parser.add_argument("--plain", action="store_true", help="without the settings that could make either faster")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of an update")
    parser.add_argument("--rows", choices=["world", "hh", "filled"], default="world")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"], help="ours and trl's")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    rates = {precision: measuring.matrix_rate(device, types[precision]) for precision in options.precision}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ALIGNMENT_CACHE"] = str(folder / "cache")
        files = write_world(folder / "world", sizes=RowCounts(pretrain=800, demonstrations=600, comparisons=600))
        rows = {kind: files["demonstrations" if kind == "sft" else "comparisons"] for kind in RUNS}
        text = files["pretrain"]
        if options.rows == "hh":
            rows = {kind: hh_rows(kind, folder, HH_ROWS) for kind in RUNS}
            text = rows["sft"]
        if options.rows == "filled":
            rows = {kind: filled_rows(kind, folder, options.batch * options.steps) for kind in RUNS}
        for size in [options.policy] if options.policy else options.sizes:
            checkpoint = Path(size) if options.policy else make_checkpoint(folder / size, text, size)
            weights = measuring.matrix_weights(checkpoint)
            seconds = {precision: weights / rate for precision, rate in rates.items()}
            for kind, adapter in product(options.only, options.adapters):
                settings = {"kind": kind, "checkpoint": str(checkpoint.resolve()), "rows": str(rows[kind])}
                settings |= {"steps": options.steps, "batch": options.batch, "adapter": adapter, "plain": options.plain}
                for row in bench_trainers(settings, options.rounds, seconds):
                    print(json.dumps({**row, "size": size, "rows": options.rows}), flush=True)


def make_checkpoint(directory: Path, text: Path, size: str) -> Path:
    """A random model of this size with a byte-level BPE of the texts in a file of rows."""
    texts = (" ".join(map(str, json.loads(line).values())) for line in text.read_text().splitlines())
    measuring.write_checkpoint(directory, SIZES[size], texts, 8192 if size == "gpt2" else 640)
    return directory


def bench_trainers(settings: dict[str, Any], rounds: int, weight_seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Figures of ours and of trl's runs, which take turns.

    Args:
        weight_seconds: weights over operations a second, of each precision.
    """
    kind, calls = settings["kind"], {}
    for precision, (name, own) in product(weight_seconds, RUNS[kind].items()):
        if own and settings["plain"]:
            continue
        this = {**settings, "precision": precision, "impl": name.split()[0], "own": own}
        calls[name, precision] = partial(measuring.in_process, run, this)
        if name.startswith("alignment") and not settings["plain"]:
            calls[name, precision]()  # not counted: it fills our cache of prepared rows (and of the reference)
    figures, rows = measuring.take_turns(calls, rounds), []
    for (name, precision), measured in figures.items():
        row: dict[str, Any] = {"bench": kind, "impl": name, "threads": torch.get_num_threads()}
        row |= {"adapter": settings["adapter"], "precision": precision, "batch": settings["batch"], "rounds": rounds}
        row |= measuring.medians(measured, KEYS)
        operations = 4 if settings["adapter"] == "lora" else 6
        operations += 2 if kind == "dpo" and "precomputed" not in name else 0
        on_gpu = torch.cuda.is_available()
        speed = row["tokens_per_second"] if on_gpu else row["tokens_per_cpu_second"] * row["threads"]
        row["mfu"] = round(speed * operations * weight_seconds[precision], 3)
        if name.startswith("trl"):  # beside our own run with the same idea, where there is one
            ours = figures.get((name.replace("trl", "alignment", 1), precision), figures["alignment", precision])
            row["ratios"] = measuring.ratios(ours, measured, KEYS)
        rows.append(row)
    return rows


def hh_rows(kind: str, folder: Path, count: int) -> Path:
    """Rows of HH-RLHF under ALIGNMENT_DATA that are short enough to be read whole: pairs, or the chosen side of each."""
    from alignment.data.rows.read import read_rows

    source = Path(os.environ.get("ALIGNMENT_DATA", "../shared/data")) / "hh_rlhf"
    files = sorted(source.rglob("*helpful-base*.jsonl.gz")) or sorted(source.rglob("*.jsonl.gz"))
    if not files:
        raise SystemExit(f"{source}: no HH-RLHF rows here; set ALIGNMENT_DATA, or take --rows world")
    pairs = read_rows(str(files[0]), "comparisons", on_bad_row="skip")[0]
    short = (row for row in pairs if len(row.prompt) + max(len(row.chosen), len(row.rejected)) < SHORT)
    names = {"prompt": "prompt", "completion": "chosen"} if kind == "sft" else {x: x for x in PAIR}
    rows = ({name: getattr(row, column) for name, column in names.items()} for row in islice(short, count))
    return Path(measuring.write_rows(folder / f"hh_{kind}.jsonl", rows))


def filled_rows(kind: str, folder: Path, count: int) -> Path:
    """Rows of about as many tokens as may be read of one, and never more: trl leaves longer pairs out."""
    sentences = [f"The guest of room {i} asked for {i * 7 % 13} towels and a quiet evening." for i in range(200)]
    rows = []
    for number in range(count):
        text = " ".join(sentences[number % 100 :])[:FILLED]
        prompt = f"Tell me about it, guest {number}."
        sides = {"completion": f" {text}"}
        if kind != "sft":
            sides = {"chosen": f" {text}", "rejected": f" Nothing of that kind. {text}"}
        rows.append({"prompt": prompt, **sides})
    return Path(measuring.write_rows(folder / f"filled_{kind}.jsonl", rows))


def run(settings: dict[str, Any]) -> dict[str, float]:
    """Figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return {"alignment": run_ours, "trl": run_trl}[settings["impl"]](settings, Path(folder)).figures()


class Clock:
    """Notes the end of each update and what was trained in it."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, float, float, float]] = []  # end, tokens, rows, processor's seconds

    def note(self, tokens: float, rows: float) -> None:
        """An update has ended."""
        self.updates.append((time.time(), tokens, rows, time.process_time()))

    def figures(self) -> dict[str, float]:
        """Speed after the warm-up, seconds to the first update, peak memory of the process in MB."""
        ends, tokens, rows, processor = zip(*self.updates, strict=True)
        seconds = ends[-1] - ends[WARM_UP - 1]
        return {
            "tokens_per_second": sum(tokens[WARM_UP:]) / seconds,
            "tokens_per_cpu_second": sum(tokens[WARM_UP:]) / (processor[-1] - processor[WARM_UP - 1]),
            "rows_per_second": sum(rows[WARM_UP:]) / seconds,
            "first_step_seconds": ends[0] - psutil.Process().create_time(),
            "peak_mb": measuring.resident("VmHWM") / 2**20,
        }


def run_ours(settings: dict[str, Any], folder: Path) -> Clock:
    """A run of the library's own command."""
    from alignment.adapters.specs import LoRASpec
    from alignment.data.config import DataConfig
    from alignment.pipeline.stages import find_stage
    from alignment.training import Engine, OptimConfig, TrainingConfig

    clock, update = Clock(), Engine.update

    def timed(engine: Engine, *terms: Any) -> dict[str, float]:
        metrics = update(engine, *terms)
        tokens = sum(sum(batch.lengths) for term in terms for batch in term.micro_batches)
        clock.note(tokens, settings["batch"])
        return metrics

    config, run = find_stage(settings["kind"])
    training = TrainingConfig(
        max_steps=settings["steps"], save_every_steps=0, batch_size=settings["batch"], precision=settings["precision"]
    )
    adapter = {"adapter": LoRASpec(rank=RANK, alpha=ALPHA)} if settings["adapter"] == "lora" else {}
    data = DataConfig(train=settings["rows"], max_length=MAX_LENGTH)
    with patch.object(Engine, "update", timed):
        run(
            config(
                policy=settings["checkpoint"], data=data, output=str(folder / "run"), training=training,
                optim=OptimConfig(learning_rate=1e-5), **adapter, **settings["own"]
            )
        )  # fmt: skip
    return clock


def run_trl(settings: dict[str, Any], folder: Path) -> Clock:
    """The same run in trl."""
    import datasets
    import trl
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

    kind, model = settings["kind"], settings["checkpoint"]
    name = {"sft": "SFT", "reward": "Reward", "dpo": "DPO"}[kind]
    trainer_class, config_class = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    rows = map(json.loads, Path(settings["rows"]).read_text().splitlines())
    data = datasets.Dataset.from_list([{key: row[key] for key in row if key in (*PAIR, "completion")} for row in rows])
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": settings["batch"], "max_steps": settings["steps"],
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

    lora: dict[str, Any] = {}
    if settings["adapter"] == "lora":
        from peft import LoraConfig

        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        lora["peft_config"] = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type=task)
    arguments: dict[str, Any] = {"args": config_class(**options), "train_dataset": data, "processing_class": tokenizer}
    Counting(model=model, callbacks=[Ends()], **arguments, **lora).train()
    return clock


if __name__ == "__main__":
    main()

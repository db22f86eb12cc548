"""Many rows: how fast they are prepared beside `datasets.map`, and the memory and the start of a training process.

    python scripts/scale.py [--rows 10000000] [--processes 2]

Demonstrations are generated, a tiny Llama trains on them, and every measurement is a process of its own and a JSON line:

    prepare        seconds and rows per second of reading, tokenizing and writing 200,000 rows
    datasets_map   the same rows and texts by `datasets.Dataset.map` alone, read before the clock starts
    train          peak memory of the training process, for 10,000 rows and for `--rows`, prepared by this start and by an
                   earlier one, and the seconds from the start of the process to the end of its first update

Ten million rows take 5 GB of disk, and on two cores about 6 minutes to prepare, which the first `train` does.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from measuring import in_process, resident, write_checkpoint

from alignment.algorithms import sft
from alignment.data import prepare as preparation
from alignment.data.config import DataConfig
from alignment.loading import load_tokenizer
from alignment.training import TrainingConfig
from alignment.training.run.directory import Run

SMALL, COMPARED = 10_000, 200_000
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = (
    "hotel guest room pool garden breakfast evening morning quiet window river bridge ticket train station coffee table "
    "please could would tell about where when open close near walk minutes price night second floor tower view friendly"
)


def main() -> None:
    """Write the rows and the model, and run each measurement in a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    variables = {"OMP_NUM_THREADS": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false"} if options.processes > 1 else {}
    with tempfile.TemporaryDirectory(prefix="alignment-scale-") as folder:
        compared = min(COMPARED, options.rows)
        for rows in {SMALL, options.rows, compared}:
            write_demonstrations(Path(folder), rows)
        with open(f"{folder}/rows-{SMALL}.jsonl", encoding="utf-8") as file:
            texts = (row["prompt"] + row["completion"] for row in map(json.loads, file))
            write_checkpoint(Path(folder) / "model", LLAMA, texts, 1024)
        trained = [(train, rows) for rows in (SMALL, SMALL, options.rows, options.rows)]
        for measure, rows in [(prepare, compared), (datasets_map, compared), *trained]:
            row = {"measure": measure.__name__, "rows": rows, "processes": options.processes}
            found = in_process(measure, folder, rows, options.processes, **variables)
            print(json.dumps(row | found), flush=True)


def write_demonstrations(folder: Path, rows: int) -> None:
    """Demonstrations of about forty tokens, each different."""
    generator = random.Random(rows)
    with open(folder / f"rows-{rows}.jsonl", "w", encoding="utf-8") as file:
        for number in range(rows):
            words = generator.choices(WORDS.split(), k=30)
            prompt, completion = " ".join(words[:14]), " ".join(words[14:])
            file.write(f'{{"prompt": "Guest {number}: {prompt}?\\n", "completion": "{completion} {number}."}}\n')


def prepare(folder: str, rows: int, processes: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(f"{folder}/model")
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        data = DataConfig(f"{folder}/rows-{rows}.jsonl", max_length=256, processes=processes, cache=cache)
        began = time.perf_counter()
        table, counts = preparation.prepare(data, "demonstrations", tokenizer)
        seconds = time.perf_counter() - began
    return {"tokens": counts.tokens, "seconds": seconds, "rows_per_second": len(table) / seconds}


def datasets_map(folder: str, rows: int, processes: int) -> dict[str, Any]:
    import datasets

    tokenizer: Any = load_tokenizer(f"{folder}/model")
    datasets.disable_progress_bars()
    file, cache = f"{folder}/rows-{rows}.jsonl", f"{folder}/datasets"
    table: Any = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options = {"add_special_tokens": False, "return_attention_mask": False}
        return {name: tokenizer(batch[name], **options)["input_ids"] for name in ("prompt", "completion")}

    began = time.perf_counter()
    done = table.map(tokenize, batched=True, num_proc=processes if processes > 1 else None, load_from_cache_file=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "rows_per_second": len(done) / seconds}


def train(folder: str, rows: int, processes: int) -> dict[str, Any]:
    first: list[float] = []
    log = Run.log

    def timed(run: Run, step: int, metrics: Any) -> None:
        first.append(time.time() - psutil.Process().create_time())
        log(run, step, metrics)

    cache = f"{folder}/cache"
    data = DataConfig(f"{folder}/rows-{rows}.jsonl", max_length=256, processes=processes, cache=cache)
    training = TrainingConfig(batch_size=8, max_steps=100, save_every_steps=0)
    with tempfile.TemporaryDirectory(dir=folder) as output, patch.object(Run, "log", timed):
        sft.run(sft.SFTConfig(policy=f"{folder}/model", data=data, output=output, training=training))
        notes = json.loads((Path(output) / "lineage.json").read_text())["notes"]
    cached = any("read from the cache" in note for note in notes)
    return {"cached": cached, "peak_mb": resident("VmHWM") / 2**20, "first_update_seconds": first[0]}


if __name__ == "__main__":
    main()

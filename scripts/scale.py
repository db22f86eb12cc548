"""Many rows: how fast they are prepared, what the training process holds of them, and that each is seen once an epoch.

Demonstrations are generated, a tiny Llama trains on them, and every measurement runs in a process of its own:

    prepare        seconds and rows per second of reading, tokenizing and writing `--compare-rows` rows, and the seconds of
                   all its processes on their cores, which other programs disturb less
    datasets_map   the same rows and texts by `datasets.Dataset.map` alone, read before the clock starts; alternating
    tokenizer      the fast tokenizer alone on the same texts, on one core: the floor of both
    train          peak memory of the training process, for 10,000 rows and for `--rows`, prepared by this start and by an
                   earlier one, and the seconds from the start of the process to the end of its first update
    stream         with --streaming, alone: peak memory of one epoch over streamed rows, for `--rows` and ten times as many
    sharding       how often each row is seen in one epoch on 1, 2 and 4 ranks, and in two real processes

    python scripts/scale.py [--rows 10000000] [--compare-rows 200000] [--processes 2] [--repeats 3] [--folder DIR]
        [--only compare train sharding rank] [--cached]

It writes one JSON line per measurement, then the ratios. Ten million rows take 5 GB of disk, and on two cores about 6
minutes to prepare, which `train` does once; a later run with the same `--folder` and `--cached` trains on what it prepared.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
START = time.time()
SMALL = 10_000
RANKED_ROWS = 2_000  # of the two real processes
PARTS = ("compare", "train", "sharding", "rank")
BATCH = 1000  # rows of a batch of `datasets.map`, its default
WORDS = (
    "hotel", "guest", "room", "pool", "garden", "breakfast", "evening", "morning", "quiet", "window", "river",
    "bridge", "ticket", "train", "station", "coffee", "table", "please", "could", "would", "tell", "about", "where",
    "when", "open", "close", "near", "walk", "minutes", "price", "night", "second", "floor", "tower", "view",
    "friendly",
)  # fmt: skip


# The measured processes


def measure_prepare(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    from alignment.data.prepare import prepare
    from alignment.loading import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "model"))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        started, worked = time.perf_counter(), core_seconds()
        table, counts = prepare(data_config(folder, rows, processes, cache), "demonstrations", tokenizer)
        seconds, worked = time.perf_counter() - started, core_seconds() - worked
    return {
        "rows": len(table), "tokens": counts.tokens, "seconds": seconds, "core_seconds": worked,
        "rows_per_second": len(table) / seconds, "rows_per_core_second": len(table) / worked,
    }  # fmt: skip


def measure_datasets_map(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    import datasets

    from alignment.loading import load_tokenizer

    tokenizer: Any = load_tokenizer(str(folder / "model"))
    datasets.disable_progress_bars()
    table: Any = datasets.load_dataset(
        "json", data_files=str(rows_file(folder, rows)), split="train", cache_dir=str(folder / "datasets")
    )

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options = {"add_special_tokens": False, "return_attention_mask": False}
        return {name: tokenizer(batch[name], **options)["input_ids"] for name in ("prompt", "completion")}

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        started, worked = time.perf_counter(), core_seconds()
        done = table.map(
            tokenize, batched=True, batch_size=BATCH, num_proc=processes if processes > 1 else None,
            load_from_cache_file=False, cache_file_name=str(Path(scratch) / "mapped.arrow"),
        )  # fmt: skip
        seconds, worked = time.perf_counter() - started, core_seconds() - worked
    return {
        "rows": len(done), "seconds": seconds, "core_seconds": worked,
        "rows_per_second": len(done) / seconds, "rows_per_core_second": len(done) / worked,
    }  # fmt: skip


def measure_tokenizer(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    from alignment.loading import load_tokenizer

    tokenizer: Any = load_tokenizer(str(folder / "model"))
    with open(rows_file(folder, rows), encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    texts = [row[name] for row in read for name in ("prompt", "completion")]
    started = time.perf_counter()
    for start in range(0, len(texts), 2 * BATCH):
        tokenizer._tokenizer.encode_batch_fast(texts[start : start + 2 * BATCH], add_special_tokens=False)
    seconds = time.perf_counter() - started
    return {"rows": rows, "seconds": seconds, "rows_per_second": rows / seconds}


def measure_train(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    from alignment.algorithms import sft
    from alignment.training import TrainingConfig
    from alignment.training.run.directory import Run

    first: list[float] = []
    log = Run.log

    def timed(run: Run, step: int, metrics: Any) -> None:
        first.append(time.time() - START)
        log(run, step, metrics)

    cast(Any, Run).log = timed
    with tempfile.TemporaryDirectory(dir=folder) as output:
        sft.run(
            sft.SFTConfig(
                policy=str(folder / "model"),
                data=data_config(folder, rows, processes),
                output=output,
                training=TrainingConfig(batch_size=8, max_steps=100, save_every_steps=0),
            )
        )
        notes = json.loads((Path(output) / "lineage.json").read_text())["notes"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cached = any("read from the cache" in note for note in notes)
    return {"rows": rows, "cached": cached, "peak_mb": peak, "first_update_seconds": first[0]}


def measure_sharding(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    import numpy as np

    from alignment.data.stream import Stream
    from alignment.training.terms import shard_rows

    seen: dict[str, list[int]] = {}
    for ranks in (1, 2, 4):
        counts = np.zeros(rows, np.int64)
        stream = Stream(range(rows), 1024, seed=1, epochs=1)
        for step in range(stream.steps()):
            batch = stream.rows_at(step)
            for rank in range(ranks):
                np.add.at(counts, np.asarray(shard_rows(batch, kept, rank, ranks)), 1)
        seen[str(ranks)] = [int(counts.min()), int(counts.max())]
    return {"rows": rows, "least_and_most_per_epoch_by_ranks": seen}


def measure_rank(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    """One of two processes: the rows that it reads of the table in one epoch, gathered."""
    import torch.distributed as dist

    from alignment.data.prepare import prepare
    from alignment.data.stream import Stream
    from alignment.loading import load_tokenizer
    from alignment.training.distributed import compare_rows
    from alignment.training.terms import shard_rows

    dist.init_process_group("gloo")
    config = data_config(folder, rows, processes, str(folder / "cache-of-ranks"))
    table, _ = prepare(config, "demonstrations", load_tokenizer(str(folder / "model")))
    compare_rows("data.train", table)
    stream = Stream(table, 16, seed=1, epochs=1)
    own = [
        row.row_id
        for step in range(stream.steps())
        for row in cast("list[Any]", shard_rows(stream.rows_at(step), kept, dist.get_rank(), dist.get_world_size()))
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, getattr(table, "cached", True)))
    names = [name for each, _ in gathered for name in each]
    dist.destroy_process_group()
    return {
        "rows": rows, "seen": len(names), "different": len(set(names)), "by_rank": [len(each) for each, _ in gathered],
        "prepared_by": sum(not cached for _, cached in gathered),
    }  # fmt: skip


def measure_stream(folder: Path, rows: int, processes: int) -> dict[str, Any]:
    """One epoch over streamed rows, without training on them: peak memory, and rows per second."""
    from alignment.data.config import DataConfig
    from alignment.data.prepare import preparation_of
    from alignment.data.streaming import StreamedOrder, open_stream
    from alignment.loading import load_tokenizer

    config = DataConfig(str(rows_file(folder, rows)), max_length=256, streaming=True)
    tokenizer = load_tokenizer(str(folder / "model"))
    streamed, _ = open_stream(preparation_of("demonstrations"), config, tokenizer)
    stream: StreamedOrder[Any] = StreamedOrder(streamed, batch_size=100, seed=1)
    started = time.perf_counter()
    seen = sum(len(stream.rows_at(step)) for step in range(rows // 100))
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": seen, "buffer": config.shuffle_buffer, "peak_mb": peak, "rows_per_second": seen / seconds}


def kept(rows: Any) -> Any:
    """The rows that a rank is given, in the place of micro-batches."""
    return rows


MEASURES = {
    "prepare": measure_prepare,
    "datasets_map": measure_datasets_map,
    "tokenizer": measure_tokenizer,
    "train": measure_train,
    "sharding": measure_sharding,
    "rank": measure_rank,
    "stream": measure_stream,
}


def core_seconds() -> float:
    """Seconds that this process and its children that have ended were on a core."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# What they are measured on


def data_config(folder: Path, rows: int, processes: int, cache: str | None = None) -> Any:
    from alignment.data.config import DataConfig

    cache = cache or str(folder / "cache")
    return DataConfig(str(rows_file(folder, rows)), max_length=256, processes=processes, cache=cache)


def rows_file(folder: Path, rows: int) -> Path:
    return folder / f"rows-{rows}.jsonl"


def write_rows(folder: Path, rows: int) -> None:
    """Demonstrations of about forty tokens, each different."""
    generator = random.Random(rows)
    with open(rows_file(folder, rows), "w", encoding="utf-8") as file:
        for number in range(rows):
            words = generator.choices(WORDS, k=30)
            prompt, completion = " ".join(words[:14]), " ".join(words[14:])
            file.write(f'{{"prompt": "Guest {number}: {prompt}?\\n", "completion": "{completion} {number}."}}\n')


def write_model(folder: Path) -> None:
    """A Llama of two layers, and a byte-level BPE tokenizer of 1024 tokens trained on the first rows."""
    import torch

    from alignment.data.tokenizers.load import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe
    from alignment.models.build import build_language_model
    from alignment.models.huggingface.checkpoint import save_model

    with open(rows_file(folder, SMALL), encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    tokenizer = train_bpe((row["prompt"] + row["completion"] for row in read), 1024)
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True, "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    (folder / "model").mkdir()
    save_model(build_language_model(config), folder / "model")
    save_tokenizer(tokenizer, folder / "model")


# The script


def measure(name: str, folder: Path, rows: int, processes: int) -> dict[str, Any]:
    """One measurement in a process of its own, or two that form a group, as a JSON line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if name == "rank" else []
    command = [sys.executable, *launcher, __file__, "--measure", name, "--folder", str(folder)]
    threads = {"TOKENIZERS_PARALLELISM": "false"} if processes > 1 or name == "tokenizer" else {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **threads}
    if processes == 1:
        environment["RAYON_NUM_THREADS"] = "1"
    command += ["--rows", str(rows), "--processes", str(processes)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"measure"')]
    if ran.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}")
    print(lines[0], flush=True)
    return json.loads(lines[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--compare-rows", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="kept, with rows and cache; a temporary one by default")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the measurements to make")
    parser.add_argument("--cached", action="store_true", help="train on what an earlier run prepared in --folder")
    parser.add_argument(
        "--streaming", action="store_true", help="instead: memory of --rows and of ten times as many, streamed"
    )
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        result = MEASURES[options.measure](options.folder, options.rows, options.processes)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"measure": options.measure, "processes": options.processes, **result}), flush=True)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="alignment-scale-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (run_streaming if options.streaming else run)(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def run_streaming(options: argparse.Namespace, folder: Path) -> None:
    sizes = (options.rows, 10 * options.rows)
    for rows in {SMALL, *sizes}:
        if not rows_file(folder, rows).exists():
            write_rows(folder, rows)
    if not (folder / "model").exists():
        write_model(folder)
    few, many = (measure("stream", folder, rows, 1)["peak_mb"] for rows in sizes)
    print(json.dumps({"peak_mb_of_ten_times_the_rows_above": many - few}))


def run(options: argparse.Namespace, folder: Path) -> None:
    """The measurements of `--only`, each in its order, then what follows of them."""
    wanted = {"compare": options.compare_rows, "train": options.rows, "rank": RANKED_ROWS}
    for rows in {SMALL, *(wanted[part] for part in options.only if part in wanted)}:
        if not rows_file(folder, rows).exists():
            write_rows(folder, rows)
    if not (folder / "model").exists():
        write_model(folder)
    found: dict[str, float] = {}
    if "compare" in options.only:
        found |= compare(options, folder)
    if "train" in options.only:
        found |= compare_training(options, folder)
    if "sharding" in options.only:
        measure("sharding", folder, options.rows, 1)
    if "rank" in options.only:
        shutil.rmtree(folder / "cache-of-ranks", ignore_errors=True)
        measure("rank", folder, RANKED_ROWS, 1)
    print(json.dumps(found))


def compare(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The speed of preparation beside `datasets.map` and the tokenizer alone, medians of several turns."""
    measured: dict[str, list[dict[str, Any]]] = {"prepare": [], "datasets_map": [], "tokenizer": []}
    for _ in range(options.repeats):
        for name in measured:
            processes = 1 if name == "tokenizer" else options.processes
            measured[name].append(measure(name, folder, options.compare_rows, processes))
    speed = {name: median(each["rows_per_second"] for each in several) for name, several in measured.items()}
    work = {name: median(each.get("rows_per_core_second", 0.0) for each in measured[name]) for name in measured}
    return {
        "prepare_to_datasets_map": speed["prepare"] / speed["datasets_map"],
        "prepare_to_datasets_map_per_core_second": work["prepare"] / work["datasets_map"],
        "prepare_to_tokenizer_per_core": speed["prepare"] / speed["tokenizer"] / options.processes,
    }


def compare_training(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Memory and start of the training process with few rows and with many: prepared by this start, then by an earlier."""
    if not options.cached:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    runs = (True,) if options.cached else (False, True)
    trained = {
        (rows, cached): measure("train", folder, rows, options.processes)
        for rows in (SMALL, options.rows)
        for cached in runs
    }
    for (rows, cached), each in trained.items():
        if each["cached"] != cached:
            raise SystemExit(f"{rows} rows: cached is {each['cached']}; a run without --cached prepares them")
    more = {cached: trained[options.rows, cached]["peak_mb"] - trained[SMALL, cached]["peak_mb"] for cached in runs}
    found = {
        "peak_mb_above_10000_rows": more[True],
        "cached_first_update_seconds": trained[options.rows, True]["first_update_seconds"],
    }
    return found if options.cached else {**found, "peak_mb_above_10000_rows_while_preparing": more[False]}


if __name__ == "__main__":
    main()

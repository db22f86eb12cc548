"""Speed of ours and of the peers on the same weights, rows, machine and run; JSON lines on standard output.

    python scripts/bench.py [--only NAME ...] [--sizes nano micro gpt2] [--rows world|hh] [--rounds N] [--table]

Trainers (sft, reward, dpo) run in processes of their own, which take turns: ours, trl as it comes, and trl at each setting
that could make it faster (packing, rows grouped by length, reference log-probabilities computed beforehand, as ours can
too). Figures are medians over rounds, with the lowest and the highest: tokens and rows (pairs) per second after two
updates, seconds from the start of Python to the end of the first update (prepared data lies in ours' cache from a round
that is not counted), peak memory, and MFU: 6 operations per weight of a matrix product and token, 2 more for DPO's
reference where it runs beside the policy, over what a large product reaches in the same run. Tokens are real ones: padding
earns nothing, and a prompt that we compute once for both sides of a pair counts twice. The forward pass and generation are
beside transformers. `ratio` above 1: ours is faster.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bench_model import matrix_rate

from alignment.data.rows.read import read_rows
from alignment.data.tokenizers.load import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.generation.decode import decode_responses
from alignment.generation.sampling import SamplingConfig
from alignment.hotel_world.datasets import RowCounts, write_world
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from alignment.ragged import Ragged

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "micro": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    "gpt2": {  # GPT-2 small; its vocabulary is what the rows give of 50,257
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocabulary": 8192,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "1b": {  # for a GPU
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    },
}  # fmt: skip


def main() -> None:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*BENCHES, *BEST], default=[*BENCHES, *BEST])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano"])
    parser.add_argument("--rows", choices=["world", "hh"], default="world", help="of the trainers")
    parser.add_argument(
        "--hh-rows", type=int, default=1200, help="how many, from the first on; all have a reference computed"
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in each round of the trainers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the trainers, ours and trl's")
    parser.add_argument("--table", action="store_true", help="print the trainers' figures as a table at the end")
    options = parser.parse_args()
    options.results = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.matrix_rate = matrix_rate(device, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ALIGNMENT_CACHE"] = str(folder / "cache")
        files = write_world(folder / "world", sizes=RowCounts(pretrain=800, demonstrations=600, comparisons=600))
        for size in options.sizes:
            rows = {kind: files["demonstrations" if kind == "sft" else "comparisons"] for kind in BEST}
            text = files["pretrain"]
            if options.rows == "hh":
                rows = {kind: hh_rows(kind, folder, options.hh_rows) for kind in BEST}
                text = rows["sft"]
            checkpoint = make_checkpoint(folder / size, text, size)
            for bench in options.only:
                if bench in BEST:
                    bench_trainers(bench, size, checkpoint, rows[bench], options)
                else:
                    ours, peer, impl, unit = BENCHES[bench](checkpoint, options.steps)
                    report(bench, size, impl, unit, take_turns(ours, peer, options.rounds))
    if options.table:
        print_table(options.results)


def report(name: str, size: str, impl: str, unit: str, times: tuple[list[float], list[float]]) -> None:
    """One line for us and one for the peer."""
    mine, theirs = times
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    for who, values in (("alignment", mine), (impl, theirs)):
        row: dict[str, Any] = {"bench": name, "impl": who, "size": size, "threads": torch.get_num_threads()}
        row |= {f"{unit}_median": statistics.median(values), f"{unit}_min": min(values), f"{unit}_max": max(values)}
        print(json.dumps(row | ({"ratio": round(ratio, 3)} if who == "alignment" else {})), flush=True)


def take_turns(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, round by round, after one round that is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for call, kept in zip((ours, peer), times, strict=True):
            began = time.perf_counter()
            measured = call()
            elapsed = measured if isinstance(measured, float) else time.perf_counter() - began
            if number:
                kept.append(elapsed)
    return times


def make_checkpoint(directory: Path, text: Path, size: str) -> Path:
    """A random model of this size with a byte-level BPE of the texts in a file of rows."""
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


def bench_forward_backward(checkpoint: Path, steps: int) -> Any:
    """Loss and gradient of 64 documents of 16 to 128 tokens (about half of the padded rectangle is padding)."""
    from transformers import AutoModelForCausalLM

    mine = load_language_model(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa")
    generator = random.Random(0)
    lengths = [generator.randint(16, 128) for _ in range(64)]
    documents = [[generator.randrange(10, 600) for _ in range(length)] for length in lengths]
    batch = Ragged.build(documents)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(document) for document in documents], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)

    def ours() -> None:
        mine.zero_grad()
        (-mine(batch=batch).log_probs.mean()).backward()

    def peer() -> None:
        theirs.zero_grad()
        theirs(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()

    return partial(repeat, ours, steps), partial(repeat, peer, steps), "transformers", "seconds"


def bench_generate(checkpoint: Path, steps: int) -> Any:
    """64 new tokens for each of 64 prompts of 16 to 64 tokens, sampled at temperature 1, none ending early."""
    from transformers import AutoModelForCausalLM

    mine = load_language_model(checkpoint).eval()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    generator = random.Random(0)
    prompts = [[generator.randrange(10, 600) for _ in range(generator.randint(16, 64))] for _ in range(64)]
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 64, "min_new_tokens": 64, "pad_token_id": 2}

    def ours() -> None:
        decode_responses(mine, prompts, SamplingConfig(max_new_tokens=64), stop_ids=[])

    def peer() -> None:
        theirs.generate(input_ids=ids, attention_mask=mask, **settings)

    return ours, peer, "transformers", "seconds"


def bench_trainers(kind: str, size: str, checkpoint: Path, rows: Path, options: argparse.Namespace) -> None:
    """Runs of ours and of trl by turns, in processes of their own; a line of figures for each."""
    runs: dict[str, tuple[str, list[str]]] = {"alignment": ("alignment", []), "trl": ("trl", [])}
    runs |= {f"trl {name}": ("trl", settings) for name, settings in BEST[kind].items()}
    runs |= {f"alignment {name}": ("alignment", settings) for name, settings in OURS[kind].items()}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        for name, (impl, settings) in runs.items():
            if number == 0 and impl == "trl":
                continue  # the round that is not counted only fills our cache of prepared rows (and of the reference)
            measured = run_trainer(impl, kind, checkpoint, rows, settings, options)
            if number:
                figures[name].append(measured)
    weights = matrix_weights(checkpoint)
    for name, measured in figures.items():
        row: dict[str, Any] = {"bench": kind, "impl": name, "size": size, "rows": options.rows}
        row |= {"threads": torch.get_num_threads(), "precision": options.precision, "rounds": len(measured)}
        for key in ("tokens_per_second", "rows_per_second", "first_step_seconds", "peak_mb"):
            values = [one[key] for one in measured]
            row[key] = round(statistics.median(values), 2)
            row[f"{key}_spread"] = [round(min(values), 2), round(max(values), 2)]
        operations = weights * (8 if kind == "dpo" and "precomputed" not in name else 6)
        row["mfu"] = round(row["tokens_per_second"] * operations / options.matrix_rate, 3)
        if name.startswith("trl"):  # beside our own run with the same idea, where there is one
            ours = name.replace("trl", "alignment", 1)
            row["ratios"] = ratios(figures.get(ours, figures["alignment"]), measured)
        options.results.append(row)
        print(json.dumps(row), flush=True)


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds of ours over theirs."""
    pairs = list(zip(ours, theirs, strict=True))
    keys = ("tokens_per_second", "rows_per_second", "first_step_seconds", "peak_mb")
    return {key: round(statistics.median(a[key] / b[key] for a, b in pairs), 3) for key in keys}


def run_trainer(
    impl: str, kind: str, checkpoint: Path, rows: Path, settings: list[str], options: argparse.Namespace
) -> dict[str, float]:
    """Figures of one run in a process of its own."""
    command = [
        sys.executable, str(Path(__file__).with_name("bench_trainers.py")), impl, kind, str(checkpoint), str(rows),
        "--steps", str(options.steps), "--precision", options.precision,
        *[part for setting in settings for part in ("--setting", setting)],
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def matrix_weights(checkpoint: Path) -> int:
    """Numbers in the matrices that every token is multiplied with; the embedding counts once, as the head."""
    model = load_language_model(checkpoint)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def hh_rows(kind: str, folder: Path, count: int) -> Path:
    """Rows of HH-RLHF under ALIGNMENT_DATA that are short enough to be read whole: pairs, or the chosen side of each."""
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


def print_table(rows: list[dict[str, Any]]) -> None:
    """The trainers' figures as a Markdown table."""
    print("\n| stage | model | rows | | tokens/s | rows/s | MFU | first update | peak memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = row.get("ratios", {})
        cells = [
            f"{row[key]:,.{digits}f}{unit}" + (f" ({ratio[key]:.2f}x)" if key in ratio else "")
            for key, digits, unit in (
                ("tokens_per_second", 0, ""), ("rows_per_second", 1, ""), ("mfu", 2, ""),
                ("first_step_seconds", 1, " s"), ("peak_mb", 0, " MB"),
            )
        ]  # fmt: skip
        print(f"| {row['bench']} | {row['size']} | {row['rows']} | {row['impl']} | {' | '.join(cells)} |")


def repeat(call: Callable[[], None], times: int) -> None:
    """Call several times."""
    for _ in range(times):
        call()


SHORT = 1000  # characters; below 512 tokens of the small vocabularies here
BENCHES: dict[str, Callable[..., Any]] = {"forward_backward": bench_forward_backward, "generate": bench_generate}
# trl's settings that could make it faster, by the trainer they belong to.
PACKING = ["packing=true", 'packing_strategy="wrapped"', "per_device_train_batch_size=4"]
GROUPING = ['train_sampling_strategy="group_by_length"']
BEST: dict[str, dict[str, list[str]]] = {
    "sft": {"packing": PACKING, "grouped by length": GROUPING},
    "reward": {"micro-batch 8": ["per_device_train_batch_size=8", "gradient_accumulation_steps=4"]},
    "dpo": {"reference precomputed": ["precompute_ref_log_probs=true"]},
}
OURS: dict[str, dict[str, list[str]]] = {
    "sft": {}, "reward": {}, "dpo": {"reference precomputed": ['reference_log_probs="cache"']},
}  # fmt: skip

if __name__ == "__main__":
    main()

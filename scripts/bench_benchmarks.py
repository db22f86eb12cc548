"""Benchmark tasks beside lm-eval's transformers backend: the same rows, weights, machine and run.

    python scripts/bench_benchmarks.py [--models stories llama qwen3] [--tasks NAME ...] [--rows N] [--rounds N]
        [--batch-sizes N ...]

Needs the extra `bench` and the folder of real data. The rows of the packaged tasks, examples included, are written once; an
lm-eval task and one of ours, both YAML, read that file. `stories` is stories260K, `llama` and `qwen3` are random. lm-eval's
seconds are those inside its model's methods alone, ours those of the whole task; they take turns after a round that is not
counted. JSON lines: for each model and task the medians, lm-eval at each batch size, `ratio` of its best over ours, the largest
difference of a log-likelihood (for whole texts divided by the log-likelihood) and of a figure (divided by it above 1), and
responses that differ.
"""

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")

import measuring
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from alignment.config.load import data_folder, packaged_folder
from alignment.errors import UserError
from alignment.evaluation.benchmarks.figures import measure, task_figures
from alignment.evaluation.benchmarks.tasks import LoadedBenchmark, read_task
from alignment.generation import SamplingConfig
from alignment.judging.likelihood import LanguageScorer
from alignment.loading import load_model, load_tokenizer
from alignment.pipeline.stages import load_stage_file

TASKS = ("truthfulqa", "mmlu", "hhh", "sst2", "crows_pairs", "lambada", "wikitext", "gsm8k")
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True}  # fmt: skip
CONFIGS = {"llama": {"model_type": "llama", **SIZES}, "qwen3": {"model_type": "qwen3", "head_dim": 64, **SIZES}}
VOCABULARY = 8192
NAMES = {"acc": "accuracy", "exact_match": "accuracy", "acc_norm": "accuracy_norm"}  # lm-eval's name -> ours
METRICS = {
    "multiple_choice": ("acc", "acc_norm"), "pairs": ("acc", "acc_norm"), "last_word": ("acc", "perplexity"),
    "rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"), "answers": (),
}  # fmt: skip
KINDS = {"last_word": "loglikelihood", "rolling": "loglikelihood_rolling", "answers": "generate_until"}


class TimedHFLM(HFLM):
    """lm-eval's transformers backend, with the seconds of its methods, what it was asked and what it gave."""

    seconds = 0.0

    def timed(self, name: str, requests: Sequence[Any]) -> Any:
        began = time.perf_counter()
        found = getattr(super(), name)(requests, disable_tqdm=True)
        self.seconds = time.perf_counter() - began
        self.asked, self.given = [request.args for request in requests], found
        return found

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self.timed("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self.timed("loglikelihood_rolling", requests)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self.timed("generate_until", requests)


def write_model(name: str, folder: Path) -> str:
    """The directory of stories260K, converted, or of a random model whose tokenizer was trained on WikiText-2."""
    data = data_folder()
    if name == "stories":
        llama2c: Any = load_stage_file(packaged_folder("recipes") / "stories/llama2c.py")
        files = [str(data / "stories260k" / file) for file in ("stories260K.bin", "tok512.bin")]
        return str(llama2c.run_import(llama2c.ImportConfig(*files, str(folder / name))))
    with gzip.open(data / "wikitext2" / "valid.txt.gz", "rt", encoding="utf-8") as file:
        measuring.write_checkpoint(folder / name, CONFIGS[name], file, VOCABULARY)
    return str(folder / name)


def write_tasks(name: str, rows: int, folder: Path) -> LoadedBenchmark:
    """Write the rows of a packaged task, an lm-eval task and one of ours over them; ours, read again."""
    task = read_task(name, data_folder(), max_rows=rows)
    kind, delimiter = task.settings.kind, task.settings.delimiter if task.settings.prompt else ""
    written, several = [], any(len(item.right) > 1 for item in task.items)
    for item in task.items:
        index = list(item.right) if several else item.right[0] if item.right else None
        label = index if kind in ("multiple_choice", "pairs") else item.own
        prompt = item.prompt.strip() if kind == "rolling" else item.prompt
        written.append({"prompt": prompt, "choices": list(item.choices), "label": label})
    path = measuring.write_rows(folder / f"{name}.jsonl", written)
    target = {"rolling": "{{prompt}}", "last_word": delimiter + "{{label}}"}.get(kind, "{{label}}")
    theirs: dict[str, Any] = {
        "task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test", "output_type": KINDS.get(kind, "multiple_choice"), "doc_to_target": target,
        "doc_to_text": "" if kind == "rolling" else "{{prompt}}", "target_delimiter": delimiter,
        "metric_list": [{"metric": metric} for metric in METRICS[kind] or ("exact_match",)],
    }  # fmt: skip
    ours: dict[str, Any] = {
        "kind": "multiple_choice" if kind == "pairs" else kind,
        "source": path,
        "prompt": "{{ prompt }}",
    }
    ours |= {"answer": "label", "delimiter": delimiter} if kind != "rolling" else {}
    if kind in ("multiple_choice", "pairs"):
        theirs["doc_to_choice"], ours["choices"] = "{{choices}}", "choices"
    if kind == "answers":
        settings = task.settings
        theirs["generation_kwargs"] = {"until": settings.stop, "max_gen_toks": 64, "do_sample": False}
        ours |= {"stop": settings.stop, "match": settings.match}
    (folder / "lm_eval").mkdir(exist_ok=True)
    (folder / "lm_eval" / f"{name}.yaml").write_text(json.dumps(theirs))
    (folder / f"{name}.yaml").write_text(json.dumps(ours))
    return read_task(str(folder / f"{name}.yaml"), folder)


def largest(ours: LanguageScorer, theirs: TimedHFLM) -> dict[str, float]:
    """How far log-likelihoods, or how many responses, differ on the requests that lm-eval made last."""
    asked, given = theirs.asked, theirs.given
    if isinstance(given[0], str):
        texts = ours.responses([context for context, _ in asked], SamplingConfig(64, 0.0), asked[0][1]["until"])
        return {"responses": len(texts), "responses_differ": sum(a != b for a, b in zip(texts, given, strict=True))}
    if isinstance(given[0], tuple):
        pairs = list(zip(ours.likelihoods(asked), given, strict=True))
        return {
            "log_likelihoods": len(pairs),
            "log_likelihood_difference": max(abs(one.log_prob - other[0]) for one, other in pairs),
            "greedy_differ": sum(one.greedy != other[1] for one, other in pairs),
        }
    sums = zip(ours.text_log_probs([text for (text,) in asked]), given, strict=True)
    return {"log_likelihoods": len(given), "relative_difference": max(abs(one / other - 1) for one, other in sums)}


def compare(
    model: str, source: str, tasks: dict[str, LoadedBenchmark], folder: Path, options: argparse.Namespace
) -> None:
    """Print a line for each task of one model."""
    scorer = LanguageScorer(load_model(source), load_tokenizer(source))
    peers = {f"lm-eval, batches of {size}": TimedHFLM(pretrained=source, device="cpu", dtype="float32", batch_size=size)
             for size in options.batch_sizes}  # fmt: skip
    index = TaskManager(include_path=str(folder / "lm_eval"))
    for name, task in tasks.items():
        figures: dict[str, dict[str, float]] = {}

        def ours(
            name: str = name, task: LoadedBenchmark = task, figures: dict[str, dict[str, float]] = figures
        ) -> float:
            began = time.perf_counter()
            figures["ours"] = task_figures(
                task.settings, measure(read_task(str(folder / f"{name}.yaml"), folder), scorer)
            )
            return time.perf_counter() - began

        def theirs(peer: TimedHFLM, name: str = name, figures: dict[str, dict[str, float]] = figures) -> float:
            found = simple_evaluate(
                model=peer, tasks=[f"local_{name}"], task_manager=index, bootstrap_iters=0, log_samples=False
            )
            figures["theirs"] = {key.split(",")[0]: value for key, value in found["results"][f"local_{name}"].items()}
            return peer.seconds

        try:
            ours()
        except UserError as error:  # an answer is longer than the model can read; lm-eval would cut its beginning off
            print(json.dumps({"bench": "benchmarks", "model": model, "task": name, "refused": str(error)}), flush=True)
            continue
        calls = {"ours": ours} | {label: (lambda peer=peer: theirs(peer)) for label, peer in peers.items()}
        taken = {
            label: statistics.median(each)
            for label, each in measuring.take_turns(calls, options.rounds, warm_up=1).items()
        }
        metrics = METRICS[task.settings.kind]
        gaps = [
            abs(figures["theirs"][one] - figures["ours"][NAMES.get(one, one)]) / max(1, figures["theirs"][one])
            for one in metrics
        ]
        best = min(seconds for label, seconds in taken.items() if label != "ours")
        row = {"bench": "benchmarks", "model": model, "task": name, "rows": len(task.items)}
        row |= {label: round(seconds, 3) for label, seconds in taken.items()} | {
            "ratio": round(best / taken["ours"], 2)
        }
        row |= largest(scorer, next(iter(peers.values())))
        print(json.dumps(row | {"figure_difference": max(gaps, default=0.0), "figures": figures["ours"]}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every task on every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["stories", *CONFIGS], choices=["stories", *CONFIGS])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = str(Path(name) / "cache")
        folder = Path(name)
        tasks = {task: write_tasks(task, options.rows, folder) for task in options.tasks}
        for model in options.models:
            compare(model, write_model(model, folder), tasks, folder, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Speed of ours and of the peers on the same weights, machine and run; JSON lines on standard output.

    python scripts/bench.py [--only NAME ...] [--steps N] [--rounds N]

Each figure is the median over rounds in which ours and the peer take turns, so that a machine whose speed drifts
treats both alike. `ratio` is ours over the peer: above 1, ours is faster. Peers: transformers (forward and backward,
generation) and trl (SFT, reward, DPO).
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignment.algorithms import dpo, reward, sft
from alignment.data.config import DataConfig
from alignment.data.tokenizers.load import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.generation.decode import decode_responses
from alignment.generation.sampling import SamplingConfig
from alignment.hotel_world.datasets import RowCounts, write_world
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig

SIZES = {
    "nano": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "micro": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },  # for a GPU
}


def main() -> None:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--size", choices=list(SIZES), default="nano")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in each round of the trainers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the trainers, ours and trl's")
    arguments = parser.parse_args()
    if arguments.precision == "bf16" and set(arguments.only) - TRAINERS:
        parser.error(f"--precision bf16 goes with --only {' '.join(sorted(TRAINERS))}")
    with tempfile.TemporaryDirectory() as folder:
        files = write_world(Path(folder) / "world", sizes=RowCounts(pretrain=800, demonstrations=600, comparisons=600))
        checkpoint = make_checkpoint(Path(folder) / "model", files["pretrain"], arguments.size)
        for name in arguments.only:
            more = {"precision": arguments.precision} if name in TRAINERS else {}
            ours, peer, impl, unit = BENCHES[name](checkpoint, files, Path(folder), arguments.steps, **more)
            report(name, arguments.size, impl, unit, take_turns(ours, peer, arguments.rounds))


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
    """A random Llama with a byte-level BPE of the world's text."""
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    tokenizer = train_bpe(texts, 640)
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 512, **SIZES[size]}
    config |= {"num_key_value_heads": config["num_attention_heads"], "tie_word_embeddings": True}
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    directory.mkdir(parents=True)
    save_model(build_language_model({**config, "pad_token_id": tokenizer.pad_token_id}), directory)
    save_tokenizer(tokenizer, directory)
    return directory


def bench_forward_backward(checkpoint: Path, files: dict[str, Path], folder: Path, steps: int) -> Any:
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


def bench_generate(checkpoint: Path, files: dict[str, Path], folder: Path, steps: int) -> Any:
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


def bench_trainer(
    kind: str, checkpoint: Path, files: dict[str, Path], folder: Path, steps: int, *, precision: Any = "fp32"
) -> Any:
    """Seconds per run of `steps` updates of 32 rows, start-up and data preparation left out."""
    source = files["demonstrations" if kind == "sft" else "comparisons"]
    module, config = {
        "sft": (sft, sft.SFTConfig),
        "reward": (reward, reward.RewardConfig),
        "dpo": (dpo, dpo.DPOConfig),
    }[kind]

    def ours() -> float:
        output = tempfile.mkdtemp(dir=folder)
        settings = {"policy": str(checkpoint), "data": DataConfig(train=str(source), max_length=512), "output": output}
        training = TrainingConfig(max_steps=steps, batch_size=32, precision=precision)
        module.run(config(**settings, training=training, optim=OptimConfig(learning_rate=1e-5)))
        lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
        return sum(line["tokens"] / line["tokens_per_second"] for line in lines[2:])  # the first two warm up

    peer = partial(trl_seconds, kind, checkpoint, source, folder, steps, bf16=precision == "bf16")
    return ours, peer, "trl", "seconds"


def trl_seconds(kind: str, checkpoint: Path, source: Path, folder: Path, steps: int, *, bf16: bool) -> float:
    """The same run in trl; seconds from the end of step 2 to the end of the last."""
    import datasets
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    trainer_class, config_class = {
        "sft": (SFTTrainer, SFTConfig), "reward": (RewardTrainer, RewardConfig), "dpo": (DPOTrainer, DPOConfig)
    }[kind]  # fmt: skip
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    data = datasets.Dataset.from_list(
        [{k: r[k] for k in r if k in ("prompt", "completion", "chosen", "rejected")} for r in rows]
    )
    settings = {
        "output_dir": tempfile.mkdtemp(dir=folder), "per_device_train_batch_size": 32, "max_steps": steps,
        "learning_rate": 1e-5, "report_to": [], "logging_steps": 1000, "save_strategy": "no", "bf16": bf16,
        "use_cpu": not torch.cuda.is_available(), "gradient_checkpointing": False, "max_length": 512, "disable_tqdm": True,
    }  # fmt: skip
    model: Any = str(checkpoint)
    if kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    trainer = trainer_class(
        model=model, args=config_class(**settings), train_dataset=data, callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )  # fmt: skip
    trainer.train()
    return marks[-1] - marks[1]


def repeat(call: Callable[[], None], times: int) -> None:
    """Call several times."""
    for _ in range(times):
        call()


TRAINERS = {"sft", "reward", "dpo"}
BENCHES: dict[str, Callable[..., Any]] = {
    "forward_backward": bench_forward_backward,
    "generate": bench_generate,
    "sft": partial(bench_trainer, "sft"),
    "reward": partial(bench_trainer, "reward"),
    "dpo": partial(bench_trainer, "dpo"),
}

if __name__ == "__main__":
    main()

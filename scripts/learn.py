"""Whether the stack learns what it should on real text; JSON lines on standard output, exit 1 where a bound is missed.

    python scripts/learn.py shakespeare|spans|distillation|encoder [--seeds N ...] [--steps N]

shakespeare    a character model of nanoGPT's CPU size; loss on the last tenth of the file at most 1.90 nats
spans          a small T5 by span corruption on gsm8k; loss and accuracy of the written spans against their unigram
               distribution
distillation   half the layers, trained on a teacher's distributions or on the text's own tokens, at equal steps
encoder        masked pretraining on wikitext2, then SST-2, against the same encoder from random weights

The data lies in the folder that ALIGNMENT_DATA names; its README says where it comes from.
"""

import argparse
import gzip
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from alignment.algorithms.pretrain import pretrain
from alignment.algorithms.pretrain.objectives import DistillationConfig, Masked, SpanCorruption, target_tokens
from alignment.algorithms.pretrain.pretrain import PretrainConfig
from alignment.data.config import DataConfig
from alignment.data.pretraining.corruption import Masking
from alignment.loading import load_model, load_tokenizer
from alignment.training import OptimConfig, TrainingConfig

NANO = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
BLOCK = 64


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(SHOWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=None)
    arguments = parser.parse_args()
    data = Path(os.environ.get("ALIGNMENT_DATA", "../shared/data"))
    with tempfile.TemporaryDirectory() as folder:
        return 0 if SHOWS[arguments.what](data, Path(folder), arguments) else 1


def say(**row: Any) -> None:
    """One line of the result."""
    print(json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}), flush=True)


def read_text(path: Path) -> str:
    """A whole gzipped text."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def write_rows(path: Path, texts: Iterable[str]) -> str:
    """Texts as JSON lines; returns the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def last_line(output: str) -> dict[str, Any]:
    """The last update's metrics."""
    return json.loads(Path(output, "metrics.jsonl").read_text().splitlines()[-1])


# --- characters of tinyshakespeare ----------------------------------------------------------------------------------


def characters(data: Path, folder: Path) -> dict[str, str]:
    """The first nine tenths of the training file, and the last."""
    text = read_text(data / "tinyshakespeare" / "train.txt.gz")
    cut = len(text) * 9 // 10
    return {
        "train": write_rows(folder / "train.jsonl", [text[:cut]]),
        "evaluation": write_rows(folder / "heldout.jsonl", [text[cut:]]),
    }


def nano_config(files: dict[str, str], output: Path, steps: int, seed: int, **changes: Any) -> PretrainConfig:
    """nanoGPT's settings for a CPU: 12 windows of 64 characters an update, no dropout."""
    fields: dict[str, Any] = {
        "data": DataConfig(**files, max_length=BLOCK),
        "output": str(output),
        "model": NANO,
        "tokenizer_kind": "characters",
        "optim": OptimConfig(1e-3, weight_decay=0.1, betas=(0.9, 0.99), warmup_steps=100, min_learning_rate_ratio=0.1),
        "training": TrainingConfig(max_steps=steps, batch_size=12, seed=seed),
    }
    return PretrainConfig(**(fields | changes))


def shakespeare(data: Path, folder: Path, arguments: argparse.Namespace) -> bool:
    """nanoGPT's published run, with its loss as the bound."""
    losses, files = [], characters(data, folder)
    for seed in arguments.seeds or [0]:
        config = nano_config(files, folder / f"run{seed}", arguments.steps or 2000, seed)
        began = time.perf_counter()
        pretrain.run(config)
        seconds = time.perf_counter() - began
        losses.append(last_line(config.output)["held_out_loss"])
        say(show="shakespeare", impl="alignment", seed=seed, held_out_loss=losses[-1], seconds=seconds)
    return max(losses) <= 1.90


# --- a teacher ------------------------------------------------------------------------------------------------------


def distillation(data: Path, folder: Path, arguments: argparse.Namespace) -> bool:
    """Two layers distilled from a teacher of four, or trained on the text alone, at equal steps."""
    files, steps = characters(data, folder), arguments.steps or 1000
    teacher = str(pretrain.run(nano_config(files, folder / "teacher", 2 * steps, 0)))
    say(show="distillation", who="teacher", held_out_loss=last_line(str(folder / "teacher"))["held_out_loss"])
    half = {**NANO, "n_layer": 2}
    own = {"model": half, "tokenizer": teacher, "tokenizer_kind": "bpe"}
    distillation = DistillationConfig(teacher, temperature=2.0, soft_coef=0.5, hard_coef=0.5)
    gains = []
    for seed in arguments.seeds or range(3):
        losses = {}
        for who, distil in (("hard labels", None), ("distilled", distillation)):
            config = nano_config(files, folder / f"{who}{seed}", steps, seed, distillation=distil, **own)
            pretrain.run(config)
            losses[who] = last_line(config.output)["held_out_loss"]
            say(show="distillation", who=who, seed=seed, held_out_loss=losses[who])
        gains.append(losses["hard labels"] - losses["distilled"])
    say(show="distillation", gain_nats=statistics.mean(gains), least=min(gains), most=max(gains))
    return min(gains) > 0


# --- spans ----------------------------------------------------------------------------------------------------------


def articles(data: Path) -> dict[str, list[str]]:
    """Paragraphs of wikitext2's two files: the last twentieth is held out."""
    lines = [
        line
        for name in ("valid", "test_part")
        for line in read_text(data / "wikitext2" / f"{name}.txt.gz").splitlines()
    ]
    texts = [line.strip() for line in lines if len(line.split()) > 8]
    cut = len(texts) * 19 // 20
    return {"train": texts[:cut], "evaluation": texts[cut:]}


def problems(data: Path) -> dict[str, list[str]]:
    """Questions and worked answers of gsm8k: its training rows, and 200 of its test rows held out."""
    found = {}
    for part, name, most in (("train", "train", None), ("evaluation", "test", 200)):
        rows = map(json.loads, read_text(data / "gsm8k" / f"{name}.jsonl.gz").strip().split("\n"))
        found[part] = [f"{row['question']} {row['answer']}" for row in rows][:most]
    return found


def spans(data: Path, folder: Path, arguments: argparse.Namespace) -> bool:
    """A small T5 on worked problems; what it writes for missing spans against the words' own frequencies."""
    files = {part: write_rows(folder / f"{part}.jsonl", texts) for part, texts in problems(data).items()}
    shape = {
        "d_model": 128,
        "d_ff": 256,
        "d_kv": 32,
        "num_heads": 4,
        "num_layers": 2,
        "feed_forward_proj": "gated-gelu",
    }
    config = PretrainConfig(
        data=DataConfig(**files, max_length=64),
        output=str(folder / "run"),
        objective=SpanCorruption(),
        model={"model_type": "t5", "tie_word_embeddings": True, **shape},
        tokenizer_kind="unigram",
        vocabulary=2000,
        sentinels=32,
        optim=OptimConfig(3e-3, warmup_steps=50, weight_decay=0.01),
        training=TrainingConfig(max_steps=arguments.steps or 1200, batch_size=64),
    )
    began = time.perf_counter()
    directory = str(pretrain.run(config))
    seconds = time.perf_counter() - began
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    losses, right, guessed, baseline = span_figures(config, model, tokenizer)
    say(show="spans", seconds=seconds, loss=losses, unigram_loss=baseline, accuracy=right, commonest_accuracy=guessed)
    return losses < baseline and right > guessed


@torch.no_grad()
def span_figures(config: PretrainConfig, model: Any, tokenizer: Any) -> tuple[float, float, float, float]:
    """Loss and accuracy on held-out span tokens, the commonest token's accuracy, and the unigram loss; no sentinels."""
    from alignment.algorithms.pretrain.objectives import collate_for_objective
    from alignment.data.pretraining.corruption import fixed_seed_rows
    from alignment.data.pretraining.prepare import prepare_text
    from alignment.data.text.special_tokens import sentinel_ids

    train, held_out = (
        prepare_text(config.data, "span_corruption", tokenizer, part)[0] for part in ("train", "evaluation")
    )
    frequencies = Counter(token for example in train for token in example.ids)
    total = sum(frequencies.values()) + len(tokenizer)  # one more of each, so that no token is impossible
    commonest = frequencies.most_common(1)[0][0]
    special = torch.tensor([*sentinel_ids(tokenizer), tokenizer.eos_token_id])
    collate = collate_for_objective(
        config.objective, tokenizer, held_out, start_id=model.spec.start_token, max_length=config.data.max_length
    )
    loss = right = guessed = baseline = count = 0.0
    for batch in collate(fixed_seed_rows(held_out), micro_batch_tokens=8192):
        labels, logits = target_tokens(batch), model(batch=batch, return_logits=True).logits
        written = ~torch.isin(labels, special)
        labels, logits = labels[written], logits[written]
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        guessed += (labels == commonest).sum().item()
        baseline -= sum(math.log((frequencies[token] + 1) / total) for token in labels.tolist())
        count += len(labels)
    return loss / count, right / count, guessed / count, baseline / count


# --- an encoder -----------------------------------------------------------------------------------------------------

ENCODER = {  # pre-norm and rotary: at this size a post-norm BERT stays at the unigram distribution for a thousand steps
    "model_type": "modernbert", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "global_attn_every_n_layers": 1,
    "classifier_pooling": "mean",
}  # fmt: skip


def encoder(data: Path, folder: Path, arguments: argparse.Namespace) -> bool:
    """Masked pretraining on wikitext2, then SST-2, compared with the same encoder from random weights; paired over seeds.

    A seed is one pretraining and, as fine-tuning is noisier than the gain, the mean of three fine-tunings of each start.
    """
    from scipy import stats

    texts = [text for part in articles(data).values() for text in part]  # the judge is SST-2: none of it is held out
    file, gains = write_rows(folder / "wikitext2.jsonl", texts), []
    for seed in arguments.seeds or range(5):
        began = time.perf_counter()
        directory = pretrained_encoder(file, folder / f"pretrain{seed}", seed, arguments.steps or 1600)
        seconds, loss = time.perf_counter() - began, last_line(str(folder / f"pretrain{seed}"))["loss"]
        starts = {"pretrained": {"policy": directory}, "random": {"model": ENCODER, "tokenizer": directory}}
        found = {
            who: statistics.mean(
                sst2(data, folder / f"{who}{seed}-{run}", seed + run, **start) for run in (0, 100, 200)
            )
            for who, start in starts.items()
        }
        gains.append(found["pretrained"] - found["random"])
        say(show="encoder", seed=seed, pretraining_seconds=seconds, masked_loss=loss, **found)
    if len(gains) < 2:
        return gains[0] > 0
    interval = stats.t.interval(0.95, len(gains) - 1, statistics.mean(gains), stats.sem(gains))
    say(show="encoder", gain=statistics.mean(gains), low=float(interval[0]), high=float(interval[1]))
    return bool(interval[0] > 0)


def pretrained_encoder(file: str, output: Path, seed: int, steps: int) -> str:
    """Directory of an encoder that has read wikitext2 with a quarter of its tokens masked."""
    config = PretrainConfig(
        data=DataConfig(train=file, max_length=48),
        output=str(output),
        objective=Masked(masking=Masking(rate=0.25)),
        model=ENCODER,
        tokenizer_kind="wordpiece",
        vocabulary=8000,
        optim=OptimConfig(2e-3, warmup_steps=100, weight_decay=0.1, betas=(0.9, 0.98)),
        training=TrainingConfig(max_steps=steps, batch_size=64, seed=seed),
    )
    return str(pretrain.run(config))


def sst2(data: Path, output: Path, seed: int, **start: Any) -> float:
    """Accuracy on the 2,157 rows of dev and test after fine-tuning on train."""
    from alignment.algorithms.finetune import finetune

    rows = {part: str(data / "sst2" / f"{part}.jsonl.gz") for part in ("train", "dev", "test")}
    finetune.run(
        finetune.FinetuneConfig(
            task="classification",
            data=DataConfig(rows["train"], [rows["dev"], rows["test"]], columns={"text": "sentence"}, max_length=64),
            output=str(output),
            optim=OptimConfig(5e-4, warmup_steps=50, weight_decay=0.01, schedule="linear"),
            training=TrainingConfig(epochs=3, batch_size=32, seed=seed),
            **start,
        )
    )
    return last_line(str(output))["held_out_accuracy"]


SHOWS: dict[str, Callable[[Path, Path, argparse.Namespace], bool]] = {
    "shakespeare": shakespeare,
    "spans": spans,
    "distillation": distillation,
    "encoder": encoder,
}

if __name__ == "__main__":
    sys.exit(main())

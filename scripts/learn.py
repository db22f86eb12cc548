"""Whether the stack learns what it should on real text; JSON lines on standard output, exit 1 where a bound is missed.

    python scripts/learn.py shakespeare|spans|distillation|distilbert|encoder [--seeds N ...] [--steps N]

shakespeare    a character model of nanoGPT's CPU size; loss on the last tenth of the file at most 1.90 nats
spans          a small T5 by span corruption on gsm8k; loss and accuracy of the written spans against their unigram
               distribution
distillation   half the layers, trained on a teacher's distributions or on the text's own tokens, at equal steps
distilbert     half of a BERT's layers, taken from it and taught by it, against the same student alone, at equal steps
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
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import measuring
import torch

from alignment.algorithms import pretrain
from alignment.algorithms.finetune import finetune
from alignment.algorithms.pretrain import DistillationConfig, Masked, PretrainConfig, SpanCorruption
from alignment.data.config import DataConfig
from alignment.data.pretraining.corruption import Masking
from alignment.loading import load_model, load_tokenizer
from alignment.training import OptimConfig, TrainingConfig

DATA = Path(os.environ.get("ALIGNMENT_DATA", "../shared/data"))
NANO = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
BLOCK = 64
T5 = {
    "model_type": "t5", "tie_word_embeddings": True, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4,
    "num_layers": 2, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
ENCODER = {  # pre-norm and rotary: at this size a post-norm BERT stays at the unigram distribution for a thousand steps
    "model_type": "modernbert", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "global_attn_every_n_layers": 1,
    "classifier_pooling": "mean",
}  # fmt: skip


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(SHOWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if SHOWS[arguments.what](Path(folder), arguments.seeds, arguments.steps) else 1


def say(**row: Any) -> None:
    """One line of the result."""
    print(json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}), flush=True)


def read_text(name: str) -> str:
    """A whole gzipped text of the data folder."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return file.read()


def write_texts(path: Path, texts: Iterable[str]) -> str:
    """Texts as JSON lines; returns the path."""
    return measuring.write_rows(path, ({"text": text} for text in texts))


def train(config: PretrainConfig | finetune.FinetuneConfig) -> tuple[dict[str, Any], float]:
    """The last update's metrics of a run, and its seconds."""
    run = pretrain.run if isinstance(config, PretrainConfig) else finetune.run
    seconds = measuring.seconds_of(lambda: run(config))
    return json.loads(Path(config.output, "metrics.jsonl").read_text().splitlines()[-1]), seconds


def nano_config(folder: Path, name: str, steps: int, seed: int, **changes: Any) -> PretrainConfig:
    """nanoGPT's settings for a CPU, on tinyshakespeare: 12 windows of 64 characters an update, no dropout."""
    text = read_text("tinyshakespeare/train.txt.gz")
    cut = len(text) * 9 // 10
    files = {"train": write_texts(folder / "train.jsonl", [text[:cut]])}
    files["evaluation"] = write_texts(folder / "heldout.jsonl", [text[cut:]])
    fields: dict[str, Any] = {"model": NANO, "tokenizer_kind": "characters", **changes}
    return PretrainConfig(
        data=DataConfig(**files, max_length=BLOCK), output=str(folder / name),
        optim=OptimConfig(1e-3, weight_decay=0.1, betas=(0.9, 0.99), warmup_steps=100, min_learning_rate_ratio=0.1),
        training=TrainingConfig(max_steps=steps, batch_size=12, seed=seed), **fields,
    )  # fmt: skip


def shakespeare(folder: Path, seeds: list[int] | None, steps: int | None) -> bool:
    """nanoGPT's published run, with its loss as the bound."""
    losses = []
    for seed in seeds or [0]:
        metrics, seconds = train(nano_config(folder, f"run{seed}", steps or 2000, seed))
        losses.append(metrics["held_out_loss"])
        say(show="shakespeare", impl="alignment", seed=seed, held_out_loss=losses[-1], seconds=seconds)
    return max(losses) <= 1.90


def distillation(folder: Path, seeds: list[int] | None, steps: int | None) -> bool:
    """Two layers distilled from a teacher of four, or trained on the text alone, at equal steps."""
    steps, teacher = steps or 1000, str(folder / "teacher" / "model")
    metrics, _ = train(nano_config(folder, "teacher", 2 * steps, 0))
    say(show="distillation", who="teacher", held_out_loss=metrics["held_out_loss"])
    own = {"model": {**NANO, "n_layer": 2}, "tokenizer": teacher, "tokenizer_kind": "bpe"}
    distillation = DistillationConfig(teacher, temperature=2.0, soft_coef=0.5, hard_coef=0.5)
    gains = []
    for seed in seeds or range(3):
        losses = {}
        for who, distil in (("hard labels", None), ("distilled", distillation)):
            metrics, _ = train(nano_config(folder, f"{who}{seed}", steps, seed, distillation=distil, **own))
            losses[who] = metrics["held_out_loss"]
            say(show="distillation", who=who, seed=seed, held_out_loss=losses[who])
        gains.append(losses["hard labels"] - losses["distilled"])
    say(show="distillation", gain_nats=statistics.mean(gains), least=min(gains), most=max(gains))
    return min(gains) > 0


def distilbert(folder: Path, seeds: list[int] | None, steps: int | None) -> bool:
    """DistilBERT's student, which begins as every second layer of its teacher, and the same student without a teacher.

    Losses on masked tokens of the hotel world's texts: 5 times the teacher's distribution at temperature 2, 2 times the
    tokens, and the cosine of the hidden states, the weights of the authors' published command.
    """
    steps, teacher, gains = steps or 400, str(folder / "teacher" / "model"), []

    def student(name: str, seed: int, **fields: Any) -> float:
        config = {"model": {**BERT, "num_hidden_layers": 2}, "tokenizer": teacher, **fields}
        return train(masked_config(folder / f"{name}{seed}", steps, seed, **config))[0]["held_out_loss"]

    metrics, _ = train(masked_config(folder / "teacher", 2 * steps, 0, model=BERT, vocabulary=384))
    say(show="distilbert", who="teacher", held_out_loss=metrics["held_out_loss"])
    losses = {"soft_coef": 5.0, "hard_coef": 2.0, "cosine_coef": 1.0}
    for seed in seeds or range(3):
        alone = student("alone", seed)
        taught = student("taught", seed, distillation=DistillationConfig(teacher, copy_layers=True, **losses))
        gains.append(alone - taught)
        say(show="distilbert", seed=seed, alone=alone, taught=taught, gain_nats=gains[-1])
    say(show="distilbert", gain_nats=statistics.mean(gains), least=min(gains), most=max(gains))
    return min(gains) > 0


def masked_config(output: Path, steps: int, seed: int, **fields: Any) -> PretrainConfig:
    """Masked pretraining on the hotel world's packaged texts."""
    data = measuring.ROOT / "configs" / "tiny_data"
    kind = {"tokenizer_kind": "wordpiece"} if "vocabulary" in fields else {}
    return PretrainConfig(
        data=DataConfig(str(data / "pretrain.jsonl"), str(data / "pretrain_heldout.jsonl"), max_length=64),
        output=str(output), objective=Masked(), optim=OptimConfig(2e-3, warmup_steps=40, weight_decay=0.01),
        training=TrainingConfig(max_steps=steps, batch_size=16, seed=seed), **kind, **fields,
    )  # fmt: skip


def spans(folder: Path, seeds: list[int] | None, steps: int | None) -> bool:
    """A small T5 on gsm8k's questions and worked answers, 200 of the test rows held out.

    Its loss and accuracy on missing spans are compared with the words' own frequencies.
    """
    files = {}
    for part, name, most in (("train", "train", None), ("evaluation", "test", 200)):
        rows = map(json.loads, read_text(f"gsm8k/{name}.jsonl.gz").strip().split("\n"))
        texts = [f"{row['question']} {row['answer']}" for row in rows][:most]
        files[part] = write_texts(folder / f"{part}.jsonl", texts)
    config = PretrainConfig(
        data=DataConfig(**files, max_length=64), output=str(folder / "run"), objective=SpanCorruption(), model=T5,
        tokenizer_kind="unigram", vocabulary=2000, sentinels=32,
        optim=OptimConfig(3e-3, warmup_steps=50, weight_decay=0.01),
        training=TrainingConfig(max_steps=steps or 1200, batch_size=64),
    )  # fmt: skip
    _, seconds = train(config)
    directory = str(folder / "run" / "model")
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    losses, right, guessed, baseline = span_figures(config, model, tokenizer)
    say(show="spans", seconds=seconds, loss=losses, unigram_loss=baseline, accuracy=right, commonest_accuracy=guessed)
    return losses < baseline and right > guessed


@torch.no_grad()
def span_figures(config: PretrainConfig, model: Any, tokenizer: Any) -> tuple[float, float, float, float]:
    """Loss and accuracy on held-out span tokens, the commonest token's accuracy, and the unigram loss; no sentinels."""
    from alignment.algorithms.pretrain import collate_for_objective
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
        labels = batch.decoder.target_labels
        logits = model(batch=batch, return_logits=True).logits
        written = ~torch.isin(labels, special)
        labels, logits = labels[written], logits[written]
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        guessed += (labels == commonest).sum().item()
        baseline -= sum(math.log((frequencies[token] + 1) / total) for token in labels.tolist())
        count += len(labels)
    return loss / count, right / count, guessed / count, baseline / count


def encoder(folder: Path, seeds: list[int] | None, steps: int | None) -> bool:
    """Masked pretraining on wikitext2, then SST-2, compared with the same encoder from random weights; paired over seeds.

    A seed is one pretraining and, as fine-tuning is noisier than the gain, the mean of three fine-tunings of each start.
    """
    from scipy import stats

    lines = [line for name in ("valid", "test_part") for line in read_text(f"wikitext2/{name}.txt.gz").splitlines()]
    texts = (line.strip() for line in lines if len(line.split()) > 8)  # the judge is SST-2: none of it is held out
    file, gains = write_texts(folder / "wikitext2.jsonl", texts), []
    for seed in seeds or range(5):
        config = PretrainConfig(
            data=DataConfig(train=file, max_length=48), output=str(folder / f"pretrain{seed}"), model=ENCODER,
            objective=Masked(masking=Masking(rate=0.25)), tokenizer_kind="wordpiece", vocabulary=8000,
            optim=OptimConfig(2e-3, warmup_steps=100, weight_decay=0.1, betas=(0.9, 0.98)),
            training=TrainingConfig(max_steps=steps or 1600, batch_size=64, seed=seed),
        )  # fmt: skip
        metrics, seconds = train(config)
        directory = f"{config.output}/model"
        starts = {"pretrained": {"policy": directory}, "random": {"model": ENCODER, "tokenizer": directory}}
        found = {
            who: statistics.mean(sst2(folder / f"{who}{seed}-{run}", seed + run, **start) for run in (0, 100, 200))
            for who, start in starts.items()
        }
        gains.append(found["pretrained"] - found["random"])
        say(show="encoder", seed=seed, pretraining_seconds=seconds, masked_loss=metrics["loss"], **found)
    if len(gains) < 2:
        return gains[0] > 0
    interval = stats.t.interval(0.95, len(gains) - 1, statistics.mean(gains), stats.sem(gains))
    say(show="encoder", gain=statistics.mean(gains), low=float(interval[0]), high=float(interval[1]))
    return bool(interval[0] > 0)


def sst2(output: Path, seed: int, **start: Any) -> float:
    """Accuracy on the 2,157 rows of dev and test after fine-tuning on train."""
    rows = {part: str(DATA / "sst2" / f"{part}.jsonl.gz") for part in ("train", "dev", "test")}
    data = DataConfig(rows["train"], [rows["dev"], rows["test"]], columns={"text": "sentence"}, max_length=64)
    config = finetune.FinetuneConfig(
        task="classification", data=data, output=str(output),
        optim=OptimConfig(5e-4, warmup_steps=50, weight_decay=0.01, schedule="linear"),
        training=TrainingConfig(epochs=3, batch_size=32, seed=seed), **start,
    )  # fmt: skip
    return train(config)[0]["held_out_accuracy"]


Show = Callable[[Path, list[int] | None, int | None], bool]  # folder, --seeds, --steps -> within its bounds
SHOWS: dict[str, Show] = {
    "shakespeare": shakespeare, "spans": spans, "distillation": distillation, "distilbert": distilbert,
    "encoder": encoder,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

"""T5's comparison of architectures and objectives (Raffel et al. 2020, table 2) at a size for one CPU thread.

    python scripts/t5_study.py [--seeds N ...] [--steps N] [--tune-steps N]

The texts are made here: what is said of a thing is all praise or all blame. Each architecture is pretrained on them by each
objective and then fine-tuned, text to text, to write good or bad behind a sentence; the same architecture from random weights
is beside them. The words in the labeled sentences are half of the words in the texts; accuracy is that on sentences of the
other half, so that it is chance where pretraining has not told which words go together. JSON lines on standard output, and
the table as Markdown at the end.

All stacks are T5's blocks: pre-norm, relative position biases, a gated feedforward. With L layers' weights of P parameters
and M operations for a pair of source and target:

encoder-decoder    L encoder and L decoder layers, with cross-attention; 2P, M
shared             the same, the weights of a decoder layer are those of the encoder layer: P, M
language model     L layers, source and target as one document, causal mask: P, M
prefix LM          the same with the prefix mask: P, M
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from alignment.algorithms.sft import language_loss_fn
from alignment.data.batches import Example
from alignment.data.pretraining.corruption import EpochStream, corrupt_spans, fixed_seed_rows, split_prefix
from alignment.data.pretraining.prepare import Corrupt, collate_in_one, collate_seq2seq
from alignment.data.stream import Stream
from alignment.models.build import build_model, empty_model
from alignment.models.init_weights import initialize
from alignment.models.language_model import LanguageModel
from alignment.training import Collate, Engine, OptimConfig, TrainingConfig
from alignment.training.terms import Term

START, END = 0, 1
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True, "pad_token_id": START, "eos_token_id": END,
    "decoder_start_token_id": START,
}  # fmt: skip
ARCHITECTURES = ("encoder-decoder", "shared", "language model", "prefix LM")
THINGS = ("room", "lunch", "garden", "bus", "music", "view", "bed", "tea")
WORDS = (  # of blame and praise; labeled sentences have the first half of each
    ("awful", "bleak", "cold", "dirty", "grim", "harsh", "loud", "nasty", "poor", "rude", "slow", "stale"),
    ("bright", "calm", "clean", "fine", "fresh", "gentle", "grand", "lovely", "neat", "sweet", "warm", "witty"),
)
LABELS = ("bad", "good")
FORWARD = 1 << 14  # tokens of a forward


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250, help="updates of pretraining, 32 sentences each")
    parser.add_argument("--tune-steps", type=int, default=100, help="updates of fine-tuning, 32 sentences each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(arguments.steps, arguments.tune_steps)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in arguments.seeds:
        for architecture in ARCHITECTURES:
            for objective in ("denoising", "LM", "none"):
                start = time.perf_counter()
                row = study.run(architecture, objective, seed)
                found.setdefault((architecture, objective), []).append(row["accuracy"])
                seconds = time.perf_counter() - start
                print(json.dumps({"seed": seed, **row, "seconds": round(seconds, 1)}), flush=True)
    print("\n| architecture | parameters | denoising | LM | no pretraining |\n|---|---|---|---|---|")
    for architecture in ARCHITECTURES:
        cells = [describe(found[architecture, objective]) for objective in ("denoising", "LM", "none")]
        print(f"| {architecture} | {study.parameters(architecture):,} | {' | '.join(cells)} |")
    return 0


def describe(accuracies: Sequence[float]) -> str:
    """Mean and range in percent."""
    low, high = min(accuracies), max(accuracies)
    return f"{100 * statistics.mean(accuracies):.1f} ({100 * low:.1f} to {100 * high:.1f})"


def sentence(rng: random.Random, label: int, words: slice) -> str:
    """What is said of a thing in three different words."""
    first, second, third = rng.sample(WORDS[label][words], 3)
    return f"the {rng.choice(THINGS)} was {first} , {second} and {third} ."


class Study:
    """The data and the runs on it. A token is a word; 0 starts a document, 1 ends it, the last are sentinels."""

    def __init__(self, steps: int, tune_steps: int):
        self.steps, self.tune_steps, rng, half = steps, tune_steps, random.Random(0), len(WORDS[0]) // 2
        words = ["<start>", "<end>", "the", "was", ",", "and", ".", *LABELS, *THINGS, *WORDS[0], *WORDS[1]]
        self.ids = {word: number for number, word in enumerate(words)}
        self.sentinels = range(len(words), len(words) + 8)
        self.words = [self.ids[label] for label in LABELS]
        self.texts = [self.example(sentence(rng, rng.randrange(2), slice(None)), number) for number in range(4000)]
        self.train, self.judged = (
            [self.example(f"{sentence(rng, number % 2, part)} {LABELS[number % 2]}", number) for number in range(400)]
            for part in (slice(None, half), slice(half, None))
        )

    def example(self, text: str, number: int) -> Example:
        """The tokens of a text; of a labeled sentence the label is the last one, and the number's parity."""
        ids = [self.ids[word] for word in text.split()]
        return Example.single(ids, [True] * len(ids), str(number))

    def build(self, architecture: str) -> Any:
        """A fresh model."""
        config = {**T5, "vocab_size": self.sentinels.stop}
        if architecture in ("encoder-decoder", "shared"):
            return share_layers(build_model(config)) if architecture == "shared" else build_model(config)
        spec = empty_model(config, "language").spec.decoder
        spec = replace(spec, blocks=tuple(replace(block, cross=None) for block in spec.blocks))
        model: Any = LanguageModel(spec.build(), spec.head.build(spec.width, spec.vocabulary), config)
        if architecture == "prefix LM":
            model.trunk.distance.bidirectional = True  # buckets for keys to the right, which a prefix has
        return initialize(model)

    def parameters(self, architecture: str) -> int:
        """Weights without the token table."""
        model = self.build(architecture)
        table = (model.encoder if hasattr(model, "encoder") else model.trunk).embed.weight
        return sum(parameter.numel() for parameter in model.parameters()) - table.numel()

    def run(self, architecture: str, objective: str, seed: int) -> dict[str, Any]:
        """Pretrain, fine-tune and judge one model."""
        torch.manual_seed(seed)
        model: Any = self.build(architecture)
        row: dict[str, Any] = {"architecture": architecture, "objective": objective}
        if objective != "none":
            collate = collate_for(architecture, self.corruption(architecture, objective))
            row["pretraining_loss"] = round(train(model, self.texts, collate, self.steps, 3e-3, seed), 3)
        collate = collate_for(architecture, lambda ids, _: ([*ids[:-1], END], [ids[-1], END]))
        train(model, self.train, collate, self.tune_steps, 1e-3, seed)
        return {**row, "accuracy": round(self.accuracy(model, collate), 4)}

    def corruption(self, architecture: str, objective: str) -> Corrupt:
        """Source and target of a text; a language model learns all of a text where others learn its second part."""
        if objective == "denoising":
            pieces = partial(corrupt_spans, sentinels=self.sentinels, density=0.3, mean_span=1.5)
        elif architecture == "language model":
            return lambda ids, _: ([END], [*ids, END])
        else:
            pieces = split_prefix
        return lambda ids, generator: tuple([*piece, END] for piece in pieces(ids, generator=generator))  # type: ignore[return-value]

    @torch.no_grad()
    def accuracy(self, model: Any, collate: Collate) -> float:
        """Share of the judged sentences behind which the right one of the two words is the likelier."""
        right = 0
        for batch in collate(fixed_seed_rows(self.judged), micro_batch_tokens=FORWARD):
            logits = model(batch=batch, return_logits=True).logits[
                ::2
            ]  # of the word; those of its end are between them
            labels = torch.tensor([int(name) % 2 for name in batch.row_ids])
            right += int((logits[:, self.words].argmax(1) == labels).sum())
        return right / len(self.judged)


def share_layers(model: Any) -> Any:
    """The decoder's layers with the weights of the encoder's; cross-attention and position biases stay its own."""
    for ours, theirs in zip(model.decoder.blocks, model.encoder.blocks, strict=True):
        for name in ("attention", "feedforward", "attention_norm", "feedforward_norm"):
            for module, shared in zip(getattr(ours, name).modules(), getattr(theirs, name).modules(), strict=True):
                for key in list(module._parameters):
                    module._parameters[key] = shared._parameters[key]
    return model


def collate_for(architecture: str, corrupt: Corrupt) -> Collate:
    """Batches of an encoder-decoder, or of a decoder that reads source and target as one document."""
    if architecture in ("encoder-decoder", "shared"):
        return partial(collate_seq2seq, corrupt=corrupt, start_id=START)
    mask = architecture == "prefix LM"
    return partial(collate_in_one, corrupt=corrupt, with_bos=lambda ids: [START, *ids], prefix_mask=mask)


def train(model: Any, examples: Sequence[Any], collate: Collate, steps: int, rate: float, seed: int) -> float:
    """Mean loss of the last tenth of `steps` updates of 32 rows."""
    training = TrainingConfig(max_steps=steps, batch_size=32, seed=seed)
    optim = OptimConfig(rate, warmup_steps=20, weight_decay=0.01, schedule="linear")
    engine = Engine(model.train(), optim, training, total_steps=steps)
    stream, loss_fn = EpochStream(Stream(examples, batch_size=32, seed=seed)), language_loss_fn(engine.model)
    losses = [
        engine.update(Term(collate(stream.rows_at(step), micro_batch_tokens=FORWARD), loss_fn))["loss"]
        for step in range(steps)
    ]
    model.eval()
    return statistics.mean(losses[-max(1, steps // 10) :])


if __name__ == "__main__":
    sys.exit(main())

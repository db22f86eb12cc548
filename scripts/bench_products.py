"""Float32 matrix products by MKL and by oneDNN, alone and in updates of a model; JSON lines on standard output.

    python scripts/bench_products.py [--sizes nano micro] [--documents 8 32] [--rounds N]

`product`: large products of x [4096, 1024] and w [1024, 1024], and of their gradients, GFLOP/s.
`update`: forward and backward pass of a random model on documents of 40 to 100 tokens, other ones each time, milliseconds:
`mkl`, and `onednn` as the library runs where it chooses oneDNN (alignment/models/matrix_products.py), with rows of zeros
behind the tokens so that few shapes occur. Both take turns; medians with the lowest and the highest.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from bench import SIZES

from alignment.models.build import build_language_model
from alignment.models.matrix_products import VARIABLE, choose_products, products_by_mkl
from alignment.ragged import Ragged

VOCABULARY = 640


def main() -> None:
    """Run the chosen sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=[size for size in SIZES if size != "gpt2"], default=["nano", "micro"]
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.environ[VARIABLE] = "onednn"
    choose_products()
    x, w = torch.randn(4096, 1024), torch.randn(1024, 1024)
    work = 2 * x.numel() * 1024 / 1e9
    for name, product in {"x w": lambda: x @ w, "x w^T": lambda: x @ w.t(), "x^T x": lambda: x.t() @ x}.items():
        seconds = take_turns(lambda _, product=product: product(), options.rounds)
        rates = {who: round(work / statistics.median(times), 1) for who, times in seconds.items()}
        print(
            json.dumps({"bench": "product", "of": name, "threads": torch.get_num_threads(), "gflops": rates}),
            flush=True,
        )
    for size in options.sizes:
        model = random_model(size)
        for count in options.documents:
            seconds = take_turns(
                lambda seed, model=model, count=count: update(model, documents(seed, count)),
                options.rounds,
            )
            row = {"bench": "update", "size": size, "documents": count, "threads": torch.get_num_threads()}
            figures = {who: [round(1e3 * pick(times), 1) for pick in PICKS] for who, times in seconds.items()}
            print(json.dumps(row | {"milliseconds": figures}), flush=True)


PICKS: tuple[Callable[[list[float]], float], ...] = (statistics.median, min, max)


CONTESTANTS = {"mkl": products_by_mkl, "onednn": nullcontext}


def take_turns(work: Callable[[int], object], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's work in each round, after two that are not counted; `work` gets a new number each time."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    seed = 0
    for number in range(rounds + 2):
        for name, chosen in CONTESTANTS.items():
            with chosen():
                for _ in range(3):
                    seed += 1
                    began = time.perf_counter()
                    work(seed)
                    if number >= 2:
                        seconds[name].append(time.perf_counter() - began)
    return seconds


def random_model(size: str) -> torch.nn.Module:
    """A Llama with random weights."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    config |= {"bos_token_id": 0, "eos_token_id": 1, **SIZES[size]}
    return build_language_model(config | {"num_key_value_heads": config["num_attention_heads"]})


def documents(seed: int, count: int) -> Ragged:
    """Random documents of 40 to 100 tokens."""
    draw = random.Random(seed)
    return Ragged.build([[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(40, 100))] for _ in range(count)])


def update(model: torch.nn.Module, batch: Ragged) -> None:
    """Forward and backward pass."""
    model(batch=batch).log_probs.sum().backward()


if __name__ == "__main__":
    main()

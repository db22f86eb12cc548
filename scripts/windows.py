"""Time of a layer with a window against the document's length, full attention beside it; JSON lines on standard output.

    OMP_NUM_THREADS=1 python scripts/windows.py [--window 64] [--lengths 1024 2048 4096 8192 16384] [--rounds 7]

One document through a trunk of one layer of width 32, once forward and once forward and backward. The two kinds of layer
take turns; a figure is the median over the rounds. The last lines are the exponents that fit the medians: time ~ length ^
exponent, 1 for a cost that is linear, 2 for a square. `cache_bytes` is what decoding keeps of a document of the length.
"""

import argparse
import json
import math
import statistics
from functools import partial
from typing import Any

import torch
from measuring import seconds_of, seconds_row, take_turns

from alignment.models.build import build_language_model
from alignment.ragged import Ragged

WIDTH, VOCABULARY, HEADS = 32, 64, 4


def main() -> None:
    """Measure every length, forward and with the backward pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024 * 2**power for power in range(5)])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {
        name: layer(window, max(arguments.lengths)).to(device, getattr(torch, arguments.dtype))
        for name, window in (("full", None), ("window", arguments.window))
    }
    machine = {
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": arguments.dtype,
        "window": arguments.window,
    }
    medians: dict[tuple[str, str], list[float]] = {}
    for work in ("forward", "train"):
        for length in arguments.lengths:
            batch = Ragged.build([[token % VOCABULARY for token in range(length)]]).to(device)
            times = take_turns(
                {name: partial(seconds_of, partial(run, model, batch, work), device) for name, model in models.items()},
                arguments.rounds, warm_up=1,
            )  # fmt: skip
            for name, seconds in times.items():
                cache = models[name].new_cache(1, length)
                size = sum(x.nbytes for x in (*cache.keys, *cache.values))
                row = {"bench": work, "layer": name, "length": length, **machine}
                print(json.dumps({**row, **seconds_row(seconds), "cache_bytes": size}), flush=True)
                medians.setdefault((work, name), []).append(statistics.median(seconds))
    for (work, name), seconds in medians.items():
        fitted = exponent(arguments.lengths, seconds)
        print(json.dumps({"bench": work, "layer": name, "exponent": round(fitted, 3), **machine}), flush=True)


def layer(window: int | None, longest: int) -> Any:
    """A model of one layer, with the weights of its like."""
    torch.manual_seed(0)
    return build_language_model(
        {
            "model_type": "mistral", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
            "max_position_embeddings": longest, "sliding_window": window,
        }
    )  # fmt: skip


def run(model: Any, batch: Ragged, work: str) -> None:
    """One document through the layer; "train": back again."""
    with torch.set_grad_enabled(work == "train"):
        states = model.trunk(batch)
    if work == "train":
        states.square().sum().backward()


def exponent(lengths: list[int], seconds: list[float]) -> float:
    """The slope of log(seconds) over log(length), least squares."""
    return statistics.linear_regression([math.log(x) for x in lengths], [math.log(x) for x in seconds]).slope


if __name__ == "__main__":
    main()

"""Speed of the stack beside transformers (SDPA), on the same weights, machine and run; JSON lines on standard output.

    python scripts/bench_model.py [--sizes nano micro small] [--batches full half ragged] [--work forward train decode]

Each figure is the median over rounds in which both take turns, with its spread; `ratio` is their time over ours, above 1
ours is faster. Tokens are real ones: padding earns nothing. MFU is useful arithmetic (matrix products and the causal half
of attention, real tokens only; a backward pass counts twice a forward) over what a large matrix product reaches on the
machine in the same run. No optimizer and no data loading here: see bench.py.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import matrix_rate, padded, seconds_of, seconds_row, take_turns
from torch import Tensor

from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.huggingface.weight_map import to_hf
from alignment.models.weights_config import set_up_device
from alignment.ragged import Ragged

WIDTH = 256
GPT2 = {"model_type": "gpt2", "n_positions": WIDTH * 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "nano": GPT2 | {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4},
    "micro": GPT2 | {"vocab_size": 8192, "n_embd": 384, "n_layer": 6, "n_head": 6},
    "small": GPT2 | {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "llama-1b": {  # for a GPU: `--sizes llama-1b --dtype bfloat16`
        "model_type": "llama", "max_position_embeddings": WIDTH * 16, "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
DOCUMENTS = {"nano": 32, "micro": 16, "small": 4, "llama-1b": 16}  # of a batch
WORK = ("forward", "train", "decode")
NEW_TOKENS = 64


@dataclass(frozen=True)
class Bench:
    """Ours and theirs with equal weights, and the documents they run on."""

    ours: Any
    theirs: Any
    documents: list[list[int]]
    device: str


def main() -> None:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano", "micro"])
    parser.add_argument("--batches", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile both")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_up_device()  # as every run does; for both
    dtype = getattr(torch, arguments.dtype)
    rate = matrix_rate(device, dtype)
    machine = {"threads": torch.get_num_threads(), "device": device, "dtype": arguments.dtype}
    print(json.dumps({"bench": "matrix_rate", "gflops": round(rate / 1e9, 1), **machine}), flush=True)
    for size in arguments.sizes:
        ours, theirs = models(size, device, dtype)
        if arguments.compile:
            ours.compile_blocks()
            theirs = torch.compile(theirs, dynamic=True)
        for batch in arguments.batches:
            lengths = LENGTHS[batch](DOCUMENTS[size])
            bench = Bench(ours, theirs, documents(lengths, ours.spec.vocabulary), device)
            for work in arguments.work:
                row = {"bench": work, "size": size, "batch": batch, **machine}
                report(row, bench, arguments.rounds, rate)


def report(row: dict[str, Any], bench: Bench, rounds: int, rate: float) -> None:
    """Measure one kind of work; one line for us and one for the peer."""
    if row["bench"] == "decode":
        ours, theirs = decoding(bench)
        prompts = [len(row[:NEW_TOKENS]) for row in bench.documents]
        tokens, flops = len(prompts) * NEW_TOKENS, operations(bench, [length + NEW_TOKENS for length in prompts])
    else:
        ours, theirs = losses(bench, gradient=row["bench"] == "train")
        lengths = [len(row) for row in bench.documents]
        tokens, flops = sum(lengths), operations(bench, lengths) * (3 if row["bench"] == "train" else 1)
    calls = {
        "alignment": lambda: seconds_of(ours, bench.device),
        "transformers": lambda: seconds_of(theirs, bench.device),
    }
    times = take_turns(calls, rounds, warm_up=2)
    pairs = zip(times["transformers"], times["alignment"], strict=True)
    ratio = {"alignment": {"ratio": round(statistics.median(peer / own for peer, own in pairs), 2)}, "transformers": {}}
    for who, seconds in times.items():
        median = statistics.median(seconds)
        speed = {"tokens_per_second": round(tokens / median), "mfu": round(flops / median / rate, 3)}
        print(json.dumps({**row, "impl": who, **seconds_row(seconds), **speed, **ratio[who]}), flush=True)


def models(size: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Ours with fresh weights, and transformers' with the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ours = build_language_model(SIZES[size])
    config = AutoConfig.for_model(**SIZES[size])
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tensors = to_hf(dict(ours.named_parameters()), hf_locations(ours))
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    return ours.to(device, dtype), theirs.to(device, dtype).eval()


def ragged(count: int) -> list[int]:
    """Lengths of real instruction data: many short ones, a few long (log-normal, median 60)."""
    generator = torch.Generator().manual_seed(0)
    drawn = (60 * torch.exp(0.8 * torch.randn(2 * count, generator=generator))).long().clamp(4, WIDTH)
    return [*drawn.tolist()[1:], WIDTH]


LENGTHS: dict[str, Callable[[int], list[int]]] = {
    "full": lambda count: [WIDTH] * count,
    "half": lambda count: [max(2, round(WIDTH * (i + 1) / count)) for i in range(count)],  # half is padding
    "ragged": ragged,
}


def documents(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Random tokens of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


Call = Callable[[], Any]


def losses(bench: Bench, *, gradient: bool) -> tuple[Call, Call]:
    """Mean next-token loss of the same tokens by both, checked to agree; with its gradient or without."""
    batch = Ragged.build(bench.documents).to(bench.device)
    ids, mask = padded(bench.documents, "right", bench.device)
    labels = ids.masked_fill(mask == 0, -100)

    def ours() -> Tensor:
        return -bench.ours(batch=batch).log_probs.mean()

    def theirs() -> Tensor:
        seen = None if bool(mask.all()) else mask
        return bench.theirs(input_ids=ids, attention_mask=seen, labels=labels, use_cache=False).loss

    with torch.no_grad():
        torch.testing.assert_close(ours().float(), theirs().float(), atol=2e-3, rtol=2e-3)
    if not gradient:
        return torch.no_grad()(ours), torch.no_grad()(theirs)

    def step(model: Any, loss: Call) -> None:
        model.zero_grad()
        loss().backward()

    return lambda: step(bench.ours, ours), lambda: step(bench.theirs, theirs)


def decoding(bench: Bench) -> tuple[Call, Call]:
    """64 tokens after prompts of up to 64, greedily, no end token: prefill and decoding."""
    from alignment.generation.engine import decode_responses
    from alignment.generation.sampling import SamplingConfig

    prompts = [row[:NEW_TOKENS] for row in bench.documents]
    ids, mask = padded(prompts, "left", bench.device)
    options = {"min_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0)
    return (
        lambda: decode_responses(bench.ours, prompts, sampling, []),
        torch.no_grad()(lambda: bench.theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options)),
    )


def operations(bench: Bench, lengths: Sequence[int]) -> float:
    """Multiplications and additions of one forward: every matrix once per token, the causal half of attention."""
    spec = bench.ours.spec
    named = {name: x for name, x in bench.ours.named_parameters() if x.dim() == 2}
    matrices = sum(x.numel() for name, x in named.items() if "embed" not in name and "positions" not in name)
    matrices += spec.vocabulary * spec.width if spec.tied_head else 0
    heads = sum(block.attention.heads * block.attention.head_dim for block in spec.layers)
    return sum(2 * matrices * length + 2 * heads * length * (length + 1) for length in lengths)


if __name__ == "__main__":
    main()

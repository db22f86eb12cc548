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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.huggingface.weight_map import to_hf
from alignment.ragged import Ragged

SIZES: dict[str, dict[str, int]] = {  # GPT-2's shape throughout; `batch` is documents of 256 tokens
    "nano": {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4, "batch": 32},
    "micro": {"vocab_size": 8192, "n_embd": 384, "n_layer": 6, "n_head": 6, "batch": 16},
    "small": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "batch": 4},
}
LLAMA_1B = {  # for a GPU: `--sizes llama-1b --dtype bfloat16`
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "batch": 16,
}  # fmt: skip
WIDTH = 256


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
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "llama-1b"], default=["nano", "micro"])
    parser.add_argument("--batches", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    rate = matrix_rate(arguments.device, dtype)
    machine = {"threads": arguments.threads, "device": arguments.device, "dtype": arguments.dtype}
    print(json.dumps({"bench": "matrix_rate", "gflops": round(rate / 1e9, 1), **machine}), flush=True)
    for size in arguments.sizes:
        ours, theirs = models(size, arguments.device, dtype)
        if arguments.compile:
            ours.compile_blocks()
            theirs = torch.compile(theirs, dynamic=True)
        for batch in arguments.batches:
            count = (LLAMA_1B if size == "llama-1b" else SIZES[size])["batch"]
            bench = Bench(ours, theirs, documents(LENGTHS[batch](count), ours.spec.vocabulary), arguments.device)
            for work in arguments.work:
                mine, peer, tokens, flops = WORK[work](bench)
                times = take_turns(mine, peer, arguments.rounds, arguments.device)
                report({"bench": work, "size": size, "batch": batch, **machine}, times, tokens, flops, rate)


def report(row: dict[str, Any], times: tuple[list[float], list[float]], tokens: int, flops: float, rate: float) -> None:
    """One line for us and one for the peer."""
    ratio = statistics.median(theirs / ours for ours, theirs in zip(*times, strict=True))
    for who, values in zip(("alignment", "transformers"), times, strict=True):
        median = statistics.median(values)
        figures: dict[str, Any] = {
            "seconds_median": round(median, 5), "seconds_min": round(min(values), 5), "seconds_max": round(max(values), 5),
            "tokens_per_second": round(tokens / median), "mfu": round(flops / median / rate, 3),
        }  # fmt: skip
        figures |= {"ratio": round(ratio, 2)} if who == "alignment" else {}
        print(json.dumps({**row, "impl": who, **figures}), flush=True)


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of several: the machine's floor."""
    side = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = take_turns(lambda: a @ b, lambda: b @ a, 30, device)
    return 2 * side**3 / min(*times[0], *times[1])


def models(size: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Ours with fresh weights, and transformers' with the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {key: value for key, value in (LLAMA_1B if size == "llama-1b" else SIZES[size]).items() if key != "batch"}
    if size == "llama-1b":
        config = {"model_type": "llama", "max_position_embeddings": WIDTH * 16, **shape}
    else:
        config = {"model_type": "gpt2", "n_positions": WIDTH * 4, **shape}
        config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    ours = build_language_model(config)
    kind = config.pop("model_type")
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), attn_implementation="sdpa")
    tensors = to_hf(dict(ours.named_parameters()), hf_locations(ours))
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    return ours.to(device, dtype), theirs.to(device, dtype).eval()


def full(count: int) -> list[int]:
    """Every document as long as the batch is wide."""
    return [WIDTH] * count


def half(count: int) -> list[int]:
    """Lengths evenly spread up to the width: half of the rectangle is padding."""
    return [max(2, round(WIDTH * (i + 1) / count)) for i in range(count)]


def ragged(count: int) -> list[int]:
    """Lengths of real instruction data: many short ones, a few long (log-normal, median 60)."""
    generator = torch.Generator().manual_seed(0)
    drawn = (60 * torch.exp(0.8 * torch.randn(2 * count, generator=generator))).long().clamp(4, WIDTH)
    return [*drawn.tolist()[1:], WIDTH]


LENGTHS: dict[str, Callable[[int], list[int]]] = {"full": full, "half": half, "ragged": ragged}


def documents(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Random tokens of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], device: str, side: str = "right") -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, T]."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)


Measured = tuple[Callable[[], Any], Callable[[], Any], int, float]


def forward(bench: Bench) -> Measured:
    """Mean next-token loss without gradient, both from the same tokens."""
    ours, theirs = losses(bench)
    return torch.no_grad()(ours), torch.no_grad()(theirs), tokens_of(bench), useful_operations(bench)


def train(bench: Bench) -> Measured:
    """Mean next-token loss and its gradient."""
    ours, theirs = losses(bench)

    def step(model: Any, loss: Callable[[], Tensor]) -> None:
        model.zero_grad()
        loss().backward()

    mine, peer = lambda: step(bench.ours, ours), lambda: step(bench.theirs, theirs)
    return mine, peer, tokens_of(bench), 3 * useful_operations(bench)


def losses(bench: Bench) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The same loss by both; checked to agree."""
    batch = Ragged.build(bench.documents).to(bench.device)
    ids, mask = padded(bench.documents, bench.device)
    labels = ids.masked_fill(mask == 0, -100)

    def ours() -> Tensor:
        return -bench.ours(batch=batch).log_probs.mean()

    def theirs() -> Tensor:
        return bench.theirs(
            input_ids=ids, attention_mask=None if bool(mask.all()) else mask, labels=labels, use_cache=False
        ).loss

    with torch.no_grad():
        torch.testing.assert_close(ours().float(), theirs().float(), atol=2e-3, rtol=2e-3)
    return ours, theirs


def decode(bench: Bench) -> Measured:
    """64 tokens after prompts of up to 64, greedily, no end token: prefill and decoding."""
    from alignment.generation.decode import decode_responses
    from alignment.generation.sampling import SamplingConfig

    steps = 64
    prompts = [row[:64] for row in bench.documents]
    ids, mask = padded(prompts, bench.device, "left")

    def ours() -> Any:
        return decode_responses(bench.ours, prompts, SamplingConfig(max_new_tokens=steps, temperature=0.0), [])

    def theirs() -> Any:
        options = {"max_new_tokens": steps, "min_new_tokens": steps, "pad_token_id": 0, "eos_token_id": None}
        return bench.theirs.generate(ids, attention_mask=mask, do_sample=False, **options)

    flops = sum(operations(bench, [len(prompt)]) for prompt in prompts)
    flops += sum(operations(bench, [len(prompt) + steps]) - operations(bench, [len(prompt)]) for prompt in prompts)
    return ours, torch.no_grad()(theirs), len(prompts) * steps, flops


WORK: dict[str, Callable[[Bench], Measured]] = {"forward": forward, "train": train, "decode": decode}


def tokens_of(bench: Bench) -> int:
    """Real tokens of the batch."""
    return sum(map(len, bench.documents))


def useful_operations(bench: Bench) -> float:
    """Of one forward over the documents."""
    return operations(bench, [len(row) for row in bench.documents])


def operations(bench: Bench, lengths: Sequence[int]) -> float:
    """Multiplications and additions of one forward: every matrix once per token, the causal half of attention."""
    spec = bench.ours.spec
    matrices = sum(
        x.numel()
        for name, x in bench.ours.named_parameters()
        if x.dim() == 2 and "embed" not in name and "positions" not in name
    )
    matrices += spec.vocabulary * spec.width if spec.tied_head else 0
    heads = sum(block.attention.heads * block.attention.head_dim for block in spec.layers)
    return sum(2 * matrices * length + 2 * heads * length * (length + 1) for length in lengths)


def take_turns(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, device: str
) -> tuple[list[float], list[float]]:
    """Seconds of each, round by round, after two rounds that are not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 2):
        for call, kept in zip((ours, theirs), times, strict=True):
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 1:
                kept.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()

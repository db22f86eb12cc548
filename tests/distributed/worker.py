"""What every rank runs: some updates of two small models, and their whole weights on rank 0. Started by the tests.

python -m tests.distributed.worker OUTPUT MODE     MODE: plain | bf16 | resume | save | continue | optimizers NAME...
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.data.batches import Example, collate
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.build import build_language_model
from alignment.ragged import Ragged
from alignment.training import (
    Engine,
    LossSum,
    NonFiniteError,
    OptimConfig,
    Term,
    TrainingConfig,
    restore_checkpoint,
    save_checkpoint,
    shard_rows,
)
from tests.training.toys import collate_by, squared_error, toy_engine, toy_rows, weights

LLAMA = {
    "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
UPDATES = 5
ROWS = (8, 7, 5, 1, 6)  # one row: the second rank has none of its own


def documents(step: int) -> list[Example]:
    """Random documents of unequal length, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 30, (ROWS[step],), generator=generator).tolist()
    ids = [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]
    return [Example.single(row, [True] * len(row), f"{step}-{index}") for index, row in enumerate(ids)]


def language_engine(precision: str, seed: int = 0, **settings: Any) -> Engine:
    """A tiny Llama with tied embeddings."""
    torch.manual_seed(seed)
    optim = OptimConfig(1e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, **settings)
    training = TrainingConfig(precision=precision, gradient_checkpointing=True)
    return Engine(build_language_model(dict(LLAMA)), optim, training, total_steps=UPDATES)


def next_token(engine: Engine) -> Any:
    """-log p of every target."""

    def loss_fn(batch: Ragged) -> LossSum:
        log_probs = engine.model(batch=batch).log_probs
        return LossSum(-log_probs.sum(), {"likely": (log_probs > -4).float().sum()})

    return loss_fn


def advance(toy: Engine, language: Engine, updates: int) -> list[dict[str, float]]:
    """Updates of both engines in turn; micro-batches of 2 rows on rank 0 and of 3 on rank 1."""
    history, group = [], toy.process_group
    for step in range(toy.step, toy.step + updates):
        rows = shard_rows(toy_rows(step, ROWS[step]), collate_by(2 + group.rank), group.rank, group.size)
        history += [toy.update(Term(rows, squared_error(toy.model))), advance_language(language)]
    return history


def advance_language(language: Engine) -> dict[str, float]:
    """One update on rows that do not depend on the number of processes."""
    group = language.process_group
    texts = shard_rows(documents(language.step), lambda part: collate(part, 40), group.rank, group.size)
    return language.update(Term(texts, next_token(language)))


def run_optimizer(output: Path, name: str) -> None:
    """Two updates by the optimizer, and two in an engine restored from its checkpoint; weights from rank 0."""
    settings = {"name": name, "learning_rates": {"embed": 0.5}}
    first, second = (language_engine("fp32", seed, **settings) for seed in (0, 7))
    for _ in range(2):
        advance_language(first)
    path = save_checkpoint(output / name, 2, {"policy": first}, {}, {}, keep=1)
    restore_checkpoint(path, {"policy": second}, {})
    for _ in range(2):
        advance_language(second)
    state = weights(second)
    if second.process_group.is_main:
        save_file(state, output / f"{name}.safetensors")


def fail_on_last_rank(toy: Engine) -> str:
    """Message of an update in which the last rank alone meets a loss that is not finite; the weights must stay."""
    before, group = weights(toy), toy.process_group

    def loss_fn(batch: Any) -> LossSum:
        good = squared_error(toy.model)(batch)
        return LossSum(good.total * (float("nan") if group.rank == group.size - 1 else 1.0), good.metrics)

    try:
        toy.update(Term(shard_rows(toy_rows(9), collate_by(4), group.rank, group.size), loss_fn))
    except NonFiniteError as error:
        after = weights(toy)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return str(error)
    raise AssertionError("the update was applied")


class Collectives(TorchDispatchMode):
    """While open, collects the names of the collective operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.called.append(str(function))
        return function(*args, **(kwargs or {}))


def sample(engine: Engine) -> tuple[torch.Tensor, list[str]]:
    """Logits after a prompt and one more token, and the collective operations called while the weights were whole."""
    model, prompt = engine.backend.unwrapped, Ragged.build([[3, 1, 4, 1, 5]])
    with engine.backend.full_parameters(), Collectives() as collectives, torch.no_grad():
        cache = model.new_cache(1, 8)
        logits = torch.stack([model.prefill(prompt, cache), model.decode(torch.tensor([9]), cache)])
        engine.model(batch=Ragged.build([[3, 1, 4]], [[False, True, True]]))
    return logits, collectives.called


def respond(engine: Engine, weights: str) -> dict[str, Any]:
    """Sampled responses of all ranks by row, forwards of each rank, and whether blocks were whole between forwards.

    Ranks have unequal numbers of prompts, one side by side, and their responses end at different steps.
    """
    group, model, forwards, whole = engine.process_group, engine.backend.unwrapped, [0], []
    rows = list(range(5))[group.rank :: group.size]
    prompts = [[3, 1, 4, 1, 5][: row + 1] for row in rows]
    sharded = weights == "sharded"

    def count(*_: object) -> None:
        forwards[0] += 1
        query: Any = model.trunk.blocks[0].attention.query.weight
        whole.append(type(query.data) is torch.Tensor and query.numel() > 0)

    with engine.backend.sharded_decoding() if sharded else engine.backend.full_parameters(), torch.no_grad():
        hook = model.trunk.embed.register_forward_hook(count)
        found = decode_responses(
            model, prompts, SamplingConfig(20, seed=5), range(8),
            rows=rows, batch_size=1, largest=group.largest if sharded else None,
        )  # fmt: skip
        hook.remove()
    ours = list(zip(rows, found.token_ids, found.log_probs, strict=True))
    by_rank = group.gather_objects((ours, forwards[0], any(whole)))
    return {
        "responses": sorted(row for ours, _, _ in by_rank for row in ours),
        "forwards": [count for _, count, _ in by_rank],
        "whole": any(whole for _, _, whole in by_rank),
    }


def run(output: Path, mode: str) -> None:
    """Train, and write states and metrics from rank 0."""
    precision = "bf16" if mode == "bf16" else "fp32"
    toy = toy_engine(schedule="constant", training=TrainingConfig(precision=precision))
    language = language_engine(precision)
    draws = [row[0] for row in toy.process_group.gather([float(torch.rand(()))])]
    engines = {"toy": toy, "language": language}
    before, collectives = sample(language)  # ahead of any forward, as PPO does
    if mode == "save":  # for `continue`, which goes on with another number of processes
        advance(toy, language, 2)
        save_checkpoint(output / "checkpoints", 2, engines, {}, {}, keep=1, drawn=False)
        return
    if mode == "continue":
        restore_checkpoint(output / "checkpoints" / "step-000002", engines, {})
    history = advance(toy, language, {"resume": 2, "continue": UPDATES - 2}.get(mode, UPDATES))
    if mode == "resume":
        path = save_checkpoint(output / "checkpoints", 2, engines, {}, {}, keep=1)
        fresh = {"toy": toy_engine(seed=7, schedule="constant"), "language": language_engine(precision, seed=7)}
        restore_checkpoint(path, fresh, {})
        history += advance(fresh["toy"], fresh["language"], UPDATES - 2)
        engines = fresh
    states = {name: weights(engine) for name, engine in engines.items()}
    after, more = sample(engines["language"])
    collectives += more
    responses = {weights: respond(engines["language"], weights) for weights in ("gathered", "sharded")}
    message = fail_on_last_rank(engines["toy"])
    if toy.process_group.is_main:
        output.mkdir(parents=True, exist_ok=True)
        for name, state in states.items():
            save_file({key: value.clone() for key, value in state.items()}, output / f"{name}.safetensors")
        save_file({"before": before.float(), "after": after.float()}, output / "logits.safetensors")
        report = {
            "kind": toy.process_group.kind,
            "size": toy.process_group.size,
            "history": history,
            "message": message,
        }
        report |= {"draws": draws, "collectives": collectives, "sampling": responses}
        (output / "report.json").write_text(json.dumps(report))
    toy.process_group.barrier()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    if sys.argv[2] != "optimizers":
        run(Path(sys.argv[1]), sys.argv[2])
        sys.exit()
    # Muon orthogonalizes in bfloat16, where another order of sums shows in the third digit. In float32 what differs
    # between one process and several is their sharding alone.
    torch.Tensor.bfloat16 = lambda self: self  # pyright: ignore[reportAttributeAccessIssue]
    for each in sys.argv[3:]:
        run_optimizer(Path(sys.argv[1]), each)

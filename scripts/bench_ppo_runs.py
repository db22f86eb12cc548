"""PPO iterations of ours or of trl in a process of its own, for bench_ppo.py: prints one JSON line with what they took.

    python scripts/bench_ppo_runs.py alignment SETTINGS     SETTINGS: a JSON file of `Settings`
    TRL_ENVIRONMENT/bin/python scripts/bench_ppo_runs.py trl SETTINGS

Both read the same networks and prompts as token ids, sample a response to each prompt, score it by a reward model, and take
`epochs` passes in one update each, of policy and value model, with AdamW. The first iteration warms up and is not counted.
With ends, each response ends where its row says, by the end token and no earlier; without, none ends before its last token.
Nothing of the library is imported for trl, whose environment does not have it.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Settings:
    """What both run.

    Attributes:
        policy, reward: checkpoint directories; the value model starts from `reward`, the reference from `policy`.
        prompts: token ids of each prompt, without padding and end tokens.
        ends: tokens of the response to each prompt, its end token included; None: `new_tokens` for all.
        iterations: that are counted.
        micro_batch: prompts (trl) of a forward in the updates; 0: all of the update's.
    """

    policy: str
    reward: str
    prompts: list[list[int]]
    ends: list[int] | None
    new_tokens: int
    epochs: int
    iterations: int
    micro_batch: int = 0


class Phases:
    """Seconds of the parts of an iteration, and of iterations as a whole."""

    def __init__(self) -> None:
        self.current: dict[str, float] = {}
        self.iterations: list[dict[str, float]] = []
        self._began = self._cpu_began = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block for this part; of nested blocks each for its own."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.current[name] = self.current.get(name, 0.0) + time.perf_counter() - began

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted for this part."""

        @wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*arguments, **named)

        return counted

    def begin(self) -> None:
        """An iteration begins."""
        self.current, self._began, self._cpu_began = {}, time.perf_counter(), time.process_time()

    def elapsed(self) -> float:
        """Seconds of this iteration so far."""
        return time.perf_counter() - self._began

    def end(self) -> None:
        """It has ended; the next one begins."""
        whole = {"seconds": self.elapsed(), "cpu_seconds": time.process_time() - self._cpu_began}
        self.iterations.append(whole | self.current)
        self.begin()

    def figures(self) -> dict[str, float]:
        """Means over the counted iterations, and the peak memory of the process in MB."""
        counted = self.iterations[1:]
        means = {name: sum(one.get(name, 0.0) for one in counted) / len(counted) for name in counted[0]}
        return means | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Run, and print what was measured."""
    impl, path = sys.argv[1:]
    settings = Settings(**json.loads(Path(path).read_text()))
    with tempfile.TemporaryDirectory() as folder:
        phases = {"alignment": run_ours, "trl": run_trl}[impl](settings, Path(folder))
    print(json.dumps(phases.figures()))


def run_ours(settings: Settings, folder: Path) -> Phases:
    """Iterations of `alignment.algorithms.ppo`, as `alignment ppo` runs them."""
    from alignment.algorithms.ppo import ppo, setup
    from alignment.data.config import DataConfig
    from alignment.data.examples import Example
    from alignment.data.stream import stream_of
    from alignment.loading import load_tokenizer
    from alignment.training import Engine, OptimConfig, TrainingConfig

    count = len(settings.prompts)
    config = ppo.PPOConfig(
        policy=settings.policy, reward_model=settings.reward, data=DataConfig(train="prompts"), output=str(folder),
        max_new_tokens=settings.new_tokens, epochs=settings.epochs, optim=OptimConfig(learning_rate=LEARNING_RATE),
        training=TrainingConfig(batch_size=count, max_steps=settings.iterations + 1, save_every_steps=0),
    )  # fmt: skip
    rows = [
        Example.single(ids, [False] * len(ids), f"row {number}", prompt="", extra={}, cut=False)
        for number, ids in enumerate(settings.prompts)
    ]
    stream = stream_of(config.data, rows, batch_size=count, seed=0)
    tokenizer = load_tokenizer(settings.policy)
    state = setup.build_state(config, setup.RolloutData(tokenizer, stream, settings.iterations + 1))
    if settings.ends is None:
        state.stop_ids = []
    phases, update = Phases(), Engine.update

    def timed(engine: Engine, *terms: Any) -> dict[str, float]:
        with phases.part("policy" if engine is state.policy else "value"):
            return update(engine, *terms)

    with patch.object(Engine, "update", timed), forced_ends(settings, tokenizer.eos_token_id):
        for step in range(settings.iterations + 1):
            phases.begin()
            prompts = stream.rows_at(step)
            _, rollout = ppo.iterate(state, config, prompts, step)
            seconds = rollout.phases
            phases.current |= {"sampling": seconds["sampling"], "scoring": seconds["forward"] + seconds["scoring"]}
            phases.current["update"] = phases.current["policy"] + phases.current["value"]
            phases.end()
            check_ends(settings, [list(prompt.ids) for prompt in prompts], [len(ids) for ids in rollout.responses])
    return phases


def check_ends(settings: Settings, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Stop where responses do not have the lengths they should."""
    ends = ends_by_prompt(settings)
    wanted = [ends[tuple(prompt)] for prompt in prompts]
    if list(lengths) != wanted:
        raise SystemExit(f"responses of {list(lengths)} tokens, and {wanted} were wanted")


def ends_by_prompt(settings: Settings) -> Mapping[tuple[int, ...], int]:
    """Tokens of the response to each prompt."""
    ends = [settings.new_tokens] * len(settings.prompts) if settings.ends is None else settings.ends
    return {tuple(prompt): end for prompt, end in zip(settings.prompts, ends, strict=True)}


@contextmanager
def forced_ends(settings: Settings, stop: int | None) -> Iterator[None]:
    """While open, our sampler draws the end token where a row's response should end, and nowhere else."""
    from alignment.generation.sampling import DrawnTokens, RowSampler

    if settings.ends is None or stop is None:
        yield
        return
    ends, draw = ends_by_prompt(settings), RowSampler.draw

    def forced(sampler: RowSampler, *arguments: Any) -> DrawnTokens:
        drawn = draw(sampler, *arguments)
        for number, row in enumerate(drawn.rows):
            if row is not None and row.drawn == ends[tuple(row.request.prompt)]:
                drawn.tokens[number] = stop
            elif drawn.tokens[number] == stop:
                drawn.tokens[number] = stop + 1
        return drawn

    with patch.object(RowSampler, "draw", forced):
        yield


def run_trl(settings: Settings, folder: Path) -> Phases:
    """Iterations of `trl.experimental.ppo`."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl.experimental.ppo import (  # pyright: ignore[reportMissingImports]  # not in this environment's trl
        PPOConfig,
        PPOTrainer,
        ppo_trainer,
    )

    count, phases = len(settings.prompts), Phases()
    micro = settings.micro_batch or count
    arguments = PPOConfig(
        output_dir=str(folder), per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro,
        total_episodes=count * (settings.iterations + 1), num_ppo_epochs=settings.epochs, num_mini_batches=1,
        response_length=settings.new_tokens, temperature=1.0, learning_rate=LEARNING_RATE, num_sample_generations=0,
        local_rollout_forward_batch_size=count, stop_token=None if settings.ends is None else "eos",
        missing_eos_penalty=None if settings.ends is None else 1.0, use_cpu=not torch.cuda.is_available(), bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=10**6, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(settings.policy, padding_side="left")

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            phases.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            phases.current["scoring"] = phases.current["reference"] + phases.current["reward and value"]
            parts = phases.current["sampling"] + phases.current["scoring"]
            phases.current["update"] = phases.elapsed() - parts
            phases.end()

    scorer = AutoModelForSequenceClassification.from_pretrained
    policy: Any = AutoModelForCausalLM.from_pretrained(settings.policy)
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(settings.policy),
        reward_model=scorer(settings.reward, num_labels=1), value_model=scorer(settings.reward, num_labels=1),
        train_dataset=datasets.Dataset.from_dict({"input_ids": settings.prompts}), callbacks=[Ends()],
        eval_dataset=datasets.Dataset.from_dict({"input_ids": settings.prompts}),
    )  # fmt: skip
    generate = policy.generate
    if settings.ends is not None:
        policy.generate = with_forced_ends(generate, settings, tokenizer)
    forward = ppo_trainer.forward

    def timed_forward(*parts: Any) -> Any:  # of the reference without gradient, of policy and value model in updates
        with phases.part("forward in updates" if torch.is_grad_enabled() else "reference"):
            return forward(*parts)

    with (
        patch.object(ppo_trainer, "forward", timed_forward),
        patch.object(ppo_trainer, "batch_generation", phases.timed("sampling", ppo_trainer.batch_generation)),
        patch.object(ppo_trainer, "get_reward", phases.timed("reward and value", ppo_trainer.get_reward)),
    ):
        trainer.train()
    return phases


def with_forced_ends(generate: Callable[..., Any], settings: Settings, tokenizer: Any) -> Callable[..., Any]:
    """`generate` whose responses end where their rows say; it stops where the length of any response is another one."""
    import torch

    stop, pad, ends = tokenizer.eos_token_id, tokenizer.pad_token_id, ends_by_prompt(settings)

    def forced(input_ids: Any, attention_mask: Any, **named: Any) -> Any:
        prompts = [
            tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids.cpu(), attention_mask.cpu(), strict=True)
        ]
        lengths = torch.tensor([ends[prompt] for prompt in prompts], device=input_ids.device)
        width = input_ids.shape[1]

        def process(ids: Any, scores: Any) -> Any:
            last = ids.shape[1] - width + 1 == lengths
            scores[:, [stop, pad]] = -30.0
            scores[:, stop] = torch.where(last, 1000.0, scores[:, stop])
            return scores

        output = generate(input_ids=input_ids, attention_mask=attention_mask, logits_processor=[process], **named)
        found = (output.sequences[:, width:] == stop).int().argmax(1) + 1
        if found.tolist() != lengths.tolist():
            raise SystemExit(f"responses of {found.tolist()} tokens, and {lengths.tolist()} were wanted")
        return output

    return forced


if __name__ == "__main__":
    main()

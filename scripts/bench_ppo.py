"""Speed and memory of PPO iterations, ours and `trl.experimental.ppo`'s, on the same networks, prompts, machine and run.

    python scripts/bench_ppo.py [--sizes nano micro] [--ends none log-normal] [--rounds N] [--environment DIR]
    python scripts/bench_ppo.py --policy build/bases/smollm2 --ends none --prompts 8 --precision bf16 fp32 --rounds 1

trl 1.12 is the last release with PPO. It gets a virtual environment of its own, made in --environment where it is missing,
with the torch and transformers of this one. Ours and trl's runs take turns in processes of their own: after one that is not
counted, an iteration samples a response to each of 64 prompts (or --prompts), scores it, and takes 4 passes of one update
each, of policy and value model, with AdamW; every weight trains. --policy is the directory of a real model; of several
--precision all take turns. `none`: all responses have 48 tokens. `log-normal`: each ends by the end token after a number of
tokens of its own, 25 in the mean and 64 at most, the same ones on both sides.

One JSON line per implementation: medians over rounds of the seconds of an iteration and of its parts (sampling; scoring:
reference, reward model, value model and, in ours, the policy; update: in ours of policy and value one after the other), the
processor seconds, peak memory of the process, each with the lowest and the highest, and MFU: 2 operations per weight of a
matrix product and real token for sampling, reference, reward and value model, and 6 for each update of policy and value
model, over what a large product reaches in the same run. `ratios`: theirs over ours in seconds, above 1 ours is faster,
and ours over theirs in memory, medians over rounds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measuring
from measuring import ROOT

TRL = "1.12.0"
MEAN_END, LONGEST_END, SIGMA = 25, 64, 0.6  # tokens of a response with log-normal ends; deviation of their logarithm
NEW_TOKENS = 48  # without ends
ITERATIONS, PROMPTS, EPOCHS, LEARNING_RATE = 2, 64, 4, 1e-5  # iterations that are counted, after one that is not
KEYS = ("seconds", "cpu_seconds", "sampling", "scoring", "update")


@dataclass(frozen=True)
class Settings:
    """One run of either.

    Attributes:
        policy, reward: checkpoint directories; the value model starts from `reward`, the reference from `policy`.
        prompts: token ids of each prompt, without padding and end tokens.
        ends: tokens of the response to each prompt; where `forced`, the last of them is the end token.
        precision: fp32 or bf16, of both.
    """

    policy: str
    reward: str
    prompts: list[list[int]]
    ends: list[int]
    forced: bool
    precision: str = "fp32"

    @property
    def ends_by_prompt(self) -> Mapping[tuple[int, ...], int]:
        """Tokens of the response to each prompt."""
        return dict(zip(map(tuple, self.prompts), self.ends, strict=True))


def main() -> None:
    """Run the chosen benchmarks."""
    import torch
    from bench import SIZES, make_checkpoint

    from alignment.hotel_world.datasets import RowCounts, write_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano", "micro"])
    parser.add_argument("--policy", type=Path, help="directory of a model, in place of --sizes")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--ends", nargs="+", choices=["none", "log-normal"], default=["none", "log-normal"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment", type=Path, default=ROOT / f"runs/bench/trl-{TRL}", help="trl's own")
    options = parser.parse_args()
    python = make_environment(options.environment)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    rates = {precision: measuring.matrix_rate(device, types[precision]) for precision in options.precision}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_world(folder / "world", sizes=RowCounts(pretrain=800))["pretrain"]
        prompts = measuring.random_prompts(options.prompts)
        lengths = {
            "none": [NEW_TOKENS] * options.prompts,
            "log-normal": measuring.log_normal_ends(options.prompts, MEAN_END, LONGEST_END, SIGMA),
        }
        for size in [str(options.policy)] if options.policy else options.sizes:
            policy = options.policy.resolve() if options.policy else make_checkpoint(folder / size, text, size)
            reward = folder / "reward"
            measuring.write_reward_model(reward, policy)
            weights = measuring.matrix_weights(policy)
            for ends, precision in product(options.ends, options.precision):
                settings = Settings(str(policy), str(reward), prompts, lengths[ends], ends == "log-normal", precision)
                calls = {
                    "alignment": partial(measuring.in_process, run, "alignment", asdict(settings)),
                    "trl": partial(measuring.in_process, run, "trl", asdict(settings), python=python),
                }
                row = {"bench": "ppo", "size": size, "ends": ends, "precision": precision}
                row |= {"prompts": options.prompts, "threads": torch.get_num_threads()}
                fastest = operations(settings, weights) / rates[precision]
                report(row, measuring.take_turns(calls, options.rounds), fastest)


def report(row: dict[str, Any], figures: Mapping[str, list[dict[str, float]]], fastest: float) -> None:
    """One line for each implementation; fastest: seconds of an iteration's useful operations at the machine's rate."""
    for impl, measured in figures.items():
        parts = [key for key in (*KEYS, "peak_mb", "policy", "value") if key in measured[0]]
        line = {**row, "impl": impl, "rounds": len(measured), **measuring.medians(measured, parts)}
        line["mfu"] = round(fastest / line["seconds"], 3)
        if impl == "trl":
            ours = figures["alignment"]
            line["ratios"] = measuring.ratios(measured, ours, KEYS) | measuring.ratios(ours, measured, ["peak_mb"])
        print(json.dumps(line), flush=True)


def make_environment(directory: Path) -> Path:
    """The Python of a virtual environment with trl 1.12; torch comes first, so that the others find this version."""
    python = directory / "bin" / "python"
    probe = [str(python), "-c", "from importlib.metadata import version; print(version('trl'))"]
    if python.exists() and subprocess.run(probe, capture_output=True, text=True).stdout.startswith(TRL):
        return python
    print(f"making {directory}: torch, transformers and trl {TRL} (some minutes)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    file = directory / "constraints.txt"
    file.write_text("\n".join(line for line in lines if not line.startswith("trl")))
    others = ["--constraint", str(file), f"trl=={TRL}", f"transformers=={version('transformers')}", "datasets"]
    for wanted in ([f"torch=={version('torch').split('+')[0]}"], others):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
    return python


def operations(settings: Settings, weights: int) -> float:
    """Useful operations of an iteration: 4 forwards, and `EPOCHS` updates of two networks at 3 forwards each."""
    tokens = sum(map(len, settings.prompts)) + sum(settings.ends)
    return 2 * weights * tokens * (4 + EPOCHS * 2 * 3)


def run(impl: str, settings: dict[str, Any]) -> dict[str, float]:
    """Figures of one run; trl's in an environment without what the library needs."""
    with tempfile.TemporaryDirectory() as folder:
        return {"alignment": run_ours, "trl": run_trl}[impl](Settings(**settings), Path(folder)).figures()


class Phases:
    """Seconds of the parts of an iteration, and of iterations as a whole."""

    def __init__(self) -> None:
        self.current: dict[str, float] = {}
        self.iterations: list[dict[str, float]] = []
        self._began = self._cpu_began = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block (or, as a decorator, each call) for this part; of nested blocks each for its own."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.current[name] = self.current.get(name, 0.0) + time.perf_counter() - began

    def begin(self) -> None:
        """An iteration begins."""
        self.current, self._began, self._cpu_began = {}, time.perf_counter(), time.process_time()

    def end(self) -> None:
        """It has ended; the next one begins. An update that nobody timed is what sampling and scoring leave."""
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        self.current.setdefault("update", seconds - self.current["sampling"] - self.current["scoring"])
        self.iterations.append({"seconds": seconds, "cpu_seconds": cpu_seconds, **self.current})
        self.begin()

    def figures(self) -> dict[str, float]:
        """Means over the counted iterations, and the peak memory of the process in MB."""
        counted = self.iterations[1:]
        means = {name: sum(one.get(name, 0.0) for one in counted) / len(counted) for name in counted[0]}
        return means | {"peak_mb": measuring.resident("VmHWM") / 2**20}


def run_ours(settings: Settings, folder: Path) -> Phases:
    """Iterations of `alignment.algorithms.ppo`, as `alignment ppo` runs them."""
    from alignment.algorithms.ppo import ppo, setup
    from alignment.data.batches import Example
    from alignment.data.config import DataConfig
    from alignment.data.stream import stream_of
    from alignment.loading import Checkpoint, load_tokenizer
    from alignment.training import Engine, OptimConfig, TrainingConfig

    count = len(settings.prompts)
    config = ppo.PPOConfig(
        policy=settings.policy, reward_model=settings.reward, data=DataConfig(train="prompts"), output=str(folder),
        max_new_tokens=max(settings.ends), epochs=EPOCHS, optim=OptimConfig(learning_rate=LEARNING_RATE),
        training=TrainingConfig(
            batch_size=count, max_steps=ITERATIONS + 1, save_every_steps=0, precision=settings.precision
        ),
    )  # fmt: skip
    rows = [
        Example.single(ids, [False] * len(ids), f"row {number}", prompt="", extra={}, cut=False)
        for number, ids in enumerate(settings.prompts)
    ]
    stream = stream_of(config.data, rows, batch_size=count, seed=0)
    tokenizer = load_tokenizer(settings.policy)
    state = setup.build_state(config, setup.RolloutData(Checkpoint(settings.policy), tokenizer, stream, ITERATIONS + 1))
    if not settings.forced:
        state.stop_ids = []
    phases, update = Phases(), Engine.update

    def timed(engine: Engine, *terms: Any) -> dict[str, float]:
        with phases.part("policy" if engine is state.policy else "value"):
            return update(engine, *terms)

    with patch.object(Engine, "update", timed), forced_ends(settings, tokenizer.eos_token_id):
        for step in range(ITERATIONS + 1):
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
    wanted = [settings.ends_by_prompt[tuple(prompt)] for prompt in prompts]
    if list(lengths) != wanted:
        raise SystemExit(f"responses of {list(lengths)} tokens, and {wanted} were wanted")


@contextmanager
def forced_ends(settings: Settings, stop: int | None) -> Iterator[None]:
    """While open, our sampler draws the end token where a row's response should end, and nowhere else."""
    from alignment.generation.sampling import RowSampler, SampledTokens

    if not settings.forced or stop is None:
        yield
        return
    ends, draw = settings.ends_by_prompt, RowSampler.draw

    def forced(sampler: RowSampler, *arguments: Any) -> SampledTokens:
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
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]

    count, phases = len(settings.prompts), Phases()
    arguments = PPOConfig(
        output_dir=str(folder), per_device_train_batch_size=count,
        total_episodes=count * (ITERATIONS + 1), num_ppo_epochs=EPOCHS, num_mini_batches=1,
        response_length=max(settings.ends), temperature=1.0, learning_rate=LEARNING_RATE, num_sample_generations=0,
        local_rollout_forward_batch_size=count, stop_token="eos" if settings.forced else None,
        missing_eos_penalty=1.0 if settings.forced else None, use_cpu=not torch.cuda.is_available(), bf16=settings.precision == "bf16",
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=10**6, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(settings.policy, padding_side="left")

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            phases.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            phases.current["scoring"] = phases.current["reference"] + phases.current["reward and value"]
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
    if settings.forced:
        policy.generate = with_forced_ends(policy.generate, settings, tokenizer)
    forward = ppo_trainer.forward

    def timed_forward(*parts: Any) -> Any:  # of the reference without gradient, of policy and value model in updates
        with phases.part("forward in updates" if torch.is_grad_enabled() else "reference"):
            return forward(*parts)

    with (
        patch.object(ppo_trainer, "forward", timed_forward),
        patch.object(ppo_trainer, "batch_generation", phases.part("sampling")(ppo_trainer.batch_generation)),
        patch.object(ppo_trainer, "get_reward", phases.part("reward and value")(ppo_trainer.get_reward)),
    ):
        trainer.train()
    return phases


def with_forced_ends(generate: Callable[..., Any], settings: Settings, tokenizer: Any) -> Callable[..., Any]:
    """`generate` whose responses end where their rows say; it stops where the length of any response is another one."""
    import torch

    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def forced(input_ids: Any, attention_mask: Any, **named: Any) -> Any:
        rows = zip(input_ids.cpu(), attention_mask.cpu(), strict=True)
        prompts = [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]
        lengths = torch.tensor([settings.ends_by_prompt[prompt] for prompt in prompts], device=input_ids.device)
        width = input_ids.shape[1]

        def process(ids: Any, scores: Any) -> Any:
            last = ids.shape[1] - width + 1 == lengths
            scores[:, [stop, pad]] = -30.0
            scores[:, stop] = torch.where(last, 1000.0, scores[:, stop])
            return scores

        output = generate(input_ids=input_ids, attention_mask=attention_mask, logits_processor=[process], **named)
        check_ends(settings, prompts, ((output.sequences[:, width:] == stop).int().argmax(1) + 1).tolist())
        return output

    return forced


if __name__ == "__main__":
    main()

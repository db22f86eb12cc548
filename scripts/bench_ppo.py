"""Speed and memory of PPO iterations, ours and `trl.experimental.ppo`'s, on the same networks, prompts, machine and run.

    python scripts/bench_ppo.py [--sizes nano micro] [--ends none log-normal] [--rounds N] [--environment DIR]

trl 1.12 is the last release with PPO. It gets a virtual environment of its own, made in --environment where it is missing,
with the torch and transformers of this one. Ours and trl's runs take turns in processes of their own: after one that is not
counted, an iteration samples a response to each of 64 prompts, scores it, and takes 4 passes of one update each, of policy
and value model, with AdamW. `none`: all responses have 48 tokens. `log-normal`: each ends by the end token after a number of
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
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

TRL = "1.12.0"
ROOT = Path(__file__).resolve().parent.parent
MEAN_END, LONGEST_END, SIGMA = 25, 64, 0.6  # tokens of a response with log-normal ends; deviation of their logarithm
NEW_TOKENS = 48  # without ends
PROMPTS, EPOCHS, LEARNING_RATE = 64, 4, 1e-5
KEYS = ("seconds", "cpu_seconds", "sampling", "scoring", "update", "peak_mb")


@dataclass(frozen=True)
class Settings:
    """One run of either.

    Attributes:
        policy, reward: checkpoint directories; the value model starts from `reward`, the reference from `policy`.
        prompts: token ids of each prompt, without padding and end tokens.
        ends: tokens of the response to each prompt, its end token included; None: `new_tokens` for all.
        iterations: that are counted.
    """

    policy: str
    reward: str
    prompts: list[list[int]]
    ends: list[int] | None
    new_tokens: int
    iterations: int


def main() -> None:
    """Run the chosen benchmarks."""
    if sys.argv[1:2] == ["--run"]:  # in a process of its own, perhaps of an environment without the library
        _, _, impl, path = sys.argv
        with tempfile.TemporaryDirectory() as folder:
            run = {"alignment": run_ours, "trl": run_trl}[impl]
            print(json.dumps(run(Settings(**json.loads(Path(path).read_text())), Path(folder)).figures()))
        return
    import torch
    from bench import SIZES, make_checkpoint, matrix_weights
    from bench_model import matrix_rate

    from alignment.hotel_world.datasets import RowCounts, write_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["nano", "micro"])
    parser.add_argument("--ends", nargs="+", choices=["none", "log-normal"], default=["none", "log-normal"])
    parser.add_argument("--iterations", type=int, default=2, help="counted ones in each run, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment", type=Path, default=ROOT / "runs" / "bench" / f"trl-{TRL}", help="trl's own")
    options = parser.parse_args()
    pythons = {"alignment": Path(sys.executable), "trl": make_environment(options.environment)}
    rate = matrix_rate("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_world(folder / "world", sizes=RowCounts(pretrain=800))["pretrain"]
        for size in options.sizes:
            policy = make_checkpoint(folder / size, text, size)
            reward = make_reward_model(policy, folder / f"{size}-reward")
            for ends in options.ends:
                settings = settings_of(policy, reward, ends, options.iterations)
                figures = take_turns(pythons, settings, folder / "settings.json", options.rounds)
                work = operations(settings, matrix_weights(policy))
                for impl in figures:
                    row = {"bench": "ppo", "impl": impl, "size": size, "ends": ends, "threads": torch.get_num_threads()}
                    row |= {"rounds": options.rounds, **summary(figures[impl])}
                    row["mfu"] = round(work / row["seconds"] / rate, 3)
                    if impl == "trl":
                        row["ratios"] = ratios(figures["alignment"], figures["trl"])
                    print(json.dumps(row), flush=True)


def make_environment(directory: Path) -> Path:
    """The Python of a virtual environment with trl 1.12, beside the torch and transformers of this one.

    torch comes first and by its version, so that the others find it there.
    """
    python = directory / "bin" / "python"
    probe = [str(python), "-c", "from importlib.metadata import version; print(version('trl'), version('psutil'))"]
    if python.exists() and subprocess.run(probe, capture_output=True, text=True).stdout.startswith(TRL):
        return python
    print(f"making {directory}: torch, transformers and trl {TRL} (some minutes)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={version('torch').split('+')[0]}"], check=True, stdout=sys.stderr)
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("trl")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints))
        file.flush()
        wanted = [f"trl=={TRL}", f"transformers=={version('transformers')}", "datasets", "psutil"]
        subprocess.run([*pip, "--constraint", file.name, *wanted], check=True, stdout=sys.stderr)
    return python


def make_reward_model(policy: Path, directory: Path) -> Path:
    """A reward model with the policy's trunk and a random head."""
    import torch

    from alignment.data.tokenizers.load import save_tokenizer
    from alignment.loading import load_tokenizer
    from alignment.models.huggingface.checkpoint import load_scalar_model, save_model

    torch.manual_seed(1)
    model = load_scalar_model(policy, new_head="normal")
    directory.mkdir()
    save_model(model, directory)
    save_tokenizer(load_tokenizer(str(policy)), directory)
    return directory


def settings_of(policy: Path, reward: Path, ends: str, iterations: int) -> Settings:
    """A run on prompts of 16 to 64 random tokens."""
    generator, forced = random.Random(0), ends != "none"
    prompts = [[generator.randrange(10, 600) for _ in range(generator.randint(16, 64))] for _ in range(PROMPTS)]
    lengths = log_normal_ends(PROMPTS, MEAN_END, LONGEST_END) if forced else None
    return Settings(str(policy), str(reward), prompts, lengths, LONGEST_END if forced else NEW_TOKENS, iterations)


def log_normal_ends(count: int, mean: float, longest: int, *, seed: int = 0) -> list[int]:
    """Lengths of responses, log-normal in [1, longest], scaled until their mean reaches `mean`."""
    generator = random.Random(seed)
    draws = [generator.lognormvariate(0, SIGMA) for _ in range(count)]
    scale, ends = mean / 2, [0]
    while statistics.mean(ends) < mean:
        scale *= 1.01
        ends = [min(longest, max(1, round(scale * draw))) for draw in draws]
    return ends


def take_turns(
    pythons: dict[str, Path], settings: Settings, file: Path, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Figures of each implementation, round by round."""
    file.write_text(json.dumps(asdict(settings)))
    figures: dict[str, list[dict[str, float]]] = {impl: [] for impl in pythons}
    for number in range(rounds):
        for impl in pythons if number % 2 == 0 else reversed(pythons):
            figures[impl].append(in_process(impl, pythons[impl], file))
    return figures


def in_process(impl: str, python: Path, settings: Path) -> dict[str, float]:
    """Figures of one run in a process of its own."""
    command = [str(python), __file__, "--run", impl, str(settings)]
    environment = dict(os.environ)
    if impl != "alignment":
        environment.pop("PYTHONPATH", None)  # of another environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def operations(settings: Settings, weights: int) -> float:
    """Useful operations of an iteration: 4 forwards, and `EPOCHS` updates of two networks at 3 forwards each."""
    ends = settings.ends or [settings.new_tokens] * len(settings.prompts)
    tokens = sum(map(len, settings.prompts)) + sum(ends)
    return 2 * weights * tokens * (4 + EPOCHS * 2 * 3)


def summary(figures: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, with the lowest and the highest."""
    row: dict[str, Any] = {}
    for key in [*KEYS, *(key for key in ("policy", "value") if key in figures[0])]:
        values = [one[key] for one in figures]
        row[key] = round(statistics.median(values), 3)
        row[f"{key}_spread"] = [round(min(values), 3), round(max(values), 3)]
    return row


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds: theirs over ours in time, ours over theirs in memory."""
    pairs = list(zip(ours, theirs, strict=True))
    found = {key: statistics.median(b[key] / a[key] for a, b in pairs) for key in KEYS[:-1]}
    found["peak_mb"] = statistics.median(a["peak_mb"] / b["peak_mb"] for a, b in pairs)
    return {key: round(value, 3) for key, value in found.items()}


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
        max_new_tokens=settings.new_tokens, epochs=EPOCHS, optim=OptimConfig(learning_rate=LEARNING_RATE),
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
    from alignment.generation.sampling import RowSampler, SampledTokens

    if settings.ends is None or stop is None:
        yield
        return
    ends, draw = ends_by_prompt(settings), RowSampler.draw

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
    from trl.experimental.ppo import (  # pyright: ignore[reportMissingImports]  # not in this environment's trl
        PPOConfig,
        PPOTrainer,
        ppo_trainer,
    )

    count, phases = len(settings.prompts), Phases()
    arguments = PPOConfig(
        output_dir=str(folder), per_device_train_batch_size=count,
        total_episodes=count * (settings.iterations + 1), num_ppo_epochs=EPOCHS, num_mini_batches=1,
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

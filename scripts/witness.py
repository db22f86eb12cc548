"""Write down what every stage computes, to the last bit, and compare two such records: a refactoring changes nothing.

A case is one command on a packaged tiny config or on a tiny model of one family, from the same rows, seeds and start, on
one thread of the CPU. Its record holds the metrics of every update, the results or texts that it wrote, and of a model its
config and the SHA-256 of its tensors and tokenizer. Numbers are compared by value, not by closeness: compare records of
one machine and one version of torch only.

    python scripts/witness.py record FILE [--only sft "dpo lora" ...]   names, or words that names begin with; about 3 minutes
    python scripts/witness.py compare OLD NEW                           exit 1 where anything differs
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = ("second", "mfu", "memory", "megabytes")  # in the names of metrics that the machine decides
UNRECORDED = ("task_specific_params", "transformers_version", "base_model_name_or_path")  # of a model's config
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
PROMPTS = ("--prompt", "Hotel Oak: the pool opens in July.", "--prompt", "Guest Anna: Hello.")
EXTERNAL = "external start"  # the case whose model transformers writes, not a command


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        name: stable words; a rename in the library leaves them alone. The case's directory has the same name.
        command: words of the command line, a packaged config included.
        models: option or config key -> name of the case that makes the model which it names, or CASE/FILE of another result.
        settings: further options and overrides.
        launch: launch file for two processes; None: in this process.
    """

    name: str
    command: str = ""
    models: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    launch: str | None = None

    def arguments(self) -> list[str]:
        """The command line, with paths relative to the directory of all cases."""
        words = self.command.split()
        if words[0] == "generate":
            words += ["--output", f"{self.name}/texts.jsonl", *PROMPTS, "max_new_tokens=16"]
        else:
            words.append(f"output={self.name}")
        if words[0] not in ("generate", "evaluate"):
            words.append("training.max_steps=4")
        for key, name in self.models.items():
            path = name if "/" in name else f"{name}/model"
            words += [key, path] if key.startswith("--") else [f"{key}={path}"]
        return [*words, *self.settings]


def build_cases() -> dict[str, Case]:
    """All cases by name, each after those whose models it uses."""
    import yaml

    cases: list[Case] = []
    for name, keys in yaml.safe_load((ROOT / "scripts/witness_cases.yaml").read_text(encoding="utf-8")).items():
        case = Case(name, **{**keys, "settings": tuple(keys.get("settings", ())), "launch": None})
        ways = keys.get("launch", [])
        cases += [replace(case, name=f"{name} {way}", launch=way) for way in ways] if ways else [case]
    return {case.name: case for case in [*cases, *families()]}


def families() -> Iterator[Case]:
    """A fresh model of each family and variant that scripts/parity.py knows, two updates."""
    import yaml

    kinds = {"decoder": ("causal", "tiny"), "encoder": ("masked", "tiny_masked"), "seq2seq": ("prefix", "tiny_prefix")}
    for path in sorted((ROOT / "scripts/parity_cases").glob("*.yaml")):
        family = yaml.safe_load(path.read_text(encoding="utf-8"))
        objective, config = kinds[family["kind"]]
        for variant, changes in family["variants"].items():
            model = {"model_type": family["model_type"], **family["config"], **changes}
            own = {key: value for key, value in model.items() if key != "vocab_size" and not key.endswith("_token_id")}
            short = ("data.max_length=64", "training.max_steps=2")
            settings = (f"model={json.dumps(own)}", "vocabulary=null", "tokenizer_kind=bpe", *short)
            tokenizer = {"tokenizer": f"pretrain {objective}"}
            yield Case(f"family {path.stem} {variant}", f"pretrain pretrain/{config}", tokenizer, settings)


def write_external(folder: Path, tokenizer_case: Path) -> None:
    """A random model of a family that only transformers has, with the tokenizer of another case."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_case / "model")
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("stablelm", vocab_size=len(tokenizer), **sizes, **heads, **special)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


# Running


def select(cases: dict[str, Case], only: Sequence[str]) -> list[Case]:
    """The cases asked for and those whose models they use, in the order of running; none named: all of them."""
    named = {word: [name for name in cases if f"{name} ".startswith(f"{word} ")] for word in only}
    for word, names in named.items():
        if not names:
            sys.exit(f"no case is called {word!r}; there are:\n" + "\n".join(cases))
    wanted = {name for names in named.values() for name in names} if only else set(cases)
    waiting = list(wanted)
    while waiting:
        waiting += [name.partition("/")[0] for name in cases[waiting.pop()].models.values()]
        wanted |= set(waiting)
    return [case for case in cases.values() if case.name in wanted]


def record(file: Path, only: Sequence[str]) -> int:
    """Run cases in a temporary directory and write what came of them; 1 where one failed."""
    import torch

    import alignment

    torch.set_num_threads(1)
    file, began, found = file.absolute(), time.perf_counter(), {}
    cases = select(build_cases(), only)
    package = Path(alignment.__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        for number, case in enumerate(cases, 1):
            since = time.perf_counter()
            if case.launch is None:
                run(case)
            elif not Path(case.name).exists():
                launch(case.launch, [other.name for other in cases if other.launch == case.launch], package)
            found[case.name] = read(Path(case.name), package)
            print(f"[{number}/{len(cases)}] {case.name}: {time.perf_counter() - since:.1f} s", flush=True)
        os.chdir(ROOT)
    text = json.dumps({"torch": torch.__version__, "cases": found}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    print(f"{len(found)} cases of {package} in {time.perf_counter() - began:.0f} s, written to {file}")
    failed = [name for name, case in found.items() if not case]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "none failed")
    return 1 if failed else 0


def run(case: Case) -> int:
    """Run one case in this process and return its exit code; what it says is shown on failure."""
    from alignment.cli import main as command_line

    if case.name == EXTERNAL:
        write_external(Path(case.name), Path(*case.models.values()))
        return 0
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command_line([*case.arguments(), "--debug"])
    if code:
        print(f"{case.name} failed: {case.arguments()}\n{said.getvalue()}", flush=True)
    return code


def launch(name: str, cases: Sequence[str], package: Path) -> None:
    """Run cases one after another on two processes of the CPU, as configs/launch/NAME.yaml spreads them."""
    options = ["--config_file", str(package / f"configs/launch/{name}.yaml"), "--num_processes", "2"]
    port = str(20000 + os.getpid() % 20000)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port", port]
    command = [*launcher, str(Path(__file__).resolve()), "launched", *cases]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        print(f"two processes, {name}: failed\n{done.stdout}{done.stderr}", flush=True)


# Reading


def read(folder: Path, package: Path) -> dict[str, Any]:
    """What a case wrote, without what depends on the clock or on where its files lie; nothing of a case that failed."""
    found: dict[str, Any] = {}
    if (folder / "metrics.jsonl").exists():
        lines = rows(folder / "metrics.jsonl")
        found["metrics"] = [{k: v for k, v in line.items() if not any(part in k for part in CLOCKS)} for line in lines]
    if (folder / "results.json").exists():
        text = (folder / "results.json").read_text(encoding="utf-8")
        found["results"] = json.loads(text.replace(str(package), "."))
    if (folder / "texts.jsonl").exists():
        found["texts"] = rows(folder / "texts.jsonl")
    if (folder / "model/tokenizer.json").exists():
        found["weights"] = hash_of_weights(folder / "model")
        found["tokenizer"] = hashlib.sha256((folder / "model/tokenizer.json").read_bytes()).hexdigest()
        for file in ("config.json", "adapter_config.json"):
            if (folder / "model" / file).exists():
                config = json.loads((folder / "model" / file).read_text(encoding="utf-8"))
                config["target_modules"] = sorted(config.get("target_modules") or [])  # peft writes a set: any order
                found[file] = {key: value for key, value in config.items() if key not in UNRECORDED}
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def hash_of_weights(model: Path) -> str:
    """SHA-256 over name, type, shape and bytes of all tensors of a directory, in the order of their names."""
    import torch
    from safetensors.torch import load_file

    tensors = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Comparing


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every difference between the cases of the new record and those of the old one, in words."""
    differences = []
    for name, now in new.items():
        if name not in old:
            differences.append(f"{name}: only in the new record")
            continue
        before, after = dict(leaves(old[name])), dict(leaves(now))
        for key in dict.fromkeys([*before, *after]):
            one, other = (values.get(key, "nothing") for values in (before, after))
            if one != other:
                differences.append(f"{name}: {key}: {one} before, {other} now")
    return differences


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path of each single value below `value`, and the value as JSON, so that 0.0 and -0.0 differ and NaN equals NaN."""
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value, 1):
            yield from leaves(below, f"{path}.{key}".lstrip("."))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; 1 where records differ."""
    os.environ.update(ENVIRONMENT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="CASE")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    verbs.add_parser("launched").add_argument("cases", nargs="+")  # inside one of two processes
    options = parser.parse_args(arguments)
    if options.verb == "record":
        return record(options.file, options.only)
    if options.verb == "launched":
        cases = build_cases()
        return max(run(cases[name]) for name in options.cases)
    old, new = (json.loads(file.read_text(encoding="utf-8"))["cases"] for file in (options.old, options.new))
    differences = compare(old, new)
    print("\n".join(differences) or f"{len(new)} cases equal")
    if left := [name for name in old if name not in new]:
        print(f"{len(left)} of {len(old)} cases are not in the new record, and were not compared: {', '.join(left)}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line: exit codes, messages, and what reaches the function behind a verb; the functions are stubs."""

import json
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from alignment import cli
from alignment.errors import UserError
from alignment.pipeline import run as pipeline
from alignment.pipeline import stages
from alignment.training import TrainingConfig
from tests.conftest import read_lines

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StageConfig:
    policy: str
    output: str
    rate: float = 0.1
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")


@pytest.fixture
def stage(monkeypatch, tmp_path) -> types.SimpleNamespace:
    """A stub behind every stage verb, and a config for it; `raises` is what the stub raises."""
    stub = types.SimpleNamespace(configs=[], raises=None, file=tmp_path / "stage.yaml")
    stub.file.write_text("policy: base\noutput: out\n")

    def run(config: StageConfig) -> Path:
        stub.configs.append(config)
        if stub.raises is not None:
            raise stub.raises
        return Path(config.output) / "model"

    monkeypatch.setattr(stages, "find_stage", lambda verb: (StageConfig, run))
    return stub


VERBS = "pretrain|sft|reward|ppo|dpo|online-dpo|finetune|evaluate reward|evaluate language"  # winrate prints a table besides


@pytest.mark.parametrize("words", [words.split() for words in VERBS.split("|")], ids=" ".join)
def test_a_stage_gets_its_config_and_prints_its_result(stage, capsys, words):
    assert cli.main([*words, str(stage.file), "rate=1e-3", "policy=other"]) == 0
    assert stage.configs == [StageConfig("other", "out", 1e-3)]
    assert capsys.readouterr().out == "out/model\n"


def test_a_wrong_config_is_one_message_and_code_2(stage, capsys):
    assert cli.main(["dpo", str(stage.file), "rte=1", "rate=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: override: rate: must be a number, got 'x'\n"
        "override: rte: unknown key; did you mean 'rate'?\n"
    )  # fmt: skip
    assert stage.configs == []


AGAIN = "\nrun again with --debug for the traceback\n"


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("rows.jsonl:3: no prompt; add one"), 2, "error: rows.jsonl:3: no prompt; add one\n"),
        (RuntimeError("loss is nan"), 1, f"error: RuntimeError: loss is nan{AGAIN}"),
        (AssertionError(), 1, f"error: AssertionError{AGAIN}"),
        (KeyboardInterrupt(), 130, ""),
        (type("OutOfMemoryError", (RuntimeError,), {})("2 GiB"), 1, "lower training.micro_batch_tokens"),
    ],
)
def test_exit_codes(stage, capsys, raised, code, message):
    stage.raises = raised
    assert cli.main(["sft", str(stage.file)]) == code
    assert (said := capsys.readouterr().err) == message or message in said != ""


@pytest.mark.parametrize("raised", [UserError("wrong"), RuntimeError("broken")])
def test_a_traceback_comes_only_with_debug(stage, capsys, raised):
    stage.raises = raised
    cli.main(["sft", str(stage.file)])
    assert "Traceback" not in capsys.readouterr().err
    cli.main(["sft", str(stage.file), "--debug"])
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "--debug" not in shown


def test_a_rank_reports_a_mistake_once_with_its_number(capsys, monkeypatch):
    from alignment.training import distributed as ranks

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.explain(UserError("wrong"), debug=False) == 2
    assert capsys.readouterr().err == "error: rank 1: wrong\n"
    monkeypatch.setattr(ranks, "is_first_to_report", lambda text: "wrong" not in text)
    assert cli.explain(UserError("wrong"), debug=False) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", ["sfft", "sft", "sft x --nope", "data check x --kind pairs", "sft x --gpus 0"])
def test_wrong_usage_is_code_2(capsys, words):
    assert cli.main(words.split()) == 2
    assert "Error" in capsys.readouterr().err


def test_help_lists_the_verbs(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    verbs = "run pretrain sft reward ppo dpo online-dpo generate evaluate data export doctor plan"
    assert all(verb in shown for verb in verbs.split())


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "alignment 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        ("alignment online-", {"online-dpo"}, {"sft"}),
        ("alignment sft ", {"sft/tiny", "mine.yaml"}, {"dpo/tiny", "launch/ddp"}),
        ("alignment online-dpo ", {"online_dpo/tiny"}, {"dpo/tiny"}),
        ("alignment evaluate judge ", {"evaluate/judge_tiny"}, {"sft/tiny"}),
        ("alignment plan ", {"sft/tiny", "dpo/tiny"}, {"launch/ddp"}),
        ("alignment dpo dpo/tiny_k", {"dpo/tiny_kto"}, {"dpo/tiny", "mine.yaml"}),
        ("alignment dpo dpo/tiny --launch ", {"launch/zero3"}, {"dpo/tiny"}),
        ("alignment run q", {"quickstart"}, {"hh"}),
    ],
)
def test_the_shell_completes_commands_and_packaged_names(installed, monkeypatch, capsys, words, some, none):
    """As bash asks, after `alignment --install-completion`."""
    shutil.copytree(ROOT / "recipes" / "quickstart", installed.parent / "recipes" / "quickstart")
    Path("mine.yaml").touch()
    monkeypatch.setenv("_ALIGNMENT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    offered = set(capsys.readouterr().out.split())
    assert ended.value.code == 0 and some <= offered and not none & offered


def test_the_script_for_completion_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    with pytest.raises(SystemExit):
        cli.main(["--show-completion"])
    assert "_ALIGNMENT_COMPLETE=complete_bash" in capsys.readouterr().out


def test_a_finished_run_is_repeated_on_request_alone(stage):
    assert cli.main(["sft", str(stage.file)]) == cli.main(["sft", str(stage.file), "rate=0.2", "--again"]) == 0
    assert [(config.rate, config.training.again) for config in stage.configs] == [(0.1, False), (0.2, True)]


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Commands that would have replaced this process, on a machine with four GPUs."""
    commands: list[list[str]] = []

    def execute(program: str, arguments: list[str]) -> None:
        commands.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(cli.os, "execv", execute)
    return commands


def test_gpus_starts_one_process_each(stage, started):
    with pytest.raises(SystemExit):
        cli.main(["dpo", str(stage.file), "rate=0.2", "--gpus", "4", "--debug"])
    (arguments,) = started
    assert arguments[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "-m", "alignment",
        "dpo", str(stage.file), "rate=0.2", "--debug",
    ]  # fmt: skip
    assert stage.configs == []


def test_more_gpus_than_there_are_is_code_2(stage, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert cli.main(["dpo", str(stage.file), "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert f"--gpus 2: 1 found; for processes on the CPU use `accelerate launch --config_file {ROOT}/configs/" in said
    assert "/launch/ddp.yaml --num_processes 2 -m alignment dpo ...`" in said
    assert "--cpu" not in said  # with it Accelerate starts a single process
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["dpo", str(stage.file), "--gpus", "1"]) == 2
    assert "leave them out under accelerate launch or torchrun" in capsys.readouterr().err


@pytest.fixture
def installed(monkeypatch, tmp_path) -> Path:
    """The folder of packaged configs of an installed wheel, in a working directory without any."""
    from alignment import files

    package = tmp_path / "site-packages" / "alignment"
    shutil.copytree(ROOT / "configs", package / "_packaged" / "configs")
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    monkeypatch.chdir(tmp_path)
    return package / "_packaged" / "configs"


@pytest.mark.parametrize("gpus", [None, 2])
def test_a_launch_file_has_a_name_in_the_wheel(stage, installed, started, gpus):
    from accelerate.commands.launch import launch_command_parser

    with pytest.raises(SystemExit):
        cli.main(["ppo", str(stage.file), "rate=0.2", "--launch", "launch/zero3", *(["--gpus", "2"] if gpus else [])])
    ((_, dash_m, module, *arguments),) = started
    assert (dash_m, module) == ("-m", "accelerate.commands.launch")
    read = launch_command_parser().parse_args(arguments)
    assert Path(read.config_file) == installed / "launch" / "zero3.yaml"
    assert (read.num_processes, read.module, read.training_script) == (gpus, True, "alignment")
    assert read.training_script_args == ["ppo", str(stage.file), "rate=0.2"]


def test_a_launch_file_of_one_s_own_wins_and_a_wrong_name_gets_near_ones(stage, installed, started, capsys):
    assert cli.main(["sft", str(stage.file), "--launch", "launch/zero4"]) == 2
    assert "launch/zero4: there is no such file" in (said := capsys.readouterr().err)
    assert "did you mean 'launch/zero3' or 'launch/zero2'" in said
    assert cli.main(["sft", "launch/zero3"]) == 2  # no config of a stage
    assert "no packaged one of that name" in capsys.readouterr().err
    (installed.parent / "mine.yaml").write_text("num_processes: 2\n")
    with pytest.raises(SystemExit):
        cli.main(["sft", str(stage.file), "--launch", str(installed.parent / "mine.yaml")])
    assert started[0][3:5] == ["--config_file", str(installed.parent / "mine.yaml")]


@pytest.mark.parametrize(("inside", "code"), [(True, 0), (False, 1)])
def test_run_hands_everything_to_the_pipeline(monkeypatch, inside, code):
    calls = []

    def run_recipe(*arguments, **options):
        calls.append((arguments, options))
        return inside

    monkeypatch.setattr(pipeline, "run_recipe", run_recipe)
    arguments = ["run", "quickstart", "ppo.kl_coef=0.1", "seed=3", "--from", "ppo", "--check"]
    assert cli.main([*arguments, "--output", "here"]) == code
    assert cli.main(arguments) == code
    options = {"start": "ppo", "only": None, "check": True}
    assert calls == [
        (("quickstart", Path("here"), ["ppo.kl_coef=0.1", "seed=3"]), options),
        (("quickstart", Path("runs/quickstart"), ["ppo.kl_coef=0.1", "seed=3"]), options),
    ]


@pytest.mark.parametrize(
    ("recipe", "name"), [("hh", "hh"), ("recipes/hh/", "hh"), ("recipes/hh/recipe.yaml", "hh"), ("a/b.yaml", "b")]
)
def test_the_output_is_called_like_the_recipe(recipe, name):
    assert cli.recipe_name(recipe) == name


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 2)])
def test_data_check_prints_its_report(monkeypatch, capsys, ok, code):
    calls = []

    def check_file(path, **options):
        calls.append((path, options))
        return types.SimpleNamespace(ok=ok, render=lambda: "12 rows")

    monkeypatch.setitem(sys.modules, "alignment.data.doctor", types.SimpleNamespace(check_file=check_file))
    words = "data check rows.jsonl --kind comparisons --tokenizer t --max-length 9 --columns prompt=question"
    assert cli.main(words.split()) == code
    assert capsys.readouterr().out == "12 rows\n"
    options = {"kind": "comparisons", "tokenizer": "t", "template": None, "max_length": 9, "evaluation": None}
    assert calls == [("rows.jsonl", {**options, "columns": {"prompt": "question"}})]


def test_generate_needs_prompts_of_one_kind(capsys):
    assert cli.main(["generate", "--model", "m"]) == 2
    assert cli.main(["generate", "--model", "m", "--prompt", "a", "--prompts", "f"]) == 2
    assert "give either --prompt TEXT or --prompts FILE" in capsys.readouterr().err


@pytest.fixture
def responder(monkeypatch):
    """alignment.commands.generate with its model and sampling replaced; gives the settings that sampling saw."""
    from alignment.commands import generate as command
    from alignment.generation import Generation

    seen = []

    def generate(model, tokenizer, prompts, **settings) -> Generation:
        seen.append((model, tokenizer, list(prompts), settings))
        n = len(prompts)
        return Generation(["yes"] * n, [[7, 2]] * n, [[-0.5, -0.25]] * n, [True] * n)

    monkeypatch.setattr(command, "Checkpoint", str)
    monkeypatch.setattr(command, "load_model", lambda name, *_, **__: types.SimpleNamespace(name=name, config={}))
    monkeypatch.setattr(command, "load_tokenizer", lambda name, _: types.SimpleNamespace(name=name, chat_template=None))
    monkeypatch.setattr(
        command, "describe_stop_tokens", lambda name, tokenizer: f"a response of {name} ends at <end> (1)"
    )
    monkeypatch.setattr(command, "generate_texts", generate)
    return seen


def test_generate_writes_one_row_per_prompt(responder, capsys, tmp_path):
    arguments = ["generate", "--model", "m", "--prompt", "a", "--prompt", "b", "temperature=0", "seed=4"]
    assert cli.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == {"prompt": "b", "response": "yes", "token_ids": [7, 2], "log_probs": [-0.5, -0.25], "ended": True}
    model, tokenizer, prompts, settings = responder[0]
    assert (model.name, tokenizer.name, prompts) == ("m", "m", ["a", "b"])
    assert settings == {
        "max_new_tokens": 64, "temperature": 0, "top_k": 0, "top_p": 1.0, "seed": 4, "batch_size": 64, "min_p": 0.0,
        "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "num_beams": 1, "length_penalty": 1.0,
        "early_stopping": False, "adapters": None,
    }  # fmt: skip
    assert cli.main([*arguments, "--output", str(tmp_path / "rows.jsonl")]) == 0
    assert read_lines(tmp_path / "rows.jsonl") == rows
    assert cli.main(["generate", "--model", "m", "--prompts", str(tmp_path / "rows.jsonl")]) == 0
    assert responder[-1][2] == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["temprature=1", "top_p=2"], ["temprature: unknown key; did you mean 'temperature'", "top_p: must be at most 1, got 2"]),
        (["num_beams=4", "top_k=2"], ["num_beams=4"]),
        (["num_beams=4", "early_stopping=often"], ["early_stopping"]),
    ],
)  # fmt: skip
def test_wrong_generate_settings_are_code_2(responder, capsys, settings, words):
    assert cli.main(["generate", "--model", "m", "--prompt", "a", *settings]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and not responder


def test_doctor_names_versions_devices_extras_and_launch_files(installed, capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("torch", "transformers", "accelerate", "processes", "attention", "GB free"):
        assert word in shown
    lines = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line}
    assert {"bitsandbytes", "sacrebleu", "wandb", "deepspeed"} <= lines.keys() and "MISSING" not in shown
    for name in ("ddp.yaml", "fsdp2.yaml", "zero2.yaml", "zero3.yaml", "slurm.sh", "torchrun.sh", "servers.sh"):
        assert lines[f"launch/{name.removesuffix('.yaml')}"] == str(installed / "launch" / name)


def test_python_dash_m_and_sigterm(tmp_path):
    """SIGTERM leaves through `finally`, with 143; a run's lock is then released."""
    (tmp_path / "stub.py").write_text(
        "import pathlib, sys, time\n"
        "from alignment import cli\n"
        "from alignment.pipeline import run as pipeline\n"
        "def run_recipe(*a, **k):\n"
        "    try:\n"
        "        print('running', flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        pathlib.Path('left').touch()\n"
        "pipeline.run_recipe = run_recipe\n"
        "sys.exit(cli.main(['run', 'quickstart']))\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "stub.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert (tmp_path / "left").exists()


def test_python_dash_m_alignment(tmp_path):
    command = [sys.executable, "-m", "alignment", "run", "quickstrat"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: quickstrat: there is no such file, and no packaged one of that name; ")
    assert "Traceback" not in result.stderr

"""Running a page's blocks one after another, and checking those that cannot run: names, options, keys, syntax."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer
import yaml

from alignment import cli
from alignment.config.load import build, has_key, load_config
from alignment.config.yaml_source import SourcedYaml, parse_yaml
from alignment.errors import UserError
from alignment.pipeline.recipe import Recipe, read_recipe
from alignment.pipeline.stages import STAGES, find_stage
from tests.docs.pages import LANGUAGES, ROOT, Block

SHELL = re.compile(r"[;&|<>()]+")  # a token of these characters alone ends a command
WAITING = ("chat", "label")  # commands that do not end by themselves


class WrongBlock(AssertionError):
    """A block that a reader could not use: its place, and why."""


def run_blocks(blocks: list[Block], folder: Path) -> None:
    """Run the blocks of a page in `folder`, the working directory, in order; check those that have a reason not to run."""
    names: dict[str, Any] = {"__name__": "page"}
    used = "\n".join(block.text for block in blocks if block.language in ("bash", "python"))
    for block in blocks:
        try:
            run_block(block, folder, names)
            if block.file.endswith(".yaml") and block.file not in used:
                check_config(block.file)
        except WrongBlock as error:
            raise WrongBlock(f"{block.place}: {error}") from None
        except Exception as error:
            raise WrongBlock(f"{block.place}: {type(error).__name__}: {error}") from error


def run_block(block: Block, folder: Path, names: dict[str, Any]) -> None:
    """Write, run or check one block; Python's names go on in `names` from block to block."""
    if block.language not in LANGUAGES:
        raise WrongBlock(f"the language {block.language!r} is none of {', '.join(sorted(LANGUAGES))}")
    if block.file:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    if block.language == "yaml" and not block.file:
        check_fragment(block.text)
    elif block.language == "python":
        code = compile(block.text, block.place, "exec")
        if not block.file and not block.reason:
            exec(code, names)
    elif block.language == "bash":
        if block.reason:
            for command in commands(block.text):
                check_command(command)
        else:
            run_shell(block.text, folder)


# Shell


def run_shell(text: str, folder: Path) -> None:
    """Run a block of commands: those of `alignment` alone in this process, which has loaded torch, others in bash."""
    for command in commands(text):
        if command[0] == "alignment" and ({*WAITING} & {*command[1:2]} or {"--gpus", "--launch"} & {*command}):
            raise WrongBlock(f"`{shlex.join(command)}` needs <!-- not run: REASON --> on the line before the block")
    lines = list(logical_lines(text))
    if all(line.startswith("alignment ") and not re.search(r"[$`*~]", line) for line in lines) and not any(
        SHELL.fullmatch(token) for line in lines for token in tokens_of(line)
    ):
        for line in lines:
            if code := cli.main(tokens_of(line)[1:]):
                raise WrongBlock(f"`{line}` ended with exit code {code}")
        return
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("alignment", "-m alignment"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text], cwd=folder, env=os.environ | environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode:
        raise WrongBlock(f"bash ended with exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def logical_lines(text: str) -> Iterator[str]:
    """Lines without comments alone; those that end in a backslash or inside quotes with what follows."""
    line = ""
    for part in text.splitlines():
        line += part
        if line.endswith("\\"):
            line = line[:-1] + " "
            continue
        try:
            if tokens_of(line):
                yield line.strip()
        except ValueError:  # a quotation goes on
            line += "\n"
            continue
        line = ""
    if line.strip():
        raise WrongBlock(f"the command does not end: {line}")


def tokens_of(line: str) -> list[str]:
    """The words of a shell line, `|` and the like by themselves."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block, without assignments before it."""
    for line in logical_lines(text):
        command: list[str] = []
        for token in [*tokens_of(line), ";"]:
            if SHELL.fullmatch(token):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"\w+=", token):
                command.append(token)


def check_command(command: list[str]) -> None:
    """Refuse a command that names what is not there: a command or option of ours, a file of the checkout, a target of make."""
    for name in command:
        if re.match(r"(configs|docs|recipes|scripts|tests)/[\w./-]+$", name) and not (ROOT / name).exists():
            raise WrongBlock(f"{name} is not in the checkout")
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(command)) if command[:2] == ["pip", "install"] else []:
        section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
        for extra in extras.split(","):
            if not re.search(rf"^{extra} = ", section, re.MULTILINE):
                raise WrongBlock(f"there is no extra {extra!r}")
    if command[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        for target in (word for word in command[1:] if "=" not in word and not word.startswith("-")):
            if target not in targets:
                raise WrongBlock(f"make has no target {target!r}")
    for i, word in enumerate(command):
        if word == "alignment" and (i == 0 or command[i - 1] == "-m"):
            check_alignment(command[i + 1 :])


def check_alignment(arguments: list[str]) -> None:
    """Parse the arguments as the command line does, and load the config that they name, without running anything."""
    command: Any = typer.main.get_command(cli.app)
    rest = [word for word in arguments if word != "--debug"]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise WrongBlock(f"there is no command `alignment {' '.join(arguments)}`")
        command = command.commands[rest.pop(0)]
    if "--help" in rest:
        if cli.main(arguments):
            raise WrongBlock(f"`alignment {' '.join(arguments)}` is refused")
        return
    if hasattr(command, "commands"):
        known = {option for parameter in command.params for option in parameter.opts}
        if unknown := set(rest) - known:
            raise WrongBlock(f"`alignment {' '.join(arguments)}`: {', '.join(sorted(unknown))} is not known")
        return
    context = command.make_context(command.name, rest)
    config, overrides = context.params.get("config"), context.params.get("overrides") or []
    if command.name == "run":
        check_recipe(context.params["recipe"], overrides)
    elif context.obj:
        load_config(find_stage(context.obj)[0], config, overrides)
    elif config:  # of `plan`, which finds the stage itself
        stage = context.params.get("stage") or config.partition("/")[0]
        check_config(config, overrides, [stage] if stage in STAGES else list(STAGES))


# Configs


def check_config(source: str, overrides: list[str] | None = None, stages: list[str] | None = None) -> None:
    """Refuse a config that is none of a stage, a recipe or a launcher, with the problems of the stage that it is nearest to."""
    path = Path(source)
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "stages" in values:
        return check_recipe(source, overrides or [])
    if "distributed_type" in values:
        from accelerate.commands.config.config_args import load_config_from_file

        load_config_from_file(source)
        return None
    problems = []
    for stage in stages or STAGES:
        try:
            load_config(find_stage(stage)[0], source, overrides or [])
            return None
        except UserError as error:
            problems.append(str(error))
    raise WrongBlock(min(problems, key=lambda text: text.count("\n")))


def check_recipe(source: str, overrides: list[str]) -> None:
    """Refuse a recipe that cannot be read, and settings of its stages that are no keys of theirs."""
    _, folder, stages = read_recipe(source, overrides)
    for entry, document in stages:
        config_class = find_stage(entry.run, folder)[0]
        for name in document.values or {}:
            if not has_key(config_class, (name,)):
                raise WrongBlock(f"stage {entry.name}: {entry.run} has no key {name!r}")


def check_fragment(text: str) -> None:
    """Refuse lines of a config in which a top-level key is of no stage, or has a value that none of them takes.

    Each top-level key is looked at by itself: a page may show two values of one.
    """
    for part in re.split(r"(?m)^(?=[\w-]+:)", text):
        values = parse_yaml(part, "yaml").values
        for key, value in (values or {}).items():
            hints = [_hint(cls, key) for cls in (Recipe, *(find_stage(stage)[0] for stage in STAGES))]
            problems = [_problem(key, value, hint) for hint in hints if hint is not None]
            if not problems:
                raise WrongBlock(f"no stage has the key {key!r}")
            if all(problems):
                raise WrongBlock(min(problems, key=len))


def _hint(cls: type, key: str) -> Any:
    return get_type_hints(cls, include_extras=True).get(key) if has_key(cls, (key,)) else None


def _problem(key: str, value: object, hint: Any) -> str:
    fragment = dataclasses.make_dataclass("Fragment", [(key, hint)])
    try:
        build(fragment, SourcedYaml({key: value}, {(): "yaml"}))
    except UserError as error:
        return str(error)
    return ""

"""Python functions as rewards: f(prompts, responses, **columns) -> one number, or None, for each response.

trl's f(prompts, completions, **columns) is understood as well.
"""

import importlib
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import cast

from alignment.config.load import code_folders
from alignment.errors import UserError
from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import RewardSpec

RewardFunction = Callable[..., object]
TEXTS = ("responses", "completions")
GIVEN: dict[str, RewardFunction] = {}  # functions that were passed from Python, by the name that the config has


def with_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings whose `rewards` name each function, `module:qualname`, where they held the function itself.

    `rewards` may be one function, or a list of functions, of entries with a function, and of other entries. The functions
    are found by `load_reward_function` in this process.

    Raises:
        UserError: two functions have one name.
    """
    return {
        key: _named(value) if key == "rewards" else with_names(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }


def _named(rewards: object) -> object:
    """The entries of `rewards` with names of functions."""
    entries = [rewards] if callable(rewards) else rewards
    if not isinstance(entries, (list, tuple)):
        return rewards
    found: dict[str, RewardFunction] = {}
    named: list[object] = []
    for entry in entries:
        settings = entry if isinstance(entry, Mapping) else {"function": entry}
        if not callable(function := settings.get("function")):
            named.append(entry)
            continue
        own = function if hasattr(function, "__qualname__") else type(function)
        name = f"{own.__module__}:{own.__qualname__}"
        if found.setdefault(name, function) is not function:
            raise UserError(f"rewards: two functions are named {name}; define each under a name of its own")
        named.append({**settings, "function": name})
    GIVEN.update(found)
    return named


def load_reward_function(name: str) -> RewardFunction:
    """The function of `module:name`, of a module beside the config, in the working directory, or installed, in this order.

    Both folders stay on Python's path, for what the module imports later.

    Raises:
        UserError: no such module or function, or it cannot be called with responses by their names.
    """
    module, _, attribute = name.partition(":")
    try:
        function = GIVEN[name] if name in GIVEN else operator.attrgetter(attribute)(import_own(module))
    except Exception as error:  # of the user's module, which may raise anything
        why = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"rewards: function {name!r} was not found ({why}); write module:name of a module in "
            f"{' or '.join(_own_folders())}, or of an installed one"
        ) from error
    if not callable(function):
        raise UserError(f"rewards: function {name!r} is a {type(function).__name__} and cannot be called")
    columns_of(function, name)
    return function


def function_files(rewards: Sequence[RewardSpec], judge: str = "") -> dict[str, list[Path]]:
    """The file in which each reward function is written, by dotted key; none where it is not found: loading says so.

    Args:
        judge: module:name of a function too, or the name of another judge.
    """
    files: dict[str, list[Path]] = {}
    for number, spec in enumerate(rewards):
        with suppress(UserError, TypeError):  # what is written in C has no file
            function = load_reward_function(spec.function) if spec.function else None
            file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
            if function is not None and file is not None and Path(file).is_file():  # a notebook's cell is none
                files[f"rewards.{number}.function"] = [Path(file)]
    module, colon, _ = judge.partition(":")
    with suppress(ImportError, ValueError, TypeError, OSError):
        if colon and (file := inspect.getsourcefile(cast(ModuleType, import_own(module)))):
            files["judge"] = [Path(file)]
    return files


def import_own(module: str) -> object:
    """A module beside the config, in the working directory, or installed, in this order."""
    for folder in reversed(_own_folders()):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(module)


def _own_folders() -> list[str]:
    return list(dict.fromkeys(str(folder.resolve()) for folder in (*code_folders, Path.cwd())))


def columns_of(function: RewardFunction, name: str) -> list[str]:
    """The columns that a function needs: its arguments without a default, other than prompts, responses and completions.

    Raises:
        UserError: it takes neither responses nor completions, or takes arguments by position alone.
    """
    arguments = inspect.signature(function).parameters.values()
    if any(each.kind is each.POSITIONAL_ONLY for each in arguments) or not set(TEXTS) & set(_texts_of(function)):
        raise UserError(
            f"rewards: function {name!r} must be of the form f(prompts, responses, **columns), or with completions as in "
            f"trl; its arguments are {inspect.signature(function)}"
        )
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in arguments if each.kind not in optional and each.default is each.empty]
    return [each for each in needed if each not in ("prompts", *TEXTS)]


def _takes_all(function: RewardFunction) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def _texts_of(function: RewardFunction) -> list[str]:
    """The texts that a function is given: those it names; with `**columns` prompts, and responses under one name at least."""
    named = [each for each in ("prompts", *TEXTS) if each in inspect.signature(function).parameters]
    return ["prompts", *([each for each in named if each in TEXTS] or TEXTS)] if _takes_all(function) else named


def function_reward(function: RewardFunction, name: str) -> TextReward:
    """A function as a reward. It is given the columns that it names, or all of them where it takes `**columns`.

    `responses` are texts. `completions` are as in trl: texts, and for a prompt of messages a list with the assistant's
    message.

    Args:
        function: of `load_reward_function`.
        name: of the function, for messages.
    """
    named, takes_all, given_texts = (
        inspect.signature(function).parameters.keys(),
        _takes_all(function),
        _texts_of(function),
    )

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        present = {column for row in samples.columns for column in row}
        columns = sorted((present if takes_all else present & named) - {"prompts", *TEXTS})
        texts: dict[str, list[object]] = {
            "prompts": list(samples.prompts),
            "responses": list(samples.responses),
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(samples.prompts, samples.responses, strict=True)
            ],
        }
        try:
            given = function(**{each: texts[each] for each in given_texts}, **{c: samples.column(c) for c in columns})
        except Exception as error:  # of the user's function, which may raise anything
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"rewards: function {name!r} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            ) from error
        try:
            return [None if value is None else float(value) for value in cast("Sequence[float | None]", given)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"rewards: function {name!r} must give a list of numbers or None, one for each response: {error}"
            ) from error

    return reward

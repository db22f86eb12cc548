"""Python functions as rewards: f(prompts, responses, **columns) -> one number, or None, for each response.

trl's f(prompts, completions, **columns) is understood as well; both may be `async def`.
"""

import asyncio
import importlib
import inspect
import operator
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from alignment.config.load import code_folders
from alignment.errors import UserError
from alignment.rewards.combine import SampledTexts, TextReward
from alignment.rewards.specs import RewardSpec

RewardFunction = Callable[..., object]
TEXTS = ("responses", "completions")
GIVEN: dict[str, RewardFunction] = {}  # functions that were passed from Python, by the name that the config has


def with_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings whose `rewards` name each function, `module:qualname`, where they held the function itself.

    `rewards` may be one function, or a list of functions, of entries with a function, and of other entries.
    """
    return {
        key: _named(value) if key == "rewards" else with_names(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }


def _named(rewards: object) -> object:
    entries = [rewards] if callable(rewards) else rewards
    if not isinstance(entries, (list, tuple)):
        return rewards
    functions: dict[str, RewardFunction] = {}
    named: list[object] = []
    for entry in entries:
        settings = entry if isinstance(entry, Mapping) else {"function": entry}
        if not callable(function := settings.get("function")):
            named.append(entry)
            continue
        definition = function if hasattr(function, "__qualname__") else type(function)
        name = f"{definition.__module__}:{definition.__qualname__}"
        if functions.setdefault(name, function) is not function:
            raise UserError(f"rewards: two functions are named {name}; define each under a name of its own")
        named.append({**settings, "function": name})
    GIVEN.update(functions)
    return named


def load_reward_function(name: str) -> RewardFunction:
    """The function of `module:name`: a module beside the config, in the working directory, or else installed."""
    function = GIVEN[name] if name in GIVEN else load_own(name, "rewards: function")
    if not callable(function):
        raise UserError(f"rewards: function {name!r} is a {type(function).__name__} and cannot be called")
    columns_of(function, name)
    return function


def load_own(name: str, what: str) -> Any:
    """The object that `module:name` names; where it is not found a UserError says so of `what`."""
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(import_own(module))
    except Exception as error:  # of the user's module, which may raise anything
        why = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{what} {name!r} was not found ({why}); write module:name of a module in {' or '.join(_own_folders())}, "
            "or of an installed one"
        ) from error


def function_files(rewards: Sequence[RewardSpec], judge: str = "") -> dict[str, list[Path]]:
    """The source file of each reward function and of the function of a `judge`, by dotted key, where it is found."""
    definitions: dict[str, object] = {}
    if ":" in judge:
        with suppress(ImportError, ValueError):
            definitions["judge"] = import_own(judge.partition(":")[0])
    for index, spec in enumerate(rewards):
        if spec.function is None:
            continue
        with suppress(UserError):
            function = load_reward_function(spec.function)
            definitions[f"rewards.{index}.function"] = function if inspect.isroutine(function) else type(function)
    files: dict[str, list[Path]] = {}
    for key, definition in definitions.items():
        with suppress(TypeError):  # what is written in C has no file, and a notebook's cell names one that is not there
            file = Path(inspect.getsourcefile(cast(type, definition)) or "")
            if file.is_file():
                files[key] = [file]
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
    """The columns that a function needs: arguments without a default, except prompts, responses and completions."""
    arguments = inspect.signature(function).parameters.values()
    takes_texts = any(argument.name in TEXTS or argument.kind is argument.VAR_KEYWORD for argument in arguments)
    if not takes_texts or any(argument.kind is argument.POSITIONAL_ONLY for argument in arguments):
        raise UserError(
            f"rewards: function {name!r} must be of the form f(prompts, responses, **columns), or with completions as "
            f"in trl; its arguments are {inspect.signature(function)}"
        )
    return [
        argument.name
        for argument in arguments
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
        and argument.default is argument.empty
        and argument.name not in ("prompts", *TEXTS)
    ]


async def _awaited(values: Awaitable[object]) -> object:
    return await values


def function_reward(function: RewardFunction, name: str) -> TextReward:
    """A function as a reward. It is given the columns that it names, or all of them where it takes `**columns`.

    `responses` are texts. `completions` are as in trl: texts, and for a prompt of messages a list with the assistant's
    message. A function that names neither gets both in its `**columns`.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unnamed = {*TEXTS} - parameters.keys()
    left_out = unnamed if len(unnamed) == 1 else set[str]()

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        columns = sorted({column for row in samples.columns for column in row})
        given = {column: samples.column(column) for column in columns} | {
            "prompts": list(samples.prompts),
            "responses": list(samples.responses),
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(samples.prompts, samples.responses, strict=True)
            ],
        }
        given = {
            key: values for key, values in given.items() if key in parameters or (takes_all and key not in left_out)
        }
        try:
            values = function(**given)
            if inspect.isawaitable(values):
                with ThreadPoolExecutor(1) as pool:  # a notebook's own thread has an event loop that runs already
                    values = pool.submit(asyncio.run, _awaited(values)).result()
        except Exception as error:  # of the user's function, which may raise anything
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"rewards: function {name!r} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            ) from error
        try:
            return [None if value is None else float(value) for value in cast("Sequence[float | None]", values)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"rewards: function {name!r} must give a list of numbers or None, one for each response: {error}"
            ) from error

    return reward

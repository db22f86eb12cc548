"""Python functions as rewards: f(prompts, responses, **columns) -> one number, or None, for each response."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from alignment.errors import UserError
from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.specs import RewardSpec

RewardFunction = Callable[..., object]
OWN = ("prompts", "responses")  # arguments that are not columns


def load_reward_function(name: str) -> RewardFunction:
    """The function of `module:name`.

    Raises:
        UserError: no such module or function, or it cannot be called with prompts and responses by their names.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"rewards: function {name!r} was not found ({error}); write module:name of a module that Python can import"
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
    with suppress(ImportError, ValueError):
        found = importlib.util.find_spec(module) if colon else None
        if found is not None and found.origin is not None and found.has_location:
            files["judge"] = [Path(found.origin)]
    return files


def columns_of(function: RewardFunction, name: str) -> list[str]:
    """The columns that a function needs: its arguments without a default, other than prompts and responses.

    Raises:
        UserError: it does not take prompts and responses, or takes arguments by position alone.
    """
    arguments = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments)
    named = {each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    positional = [each.name for each in arguments if each.kind is each.POSITIONAL_ONLY]
    if positional or not (takes_all or set(OWN) <= named):
        raise UserError(
            f"rewards: function {name!r} must be of the form f(prompts, responses, **columns); its arguments are "
            f"{inspect.signature(function)}"
        )
    return [
        each.name
        for each in arguments
        if each.name in named and each.name not in OWN and each.default is inspect.Parameter.empty
    ]


def function_reward(function: RewardFunction, name: str) -> TextReward:
    """A function as a reward. It is given the columns that it names, or all of them where it takes `**columns`.

    Args:
        function: of `load_reward_function`.
        name: of the function, for messages.
    """
    arguments = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments)

    def reward(samples: SampledTexts) -> Sequence[float | None]:
        present = {column for row in samples.columns for column in row}
        wanted = present if takes_all else present & {each.name for each in arguments}
        columns = {column: samples.column(column) for column in sorted(wanted - set(OWN))}
        given = function(prompts=list(samples.prompts), responses=list(samples.responses), **columns)
        try:
            return [None if value is None else float(value) for value in cast("Sequence[float | None]", given)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"rewards: function {name!r} must give a list of numbers or None, one for each response: {error}"
            ) from error

    return reward

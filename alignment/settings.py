"""The base of config classes: limits are types, contradictions a table, and one start names all of both; and patterns.

A config is a frozen dataclass. What a single value may be is the type of its field; what values must not be together is
a row of `RULES`. From Python a config is checked where it is made. From YAML `config.load.build` makes all sections
first and asks `contradictions` afterwards, so that one wrong section hides nothing in the others.
"""

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, cast, get_args, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

from alignment.errors import UserError

if TYPE_CHECKING:
    from regex import Pattern

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]

BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # annotated_types' names, and pydantic's

PATTERN_SECONDS = 1.0  # for one text, or all names of a model; an ordinary pattern takes microseconds

Key = tuple[str | int, ...]
_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


class Rule(NamedTuple):
    """A contradiction.

    Attributes:
        key: the key to change, such as `beta`, or `training.batch_size` of a section.
        wrong: config -> something true where the config contradicts itself, such as True or a text.
        why: what comes after the key's name: the reason and the way out. `{self.KEY}` is a value of the config,
            `{found}` what `wrong` gave.
    """

    key: str
    wrong: Callable[[Any], object]
    why: str = "{found}"


Contradiction = tuple[Key, str, frozenset[Key]]
"""Key of the value to change, from the outermost section; why, in words; keys of the values that the rule looked at."""


class Settings:
    """Base of config dataclasses.

    Attributes:
        RULES: contradictions among the fields of this class; those of its bases hold too.
    """

    RULES: ClassVar[Sequence[Rule]] = ()

    def __post_init__(self) -> None:
        if not _deferred.get():
            wrong = list(_out_of_range(self)) or [
                (".".join(map(str, key)), why) for key, why, _ in _contradictions(self, ())
            ]
            if wrong:
                raise ValueError("\n".join(f"{name} {why}" for name, why in wrong))


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Settings made inside are not checked; see `contradictions`."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def broken_rules(value: object, key: Key = ()) -> Iterator[Contradiction]:
    """All broken rules of a config and of the sections in it; `key` is its own key."""
    if is_dataclass(value):
        for field in fields(value):
            yield from broken_rules(getattr(value, field.name), (*key, field.name))
        yield from _contradictions(value, key) if isinstance(value, Settings) else ()
    elif isinstance(value, (list, tuple, Mapping)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            yield from broken_rules(item, (*key, name))


def refusal(check: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text of the ValueError that a check raises; '' where it raises none."""
    try:
        check(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def limit_text(bound: str, limit: float) -> str:
    """`must be at least 1`, from annotated_types' name of a bound."""
    return f"must be {BOUNDS[bound]} {int(limit) if limit == int(limit) else limit:,}"


def default_text(cls: type, name: str) -> str:
    """`; the default is 0.1` where a field has a number for a default, else ''."""
    default = next((field.default for field in fields(cast(Any, cls)) if field.name == name), MISSING)
    return f"; the default is {default}" if isinstance(default, (int, float)) else ""


def _contradictions(settings: Settings, key: Key) -> Iterator[Contradiction]:
    for cls in reversed(type(settings).__mro__):
        for rule in cls.__dict__.get("RULES", ()):
            read: set[Key] = set()
            if finding := rule.wrong(_Reader(settings, key, read)):
                yield (*key, *rule.key.split(".")), rule.why.format(self=settings, found=finding), frozenset(read)


def _out_of_range(settings: Settings) -> Iterator[tuple[str, str]]:
    """Names of fields outside the limits of their types, and why; pydantic finds the same in YAML."""
    for name, bounds, options in _limited_fields(type(settings)):
        value = getattr(settings, name)
        if options and isinstance(value, str) and value not in options:
            yield name, f"must be {' or '.join(map(repr, options))}, got {value!r}"
        numbers = (x for _, x in leaves(value) if isinstance(x, (int, float)) and not isinstance(x, bool))
        for leaf, (bound, limit) in itertools.product(numbers, bounds):
            inside = {"gt": leaf > limit, "ge": leaf >= limit, "lt": leaf < limit, "le": leaf <= limit}
            if not inside[bound]:  # also where the number is NaN
                yield name, f"{limit_text(bound, limit)}, got {leaf}{default_text(type(settings), name)}"


@functools.cache
def _limited_fields(cls: type) -> list[tuple[str, list[tuple[str, float]], list[str]]]:
    """Name, bounds and options of each field whose type has some; a field that takes any text has no options."""
    hints = get_type_hints(cls, include_extras=True)
    limited = []
    for field in fields(cast(Any, cls)):
        parts = list(_parts(hints[field.name]))
        limits = [part for part in parts if isinstance(part, (Gt, Ge, Lt, Le, Interval))]
        bounds = [(name, getattr(part, name)) for part in limits for name in BOUNDS if hasattr(part, name)]
        bounds = [(name, limit) for name, limit in bounds if limit is not None]
        options = [] if str in parts else [part for part in parts if isinstance(part, str)]
        if bounds or options:
            limited.append((field.name, bounds, options))
    return limited


def _parts(hint: object) -> Iterator[object]:
    """The types, limits and options that a type is made of."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def leaves(value: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """The values inside of mappings and lists, however deep, each with its key."""
    if not isinstance(value, (list, tuple, Mapping)):
        yield key, value
        return
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(item, (*key, name))


class _Reader:
    """Settings that note in `read` the key of every value read; methods and properties are noted by what they read."""

    def __init__(self, settings: Settings, key: Key, read: set[Key]):
        self.__dict__.update(_settings=settings, _key=key, _read=read)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (isinstance asks it)
        return type(self._settings)

    def __getattr__(self, name: str) -> Any:
        settings = self._settings
        cls = type(self._settings)
        in_class = getattr(cls, name, None)
        if isinstance(in_class, property):
            return cast(Any, in_class.fget)(self)
        if callable(in_class) and name not in settings.__dict__:
            return MethodType(in_class, self)
        value = getattr(settings, name)
        if name not in settings.__dict__:
            return value
        self._read.add((*self._key, name))
        return _Reader(value, (*self._key, name), self._read) if isinstance(value, Settings) else value


# Regular expressions from a config, searched within a time limit in texts and in the names of a model's parts


def compile_pattern(pattern: str, *, dotall: bool = False) -> "Pattern[str]":
    """A pattern whose methods take `timeout=PATTERN_SECONDS` and then raise TimeoutError; ValueError where it is none.

    With `dotall`, `.` matches line ends too.
    """
    import regex  # `re` has no timeout, and (.*)*(.*)*! on one long name never ends

    try:
        return regex.compile(pattern, regex.DOTALL if dotall else 0)
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error


def search_names(pattern: str, names: Sequence[str], setting: str) -> list[str]:
    """The names in which `pattern` is found anywhere, in their order.

    Raises:
        UserError: the pattern takes too long; `setting` is its config key and the pattern as the user wrote them.
    """
    compiled = compile_pattern(pattern)
    end = time.monotonic() + PATTERN_SECONDS
    try:
        return [name for name in names if compiled.search(name, timeout=max(end - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"{setting} takes more than {PATTERN_SECONDS:g} seconds on the names of the model; "
            "nest no repetitions, as in (a*)*"
        ) from error


def slow_pattern(pattern: str) -> str:
    """The reason where a pattern runs into the time limit on one text."""
    return f"pattern {pattern!r} takes more than {PATTERN_SECONDS:g} seconds; nest no repetitions, as in (a*)*"


def without_numbers(names: Iterable[str]) -> list[str]:
    """The names with * for each number between dots, every one once, sorted."""
    return sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})

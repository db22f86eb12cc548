"""Settings of rewards: one entry of `rewards` for each part of the score, with their checks.

What an entry does is in the file of its kind: reward_models.py, functions.py, rules.py, answers.py, code.py, judge.py.
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from string import Formatter
from typing import Literal

from alignment.patterns import compile_pattern
from alignment.reward_model import Combine
from alignment.rewards.http import url_problem

KINDS = ("reward_model", "function", "length", "format", "regex", "answer", "code", "judge")
FORMATS = {  # name of a format -> the pattern that the whole response has to match
    "think_answer": r"\s*<think>((?!</?(think|answer)>).)*</think>\s*<answer>((?!</?(think|answer)>).)*</answer>\s*",
    "gsm8k": r".*####\s*[-+]?[$]?[\d,]*\.?\d+\s*",
    "boxed": r".*\\boxed\{.+\}.*",
}
NAME = re.compile(r"[\w.-]+")
VARIABLE = re.compile(r"[A-Za-z_]\w*")

Normalize = Literal["none", "first", "running"]
AnswerMatch = Literal["gsm8k", "exact", "boxed"]


@dataclass(frozen=True)
class LengthSpec:
    """A reward for the length of a response: 0 where it is as wanted, and less for each unit too many or too few.

    reward = -penalty * (|length - target| with `target`, or max(0, length - max) with `max`)

    With `clip: [-1, 0]`, `max` at the largest length less a margin and a penalty of 1 / margin this is the soft
    punishment of overlong responses of Yu et al. 2025, arXiv:2503.14476, eq. 13.

    Attributes:
        target: the wanted length; shorter and longer responses lose alike.
        max: the longest length that loses nothing.
        penalty: taken off for each unit, above 0.
        unit: tokens of the policy's tokenizer, end token included; or characters of the text.
    """

    target: int | None = None
    max: int | None = None
    penalty: float = 0.01
    unit: Literal["tokens", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if (self.target is None) == (self.max is None):
            raise ValueError("length needs either target or max")
        for name in ("target", "max"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} of a length must be 0 or above, got {value}")
        if self.penalty <= 0:
            raise ValueError(f"penalty of a length must be above 0, got {self.penalty}")


@dataclass(frozen=True)
class MatchSpec:
    """A reward for responses that match a regular expression.

    Attributes:
        pattern: Python's regular expression; `.` matches line ends too. In `format` also a format's name. A response on
            which it takes more than a second has no score.
        value: reward of a response that matches.
        otherwise: reward of one that does not.
    """

    pattern: str
    _: KW_ONLY
    value: float = 1.0
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        compile_pattern(self.pattern, dotall=True)


@dataclass(frozen=True)
class AnswerSpec:
    """A reward for responses whose answer is that of a column of the prompt's row.

    Attributes:
        match: gsm8k: the number after `####`, or else in `\\boxed{}`, or else the last number, is equal to that of the column
            (`1,000.0` is 1000, `3/4` is 0.75). exact: the texts are equal without case, white space and punctuation at the
            ends of words, and with equal numbers. boxed: the last `\\boxed{}` holds the column's text, compared likewise.
        column: of the prompts; a text, a number, or a list of accepted answers.
        value: reward of a right answer.
        otherwise: reward of a wrong one.
    """

    match: AnswerMatch
    _: KW_ONLY
    column: str = "answer"
    value: float = 1.0
    otherwise: float = 0.0


@dataclass(frozen=True)
class CodeSpec:
    """A reward for Python code that passes unit tests, run in a process without files, sockets and other processes.

    The code is the response's last block fenced as Python, else the last fenced without a language, else all of it.

    Attributes:
        column: of the prompts: a list of tests, each a text of asserts that call the code's functions, or a mapping
            `{input, output}` of what the program reads and has to print.
        reward: the share of the tests that pass, or 1 only where all pass.
        cpu_seconds, wall_seconds: limits of one test.
        memory_megabytes: limit of the address space.
        output_bytes: limit of what a test may print and a function may return.
        processes: tests that one rank runs side by side.
        solution: column of a reference solution, run at the start: rows whose tests it fails are refused. None: not run.
    """

    column: str = "tests"
    reward: Literal["share", "all"] = "all"
    cpu_seconds: float = 5.0
    wall_seconds: float = 10.0
    memory_megabytes: int = 512
    output_bytes: int = 65_536
    processes: int = 2
    solution: str | None = None

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "memory_megabytes", "output_bytes", "processes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.memory_megabytes < 64:
            raise ValueError(
                f"memory_megabytes must be at least 64, got {self.memory_megabytes}: Python itself needs 30"
            )


@dataclass(frozen=True)
class JudgeSpec:
    """A reward that an HTTP service gives.

    Attributes:
        url: of the service; with protocol openai that of `.../v1/chat/completions`.
        protocol: json: `{"prompt", "response", "columns"}` is posted and `{"score": number}` expected. openai: a chat
            completion of `model` on `template`, in whose text the score stands.
        model: name of the judging model (openai).
        template: of the question, with {prompt} and {response} and {NAME} for each column used (openai).
        pattern: regular expression whose first group is the score; its last match counts. null: the number in double
            brackets, or else the one after `score`, `rating` or `grade`, or else the only number; `of 10`, `/10` and
            `1-10` are read as scales, and where different numbers are left there is no score (openai).
        columns: columns of the prompts that the service gets.
        key_variable: environment variable that holds the key, sent as a bearer token; None: no key. The URL may hold none.
        timeout_seconds: for one whole request.
        retries: further requests after a failed one: no connection, time-out, status 408, 409, 425, 429 or 5xx.
        backoff_seconds: pause before the first of them, doubled each time, with jitter; a Retry-After header counts
            where it is longer.
        max_backoff_seconds: longest pause; a longer Retry-After is a failure.
        max_failed_share: largest share of responses of one iteration without a score; nothing is learned from them.
        requests: at the same time from one rank.
        low, high: a score outside is a failure; None: no bound.
    """

    url: str
    _: KW_ONLY
    protocol: Literal["json", "openai"] = "json"
    model: str | None = None
    template: str | None = None
    pattern: str | None = None
    columns: tuple[str, ...] = ()
    key_variable: str | None = None
    timeout_seconds: float = 60.0
    retries: int = 5
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    max_failed_share: float = 0.1
    requests: int = 8
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_judge_url(self.url)
        if self.protocol == "openai":
            if self.model is None or self.template is None:
                raise ValueError("protocol openai of a judge needs model and template")
        elif (self.model, self.template, self.pattern) != (None, None, None):
            raise ValueError("model, template and pattern of a judge go with protocol: openai")
        if self.template is not None and (problem := template_problem(self.template, self.columns)):
            raise ValueError(problem)
        if self.pattern is not None and compile_pattern(self.pattern).groups < 1:
            raise ValueError(f"pattern {self.pattern!r} needs a group (...) around the score")
        if self.key_variable is not None and not VARIABLE.fullmatch(self.key_variable):
            raise ValueError("key_variable must be the name of an environment variable, not the key itself")
        for name in ("timeout_seconds", "backoff_seconds", "max_backoff_seconds", "requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or above, got {self.retries}")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share must lie between 0 and 1, got {self.max_failed_share}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")


@dataclass(frozen=True)
class RewardSpec:
    """One part of the score of a response: exactly one kind, and how it is shaped and weighed.

    score = sum over the entries of weight * clip(normalize(part))

    Attributes:
        reward_model: directory or Hub id of a reward model of any architecture and tokenizer; one with a tokenizer or chat
            template of its own reads texts through it.
        reward_combine: how the scores of an ensemble become one: mean, min, or lower (mean - reward_std_coef * deviation).
        reward_std_coef: weight of the deviation in `lower`.
        function: module:name of a Python function f(prompts, responses, **columns) -> one number for each response, or
            None where it does not apply; the module lies beside the config or in the working directory, or is installed.
            Columns are the prompts' further columns, as lists; a function without `**columns` gets those that it names.
            With `completions` in place of `responses` it is called as trl calls it: for a prompt of messages a
            completion is a list with the assistant's message. From Python the function itself may stand here.
        length: a penalty for responses longer or shorter than wanted.
        format: a named format (think_answer, gsm8k, boxed), a regular expression, or a section; the whole response has to
            match.
        regex: a regular expression, or a section; it has to match somewhere in the response.
        answer: gsm8k, exact or boxed, or a section: whether the response's answer is that of a column.
        code: whether Python code passes unit tests; `{}` for the usual settings. Linux only.
        judge: URL of an HTTP service, or a section.
        weight: factor of this part; negative for what is to be avoided.
        name: in metrics, `score/NAME`; None: made of the kind.
        clip: [low, high] of the part, after its normalization and before its weight; null: no bounds.
        normalize: first: mean 0 and deviation 1 on the first samples, fixed for the whole run. running: on all samples so
            far. none: as it is. null: first for a reward model without a scale of its own, none for the other kinds.
        per_source: normalize the samples of each data source by themselves.
    """

    reward_model: str | None = None
    _: KW_ONLY
    reward_combine: Combine = "mean"
    reward_std_coef: float = 1.0
    function: str | None = None
    length: LengthSpec | None = None
    format: str | MatchSpec | None = None
    regex: str | MatchSpec | None = None
    answer: AnswerMatch | AnswerSpec | None = None
    code: CodeSpec | None = None
    judge: str | JudgeSpec | None = None
    weight: float = 1.0
    name: str | None = None
    clip: tuple[float, float] | None = None
    normalize: Normalize | None = None
    per_source: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"an entry of rewards has one kind of {', '.join(KINDS)}; found {found}")
        if self.weight == 0:
            raise ValueError("weight must not be 0; leave the entry out, or log it by `metrics`")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(f"name may have letters, digits and _ . - only, got {self.name!r}")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip must be [low, high] with low below high, got {list(self.clip)}")
        if self.per_source and self.normalize in (None, "none"):
            raise ValueError("per_source goes with normalize: first or running")
        self._check_kind(given[0])

    def _check_kind(self, kind: str) -> None:
        """Check what belongs to one kind alone, the short forms among it."""
        if kind != "reward_model" and (self.reward_combine != "mean" or self.reward_std_coef != 1):
            raise ValueError("reward_combine and reward_std_coef go with reward_model")
        if self.reward_std_coef <= 0:
            raise ValueError(f"reward_std_coef must be above 0, got {self.reward_std_coef}")
        if self.reward_std_coef != 1 and self.reward_combine != "lower":
            raise ValueError(f"reward_std_coef goes with reward_combine=lower, not with {self.reward_combine}")
        if kind == "function" and not re.fullmatch(r"[\w.]+:[\w.<>]+", self.function or ""):
            raise ValueError(f"function must be module:name, got {self.function!r}")
        if kind == "judge" and isinstance(self.judge, str):
            check_judge_url(self.judge)
        if kind in ("format", "regex"):
            self.match  # noqa: B018 (compiles the pattern)

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def match(self) -> MatchSpec:
        """Pattern and values of a `format` or a `regex`, of which the pattern alone is the short form."""
        given = self.format if self.format is not None else self.regex
        if isinstance(given, str):
            given = MatchSpec(FORMATS.get(given, given) if self.format is not None else given)
        if given is None:
            raise ValueError("neither a format nor a regex")
        if self.format is not None and given.pattern in FORMATS:
            return MatchSpec(FORMATS[given.pattern], value=given.value, otherwise=given.otherwise)
        return given

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every prompt's row needs, as far as the settings say; a function's are in its signature."""
        if self.answer is not None:
            return (self.answer.column if isinstance(self.answer, AnswerSpec) else "answer",)
        if self.code is not None:
            return (self.code.column,)
        return self.judge.columns if isinstance(self.judge, JudgeSpec) else ()


def check_judge_url(url: str) -> None:
    """Refuse what is no http or https URL with a host, or holds a key.

    Raises:
        ValueError: in words, without the key.
    """
    if problem := url_problem(url):
        raise ValueError(f"judge: {problem}")


def template_problem(template: str, columns: Sequence[str]) -> str:
    """What is wrong with a template; empty where nothing is."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        return f"template is not of the form 'text {{prompt}} text': {error}; double the braces that are text"
    if unknown := sorted(names - {"prompt", "response", *columns}):
        return f"template names {{{unknown[0]}}}, which is neither prompt, response nor one of columns"
    return "" if "response" in names else "template does not show {response} to the judge"


def names_of(specs: Sequence[RewardSpec]) -> list[str]:
    """The name of each entry; those made of the kind get a number from the second of their kind on.

    Raises:
        ValueError: two entries have one name.
    """
    names: list[str] = []
    taken = {spec.name for spec in specs if spec.name is not None}
    for spec in specs:
        if spec.name is not None and spec.name in names:
            raise ValueError(f"rewards: two entries are named {spec.name!r}; names have to differ")
        base, number = spec.name or _default_name(spec), 1
        name = base
        while spec.name is None and (name in names or name in taken):
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def _default_name(spec: RewardSpec) -> str:
    if spec.function is not None:
        return re.findall(r"\w+", spec.function)[-1]
    return spec.kind


def reward_models_of(reward_model: str | None, rewards: Sequence[RewardSpec]) -> list[str]:
    """Directories of the reward models, in the order of `rewards`; `reward_model` is the short form of one entry."""
    if reward_model is not None:
        return [reward_model]
    return [spec.reward_model for spec in rewards if spec.reward_model is not None]


def as_given_alone(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The entries, of which a single one that does not say `normalize` is not normalized.

    For what compares responses: a scale alone changes no order.
    """
    if len(specs) != 1:
        return list(specs)
    return [replace(spec, normalize=spec.normalize or "none") for spec in specs]


def check_rewards(
    reward_model: str | None, rewards: Sequence[RewardSpec], combine: Combine = "mean", std_coef: float = 1.0
) -> None:
    """Refuse no reward, both forms of it, and settings of the short form beside the list.

    Args:
        reward_model, combine, std_coef: the short form, one entry of kind reward_model.
        rewards: the list.

    Raises:
        ValueError: in words.
    """
    if not rewards:
        if reward_model is None:
            raise ValueError("say what is rewarded: reward_model=DIR, or a list `rewards` of entries")
        return
    if reward_model is not None:
        raise ValueError(
            "reward_model is the short form of a list `rewards` with one entry, so both cannot be given; write it as an "
            "entry `- reward_model: DIR` of rewards"
        )
    if combine != "mean" or std_coef != 1:
        raise ValueError("reward_combine and reward_std_coef stand in their entry of rewards, where rewards are a list")
    names_of(rewards)

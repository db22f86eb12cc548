"""Settings of rewards: one entry of `rewards` for each part of the score.

An entry of each kind runs in a file: functions.py, answers.py (lengths and patterns too), code/unit_tests.py, judge.py.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

from alignment.errors import SECRET
from alignment.reward_model import Combine
from alignment.rewards.code.sandbox import SandboxLimits
from alignment.settings import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    Share,
    compile_pattern,
    refusal,
)

KINDS = ("reward_model", "function", "length", "format", "regex", "answer", "code", "judge")
FORMATS = {  # name of a format -> the pattern that the whole response has to match
    "think_answer": r"\s*<think>((?!</?(think|answer)>).)*</think>\s*<answer>((?!</?(think|answer)>).)*</answer>\s*",
    "gsm8k": r".*####\s*[-+]?[$]?[\d,]*\.?\d+\s*",
    "boxed": r".*\\boxed\{.+\}.*",
}
SECRET_PARAMETER = re.compile(r"(?:^|[_-])(?:key|code|auth|sig|signature|pass|pwd|jwt)$", re.IGNORECASE)  # of a query

AnswerMatch = Literal["gsm8k", "exact", "boxed"]


@dataclass(frozen=True)
class LengthSpec(Settings):
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

    target: NonNegativeInt | None = None
    max: NonNegativeInt | None = None
    penalty: PositiveFloat = 0.01
    unit: Literal["tokens", "characters"] = "tokens"

    RULES = (Rule("target", lambda c: (c.target is None) == (c.max is None), "or max must be given, and one alone"),)


@dataclass(frozen=True)
class MatchSpec(Settings):
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

    max_failed_share: ClassVar[float] = 0.1  # of responses on which the pattern takes too long
    RULES = (Rule("pattern", lambda c: refusal(compile_pattern, c.pattern, dotall=True)),)


@dataclass(frozen=True)
class AnswerSpec(Settings):
    """A reward for responses whose answer is that of a column of the prompt's row.

    Attributes:
        match: gsm8k: the number after `####`, or else in `\\boxed{}`, or else the last number, is equal to that of the
            column (`1,000.0` is 1000, `3/4` is 0.75). exact: the texts are equal without case, white space and
            punctuation at the ends of words, and with equal numbers. boxed: the last `\\boxed{}` holds the column's
            text; brackets have to be the same, blanks, a unit in `\\text{}`, `x =` and the usual ways to write a
            fraction or a root do not count.
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
class CodeSpec(SandboxLimits):
    """A reward for Python code that passes unit tests, run in a process without files, sockets and other processes.

    The code is the response's last block fenced as Python, else the last fenced without a language, else all of it.

    Attributes:
        column: of the prompts: a list of tests, each a text of asserts that call the code's functions, or a mapping
            `{input, output}` of what the program reads and has to print. Limits are those of one test.
        reward: the share of the tests that pass, or 1 only where all pass.
        processes: tests that one rank runs side by side.
        solution: column of a reference solution, run at the start: rows whose tests it fails are refused. None: not
            run.
    """

    _: KW_ONLY
    column: str = "tests"
    reward: Literal["share", "all"] = "all"
    processes: PositiveInt = 2
    solution: str | None = None


@dataclass(frozen=True)
class ServiceSpec(Settings):
    """An HTTP service that answers a posted body of JSON, and how it is asked.

    Attributes:
        url: of the service.
        key_variable: environment variable that holds the key, sent as a bearer token; None: no key. The URL may hold
            none.
        timeout_seconds: for one whole request.
        retries: further requests after a failed one: no connection, time-out, status 408, 409, 425, 429 or 5xx.
        backoff_seconds: pause before the first of them, doubled each time, with jitter; a Retry-After header counts
            where it is longer.
        max_backoff_seconds: longest pause; a longer Retry-After is a failure.
        requests: at the same time from one rank.
    """

    url: str
    _: KW_ONLY
    key_variable: str | None = None
    timeout_seconds: PositiveFloat = 60.0
    retries: NonNegativeInt = 5
    backoff_seconds: PositiveFloat = 1.0
    max_backoff_seconds: PositiveFloat = 60.0
    requests: PositiveInt = 8

    RULES = (
        Rule("url", lambda c: url_problem(c.url)),
        Rule(
            "key_variable",
            lambda c: c.key_variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", c.key_variable),
            "must be the name of an environment variable, not the key itself",
        ),
    )


@dataclass(frozen=True)
class JudgeSpec(ServiceSpec):
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
        max_failed_share: largest share of responses of one iteration without a score; nothing is learned from them.
        low, high: a score outside is a failure; None: no bound.
    """

    _: KW_ONLY
    protocol: Literal["json", "openai"] = "json"
    model: str | None = None
    template: str | None = None
    pattern: str | None = None
    columns: tuple[str, ...] = ()
    max_failed_share: Share = 0.1
    low: float | None = None
    high: float | None = None

    RULES = (
        Rule(
            "protocol",
            lambda c: c.protocol == "openai" and None in (c.model, c.template),
            "openai of a judge needs model and template",
        ),
        Rule(
            "protocol",
            lambda c: c.protocol == "json" and (c.model, c.template, c.pattern) != (None, None, None),
            "json has no model, template and pattern; they go with protocol: openai",
        ),
        Rule("template", lambda c: c.template is not None and template_problem(c.template, c.columns)),
        Rule("pattern", lambda c: c.pattern is not None and _group_problem(c.pattern)),
        Rule(
            "low",
            lambda c: c.low is not None and c.high is not None and c.low >= c.high,
            "({self.low}) must be below high ({self.high})",
        ),
    )


SHORT_FORMS = {"format": MatchSpec, "regex": MatchSpec, "answer": AnswerSpec, "judge": JudgeSpec}  # of one text
Section = LengthSpec | MatchSpec | AnswerSpec | CodeSpec | JudgeSpec


@dataclass(frozen=True)
class RewardSpec(Settings):
    """One part of the score of a response: exactly one kind, and how it is shaped and weighed.

    score = sum over the entries of weight * clip(normalize(part))

    Attributes:
        reward_model: directory or Hub id of a reward model of any architecture and tokenizer; one with a tokenizer or
            chat template of its own reads texts through it.
        reward_combine: how the scores of an ensemble become one: mean, min, or lower (mean - reward_std_coef *
            deviation).
        reward_std_coef: weight of the deviation in `lower`.
        function: module:name of a Python function f(prompts, responses, **columns) -> one number for each response, or
            None where it does not apply; the module lies beside the config or in the working directory, or is
            installed. Columns are the prompts' further columns, as lists; a function without `**columns` gets those
            that it names. With `completions` in place of `responses` it is called as trl calls it: for a prompt of
            messages a completion is a list with the assistant's message. From Python the function itself may stand
            here.
        length: a penalty for responses longer or shorter than wanted.
        format: a named format (think_answer, gsm8k, boxed), a regular expression, or a section; the whole response has
            to match.
        regex: a regular expression, or a section; it has to match somewhere in the response.
        answer: gsm8k, exact or boxed, or a section: a reward for the answer of a column.
        code: a reward for Python code that passes unit tests; `{}` for the usual settings. Linux only.
        judge: URL of an HTTP service, or a section.
        weight: factor of this part; negative for a penalty.
        name: in metrics, `score/NAME`; None: made of the kind.
        clip: [low, high] of the part, after its normalization and before its weight; null: no bounds.
        normalize: first: mean 0 and deviation 1 on the first samples, fixed for the whole run. running: on all samples
            so far. none: as it is. null: first for a reward model without a scale of its own, none for the other kinds.
    """

    reward_model: str | None = None
    _: KW_ONLY
    reward_combine: Combine = "mean"
    reward_std_coef: PositiveFloat = 1.0
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
    normalize: Literal["none", "first", "running"] | None = None

    RULES = (
        Rule(
            "reward_model",
            lambda c: len(c.kinds) != 1 and (" and ".join(c.kinds) or "none"),
            f"or another kind must be given, one of {', '.join(KINDS)} in each entry; found {{found}}",
        ),
        Rule(
            "function",
            lambda c: c.function is not None and not re.fullmatch(r"[\w.]+:[\w.<>]+", c.function),
            "must be module:name, got {self.function!r}",
        ),
        Rule("format", lambda c: isinstance(c.format, str) and refusal(compile_pattern, c.format)),
        Rule("regex", lambda c: isinstance(c.regex, str) and refusal(compile_pattern, c.regex)),
        Rule("judge", lambda c: isinstance(c.judge, str) and url_problem(c.judge)),
        Rule("weight", lambda c: c.weight == 0, "must not be 0; leave the entry out, or log it by `metrics`"),
        Rule(
            "name",
            lambda c: c.name is not None and not re.fullmatch(r"[\w.-]+", c.name),
            "may have letters, digits and _ . - only, got {self.name!r}",
        ),
        Rule(
            "clip",
            lambda c: c.clip is not None and c.clip[0] >= c.clip[1],
            "must be [low, high] with low below high, got {self.clip}",
        ),
        Rule(
            "reward_combine",
            lambda c: c.reward_model is None and (c.reward_combine != "mean" or c.reward_std_coef != 1),
            "and reward_std_coef go with reward_model",
        ),
        Rule(
            "reward_std_coef",
            lambda c: c.reward_std_coef != 1 and c.reward_combine != "lower",
            "goes with reward_combine=lower, not with {self.reward_combine}",
        ),
    )

    @property
    def kinds(self) -> list[str]:
        """Names of `KINDS` that are given; one of them in an entry that is right."""
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def section(self) -> Section | None:
        """The settings of its kind, also where their short form is given; None for reward models and functions."""
        [kind] = self.kinds
        given = getattr(self, kind)
        if kind in ("reward_model", "function"):
            return None
        section = SHORT_FORMS[kind](given) if isinstance(given, str) else given
        return replace(section, pattern=FORMATS.get(section.pattern, section.pattern)) if kind == "format" else section


def url_problem(url: str) -> str:
    """The fault of a service's URL, such as a part that is probably a key; '' without one. Shows no key."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts = urlsplit("")
        good = False
    way_out = "name an environment variable in key_variable, whose key is sent as a bearer token"
    if "@" in parts.netloc:
        return f"holds a password or a user name; {way_out}"
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if SECRET.match(name) or SECRET_PARAMETER.search(name):
            return f"holds a key in its parameter {name!r}; {way_out}"
    return "" if good else f"must be a URL such as https://host/score, got {plain_url(url)!r}"


def plain_url(url: str) -> str:
    """A URL without the parts that may be secret: its user, query and fragment."""
    return re.sub(r"//[^/]*@|[?#].*", lambda found: "//" if found[0].startswith("//") else "", url, flags=re.DOTALL)


def template_problem(template: str, columns: Sequence[str]) -> str:
    """The fault of a template; '' without one."""
    try:
        shown = template.format(**{name: f"<{name}>" for name in ("prompt", "response", *columns)})
    except KeyError as error:
        return f"names {{{error.args[0]}}}, which is neither prompt, response nor one of columns"
    except (ValueError, IndexError, AttributeError) as error:
        return f"is not of the form 'text {{prompt}} text': {error}; double the braces that are text"
    return "" if "<response>" in shown else "does not show {response} to the judge"


def _group_problem(pattern: str) -> str:
    problem = refusal(compile_pattern, pattern)
    return problem or ("" if compile_pattern(pattern).groups else f"{pattern!r} needs a group (...) around the score")


def names_of(specs: Sequence[RewardSpec]) -> list[str]:
    """The name of each entry; those made of the kind get a number from the second of their kind on."""
    given = [spec.name for spec in specs if spec.name is not None]
    names = list[str]()
    if twice := [name for name in given if given.count(name) > 1]:
        raise ValueError(f"rewards: two entries are named {twice[0]!r}; names have to differ")
    for spec in specs:
        base = re.findall(r"\w+", spec.function)[-1] if spec.function is not None else (spec.kinds or [""])[0]
        free = (base if suffix == 1 else f"{base}_{suffix}" for suffix in itertools.count(1))
        names.append(spec.name or next(name for name in free if name not in (*given, *names)))
    return names


def reward_models_of(reward_model: str | None, rewards: Sequence[RewardSpec]) -> list[str]:
    """Directories of the reward models, in the order of `rewards`; `reward_model` is the short form of one entry."""
    return [
        directory for directory in (reward_model, *(spec.reward_model for spec in rewards)) if directory is not None
    ]


def unnormalized_if_single(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The entries; a single one is not normalized unless it says so, as a scale alone changes no order of responses."""
    if len(specs) != 1:
        return list(specs)
    return [replace(spec, normalize=spec.normalize or "none") for spec in specs]


def check_rewards(
    reward_model: str | None, rewards: Sequence[RewardSpec], combine: Combine = "mean", std_coef: float = 1.0
) -> None:
    """Refuse (ValueError) no reward, the short form with the list, and settings of the short form beside the list."""
    if not rewards and reward_model is None:
        raise ValueError("say what is rewarded: reward_model=DIR, or a list `rewards` of entries")
    if rewards and reward_model is not None:
        raise ValueError(
            "reward_model is the short form of a list `rewards` with one entry, so both cannot be given; write it as "
            "an entry `- reward_model: DIR` of rewards"
        )
    if rewards and (combine != "mean" or std_coef != 1):
        raise ValueError("reward_combine and reward_std_coef stand in their entry of rewards, where rewards are a list")
    names_of(rewards)

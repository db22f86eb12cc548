"""Rewards from their settings: everything that can be checked without a network, then the parts of the score.

`prepare_rewards` runs before any network is loaded; `build_rewards` puts reward models in and makes the score function.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from alignment.data.examples import PromptExample
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.rewards.answers import answer_reward, reference_problem
from alignment.rewards.code import code_reward, failing_solutions, tests_problem
from alignment.rewards.combine import RewardPart, Rewards, Scorer
from alignment.rewards.functions import columns_of, function_reward, load_reward_function
from alignment.rewards.http import key_problem
from alignment.rewards.judge import judge_reward
from alignment.rewards.normalize import PartNormalizer
from alignment.rewards.rules import length_reward, match_reward
from alignment.rewards.samples import TextReward, texts_of_responses
from alignment.rewards.sandbox import require_sandbox
from alignment.rewards.specs import AnswerSpec, CodeSpec, JudgeSpec, RewardSpec, names_of

SHOWN = 3  # rows named in a message


def prepare_rewards(specs: Sequence[RewardSpec], rows: Sequence[PromptExample]) -> dict[str, TextReward]:
    """The rewards that read texts, by name, reward models left out.

    Args:
        specs: entries of the config.
        rows: all prompts.

    Raises:
        UserError: a function that is not there; columns that rows lack or that hold no answers or tests; a key that is
            not in the environment; no sandbox on this machine; tests that their row's solution fails. All problems at once.
    """
    found: dict[str, TextReward] = {}
    problems: list[str] = []
    for name, spec in zip(names_of(specs), specs, strict=True):
        if spec.reward_model is not None:
            continue
        try:
            columns, check = _needs(spec)
            if lines := _row_problems(name, rows, columns, check):
                problems.extend(lines)
            else:
                found[name] = _text_reward(name, spec)
                problems.extend(_solution_problems(name, spec.code, rows))
        except UserError as error:
            problems.append(str(error))
    raise_all(problems)
    return found


def build_rewards(
    specs: Sequence[RewardSpec],
    texts: Mapping[str, TextReward],
    models: Mapping[str, Scorer],
    *,
    tokenizer: Tokenizer,
    sources: int,
    scaled: Sequence[str] = (),
    reduce: Callable[[Tensor], Tensor],
) -> Rewards:
    """The score function of several rewards.

    Args:
        specs: entries of the config.
        texts: what `prepare_rewards` gave.
        models: the scorers of the reward models, by the name of their entry.
        tokenizer: the policy's.
        sources: number of data sources of the prompts.
        scaled: names of reward models whose scores have mean 0 and deviation 1 by their files.
        reduce: adds a tensor over all ranks.
    """
    parts = []
    for name, spec in zip(names_of(specs), specs, strict=True):
        mode = spec.normalize
        if mode is None:
            mode = "first" if name in models and name not in scaled else "none"
        count = sources if spec.per_source else 1
        failures: Counter[str] = Counter()
        score = (
            finite_scorer(name, models[name])
            if name in models
            else _text_scorer(name, texts[name], tokenizer, failures)
        )
        parts.append(
            RewardPart(
                name, score, spec.weight, spec.clip,
                normalizer=None if mode == "none" else PartNormalizer(mode, count, name),
                max_failed_share=_max_failed_share(spec),
                scaled=name in scaled,
                failures=failures,
            )
        )  # fmt: skip
    return Rewards(parts, reduce)


def _needs(spec: RewardSpec) -> tuple[Sequence[str], Callable[[object], str]]:
    """Columns that every row needs, and what is wrong with a value of them (empty: nothing)."""
    if spec.function is not None:
        return columns_of(load_reward_function(spec.function), spec.function), lambda value: ""
    if spec.answer is not None:
        match = spec.answer.match if isinstance(spec.answer, AnswerSpec) else spec.answer
        return spec.columns, partial(reference_problem, match)
    return spec.columns, tests_problem if spec.code is not None else lambda value: ""


def _row_problems(
    name: str, rows: Sequence[PromptExample], columns: Sequence[str], check: Callable[[object], str]
) -> list[str]:
    """A line for each column that rows lack, or whose values are of no use."""
    if not columns:
        return []
    lacking: dict[str, list[str]] = {}
    for row in rows:
        for column in columns:
            problem = check(row.extra[column]) if column in row.extra else "it is missing"
            if problem:
                lacking.setdefault(f"rewards: {name} needs the column {column!r}: {problem}", []).append(row.row_id)
    return [
        f"{text} in {len(ids)} of {len(rows)} prompts ({', '.join(ids[:SHOWN])}); add it, name another column, or map "
        "it by data.columns"
        for text, ids in lacking.items()
    ]


def _solution_problems(name: str, spec: CodeSpec | None, rows: Sequence[PromptExample]) -> list[str]:
    """A line where reference solutions fail the tests of their rows, which then no response can be relied on to pass."""
    if spec is None or spec.solution is None:
        return []
    failed = [rows[i].row_id for i in failing_solutions(spec, [row.extra for row in rows])]
    if not failed:
        return []
    return [
        f"rewards: {name}: the solution in the column {spec.solution!r} is missing or fails the tests of its row in the "
        f"sandbox, in {len(failed)} of {len(rows)} prompts ({', '.join(failed[:SHOWN])}); correct or drop these rows"
    ]


def _text_reward(name: str, spec: RewardSpec) -> TextReward:
    """The reward of an entry that reads texts.

    Raises:
        UserError: no sandbox here, or no key in the environment.
    """
    if spec.function is not None:
        return function_reward(load_reward_function(spec.function), spec.function)
    if spec.length is not None:
        return length_reward(spec.length)
    if spec.answer is not None:
        return answer_reward(spec.answer if isinstance(spec.answer, AnswerSpec) else AnswerSpec(spec.answer))
    if spec.code is not None:
        require_sandbox()
        return code_reward(spec.code)
    if spec.judge is not None:
        judge = spec.judge if isinstance(spec.judge, JudgeSpec) else JudgeSpec(spec.judge)
        if judge.key_variable is not None and (problem := key_problem(judge.key_variable)):
            raise UserError(f"rewards: {name}: {problem}")
        return judge_reward(judge)
    return match_reward(spec.match, whole=spec.format is not None)


def _max_failed_share(spec: RewardSpec) -> float | None:
    """Largest share without a number; None: any, of rewards that need not apply."""
    if spec.format is not None or spec.regex is not None:  # None: the pattern takes too long
        return JudgeSpec.max_failed_share
    if spec.judge is None:
        return None
    return spec.judge.max_failed_share if isinstance(spec.judge, JudgeSpec) else JudgeSpec.max_failed_share


def finite_scorer(name: str, score: Scorer) -> Scorer:
    """The scorer of a reward model, whose scores have to be finite: others would count as not given."""

    def checked(prompts: Sequence[PromptExample], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        scores = score(prompts, responses, ended)
        if bad := (~scores.isfinite()).nonzero().flatten().tolist():
            raise UserError(
                f"rewards: the reward model {name} gives {scores[bad[0]]} for a response to {prompts[bad[0]].row_id}; "
                "check it with `alignment evaluate reward`"
            )
        return scores

    return checked


def _text_scorer(name: str, reward: TextReward, tokenizer: Tokenizer, failures: Counter[str]) -> Scorer:
    """The scorer of a reward that reads texts, whose numbers have to be finite; where it gave None: not a number.

    `failures` holds the reasons of the last call's failures.
    """

    def score(prompts: Sequence[PromptExample], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        samples = texts_of_responses(tokenizer, prompts, responses, ended)
        values = list(reward(samples))
        failures.clear()
        failures.update(samples.failures)
        if len(values) != len(responses):
            raise UserError(
                f"rewards: {name} gave {len(values)} numbers for {len(responses)} responses; it has to give one each"
            )
        scores = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float32)
        for row, value in enumerate(values):
            if value is not None and not scores[row].isfinite():
                raise UserError(
                    f"rewards: {name} gave {value} for a response to {prompts[row].row_id}; give a finite number, or None "
                    "where it does not apply"
                )
        return scores

    return score

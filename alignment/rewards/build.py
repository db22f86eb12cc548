"""Rewards from their settings: everything that can be checked without a network, then the parts of the score.

`prepare_rewards` runs before any network is loaded; `build_rewards` puts reward models in and makes the score function.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from alignment.data.batches import Example
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.generation import response_text
from alignment.reward_model import RewardModel
from alignment.rewards.answers import answer_rewards, length_rewards, match_rewards, reference_problem
from alignment.rewards.code.sandbox import require_sandbox
from alignment.rewards.code.unit_tests import code_rewards, failing_solutions, tests_problem
from alignment.rewards.combine import PartNormalizer, Reduce, RewardPart, Rewards, SampledTexts, Scorer, TextReward
from alignment.rewards.functions import columns_of, function_reward, load_reward_function
from alignment.rewards.judge import check_key, judge_reward
from alignment.rewards.specs import AnswerSpec, CodeSpec, JudgeSpec, MatchSpec, RewardSpec, names_of

SHOWN = 3  # rows named in a message


def prepare_rewards(specs: Sequence[RewardSpec], rows: Sequence[Example]) -> dict[str, TextReward]:
    """The rewards that read texts, by name, reward models left out; `rows` are all prompts.

    Raises:
        UserError: a function that is not there; columns that rows lack or that hold no answers or tests; a key that is
            not in the environment; no sandbox on this machine; tests that their row's solution fails. All problems at
            once.
    """
    rewards: dict[str, TextReward] = {}
    problems: list[str] = []
    for name, spec in zip(names_of(specs), specs, strict=True):
        if spec.reward_model is not None:
            continue
        try:
            if lines := list(_row_problems(name, spec, rows)):
                problems += lines
                continue
            rewards[name] = _text_reward(name, spec)
            if spec.code is not None and (failed := failing_solutions(spec.code, [row.extra for row in rows])):
                named = ", ".join(rows[i].row_id for i in failed[:SHOWN])
                problems.append(
                    f"rewards: {name}: the solution in the column {spec.code.solution!r} is missing or fails the tests "
                    f"of its row in the sandbox, in {len(failed)} of {len(rows)} prompts ({named}); correct or drop "
                    "these rows"
                )
        except UserError as error:
            problems.append(str(error))
    raise_all(problems)
    return rewards


def _row_problems(name: str, spec: RewardSpec, rows: Sequence[Example]) -> Iterator[str]:
    """A line for each column that rows lack, or whose values are of no use."""
    section = spec.section
    check: Callable[[object], str] = lambda value: ""  # noqa: E731
    columns: Sequence[str] = getattr(section, "columns", ())
    if spec.function is not None:
        columns = columns_of(load_reward_function(spec.function), spec.function)
    elif isinstance(section, (AnswerSpec, CodeSpec)):
        columns = [section.column]
        check = partial(reference_problem, section.match) if isinstance(section, AnswerSpec) else tests_problem
    ids: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for column in columns:
            if problem := check(row.extra[column]) if column in row.extra else "it is missing":
                ids.setdefault((column, problem), []).append(row.row_id)
    for (column, problem), wrong in ids.items():
        yield (
            f"rewards: {name} needs the column {column!r}: {problem} in {len(wrong)} of {len(rows)} prompts "
            f"({', '.join(wrong[:SHOWN])}); add it, name another column, or map it by data.columns"
        )


def _text_reward(name: str, spec: RewardSpec) -> TextReward:
    """The reward of an entry that reads texts."""
    match spec.section:
        case None:
            return function_reward(load_reward_function(str(spec.function)), str(spec.function))
        case AnswerSpec() as section:
            return partial(answer_rewards, section)
        case CodeSpec() as section:
            require_sandbox()
            return partial(code_rewards, section)
        case JudgeSpec() as section:
            check_key(section, f"rewards: {name}")
            return judge_reward(section)
        case MatchSpec() as section:
            return partial(match_rewards, section, whole=spec.format is not None)
        case section:
            return partial(length_rewards, section)


def build_rewards(
    specs: Sequence[RewardSpec],
    texts: Mapping[str, TextReward],
    models: Mapping[str, Scorer],
    *,
    tokenizer: Tokenizer,
    scaled: Sequence[str] = (),
    reduce: Reduce,
) -> Rewards:
    """The score function of several rewards.

    Args:
        texts: what `prepare_rewards` gave.
        models: the scorers of the reward models, by the name of their entry.
        scaled: names of reward models whose scores have mean 0 and deviation 1 by their files.
    """
    parts = []
    for name, spec in zip(names_of(specs), specs, strict=True):
        mode = spec.normalize or ("first" if name in models and name not in scaled else "none")
        failures: Counter[str] = Counter()
        parts.append(
            RewardPart(
                name,
                finite_scorer(name, models[name])
                if name in models
                else _text_scorer(name, texts[name], tokenizer, failures),
                spec.weight,
                spec.clip,
                normalizer=None if mode == "none" else PartNormalizer(mode, name),
                max_failed_share=getattr(spec.section, "max_failed_share", None),
                scaled=name in scaled,
                failures=failures,
            )
        )
    return Rewards(parts, reduce)


def response_scorer(reward_model: RewardModel, tokenizer: Tokenizer, micro_batch_tokens: int) -> Scorer:
    """Scores of responses by a reward model: of their ids where it shares the policy's tokenizer, else of the texts.

    A reward model with a tokenizer or chat template of its own reads each prompt, text or messages, through that
    template, and its own end token after a response that ended.
    """
    shares_ids = reward_model.shares_token_ids(tokenizer)

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        rows = list(zip(prompts, responses, ended, strict=True))
        if shares_ids:
            return reward_model.score_ids([[*prompt.ids, *ids] for prompt, ids, _ in rows], micro_batch_tokens)
        pairs = [(prompt.prompt, response_text(tokenizer, ids, end)) for prompt, ids, end in rows]
        return reward_model.score(pairs, micro_batch_tokens, ended)

    return score


def finite_scorer(name: str, score: Scorer) -> Scorer:
    """The scorer of a reward model, whose scores have to be finite: others would count as not given."""

    def checked(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
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

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        texts = [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)]
        failures.clear()
        written = [prompt.prompt for prompt in prompts]
        columns = [prompt.extra for prompt in prompts]
        values = list(reward(SampledTexts(written, texts, columns, [len(ids) for ids in responses], failures)))
        if len(values) != len(responses):
            raise UserError(
                f"rewards: {name} gave {len(values)} numbers for {len(responses)} responses; it has to give one each"
            )
        scores = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float32)
        for prompt, value, response_score in zip(prompts, values, scores, strict=True):
            if value is not None and not response_score.isfinite():
                raise UserError(
                    f"rewards: {name} gave {value} for a response to {prompt.row_id}; give a finite number, or None "
                    "where it does not apply"
                )
        return scores

    return score

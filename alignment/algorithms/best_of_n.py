"""Best of n: the best of a policy's own responses by their rewards, written as rows to learn from. A stage, `best_of_n`.

SFT on them is expert iteration (RAFT, ReST, STaR), which a recipe repeats: best_of_n, sft, best_of_n, sft. Nothing is
trained here. What chooses among the responses is in rewards/selection.py.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from alignment.algorithms.runs import check_rows
from alignment.algorithms.scoring import check_combine, check_judged
from alignment.data.config import DataConfig
from alignment.data.examples import Example
from alignment.data.prepare import preparation_of, prepare_with
from alignment.data.rows.kinds import ROW_FORMATS
from alignment.data.rows.records import Kind, Message
from alignment.data.table import Rows, check_findings
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import write_json, write_text
from alignment.generation import SamplingConfig, decode_responses, response_text
from alignment.generation.requests import NewTokens
from alignment.loading import architecture_of, best_device, find_directory, load_model, load_tokenizer
from alignment.models.model import Model
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import Combine, load_reward_model
from alignment.rewards.build import build_rewards, prepare_rewards, response_scorer
from alignment.rewards.combine import Rewards
from alignment.rewards.samples import TextReward
from alignment.rewards.selection import best_of_n, choose_best, choose_pair, kl_bound, powers_of_two
from alignment.rewards.specs import RewardSpec, as_given_alone, check_rewards, names_of
from alignment.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    Share,
    refusal,
)

Written = Literal["demonstrations", "comparisons"]
BATCHES = 16  # full batches of responses that are sampled before they are scored
NOT_OF_TEXTS = {"system", "tools"}  # columns that rows whose prompt is a text may not have
OTHER_COLUMNS = {"history", "label", "kto_tag", "margin"}  # columns that say something about another response


@dataclass(frozen=True)
class BestOfNConfig(Settings):
    """Settings of the best of n responses to each prompt.

    Attributes:
        policy: the checkpoint that responds.
        data: prompts; each is read once.
        output: directory of `demonstrations.jsonl`, `comparisons.jsonl` and `results.json`.
        reward_model: directory of the reward model: the short form of `rewards` with this one entry.
        rewards: what a response is rewarded for, as in PPO. Its score is the sum of weight * clip(normalize(part)), where
            a part is normalized over all samples of this stage; a single entry that does not say `normalize` is not. A
            response without a score is neither kept nor compared.
        reward_combine: how the scores of an ensemble become one, as in PPO.
        reward_std_coef: weight of the deviation in `lower`.
        responses_per_prompt: n.
        keep: so many of the best responses to a prompt become demonstrations, fewer where fewer are left; null: all that
            are left.
        threshold: keep only responses with at least this score; null: any score.
        distinct: keep equal responses to a prompt once.
        require_end: leave out responses that did not end by themselves. Responses without any text are always left out.
        write: demonstrations: the kept responses with their scores. comparisons: the best response to each prompt
            against the worst, with the difference of their scores as `margin`. Both have the prompts' further columns.
        max_new_tokens: longest response, end token included.
        temperature: of the samples.
        top_k, top_p, min_p: filters of the samples, as in PPO.
        seed: with the number of a response it fixes what is sampled; another round of expert iteration takes another one.
        batch_size: responses sampled side by side, which changes memory and speed alone.
        micro_batch_tokens: tokens that a reward model reads at once, likewise.
        chat_template: of the policy, a built-in one's name or a Jinja file; None: its tokenizer's own.
        weights: type that policy and reward models are held and compute in; auto: each checkpoint's.
    """

    policy: str
    _: KW_ONLY
    data: DataConfig
    output: str
    reward_model: str | None = None
    rewards: list[RewardSpec] = field(default_factory=list)
    reward_combine: Combine = "mean"
    reward_std_coef: PositiveFloat = 1.0
    responses_per_prompt: PositiveInt = 8
    keep: PositiveInt | None = 1
    threshold: float | None = None
    distinct: bool = True
    require_end: bool = True
    write: list[Written] = field(default_factory=lambda: ["demonstrations"])
    max_new_tokens: NewTokens = 64
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    seed: NonNegativeInt = 0
    batch_size: PositiveInt = 256
    micro_batch_tokens: PositiveInt = 8192
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (
        Rule(
            "rewards", lambda c: refusal(check_rewards, c.reward_model, c.rewards, c.reward_combine, c.reward_std_coef)
        ),
        Rule(
            "temperature",
            lambda c: c.temperature == 0 and c.responses_per_prompt > 1,
            "must be above 0: the responses to a prompt would all be the same",
        ),
        Rule(
            "keep",
            lambda c: c.keep is not None and c.keep > c.responses_per_prompt,
            "must be at most responses_per_prompt ({self.responses_per_prompt}), got {self.keep}; null keeps all that are left",
        ),
        Rule("threshold", lambda c: not math.isfinite(c.threshold or 0), "must be a finite score; null keeps any"),
        Rule("write", lambda c: not c.write, "must name demonstrations, comparisons or both"),
        Rule(
            "write",
            lambda c: "comparisons" in c.write and c.responses_per_prompt < 2,
            "of comparisons needs responses_per_prompt of 2 or more",
        ),
        Rule(
            "data",
            lambda c: c.data.unread("mixing", "loss_weight"),
            "is read once and all rows alike, without {found[0]}; leave it out",
        ),
        Rule("data", lambda c: c.data.evaluates, "is the prompts of data.train alone; leave held-out rows out"),
    )

    @property
    def sampling(self) -> SamplingConfig:
        """How the responses are drawn."""
        return SamplingConfig(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.seed, min_p=self.min_p
        )

    @property
    def specs(self) -> list[RewardSpec]:
        """The rewards as a list; a single one is not normalized, which would only move the threshold."""
        if self.reward_model is not None:
            combine, std_coef = self.reward_combine, self.reward_std_coef
            specs = [RewardSpec(self.reward_model, reward_combine=combine, reward_std_coef=std_coef)]
        else:
            specs = self.rewards
        return as_given_alone(specs)


@dataclass(frozen=True)
class ScoredResponses:
    """n responses to each prompt, side by side: N in all.

    Attributes:
        texts: without their end token.
        lengths: tokens, end token included.
        ended: whether each stopped by itself.
        parts: the number of each reward by its name, [N]; not a number where it does not apply.
        scores: sum of the weighed and shaped parts, [N]; not a number where there is no score, see `Rewards.unscored`.
    """

    texts: list[str]
    lengths: list[int]
    ended: list[bool]
    parts: dict[str, Tensor]
    scores: Tensor


@dataclass(frozen=True)
class KeptResponses:
    """What is kept of the n responses to a prompt, by their numbers.

    Attributes:
        kept: the demonstrations, best first.
        pair: the best and the worst response; None where there is nothing to prefer.
    """

    kept: list[int]
    pair: tuple[int, int] | None


def run(config: BestOfNConfig) -> Path:
    """Sample, score and choose; write the rows and `results.json`, and return the directory.

    The results hold counts and shares, the mean score of one sample and of those that are kept, and `best_of`: the expected
    score of the best of 1, 2, 4, ... n samples, whether they could be kept or not, with the bound of its KL from the policy.

    Raises:
        UserError: bad prompts, a reward that cannot be given for them, or a bad checkpoint, before anything is sampled;
            nothing that could be kept.
    """
    output = Path(config.output)
    if architecture_of(config.policy) != "decoder":
        raise UserError(f"{config.policy}: policy must be a decoder, which samples responses to prompts")
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    prompts, counts = prepare_with(preparation_of("prompts"), config.data, tokenizer, part="train")
    for line in (*counts.lines(), *check_findings(prompts, config.data.check)):
        print(f"prompts: {line}", file=sys.stderr)
    refuse_both_forms(prompts)
    texts = prepare_rewards(config.specs, prompts)
    for spec in config.specs:
        if spec.reward_model is not None:
            find_directory(spec.reward_model)
            check_combine(spec)
    rewards = load_rewards(config, prompts, tokenizer, texts)
    policy = load_model(config.policy, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    check_rows(policy, prompts, config.data.max_length, config.max_new_tokens)
    samples = sample_and_score(config, policy, tokenizer, prompts, rewards)
    choices = choose_responses(config, samples)
    rows = written_rows(prompts, samples, choices)
    write_json(output / "results.json", results_of(config, samples, choices))
    for kind in config.write:
        if not rows[kind]:
            raise UserError(f"{output}: nothing is left for {kind}.jsonl: {why_nothing(config, samples)}")
        write_text(output / f"{kind}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[kind]))
    return output


def refuse_both_forms(prompts: Rows) -> None:
    """Refuse prompts of which some are texts and some messages: a file of rows has one form.

    Raises:
        UserError: in words.
    """
    texts = sum(isinstance(prompt.prompt, str) for prompt in prompts)
    if 0 < texts < len(prompts):
        raise UserError(
            f"data.train: {texts} of {len(prompts)} prompts are texts and the others messages, which one file cannot hold; "
            "give the sources of each a stage of their own"
        )


def load_rewards(
    config: BestOfNConfig, prompts: Rows, tokenizer: Tokenizer, texts: Mapping[str, TextReward]
) -> Rewards:
    """The rewards, each of whose models can read all prompts.

    Raises:
        UserError: a bad checkpoint, or prompts that one of the models cannot read.
    """
    scorers, scaled = {}, []
    for name, spec in zip(names_of(config.specs), config.specs, strict=True):
        if spec.reward_model is None:
            continue
        judge = load_reward_model(
            spec.reward_model, config.weights.dtype, best_device(), quantize=config.weights.quantize,
            combine=spec.reward_combine, std_coef=spec.reward_std_coef,
        )  # fmt: skip
        check_judged(prompts, judge, tokenizer, config, spec.reward_model)
        scorers[name] = response_scorer(judge, tokenizer, config.micro_batch_tokens)
        scaled += [name] if judge.calibration.fitted else []
    sources = len(config.data.source_names)
    return build_rewards(
        config.specs, texts, scorers, tokenizer=tokenizer, sources=sources, scaled=scaled, reduce=lambda sums: sums
    )


@torch.no_grad()
def sample_and_score(
    config: BestOfNConfig, policy: Model, tokenizer: Tokenizer, prompts: Rows, rewards: Rewards
) -> ScoredResponses:
    """Responses to all prompts with their scores; response k to prompt i has row number i * n + k, as in PPO."""
    n, stop_ids = config.responses_per_prompt, sorted(stop_token_ids(tokenizer))
    at_once = max(1, BATCHES * config.batch_size // n)  # prompts
    found = ScoredResponses([], [], [], {}, torch.empty(0))
    given: dict[str, list[Tensor]] = {part.name: [] for part in rewards.parts}
    rows: list[Example] = []
    for start in range(0, len(prompts), at_once):
        stop = min(start + at_once, len(prompts))
        some = [row for i in range(start, stop) for row in [prompts[i]] * n]
        sampled = decode_responses(
            policy, [list(row.ids) for row in some], config.sampling, stop_ids,
            rows=range(start * n, start * n + len(some)), batch_size=config.batch_size,
        )  # fmt: skip
        numbers = rewards.give(some, sampled.token_ids, sampled.ended)
        rewards.check_shares(numbers)
        for name, values in numbers.items():
            given[name].append(values)
        pairs = zip(sampled.token_ids, sampled.ended, strict=True)
        found.texts.extend(response_text(tokenizer, ids, end) for ids, end in pairs)
        found.lengths.extend(map(len, sampled.token_ids))
        found.ended.extend(sampled.ended)
        rows.extend(some)
        print(f"best_of_n: {len(rows)} of {n * len(prompts)} responses", file=sys.stderr)
    parts = {name: torch.cat(values) for name, values in given.items()}
    shaped = rewards.shape(parts, rows).shaped
    assert shaped is not None
    return replace(found, parts=parts, scores=shaped)


def choose_responses(config: BestOfNConfig, samples: ScoredResponses) -> list[KeptResponses]:
    """What is kept of the responses to each prompt, in the order of the prompts."""
    n, scores = config.responses_per_prompt, able_scores(config, samples)
    threshold = config.threshold
    if threshold is not None:  # scores have single precision, in which 0.7 is less
        threshold = torch.tensor(threshold, dtype=torch.float32).item()
    choices = []
    for start in range(0, len(scores), n):
        own = scores[start : start + n], samples.texts[start : start + n]
        kept = choose_best(*own, keep=config.keep, threshold=threshold, distinct=config.distinct)
        choices.append(KeptResponses(kept, choose_pair(*own, threshold=threshold)))
    return choices


def able_scores(config: BestOfNConfig, samples: ScoredResponses) -> list[float]:
    """Scores of all responses; not a number for those that cannot be kept: without text, or without an end."""
    return [
        score if text.strip() and (ended or not config.require_end) else math.nan
        for score, text, ended in zip(samples.scores.tolist(), samples.texts, samples.ended, strict=True)
    ]


def written_rows(
    prompts: Sequence[Example], samples: ScoredResponses, choices: Sequence[KeptResponses]
) -> dict[Written, list[dict[str, object]]]:
    """Demonstrations and comparisons as rows of a file."""
    n, scores = len(samples.texts) // len(choices), samples.scores.tolist()
    found: dict[Written, list[dict[str, object]]] = {"demonstrations": [], "comparisons": []}
    for i, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        replies = [_reply(prompt, text) for text in samples.texts[i * n : (i + 1) * n]]
        points, columns = scores[i * n : (i + 1) * n], kept_columns(prompt, "demonstrations")
        found["demonstrations"] += [columns | {"completion": replies[k], "score": points[k]} for k in choice.kept]
        if choice.pair is not None:
            best, worst = choice.pair
            pair = {"chosen": replies[best], "rejected": replies[worst], "margin": points[best] - points[worst]}
            found["comparisons"].append(kept_columns(prompt, "comparisons") | pair)
    return found


def kept_columns(prompt: Example, kind: Kind) -> dict[str, object]:
    """The prompt as it was written, and its row's further columns but those that a row of this kind would be read by."""
    read = {column for row_format in ROW_FORMATS[kind] for column in row_format.columns} | OTHER_COLUMNS
    if isinstance(prompt.prompt, str):
        read |= NOT_OF_TEXTS
    return {"prompt": prompt.prompt, **{name: value for name, value in prompt.extra.items() if name not in read}}


def _reply(prompt: Example, text: str) -> str | list[Message]:
    """A response in the form of its prompt."""
    return text if isinstance(prompt.prompt, str) else [Message(role="assistant", content=text)]


def results_of(config: BestOfNConfig, samples: ScoredResponses, choices: Sequence[KeptResponses]) -> dict[str, object]:
    """Counts, shares and mean scores, as `run` describes them."""
    n, total = config.responses_per_prompt, len(samples.texts)
    scores = samples.scores.view(-1, n)
    kept = [float(group[k]) for group, choice in zip(scores, choices, strict=True) for k in choice.kept]
    judged = scores[~scores.isnan().any(1)].tolist()
    sizes = sorted({*powers_of_two(n), n}) if judged else []
    return {
        "prompts": len(choices),
        "responses": total,
        "demonstrations": len(kept),
        "prompts_without_demonstration": sum(not choice.kept for choice in choices),
        "comparisons": sum(choice.pair is not None for choice in choices),
        "score": _mean(samples.scores),
        "kept_score": _mean(torch.tensor(kept)),
        "best_of": [
            {"n": size, "kl_bound": kl_bound(size), "score": sum(best_of_n(s, s, size) for s in judged) / len(judged)}
            for size in sizes
        ],
        "parts": {name: _mean(part) for name, part in samples.parts.items()},
        "ended_share": sum(samples.ended) / total,
        "empty_share": sum(not text.strip() for text in samples.texts) / total,
        "distinct_share": sum(len(set(samples.texts[i : i + n])) for i in range(0, total, n)) / total,
        "unscored_share": float(samples.scores.isnan().double().mean()),
        "response_tokens": sum(samples.lengths) / total,
    }


def _mean(values: Tensor) -> float | None:
    """The mean of what is a number; None where nothing is."""
    known = values[~values.isnan()].double()
    return float(known.mean()) if len(known) else None


def why_nothing(config: BestOfNConfig, samples: ScoredResponses) -> str:
    """Why no row could be written, and the way out."""
    able = [score for score in able_scores(config, samples) if not math.isnan(score)]
    if not able:
        return (
            f"of {len(samples.texts)} responses {sum(samples.ended)} ended by themselves, and none of these has text and a "
            "score; raise max_new_tokens, or set require_end=false"
        )
    if config.threshold is not None and max(able) < config.threshold:
        return f"the best has a score of {max(able):g}, below threshold={config.threshold:g}; lower it, or sample more"
    return (
        "the responses to each prompt are equal or have equal scores; sample more (responses_per_prompt, temperature)"
    )

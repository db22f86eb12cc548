"""Best of n, the stage `best_of_n`: the best of a policy's own responses by their rewards, as rows to learn from.

SFT on them is expert iteration (RAFT, ReST, STaR), which a recipe repeats: best_of_n, sft, best_of_n, sft. Nothing is
trained here. The choice among the responses to a prompt is in rewards/selection.py.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from alignment.algorithms.runs import check_rows
from alignment.algorithms.scoring import RewardSource
from alignment.data.batches import Example
from alignment.data.config import DataConfig
from alignment.data.prepare import preparation_of, prepare_with
from alignment.data.rows.read import ROW_FORMATS
from alignment.data.rows.records import Kind, Message
from alignment.data.table import Rows, check_findings
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, known_tokens
from alignment.errors import UserError
from alignment.files import refuse_foreign, write_figures, write_json_lines
from alignment.generation import SamplingConfig, decode_responses, response_text
from alignment.generation.requests import NewTokens
from alignment.loading import Checkpoint, best_device, load_model, load_tokenizer
from alignment.models.model import Model
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import Combine
from alignment.rewards.combine import Rewards
from alignment.rewards.selection import best_of_n, choose_best, choose_pair, kl_bound, powers_of_two
from alignment.rewards.specs import RewardSpec, check_rewards, unnormalized_if_single
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
# Columns of a prompt that would be read otherwise beside a response: of dialogues, and of another response.
NOT_OF_TEXTS = {"system", "tools"}
OTHER_COLUMNS = {"history", "label", "kto_tag", "margin"}


@dataclass(frozen=True)
class BestOfNConfig(Settings):
    """Settings of the best of n responses to each prompt.

    Attributes:
        policy: the checkpoint that responds.
        data: prompts; each is read once.
        output: directory of `demonstrations.jsonl`, `comparisons.jsonl` and `results.json`.
        reward_model: directory of the reward model: the short form of `rewards` with this one entry.
        rewards: entries as in PPO; a part is normalized over all samples of this stage, a single one only where it says
            `normalize`. A response without a score is neither kept nor compared.
        reward_combine: how the scores of an ensemble become one, as in PPO.
        reward_std_coef: weight of the deviation in `lower`.
        responses_per_prompt: n.
        keep: maximum of responses to a prompt that become demonstrations, the best ones; null: all.
        distinct: keep equal responses to a prompt once.
        threshold: keep only responses with at least this score; null: any score.
        require_end: leave out responses that did not end by themselves. Responses without any text are always left out.
        write: demonstrations: the kept responses with their scores. comparisons: the best response to each prompt
            against the worst, with the difference of their scores as `margin`. Both have the prompts' further columns.
        max_new_tokens: longest response, end token included.
        temperature: of the samples.
        top_k, top_p, min_p: filters of the samples, as in PPO.
        seed: with the number of a response it fixes what is sampled; another round of expert iteration takes another
            one.
        batch_size: responses sampled side by side, which changes memory and speed alone.
        micro_batch_tokens: tokens that a reward model reads at once, which changes memory and speed alone.
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
            "must be at most responses_per_prompt ({self.responses_per_prompt}), got {self.keep}; null keeps all that "
            "are left",
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
            lambda c: c.data.unread("mixing"),
            "is read once and all rows alike, without {found[0]}; leave it out",
        ),
        Rule("data", lambda c: c.data.evaluates, "is the prompts of data.train alone; leave held-out rows out"),
    )

    @property
    def source(self) -> RewardSource:
        """The rewards as a list; a single one is not normalized, which would only move the threshold."""
        rewards = self.rewards
        if self.reward_model is not None:
            combine = self.reward_combine
            std_coef = self.reward_std_coef
            rewards = [RewardSpec(self.reward_model, reward_combine=combine, reward_std_coef=std_coef)]
        return RewardSource(
            reward_model=None,
            rewards=unnormalized_if_single(rewards),
            data=self.data,
            max_new_tokens=self.max_new_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
        )


class ScoredResponses(NamedTuple):
    """n responses to each prompt, side by side: N in all.

    Attributes:
        texts: without their end token.
        lengths: tokens, end token included.
        ended: True where a response stopped by itself.
        parts: the number of each reward by its name, [N]; not a number where it does not apply.
        scores: sum of the weighed and shaped parts, [N]; not a number where there is no score, see
            `Rewards.without_score`.
    """

    texts: list[str]
    lengths: list[int]
    ended: list[bool]
    parts: dict[str, Tensor]
    scores: Tensor


class Choice(NamedTuple):
    """The demonstrations among a prompt's responses by their numbers, best first, and the best and the worst one."""

    kept: list[int]
    pair: tuple[int, int] | None


def run(config: BestOfNConfig) -> Path:
    """Sample, score and choose; write the rows and `results.json`, and return the directory.

    The results hold counts and shares, the mean score of one sample and of those that are kept, and `best_of`: the
    expected score of the best of 1, 2, 4, ... n samples, kept or not, with the bound of its KL from the policy.

    Raises:
        UserError: bad prompts, a reward that cannot be given for them, or a bad checkpoint, before anything is sampled;
            nothing that could be kept.
    """
    output = Path(config.output)
    if not (output / "results.json").is_file():
        for kind in config.write:
            refuse_foreign(output / f"{kind}.jsonl")
    start = Checkpoint(config.policy)
    if start.architecture != "decoder":
        raise UserError(f"{config.policy}: policy must be a decoder, which samples responses to prompts")
    tokenizer = load_tokenizer(start, config.chat_template)
    prompts, counts = prepare_with(preparation_of("prompts"), config.data, tokenizer, part="train")
    for line in (*counts.lines(), *check_findings(prompts, config.data.check)):
        print(f"prompts: {line}", file=sys.stderr)
    rewards = load_rewards(config, prompts, tokenizer)
    policy = load_model(start, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    check_rows(policy, prompts, config.data.max_length, config.max_new_tokens)
    samples = sample_and_score(config, policy, tokenizer, prompts, rewards)
    choices = choose_responses(config, samples)
    rows = written_rows(prompts, samples, choices)
    write_figures(output / "results.json", results_of(config, samples, choices))
    for kind in config.write:
        if not rows[kind]:
            raise UserError(
                f"{output}: nothing is left for {kind}.jsonl: {sum(samples.ended)} of {len(samples.texts)} responses "
                f"ended by themselves, and the best score is {samples.scores.nan_to_num(-math.inf).max():g}; raise "
                "max_new_tokens or set require_end=false, lower threshold, or sample more (responses_per_prompt, "
                "temperature)"
            )
        write_json_lines(output / f"{kind}.jsonl", rows[kind])
    return output


def load_rewards(config: BestOfNConfig, prompts: Rows, tokenizer: Tokenizer) -> Rewards:
    """The rewards, each of whose models can read all prompts."""
    source = config.source
    bases = SharedWeights(config.weights, shared=False)
    texts = source.prepare(prompts)
    rewards = source.score_function(tokenizer, texts, source.load(prompts, tokenizer, bases, best_device()))
    assert isinstance(rewards, Rewards)
    return rewards


@torch.no_grad()
def sample_and_score(
    config: BestOfNConfig, policy: Model, tokenizer: Tokenizer, prompts: Rows, rewards: Rewards
) -> ScoredResponses:
    """Responses to all prompts with their scores; response k to prompt i has row number i * n + k, as in PPO."""
    n = config.responses_per_prompt
    stop_ids = sorted(stop_token_ids(tokenizer))
    sampling = SamplingConfig(
        config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed, min_p=config.min_p
    )
    rows = [row for row in prompts for _ in range(n)]
    at_once = n * max(1, BATCHES * config.batch_size // n)
    texts = []
    lengths = []
    ended = []
    given = []
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        sampled = decode_responses(
            policy,
            [list(row.ids) for row in some],
            sampling,
            stop_ids,
            rows=range(start, start + len(some)),
            batch_size=config.batch_size,
            vocabulary=known_tokens(tokenizer),
        )
        given.append(rewards.part_scores(some, sampled.token_ids, sampled.ended))
        texts += [response_text(tokenizer, *pair) for pair in zip(sampled.token_ids, sampled.ended, strict=True)]
        lengths += map(len, sampled.token_ids)
        ended += sampled.ended
        print(f"best_of_n: {len(texts)} of {len(rows)} responses", file=sys.stderr)
    parts = {part.name: torch.cat([numbers[part.name] for numbers in given]) for part in rewards.parts}
    scores = rewards.shape(parts, rows).shaped
    assert scores is not None
    return ScoredResponses(texts, lengths, ended, parts, scores)


def choose_responses(config: BestOfNConfig, samples: ScoredResponses) -> list[Choice]:
    """The choice among the responses to each prompt; those without text or end are left out."""
    n = config.responses_per_prompt
    threshold = config.threshold
    if threshold is not None:  # scores have single precision, in which 0.7 is less
        threshold = torch.tensor(threshold, dtype=torch.float32).item()
    scores = [
        score if text.strip() and (ended or not config.require_end) else math.nan
        for score, text, ended in zip(samples.scores.tolist(), samples.texts, samples.ended, strict=True)
    ]
    groups = [(scores[start : start + n], samples.texts[start : start + n]) for start in range(0, len(scores), n)]
    choose = partial(choose_best, keep=config.keep, threshold=threshold, distinct=config.distinct)
    return [Choice(choose(*group), choose_pair(*group, threshold=threshold)) for group in groups]


def written_rows(
    prompts: Sequence[Example], samples: ScoredResponses, choices: Sequence[Choice]
) -> dict[Written, list[dict[str, object]]]:
    """Demonstrations and comparisons as rows of a file."""
    n = len(samples.texts) // len(choices)
    demonstrations = []
    comparisons = []
    for i, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        texts = samples.texts[i * n : (i + 1) * n]
        scores = samples.scores[i * n : (i + 1) * n].tolist()
        if not isinstance(prompt.prompt, str):  # a response has the form of its prompt
            texts = [[Message(role="assistant", content=text)] for text in texts]
        columns = kept_columns(prompt, "demonstrations")
        demonstrations += [columns | {"completion": texts[k], "score": scores[k]} for k in choice.kept]
        if choice.pair is not None:
            best, worst = choice.pair
            pair = {"chosen": texts[best], "rejected": texts[worst], "margin": scores[best] - scores[worst]}
            comparisons.append(kept_columns(prompt, "comparisons") | pair)
    return {"demonstrations": demonstrations, "comparisons": comparisons}


def kept_columns(prompt: Example, kind: Kind) -> dict[str, object]:
    """The prompt as it was written, and its row's further columns but those that rows of this kind are read by."""
    read = {column for row_format in ROW_FORMATS[kind] for column in row_format.columns} | OTHER_COLUMNS
    if isinstance(prompt.prompt, str):
        read |= NOT_OF_TEXTS
    return {"prompt": prompt.prompt, **{name: value for name, value in prompt.extra.items() if name not in read}}


def results_of(config: BestOfNConfig, samples: ScoredResponses, choices: Sequence[Choice]) -> dict[str, object]:
    """Counts, shares and mean scores, as `run` describes them."""
    n = config.responses_per_prompt
    total = len(samples.texts)
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
    """The mean of the known values; None where none is."""
    return float(values.double().nanmean()) if (~values.isnan()).any() else None

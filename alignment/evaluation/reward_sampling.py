"""Samples for a best-of-n curve: n responses of a policy to each prompt, their scores and their true scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import response_ids, stop_token_ids
from alignment.data.tokenize import tokenize_prompts
from alignment.errors import UserError
from alignment.evaluation.inputs import print_tally, read_records
from alignment.generation import SamplingConfig, decode_responses, response_text
from alignment.loading import architecture_of, best_device, find_directory, load_model, load_tokenizer
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model


@dataclass(frozen=True)
class BestOfNConfig:
    """Settings of a best-of-n curve on a policy's samples.

    Attributes:
        policy: directory or Hub name of a decoder, usually the SFT policy.
        prompts: those longer than `prompts.max_length` tokens are truncated on the left.
        judge: gives the true score: gold (of the hotel data set, for its prompts only), or a second reward model that was
            trained on other rows (given as `judge_model`).
        judge_model: directory or Hub name, with judge=reward_model.
        samples: responses of each prompt, N; the curve has n = 1, 2, 4, ... up to N.
        max_new_tokens, temperature, seed: of the sampling.
        batch_size: responses sampled at the same time.
        chat_template: of the policy, a built-in one's name or a Jinja file; None: its tokenizer's own.
    """

    policy: str
    prompts: DataConfig
    judge: Literal["gold", "reward_model"]
    judge_model: str | None = None
    samples: int = 16
    max_new_tokens: int = 64
    temperature: float = 1.0
    batch_size: int = 256
    seed: int = 0
    chat_template: str | None = None

    def __post_init__(self) -> None:
        SamplingConfig(self.max_new_tokens, self.temperature, seed=self.seed)  # checks their ranges
        if self.temperature == 0:
            raise ValueError("best_of_n.temperature must be above 0: the n responses to a prompt would all be the same")
        for name, least in (("samples", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"best_of_n.{name} must be at least {least}, got {getattr(self, name)}")
        if (self.judge == "reward_model") != (self.judge_model is not None):
            raise ValueError(
                "best_of_n.judge=reward_model needs `judge_model`, a directory"
                if self.judge_model is None
                else "best_of_n.judge_model says nothing with judge=gold; set judge=reward_model"
            )


@dataclass(frozen=True)
class Samples:
    """n responses to each prompt.

    Attributes:
        prompts: each prompt.
        texts: responses, n for each prompt.
        ended: whether each response has its end token.
    """

    prompts: list[Prompt]
    texts: list[list[str]]
    ended: list[list[bool]]


def check_best_of_n(config: BestOfNConfig) -> list[Prompt]:
    """The prompts, with policy and judge known to be of the right kind; nothing large is loaded.

    Raises:
        UserError: bad prompts, prompts that the judge cannot judge, a policy that is no decoder, a missing directory.
    """
    from alignment.hotel_world.grammar import is_prompt

    if architecture_of(config.policy) != "decoder":
        raise UserError(f"{config.policy}: best_of_n.policy must be a decoder, which samples responses to prompts")
    if config.judge_model is not None:
        find_directory(config.judge_model)
    prompts: list[Prompt] = read_records(config.prompts, "prompts")
    others = [prompt.row_id for prompt in prompts if config.judge == "gold" and not is_prompt(prompt.prompt)]
    if others:
        raise UserError(
            f"{others[0]}: best_of_n.judge=gold judges only prompts of the generated hotel world, and {len(others)} of "
            f"{len(prompts)} are none; take judge=reward_model with judge_model=DIR"
        )
    return prompts


def sample_responses(config: BestOfNConfig, prompts: Sequence[Prompt], weights: WeightsConfig) -> Samples:
    """Responses of the policy, which is loaded for this call only."""
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    examples, tally = tokenize_prompts(prompts, tokenizer, config.prompts.max_length)
    print_tally("best_of_n.prompts", tally)
    model = load_model(config.policy, weights.dtype, best_device(), quantize=weights.quantize)
    check_lengths(
        model,
        [(example.row_id, len(example.ids)) for example in examples],
        "lower best_of_n.max_new_tokens or best_of_n.prompts.max_length",
        config.max_new_tokens,
    )
    n = config.samples
    found = decode_responses(
        model,
        [example.ids for example in examples for _ in range(n)],
        SamplingConfig(config.max_new_tokens, config.temperature, seed=config.seed),
        sorted(stop_token_ids(tokenizer)),
        batch_size=config.batch_size,
    )
    ended = list(found.ended)
    texts = [response_text(tokenizer, ids, end) for ids, end in zip(found.token_ids, ended, strict=True)]
    starts = range(0, len(texts), n)
    return Samples(
        list(prompts), [texts[start : start + n] for start in starts], [ended[start : start + n] for start in starts]
    )


def score_samples(model: RewardModel, samples: Samples, max_length: int) -> list[list[float]]:
    """A reward model's score of each response; it reads as much of a prompt as `max_length` tokens, as the policy does."""
    flat = [
        (number, text, ended)
        for number, (texts, ends) in enumerate(zip(samples.texts, samples.ended, strict=True))
        for text, ended in zip(texts, ends, strict=True)
    ]
    if model.is_encoder:
        pairs = [(samples.prompts[number].prompt, text) for number, text, _ in flat]
        encoded = model.encode(pairs)
        ids, segments = [one.ids for one in encoded], [one.segments for one in encoded]
    else:
        heads = [example.ids for example in tokenize_prompts(samples.prompts, model.tokenizer, max_length)[0]]
        segments = None
        ids = [
            [*heads[number], *response_ids(model.tokenizer, text, samples.prompts[number].prompt, ended=ended)]
            for number, text, ended in flat
        ]
    names = [(samples.prompts[number].row_id, len(each)) for (number, _, _), each in zip(flat, ids, strict=True)]
    check_lengths(model.model, names, "lower best_of_n.max_new_tokens or best_of_n.prompts.max_length")
    scores = iter(model.score_ids(ids, segments=segments).tolist())
    return [[next(scores) for _ in texts] for texts in samples.texts]


def gold_of_samples(config: BestOfNConfig, samples: Samples, weights: WeightsConfig) -> list[list[float]]:
    """The judge's score of each response."""
    if config.judge_model is not None:
        judge = load_reward_model(config.judge_model, weights.dtype, best_device(), quantize=weights.quantize)
        return score_samples(judge, samples, config.prompts.max_length)
    from alignment.hotel_world.gold import gold_score

    return [
        gold_score([str(prompt.prompt)] * len(texts), texts)
        for prompt, texts in zip(samples.prompts, samples.texts, strict=True)
    ]

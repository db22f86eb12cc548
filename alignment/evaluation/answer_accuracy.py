"""Share of right answers of language models on prompts whose answer is known: a stage of recipes, `answer_accuracy`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenize import tokenize_prompts
from alignment.errors import raise_all
from alignment.evaluation.inputs import print_tally, read_records
from alignment.evaluation.winrate import paired_interval, win_rate
from alignment.files import write_json
from alignment.generation import SamplingConfig, decode_responses, response_text
from alignment.loading import best_device, find_directory, load_model, load_tokenizer
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.answers import is_right, reference_problem
from alignment.rewards.specs import AnswerMatch

Decoding = Literal["greedy", "sampled"]
DECODINGS: tuple[Decoding, ...] = ("greedy", "sampled")


@dataclass(frozen=True)
class AnswerAccuracyConfig:
    """Settings of the accuracy of answers.

    Attributes:
        models: name -> directory or Hub name.
        baseline: the name among `models` that the others are compared with.
        data: prompts with the column `column`.
        output: directory of `results.json`.
        match: gsm8k, exact or boxed, as in `AnswerSpec`.
        column: of the right answer: a text, a number, or a list of accepted ones.
        max_new_tokens, seed: of the responses.
        temperature: of the sampled responses; each prompt has a greedy one too.
        batch_size: responses sampled at the same time.
        samples: prompts kept with every model's sampled response.
        chat_template: of the models, a built-in one's name or a Jinja file; None: each tokenizer's own.
        weights: type that models are held and compute in; auto: each checkpoint's.
    """

    models: dict[str, str]
    baseline: str
    data: DataConfig
    output: str
    match: AnswerMatch = "gsm8k"
    column: str = "answer"
    max_new_tokens: int = 64
    temperature: float = 1.0
    batch_size: int = 256
    seed: int = 0
    samples: int = 8
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        if self.baseline not in self.models:
            raise ValueError(f"baseline {self.baseline!r} is not among the models: {', '.join(self.models)}")
        SamplingConfig(self.max_new_tokens, self.temperature, seed=self.seed)  # checks their ranges
        if self.temperature == 0:
            raise ValueError("temperature must be above 0: it is that of the sampled responses, beside the greedy ones")
        for name, least in (("batch_size", 1), ("samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Answers:
    """Responses of one model: their texts, lengths in tokens, and whether each ended by itself."""

    texts: list[str]
    lengths: list[int]
    ended: list[bool]


def run(config: AnswerAccuracyConfig) -> Path:
    """Answer every prompt with every model, greedily and sampled; write `results.json` and return its path.

    The results hold, for each model and way of decoding, the share of right answers with Wilson's 95 % interval, and the
    difference from the baseline's with the interval for pairs, since both answer the same prompts.

    Raises:
        UserError: bad prompts, prompts without an answer to compare with, or a missing model.
    """
    prompts: list[Prompt] = read_records(config.data, "prompts")
    raise_all(
        f"{prompt.row_id}: column {config.column!r}: {problem}"
        for prompt in prompts
        if (problem := reference_problem(config.match, prompt.extra.get(config.column, [])))
    )
    for source in config.models.values():
        find_directory(source)
    responses = {name: _generate_answers(config, source, prompts) for name, source in config.models.items()}
    right: dict[str, dict[Decoding, list[float]]] = {
        name: {decoding: _verdicts(config, prompts, found[decoding].texts) for decoding in DECODINGS}
        for name, found in responses.items()
    }
    results = {
        "baseline": config.baseline,
        "prompts": len(prompts),
        "models": {name: _figures(right[name], found, right[config.baseline]) for name, found in responses.items()},
        "samples": [
            {
                "prompt": prompt.prompt,
                "answer": prompt.extra[config.column],
                "responses": {
                    name: {"text": found["sampled"].texts[i], "score": right[name]["sampled"][i]}
                    for name, found in responses.items()
                },
            }
            for i, prompt in enumerate(prompts[: config.samples])
        ],
    }
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def _generate_answers(config: AnswerAccuracyConfig, source: str, prompts: Sequence[Prompt]) -> dict[Decoding, Answers]:
    """A model's responses by decoding. The model is loaded for this call only."""
    model = load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    tokenizer = load_tokenizer(source, config.chat_template)
    examples, tally = tokenize_prompts(prompts, tokenizer, config.data.max_length)
    print_tally("prompts", tally)
    lengths = [(example.row_id, len(example.ids)) for example in examples]
    check_lengths(model, lengths, "lower max_new_tokens or data.max_length", config.max_new_tokens)
    ids, stop_ids = [example.ids for example in examples], sorted(stop_token_ids(tokenizer))
    found: dict[Decoding, Answers] = {}
    for decoding in DECODINGS:
        sampling = SamplingConfig(
            config.max_new_tokens, 0.0 if decoding == "greedy" else config.temperature, seed=config.seed
        )
        sampled = decode_responses(model, ids, sampling, stop_ids, batch_size=config.batch_size)
        ends = list(sampled.ended)
        texts = [response_text(tokenizer, row, end) for row, end in zip(sampled.token_ids, ends, strict=True)]
        found[decoding] = Answers(texts, [len(row) for row in sampled.token_ids], ends)
    return found


def _verdicts(config: AnswerAccuracyConfig, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
    """1.0 for each right answer, 0.0 for the others."""
    return [
        float(is_right(config.match, text, prompt.extra[config.column]))
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _figures(
    right: Mapping[Decoding, list[float]],
    responses: Mapping[Decoding, Answers],
    baseline: Mapping[Decoding, list[float]],
) -> dict[str, Any]:
    """Figures of one model: accuracy, gain over the baseline and lengths, each by decoding."""
    return {
        decoding: {
            "accuracy": asdict(win_rate(right[decoding])),
            "gain": accuracy_gain(right[decoding], baseline[decoding]),
            "ended_share": sum(responses[decoding].ended) / len(right[decoding]),
            "response_tokens": sum(responses[decoding].lengths) / len(right[decoding]),
        }
        for decoding in DECODINGS
    }


def accuracy_gain(right: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Difference of two accuracies on the same prompts, with its 95 % interval.

    Args:
        right, baseline: 1.0 for each right answer, else 0.0.

    Source: Tango 1998, Statistics in Medicine 17, 891-908; see `paired_interval`.
    """
    pairs = list(zip(right, baseline, strict=True))
    wins, losses = (sum(1 for ours, theirs in pairs if ours - theirs == side) for side in (1.0, -1.0))
    low, high = paired_interval(wins, losses, len(pairs))
    return {"difference": (wins - losses) / len(pairs), "low": 2 * low - 1, "high": 2 * high - 1}

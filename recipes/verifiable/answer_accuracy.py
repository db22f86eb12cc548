"""Share of right answers of language models on prompts whose answer is known: a stage of this recipe."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.errors import raise_all
from alignment.files import write_json
from alignment.generation import SamplingConfig
from alignment.judging.inputs import read_records
from alignment.judging.responses import sample_responses
from alignment.loading import find_directory
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.answers import is_right, reference_problem
from alignment.rewards.specs import AnswerMatch
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Rule, Settings
from alignment.statistics.winrate import accuracy_gain, win_rate


@dataclass(frozen=True)
class AnswerAccuracyConfig(Settings):
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
    max_new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt = 256
    seed: NonNegativeInt = 0
    samples: NonNegativeInt = 8
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (Rule("baseline", lambda c: c.baseline not in c.models, "{self.baseline!r} is not among the models"),)


def run(config: AnswerAccuracyConfig) -> Path:
    """Answer every prompt with every model, greedily and sampled; write `results.json` and return its path.

    The results hold, for each model and way of decoding, the share of right answers with Wilson's 95 % interval, and the
    difference from the baseline's with the interval for pairs, since both answer the same prompts.
    """
    prompts: list[Prompt] = read_records(config.data, "prompts")
    raise_all(
        f"{prompt.row_id}: column {config.column!r}: {problem}"
        for prompt in prompts
        if (problem := reference_problem(config.match, prompt.extra.get(config.column, [])))
    )
    for source in config.models.values():
        find_directory(source)
    answers = [prompt.extra[config.column] for prompt in prompts]
    temperatures = {"greedy": 0.0, "sampled": config.temperature}
    samplings = [SamplingConfig(config.max_new_tokens, each, seed=config.seed) for each in temperatures.values()]
    responses, right = {}, {}
    for name, source in config.models.items():
        sampled = sample_responses(
            source, prompts, samplings, max_length=config.data.max_length, weights=config.weights,
            chat_template=config.chat_template, batch_size=config.batch_size, counts_of="prompts",
        )  # fmt: skip
        responses[name] = dict(zip(temperatures, sampled, strict=True))
        right[name] = {
            decoding: [float(is_right(config.match, *each)) for each in zip(found.texts, answers, strict=True)]
            for decoding, found in responses[name].items()
        }
    models = {
        name: {
            decoding: {
                "accuracy": asdict(win_rate(right[name][decoding])),
                "gain": accuracy_gain(right[name][decoding], right[config.baseline][decoding]),
                "ended_share": sum(found.ended) / len(prompts),
                "response_tokens": sum(map(len, found.token_ids)) / len(prompts),
            }
            for decoding, found in by_decoding.items()
        }
        for name, by_decoding in responses.items()
    }
    samples = []
    for i, prompt in enumerate(prompts[: config.samples]):
        said = {
            name: {"text": found["sampled"].texts[i], "score": right[name]["sampled"][i]}
            for name, found in responses.items()
        }
        samples.append({"prompt": prompt.prompt, "answer": answers[i], "responses": said})
    results = {"baseline": config.baseline, "prompts": len(prompts), "models": models, "samples": samples}
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"

"""The evaluation behind `alignment evaluate winrate`: sample every model's responses and judge them against a baseline's."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from alignment.data.batches import collate
from alignment.data.rows.read import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import response_ids, stop_token_ids
from alignment.data.tokenize import tokenize_prompts, tokenize_texts
from alignment.errors import UserError
from alignment.evaluation.inputs import best_device, print_tally, read_records
from alignment.evaluation.judges import Judge, compare, file_judge, longer_judge, score_judge, write_annotation_form
from alignment.evaluation.language_loss import language_loss
from alignment.files import write_json, write_text
from alignment.generation import Generation, SamplingConfig, decode_responses, response_text
from alignment.loading import find_directory, load_model, load_tokenizer, same_vocabulary
from alignment.models.classifiers import SequenceClassifier
from alignment.models.lengths import check_lengths
from alignment.ragged import Ragged, group_by_length
from alignment.reward_model import RewardModel, load_reward_model


@dataclass(frozen=True)
class WinRateConfig:
    """Settings of a comparison of policies.

    Attributes:
        models: name -> directory or Hub name.
        baseline: the name among `models` that the others are held against.
        data: prompts; those longer than `data.max_length` tokens lose their beginning.
        output: directory of the results.
        judge: who decides; there is no default. reward_model (`reward_model` names it), verdicts (a file, filled in by people
            or another program), longer (the longer response: a baseline for judges), gold (the embedded world's true
            reward, for that world's prompts only).
        reward_model: directory of the judging reward model; with another judge it gives each model's mean proxy score.
        verdicts: file of verdicts for judge=verdicts; where it does not exist, it is written as a form to fill in.
        reference: name among `models` to measure the KL from; None: the baseline. There is no KL between models of
            different vocabularies.
        text: held-out running text for each model's language-model loss.
        tie_margin: largest difference of scores that is a tie.
        samples: prompts kept with every model's response.
    """

    models: dict[str, str]
    baseline: str
    data: DataConfig
    output: str
    judge: Literal["gold", "reward_model", "longer", "verdicts"] | None = None
    reward_model: str | None = None
    verdicts: str | None = None
    reference: str | None = None
    text: DataConfig | None = None
    tie_margin: float = 0.0
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 256
    seed: int = 0
    samples: int = 8

    def __post_init__(self) -> None:
        for name, value in (("baseline", self.baseline), ("reference", self.reference)):
            if value is not None and value not in self.models:
                raise ValueError(f"{name} {value!r} is not among the models: {', '.join(self.models)}")
        SamplingConfig(self.max_new_tokens, self.temperature, top_p=self.top_p, seed=self.seed)  # checks their ranges
        for name, least in (("batch_size", 1), ("samples", 0), ("tie_margin", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.judge is None:
            raise ValueError(
                "say who judges: judge=reward_model with reward_model=DIR (one that no policy was trained against), "
                "judge=verdicts with verdicts=FILE (filled in by people), or judge=longer (the longer response wins); "
                "judge=gold is for prompts of the generated hotel world alone"
            )
        if self.judge == "reward_model" and self.reward_model is None:
            raise ValueError("judge=reward_model needs `reward_model`, a directory")
        if self.judge == "verdicts" and self.verdicts is None:
            raise ValueError("judge=verdicts needs `verdicts`, a file")


def run(config: WinRateConfig) -> Path:
    """Sample every model's responses, judge them against the baseline's, and write `results.json` and `responses.jsonl`.

    Raises:
        UserError: bad prompts, prompts that the judge cannot judge, a missing model, or verdicts still to be filled in.
    """
    output = Path(config.output)
    prompts: list[Prompt] = read_records(config.data, "prompts")
    if config.judge == "gold":
        _refuse_foreign(prompts)
    texts = None if config.text is None else read_records(config.text, "text")
    for source in (*config.models.values(), *filter(None, [config.reward_model])):
        find_directory(source)
    foreign = [name for name in config.models if not _comparable(config, name, config.reference or config.baseline)]
    if foreign and config.reference is not None:
        raise UserError(
            f"reference: {config.reference} has another vocabulary than {', '.join(foreign)}, so there is no KL between "
            "them; leave `reference` out, or name a model with the same tokenizer"
        )
    if foreign:
        print(f"no KL from {config.baseline} for {', '.join(foreign)}: another vocabulary", file=sys.stderr)
    # On the CPU until the policies are done: a wrong checkpoint is found now, and the GPU holds one model at a time.
    proxy = None if config.reward_model is None else load_reward_model(config.reward_model)
    print_tally(
        "prompts", tokenize_prompts(prompts, load_tokenizer(config.models[config.baseline]), config.data.max_length)[1]
    )
    answers = {name: _answer(config, source, prompts) for name, source in config.models.items()}
    _write_responses(output, prompts, answers)
    scores = None if proxy is None else _proxy_scores(config, proxy, prompts, answers)
    del proxy
    judge = _judge(config, scores, prompts, answers)
    models = {name: _measure(config, name, answers, prompts, scores, texts) for name in config.models}
    for name, result in models.items():
        if name != config.baseline:
            verdict = compare(prompts, answers[name].texts, answers[config.baseline].texts, judge)
            result["win_rate"] = asdict(verdict.win_rate)
            result |= {"inconsistent": verdict.inconsistent, "failures": verdict.failures}
    results = {
        "judge": config.judge,
        "baseline": config.baseline,
        "prompts": len(prompts),
        "models": models,
        "samples": _samples(config, prompts, answers),
    }
    write_json(output / "results.json", results)
    return output / "results.json"


def _refuse_foreign(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that are not of the embedded world, of which the gold reward knows nothing."""
    from alignment.hotel_world.grammar import is_prompt

    foreign = [prompt.row_id for prompt in prompts if not is_prompt(prompt.prompt)]
    if foreign:
        raise UserError(
            f"{foreign[0]}: judge=gold judges only prompts of the generated hotel world, and {len(foreign)} of "
            f"{len(prompts)} are none; take judge=reward_model with reward_model=DIR, or judge=verdicts with verdicts=FILE"
        )


def gold_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
    """The embedded world's score of each response, its four parts and their `total`."""
    from alignment.hotel_world.gold import score

    return [score(str(prompt.prompt), response) for prompt, response in zip(prompts, responses, strict=True)]


Scores = dict[tuple[int, str], float]  # (place of the prompt, response) -> the reward model's score


def _judge(
    config: WinRateConfig, scores: Scores | None, prompts: list[Prompt], answers: dict[str, Generation]
) -> Judge:
    if config.judge == "gold":
        return score_judge(lambda p, r: [gold.total for gold in gold_scores(p, r)], config.tie_margin)
    if config.judge == "longer":
        return longer_judge
    if config.judge == "reward_model" and scores is not None:
        place = {id(prompt): i for i, prompt in enumerate(prompts)}
        return score_judge(
            lambda p, r: [scores[place[id(prompt)], text] for prompt, text in zip(p, r, strict=True)],
            config.tie_margin,
        )
    path = Path(config.verdicts or "")
    if not path.exists():
        baseline = answers[config.baseline].texts
        ours = [(name, answer.texts) for name, answer in answers.items() if name != config.baseline]
        rows = [part for _, texts in ours for part in texts]
        write_annotation_form(path, prompts * len(ours), rows, baseline * len(ours))
        raise UserError(f"{path}: written as a form: fill in `verdict` (1, 0.5 or 0 for the first) and run this again")
    return file_judge(path)


def _proxy_scores(
    config: WinRateConfig, model: RewardModel, prompts: Sequence[Prompt], answers: dict[str, Generation]
) -> Scores:
    """The reward model's score of every distinct response; it sees as much of a prompt as the policies saw.

    It reads the very ids where its tokenizer is the policy's, else the text, without an end token where it was cut. An
    encoder reads prompt and response as a pair of texts.
    """
    model.model.to(best_device())
    if isinstance(model.model, SequenceClassifier):
        places = list(dict.fromkeys((i, text) for answer in answers.values() for i, text in enumerate(answer.texts)))
        scores = model.score([(prompts[i].prompt, text) for i, text in places])
        return dict(zip(places, scores.tolist(), strict=True))
    ids = _prompt_ids(config, model.tokenizer, prompts)
    documents: dict[tuple[int, str], list[int]] = {}
    for name, answer in answers.items():
        as_drawn = model.shares_token_ids(load_tokenizer(config.models[name]))
        for i, (text, drawn, ended) in enumerate(zip(answer.texts, answer.token_ids, answer.ended, strict=True)):
            read = drawn if as_drawn else response_ids(model.tokenizer, text, prompts[i].prompt, ended=ended)
            documents.setdefault((i, text), [*ids[i], *read])
    return dict(zip(documents, model.score_ids(list(documents.values())).tolist(), strict=True))


def _answer(config: WinRateConfig, source: str, prompts: list[Prompt]) -> Generation:
    """One model's responses; the model is let go again."""
    model, tokenizer = load_model(source, device=best_device()), load_tokenizer(source)
    sampling = SamplingConfig(config.max_new_tokens, config.temperature, top_p=config.top_p, seed=config.seed)
    stop_ids = sorted(stop_token_ids(tokenizer))
    ids = _prompt_ids(config, tokenizer, prompts)
    lengths = [(prompt.row_id, len(tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]
    check_lengths(
        model, lengths, "lower max_new_tokens or shorten the prompts (data.max_length)", config.max_new_tokens
    )
    drawn = decode_responses(model, ids, sampling, stop_ids, batch_size=config.batch_size)
    texts = [
        response_text(tokenizer, tokens, ended) for tokens, ended in zip(drawn.token_ids, drawn.ended, strict=True)
    ]
    return Generation(texts, drawn.token_ids, drawn.log_probs, drawn.ended)


def _prompt_ids(config: WinRateConfig, tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts of at most `data.max_length` tokens, the same cut for policies, reference and judge."""
    return [example.ids for example in tokenize_prompts(prompts, tokenizer, config.data.max_length)[0]]


def _measure(
    config: WinRateConfig, name: str, answers: dict[str, Generation], prompts: list[Prompt], scores: Scores | None,
    texts: list[Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """What is known of one model without a judge: gold parts, proxy score, KL from the reference, text loss, lengths."""
    answer, reference = answers[name], config.reference or config.baseline
    result: dict[str, Any] = {
        "response_tokens": sum(map(len, answer.token_ids)) / len(prompts),
        "ended_share": sum(answer.ended) / len(prompts),
    }
    if config.judge == "gold":
        golds = gold_scores(prompts, answer.texts)
        parts = ("helpful", "honest", "harmless", "brief", "total")
        result["gold"] = {part: sum(getattr(gold, part) for gold in golds) / len(golds) for part in parts}
    if scores is not None:
        result["proxy"] = sum(scores[i, text] for i, text in enumerate(answer.texts)) / len(prompts)
    if name != reference and config.temperature == 1 and config.top_p == 1 and _comparable(config, name, reference):
        result["kl"] = _kl(config, reference, answer, prompts)
    if texts is not None and config.text is not None:
        source = config.models[name]
        examples, _ = tokenize_texts(texts, load_tokenizer(source), config.text.max_length)
        size = sum(len(row.text.encode()) for row in texts)
        loss = language_loss(load_model(source, device=best_device()), collate(examples, 16_384), text_bytes=size)
        result["language_loss"], result["bits_per_byte"] = loss.loss, loss.bits_per_byte
    return result


def _comparable(config: WinRateConfig, name: str, reference: str) -> bool:
    """Whether log-probabilities of a model's tokens under the reference mean anything: whether they share a vocabulary."""
    return same_vocabulary(*(load_tokenizer(config.models[model]) for model in (name, reference)))


@torch.no_grad()
def _kl(config: WinRateConfig, reference: str, answer: Generation, prompts: list[Prompt]) -> float:
    """KL from the reference over whole responses, nats: mean of log p - log p_ref over the model's own samples."""
    source = config.models[reference]
    model, tokenizer = load_model(source, device=best_device()), load_tokenizer(source)
    ids = _prompt_ids(config, tokenizer, prompts)
    total = sum(sum(values) for values in answer.log_probs)
    for group in group_by_length([len(p) + len(r) for p, r in zip(ids, answer.token_ids, strict=True)], 16_384):
        documents = [[*ids[i], *answer.token_ids[i]] for i in group]
        masks = [[False] * len(ids[i]) + [True] * len(answer.token_ids[i]) for i in group]
        total -= float(model(batch=Ragged.build(documents, masks).to(best_device())).log_probs.sum())
    return total / len(prompts)


def _write_responses(output: Path, prompts: list[Prompt], answers: dict[str, Generation]) -> None:
    import json

    rows = [
        {"id": prompt.row_id, "prompt": prompt.prompt, "responses": {name: a.texts[i] for name, a in answers.items()}}
        for i, prompt in enumerate(prompts)
    ]
    write_text(output / "responses.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _samples(config: WinRateConfig, prompts: list[Prompt], answers: dict[str, Generation]) -> list[dict[str, Any]]:
    """Some prompts with every model's response, and the gold score where the judge is gold."""
    count = min(config.samples, len(prompts))
    rows = [{"prompt": str(prompt.prompt), "responses": {}} for prompt in prompts[:count]]
    for name, answer in answers.items():
        texts = answer.texts[:count]
        golds = (
            [gold.total for gold in gold_scores(prompts[:count], texts)] if config.judge == "gold" else [None] * count
        )
        for row, text, gold in zip(rows, texts, golds, strict=True):
            row["responses"][name] = {"text": text, "score": gold}
    return rows

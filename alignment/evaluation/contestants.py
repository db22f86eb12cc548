"""The responses of everyone who takes part in a win rate: models, best of n, files of responses, chat models behind a URL.

A contestant whose model, prompts and settings are those of an earlier start is not sampled again; a kill costs the one that
was being sampled, of a service the calls under way. How responses lie on disk is in responses.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from alignment.data.config import DataConfig
from alignment.data.rows.records import Messages, Prompt
from alignment.errors import UserError
from alignment.evaluation.inputs import read_records
from alignment.evaluation.judge_config import EndpointConfig
from alignment.evaluation.judgments import RowLog
from alignment.evaluation.language_judges import ask_service, chat_text, check_key
from alignment.evaluation.logged_judge import Call, JudgeAnswer, LoggedJudge
from alignment.evaluation.responses import (
    Responses,
    Scored,
    read_responses,
    sample_responses,
    score_responses,
    write_responses,
)
from alignment.evaluation.win_rate_config import BestOfConfig, WinRateConfig
from alignment.files import hash_of, sha256
from alignment.generation import Generation, SamplingConfig
from alignment.loading import best_device, load_tokenizer
from alignment.reward_model import RewardModel, load_reward_model

Scores = dict[tuple[int, str], float]  # (index of the prompt, response) -> the reward model's score


def sample_or_read(
    config: WinRateConfig, prompts: list[Prompt], hashes: Mapping[str, str | None]
) -> tuple[list[Prompt], Responses]:
    """The prompts, under their rows' names when they were sampled, and every contestant's responses."""
    output, template = Path(config.output), config.chat_template
    source = {
        "prompts": hash_of([[prompt.prompt, prompt.tools] for prompt in prompts]),
        "models": {name: hashes[directory] for name, directory in config.models.items()},
        "best_of": {
            name: {**asdict(own), "reward_model": hashes[own.reward_model], "model": hashes[config.models[own.policy]]}
            for name, own in config.best_of.items()
        },
        "response_files": {name: sha256(Path(path)) for name, path in config.response_files.items()},
        "endpoints": {name: hash_of([own.url, own.model, own.parameters]) for name, own in config.endpoints.items()},
        "chat_template": sha256(Path(template)) if template and Path(template).is_file() else template,
        "data.max_length": config.data.max_length,
        "weights": asdict(config.weights),
        **{key: getattr(config, key) for key in ("max_new_tokens", "temperature", "top_p", "seed")},
    }
    ids, responses = read_responses(output, source, by_people=config.judge == "verdicts")
    if ids:
        prompts = [replace(prompt, row_id=name) for prompt, name in zip(prompts, ids, strict=True)]
    missing = [name for name in config.contestants if name not in responses]
    # All files and checkpoints are read before anything is sampled: a wrong one is reported early.
    files = {
        name: file_responses(config.response_files[name], prompts) for name in missing if name in config.response_files
    }
    chosen = {config.best_of[name].reward_model for name in missing if name in config.best_of}
    choosers = {directory: load_judge(config, directory) for directory in chosen}
    for name in missing:
        check_key(config.endpoints.get(name))
    for name in missing:
        if name in files:
            responses[name] = files[name]
        elif name in config.endpoints:
            responses[name] = endpoint_responses(config, config.endpoints[name], prompts)
        elif name in config.best_of:
            own = config.best_of[name]
            responses[name] = _best_of(config, own, choosers[own.reward_model], prompts)
        else:
            responses[name] = _sample(config, name, prompts)
        write_responses(output, prompts, responses, source)
    return prompts, {name: responses[name] for name in config.contestants}


def load_judge(config: WinRateConfig, source: str) -> RewardModel:
    """A reward model in the type of the config's weights."""
    return load_reward_model(source, config.weights.dtype, quantize=config.weights.quantize)


def _texts(texts: list[str]) -> Generation:
    """Responses of which only the text is known."""
    return Generation(texts, [[] for _ in texts], [[] for _ in texts], [True] * len(texts))


def file_responses(path: str, prompts: Sequence[Prompt]) -> Generation:
    """The response to each prompt in a file of demonstrations; of several to one prompt, each is taken once, in order."""
    found: dict[str, list[str]] = {}
    for row in read_records(DataConfig(train=path), "demonstrations"):
        found.setdefault(hash_of(row.prompt), []).append(row.response)
    missing = [prompt.row_id for prompt in prompts if not found.get(hash_of(prompt.prompt))]
    if missing:
        raise UserError(f"{path}: no response to {len(missing)} of {len(prompts)} prompts, such as {missing[0]}")
    texts = [found[hash_of(prompt.prompt)] for prompt in prompts]
    return _texts([each.pop(0) if len(each) > 1 else each[0] for each in texts])


def endpoint_responses(config: WinRateConfig, service: EndpointConfig, prompts: Sequence[Prompt]) -> Generation:
    """A service's response to each prompt, each kept in `endpoint_responses.jsonl` as soon as it is there."""
    settings: dict[str, object] = {"max_tokens": config.max_new_tokens, "temperature": config.temperature}
    settings |= {"top_p": config.top_p, "seed": config.seed}

    def messages_of(call: Call) -> Messages:
        prompt = call.prompt.prompt
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def read(received: object) -> JudgeAnswer:
        text = chat_text(received)
        return JudgeAnswer(text, failure="an answer without a text" if text is None else "")

    ask, log = (
        ask_service(service, messages_of, settings, read),
        RowLog(Path(config.output) / "endpoint_responses.jsonl"),
    )
    identity = hash_of([service.url, service.model, service.parameters, settings])
    asked = LoggedJudge(service.model, identity, ask, log, max_failed_share=0.0, service=service)
    return _texts([str(text) for text in asked.values([Call(prompt) for prompt in prompts])])


def _sample(config: WinRateConfig, name: str, prompts: Sequence[Prompt], first_row: int = 0) -> Generation:
    """One model's responses, drawn as rows `first_row` on."""
    [found] = sample_responses(
        config.models[name],
        prompts,
        [SamplingConfig(config.max_new_tokens, config.temperature, top_p=config.top_p, seed=config.seed)],
        max_length=config.data.max_length,
        weights=config.weights,
        chat_template=config.chat_template,
        batch_size=config.batch_size,
        first_row=first_row,
        counts_of="prompts" if name == config.baseline and not first_row else "",
    )
    return found


def _best_of(config: WinRateConfig, own: BestOfConfig, chooser: RewardModel, prompts: Sequence[Prompt]) -> Generation:
    """For each prompt the one of n responses that a reward model scores highest; no draw is one of the policy's own response."""
    n, source = own.samples, config.models[own.policy]
    drawn = _sample(config, own.policy, [prompt for prompt in prompts for _ in range(n)], first_row=len(prompts))
    draws = [(source, _rows(drawn, range(k, len(drawn.texts), n))) for k in range(n)]
    scores = proxy_scores(config, chooser, prompts, draws)
    chooser.model.to("cpu")
    groups = [range(i * n, (i + 1) * n) for i in range(len(prompts))]
    return _rows(drawn, [max(group, key=lambda row: scores[i, drawn.texts[row]]) for i, group in enumerate(groups)])


def _rows(drawn: Generation, rows: Sequence[int]) -> Generation:
    """The responses at these rows."""
    return Generation(*([column[row] for row in rows] for column in vars(drawn).values()))


def proxy_scores(
    config: WinRateConfig, model: RewardModel, prompts: Sequence[Prompt], sides: Sequence[tuple[str | None, Generation]]
) -> Scores:
    """The score of every distinct response of each (policy, responses): of the sampled ids where the tokenizers are the same."""
    model.model.to(best_device())
    distinct: dict[tuple[int, str], Scored] = {}
    for source, own in sides:
        shared = source is not None and not model.is_encoder
        shared = shared and model.shares_token_ids(load_tokenizer(str(source), config.chat_template))
        for i, (text, ids, ended) in enumerate(zip(own.texts, own.token_ids, own.ended, strict=True)):
            distinct.setdefault((i, text), (i, text, ids if shared else None, ended))
    scores = score_responses(model, prompts, list(distinct.values()), config.data.max_length)
    return dict(zip(distinct, scores, strict=True))

"""The responses of everyone who takes part in a win rate: sampled, read or asked for, scored, and on disk.

    responses.jsonl   a row for each prompt: id, prompt, and each contestant's response with its tokens
    sampling.json     what they come from, and the form that people judge them in

People's verdicts are on the texts that they were shown, and another seed, number of threads, machine or type gives
others. So a contestant whose model, prompts and settings are those of an earlier start, by content, is read and not
sampled again. A kill costs the one that was being sampled, of a service the calls under way.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from alignment.data.config import DataConfig
from alignment.data.rows.files import json_line_rows
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import encode_response, stop_token_ids
from alignment.data.tokenize import tokenize_prompts, truncate_prompt
from alignment.data.tokenizers.tokenizer import Tokenizer, known_tokens
from alignment.errors import UserError
from alignment.files import hash_of, read_json_object, sha256, write_json, write_text
from alignment.generation import Generation, SamplingConfig, decode_responses, response_text
from alignment.judging.config import BestOfConfig, EndpointConfig, WinRateConfig
from alignment.judging.inputs import print_tally, read_records
from alignment.judging.judgments import RowLog, log_problem
from alignment.judging.language_judges import ask_service, chat_text
from alignment.judging.logged_judge import Call, JudgeAnswer, LoggedJudge
from alignment.loading import Checkpoint, best_device, load_on_best_device, load_tokenizer, preparation_for
from alignment.models.model import check_lengths, start_token_of
from alignment.models.outputs import check_numbers
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model
from alignment.rewards.judge import check_key
from alignment.training.run.lineage import differences

RESPONSES = "responses.jsonl"
SAMPLING = "sampling.json"
OF_ONE_DRAW = ("seed:", "weights.")  # what a second start for people's verdicts may change: the responses are there
# Column of a row -> attribute of `Generation`.
COLUMNS = {"responses": "texts", "token_ids": "token_ids", "log_probs": "log_probs", "ended": "ended"}
KINDS = ("models", "best_of", "response_files", "endpoints")  # of contestants

Responses = dict[str, Generation]  # contestant -> a response to each prompt
Source = Mapping[str, Any]  # setting, or kind of contestants -> what responses come from, as JSON values by content

# From every kind of contestant


def sample_or_read(
    config: WinRateConfig, prompts: list[Prompt], hashes: Mapping[str, str | None]
) -> tuple[list[Prompt], Responses]:
    """The prompts, under their rows' names when they were sampled, and every contestant's responses."""
    output = Path(config.output)
    template = config.chat_template
    source = {
        "prompts": hash_of([[prompt.prompt, prompt.tools] for prompt in prompts]),
        "models": {name: hashes[config.checkpoint(name)] for name in config.models},
        "best_of": {
            name: {
                **asdict(best_of),
                "reward_model": hashes[best_of.reward_model],
                "model": hashes[config.checkpoint(best_of.policy)],
            }
            for name, best_of in config.best_of.items()
        },
        "response_files": {name: sha256(Path(path)) for name, path in config.response_files.items()},
        "endpoints": {
            name: hash_of([endpoint.url, endpoint.model, endpoint.parameters])
            for name, endpoint in config.endpoints.items()
        },
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
    chosen = {best_of.reward_model for name, best_of in config.best_of.items() if name in missing}
    choosers = {source: ResponseScorer(source, config.weights, config.data.max_length) for source in chosen}
    for service in [config.endpoints[name] for name in missing if name in config.endpoints]:
        check_key(service, service.model)
    for name in missing:
        print(f"{name}: {len(prompts)} responses", file=sys.stderr)
        if name in files:
            responses[name] = files[name]
        elif name in config.endpoints:
            responses[name] = endpoint_responses(config, config.endpoints[name], prompts)
        elif name in config.best_of:
            best_of = config.best_of[name]
            responses[name] = _best_of(config, best_of, choosers[best_of.reward_model], prompts)
        else:
            responses[name] = _sample(config, name, prompts)
        write_responses(output, prompts, responses, source)
    return prompts, {name: responses[name] for name in config.contestants}


def _texts(texts: Sequence[str]) -> Generation:
    """Responses of which only the text is known."""
    return Generation(list(texts), [[] for _ in texts], [[] for _ in texts], [True] * len(texts))


def file_responses(path: str, prompts: Sequence[Prompt]) -> Generation:
    """The response to each prompt in a file of demonstrations; of several to one prompt each in turn, then the last."""
    by_prompt: dict[str, list[str]] = {}
    for row in read_records(DataConfig(train=path), "demonstrations"):
        by_prompt.setdefault(hash_of(row.prompt), []).append(row.response)
    missing = [prompt.row_id for prompt in prompts if not by_prompt.get(hash_of(prompt.prompt))]
    if missing:
        raise UserError(f"{path}: no response to {len(missing)} of {len(prompts)} prompts, such as {missing[0]}")
    texts = [by_prompt[hash_of(prompt.prompt)] for prompt in prompts]
    return _texts([candidates.pop(0) if len(candidates) > 1 else candidates[0] for candidates in texts])


def endpoint_responses(config: WinRateConfig, service: EndpointConfig, prompts: Sequence[Prompt]) -> Generation:
    """A service's response to each prompt, each kept in `endpoint_responses.jsonl` as soon as it is there."""
    settings: dict[str, object] = {"max_tokens": config.max_new_tokens, "temperature": config.temperature}
    settings |= {"top_p": config.top_p, "seed": config.seed}

    def read(received: object) -> JudgeAnswer:
        text = chat_text(received)
        return JudgeAnswer(text, failure="an answer without a text" if text is None else "")

    log = RowLog(Path(config.output) / "endpoint_responses.jsonl", log_problem)
    ask = ask_service(service, lambda call: call.prompt.prompt, settings, read)
    identity = hash_of([service.url, service.model, service.parameters, settings])
    priced = replace(service, max_tokens=config.max_new_tokens)
    asked = LoggedJudge(service.model, identity, ask, log, max_failed_share=0.0, service=priced)
    return _texts([str(text) for text in asked.values([Call(prompt) for prompt in prompts])])


def _sample(config: WinRateConfig, name: str, prompts: Sequence[Prompt], first_row: int = 0) -> Generation:
    """One model's responses, drawn as rows `first_row` on."""
    [responses] = sample_responses(
        config.checkpoint(name),
        prompts,
        [SamplingConfig(config.max_new_tokens, config.temperature, top_p=config.top_p, seed=config.seed)],
        max_length=config.data.max_length,
        weights=config.weights,
        chat_template=config.chat_template,
        batch_size=config.batch_size,
        first_row=first_row,
        counts_of="prompts" if name == config.baseline and not first_row else "",
    )
    return responses


def _best_of(
    config: WinRateConfig, own: BestOfConfig, scorer: "ResponseScorer", prompts: Sequence[Prompt]
) -> Generation:
    """The best of n responses to each prompt by a reward model's score, drawn apart from the policy's own response."""
    n = own.samples
    repeated = [prompt for prompt in prompts for _ in range(own.samples)]
    drawn = _sample(config, own.policy, repeated, first_row=len(prompts))
    scorer.add(repeated, [(config.checkpoint(own.policy), drawn)], config.chat_template)
    scores = scorer(repeated, drawn.texts)
    best = [max(range(i, i + n), key=lambda row: scores[row]) for i in range(0, len(repeated), n)]
    return Generation(*([column[row] for row in best] for column in vars(drawn).values()))


# From a model


def sample_responses(
    source: str,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingConfig],
    *,
    max_length: int,
    weights: WeightsConfig,
    chat_template: str | None = None,
    batch_size: int = 256,
    first_row: int = 0,
    counts_of: str = "",
    way_out: str = "lower max_new_tokens or shorten the prompts (data.max_length)",
) -> list[Generation]:
    """A policy's responses to the prompts, once with each of the samplings. The model is loaded for this call only.

    Args:
        source: directory or Hub name.
        max_length: longer prompts are truncated on the left.
        first_row: number of the first prompt, which fixes its random numbers.
        counts_of: name under which it is printed what tokenizing dropped and cut; empty: it is not.
        way_out: for prompts that do not fit.
    """
    checkpoint = Checkpoint(source)
    model = load_on_best_device(checkpoint, weights)
    tokenizer = load_tokenizer(checkpoint, chat_template)
    examples, tally = preparation_for(checkpoint, "prompts").tokenize(list(prompts), tokenizer, max_length)
    if counts_of:
        print_tally(counts_of, tally)
    start = start_token_of(model)  # of an encoder-decoder, whose positions the responses have to themselves
    lengths = [(example.row_id, len(example.ids) if start is None else 1) for example in examples]
    check_lengths(model, lengths, way_out, max(sampling.max_new_tokens for sampling in samplings))
    rows = range(first_row, first_row + len(examples))
    generations = []
    for sampling in samplings:
        sampled = decode_responses(
            model,
            [example.ids for example in examples],
            sampling,
            sorted(stop_token_ids(tokenizer)),
            rows=rows,
            batch_size=batch_size,
            start_token=start,
            vocabulary=known_tokens(tokenizer),
        )
        ids = zip(sampled.token_ids, sampled.ended, strict=True)
        generations.append(replace(sampled, texts=[response_text(tokenizer, *response, start) for response in ids]))
    return generations


def prompt_tokens(tokenizer: Tokenizer, prompts: Sequence[Prompt], max_length: int) -> list[list[int]]:
    """Token ids of prompts, truncated to `max_length`; equal for policies, reference and judge."""
    return [example.ids for example in tokenize_prompts(prompts, tokenizer, max_length)[0]]


Scored = tuple[int, str, Sequence[int] | None, bool]  # number of the prompt, text, ids, whether the response has ended


def score_responses(
    model: RewardModel, prompts: Sequence[Prompt], responses: Sequence[Scored], max_length: int
) -> list[float]:
    """A reward model's score of each response; it reads as much of a prompt as the policies do.

    Args:
        responses: where the ids are None the text is read, without an end token if the response was cut off. An encoder
            reads prompt and response as a pair of texts.
        max_length: of a prompt, in tokens.
    """
    if model.is_encoder:
        scores = model.score([(prompts[i].prompt, text) for i, text, _, _ in responses])
    else:
        heads = prompt_tokens(model.tokenizer, prompts, max_length)
        documents = []
        for i, text, ids, ended in responses:
            if ids is not None:
                documents.append([*heads[i], *ids])
                continue
            encoded = encode_response(model.tokenizer, text, prompts[i].prompt, ended=ended)
            written = encoded.prompt or heads[i]
            head = truncate_prompt(list(written), max_length, model.tokenizer.bos_token_id)
            documents.append([*head, *encoded.ids])
        names = [(prompts[i].row_id, len(ids)) for (i, *_), ids in zip(responses, documents, strict=True)]
        check_lengths(model.model, names, "lower max_new_tokens or shorten the prompts (data.max_length)")
        scores = model.score_ids(documents)
    check_numbers(scores, lambda i: prompts[responses[i][0]].row_id, "the reward model's score of a response")
    return scores.tolist()


class ResponseScorer:
    """A reward model's scores of responses, each made once. The model is on the accelerator only while it scores."""

    def __init__(self, source: str, weights: WeightsConfig, max_length: int = sys.maxsize):
        """Load the model, on the CPU, and early, to report a wrong one; `max_length` is that of prompts in tokens."""
        self.model = load_reward_model(source, weights.dtype, quantize=weights.quantize)
        self.max_length = max_length
        self.scores: dict[tuple[str, str], float] = {}  # by prompt and response

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """The score of each response, from the text where it has none yet."""
        self.add(prompts, [(None, _texts(responses))])
        return [self.scores[key] for key in self._keys(prompts, responses)]

    def add(
        self,
        prompts: Sequence[Prompt],
        sides: Sequence[tuple[str | None, Generation]],
        chat_template: str | None = None,
    ) -> None:
        """Score each (policy, responses) to the prompts: the sampled ids where the tokenizers are the same."""
        unscored: dict[tuple[str, str], Scored] = {}
        for policy, generation in sides:
            shared = policy is not None and self.model.shares_token_ids(load_tokenizer(policy, chat_template))
            rows = zip(
                self._keys(prompts, generation.texts),
                generation.texts,
                generation.token_ids,
                generation.ended,
                strict=True,
            )
            for i, (key, text, ids, ended) in enumerate(rows):
                if key not in self.scores:
                    unscored.setdefault(key, (i, text, ids if shared else None, ended))
        if unscored:
            self.model.model.to(best_device())
            scores = score_responses(self.model, prompts, list(unscored.values()), self.max_length)
            self.model.model.to("cpu")
            self.scores |= dict(zip(unscored, scores, strict=True))

    def _keys(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[tuple[str, str]]:
        names = [hash_of([prompt.prompt, prompt.tools]) for prompt in prompts]
        return list(zip(names, responses, strict=True))


# On disk


def write_responses(output: Path, prompts: Sequence[Prompt], responses: Responses, source: Source) -> None:
    """Write the responses and the prompts, models and settings that they come from, as JSON values by content."""
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, object] = {"id": prompt.row_id, "prompt": prompt.prompt}
        for column, part in COLUMNS.items():
            row[column] = {name: getattr(generation, part)[i] for name, generation in responses.items()}
        rows.append(row)
    if not (output / SAMPLING).exists():  # it says that the responses are ours, also after a kill between the two files
        write_json(output / SAMPLING, {})
    write_text(output / RESPONSES, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    present = {}
    for kind in KINDS:
        present[kind] = {name: value for name, value in source[kind].items() if name in responses}
    write_json(output / SAMPLING, {**source, **present, RESPONSES: sha256(output / RESPONSES)})


def note_form(output: Path, form: Path) -> None:
    """Record that people judge these responses in a form, so that no later start replaces them."""
    write_json(output / SAMPLING, {**read_json_object(output / SAMPLING), "form": str(form)})


def read_responses(output: Path, source: Source, *, by_people: bool) -> tuple[list[str], Responses]:
    """Row ids and responses that an earlier start sampled from `source`, of the contestants that are the same.

    Both are empty where nothing can be read again. Where verdicts of people are read, seed and type of the weights may
    be others than before.
    """
    path = output / RESPONSES
    if not (path.is_file() and (output / SAMPLING).is_file()):
        return [], {}
    earlier = read_json_object(output / SAMPLING)
    form = earlier.pop("form", None)
    now = {**source, RESPONSES: sha256(path)}
    changed = differences(earlier, now)
    others = [line for line in changed if not (by_people and line.startswith(OF_ONE_DRAW))]
    if others and form:
        raise UserError(
            "\n".join([f"{path}: people judge these responses in {form}, and now others would be sampled:", *others])
            + "\nNothing was changed. Take back what has changed, or choose another output directory and another form"
        )
    if of_all := [line for line in others if not line.startswith(KINDS)]:
        print("\n".join([f"{path}: sampled again, for this has changed:", *of_all]), file=sys.stderr)
        return [], {}
    rows = [row.values for row in json_line_rows(path) if row.values is not None]  # as written: the hash agrees
    before = _contestants(earlier)
    after = _contestants(source)
    names = [name for name in (rows[0]["responses"] if rows else ()) if name in after and before[name] == after[name]]
    kept = f", in spite of {'; '.join(changed)}" if changed and not others else ""
    new = [name for name in after if name not in names]
    sampled = f"; sampled now: {', '.join(new)}" if new else ", nothing is sampled"
    print(f"{path}: read again{kept}{sampled}", file=sys.stderr)
    responses = {}
    for name in names:
        parts = {part: [row[column][name] for row in rows] for column, part in COLUMNS.items()}
        responses[name] = Generation(**parts)
    return [row["id"] for row in rows], responses


def _contestants(source: Source) -> dict[str, list[object]]:
    """Contestant -> its kind, and what its responses come from."""
    return {name: [kind, value] for kind in KINDS for name, value in source.get(kind, {}).items()}

"""Responses of policies: sampled, scored, and on disk, where a later start reads them again.

    responses.jsonl   a row for each prompt: id, prompt, and each contestant's response with its tokens
    sampling.json     what they were sampled from, and the form that people judge them in

People's verdicts are on the texts that they were shown, and another seed, number of threads, machine or type gives others.
So an evaluation reads what it sampled before as long as prompts, models and settings are the same; by content, wherever
the directories lie. The verdicts themselves are read in judges.py.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.data.rows.files import json_line_rows
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import response_ids, stop_token_ids
from alignment.data.tokenize import tokenize_prompts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.evaluation.inputs import print_tally
from alignment.files import read_json_object, sha256, write_json, write_text
from alignment.generation import Generation, SamplingConfig, decode_responses, response_text
from alignment.loading import best_device, load_model, load_tokenizer
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel
from alignment.training.run.lineage import differences

RESPONSES, SAMPLING = "responses.jsonl", "sampling.json"
OF_ONE_DRAW = ("seed:", "weights.")  # what a second start for people's verdicts may change: the responses are there

KINDS = ("models", "best_of", "response_files", "endpoints")  # of contestants

Responses = dict[str, Generation]  # contestant -> a response to each prompt


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
    model = load_model(source, weights.dtype, best_device(), quantize=weights.quantize)
    tokenizer = load_tokenizer(source, chat_template)
    examples, tally = tokenize_prompts(prompts, tokenizer, max_length)
    if counts_of:
        print_tally(counts_of, tally)
    lengths = [(example.row_id, len(example.ids)) for example in examples]
    check_lengths(model, lengths, way_out, max(sampling.max_new_tokens for sampling in samplings))
    rows, found = range(first_row, first_row + len(examples)), []
    for sampling in samplings:
        sampled = decode_responses(
            model,
            [example.ids for example in examples],
            sampling,
            sorted(stop_token_ids(tokenizer)),
            rows=rows,
            batch_size=batch_size,
        )
        ids, ended = sampled.token_ids, list(sampled.ended)
        texts = [response_text(tokenizer, *each) for each in zip(ids, ended, strict=True)]
        found.append(Generation(texts, ids, sampled.log_probs, ended))
    return found


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
        return model.score([(prompts[i].prompt, text) for i, text, _, _ in responses]).tolist()
    heads = prompt_tokens(model.tokenizer, prompts, max_length)
    documents = [
        [*heads[i], *(response_ids(model.tokenizer, text, prompts[i].prompt, ended=ended) if ids is None else ids)]
        for i, text, ids, ended in responses
    ]
    names = [(prompts[i].row_id, len(ids)) for (i, *_), ids in zip(responses, documents, strict=True)]
    check_lengths(model.model, names, "lower max_new_tokens or shorten the prompts (data.max_length)")
    return model.score_ids(documents).tolist()


def write_responses(
    output: Path, prompts: Sequence[Prompt], responses: Responses, source: Mapping[str, object]
) -> None:
    """Write the responses, and the prompts, models and settings that they were sampled from, as JSON values by content."""
    rows = []
    for i, prompt in enumerate(prompts):
        columns = {
            "responses" if column == "texts" else column: {
                name: vars(own)[column][i] for name, own in responses.items()
            }
            for column in ("texts", "token_ids", "log_probs", "ended")
        }
        rows.append({"id": prompt.row_id, "prompt": prompt.prompt, **columns})
    write_text(output / RESPONSES, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    present = {kind: {name: own for name, own in values.items() if name in responses}
               for kind in KINDS if isinstance(values := source[kind], dict)}  # fmt: skip
    write_json(output / SAMPLING, {**source, **present, RESPONSES: sha256(output / RESPONSES)})


def note_form(output: Path, form: Path) -> None:
    """Record that people judge these responses in a form, so that no later start replaces them."""
    write_json(output / SAMPLING, {**read_json_object(output / SAMPLING), "form": str(form)})


def read_responses(output: Path, source: Mapping[str, object], *, by_people: bool) -> tuple[list[str], Responses]:
    """The ids of the rows and the responses that an earlier start sampled from `source`, of the contestants that are the same.

    Both are empty where nothing can be read again. Where verdicts of people are read, seed and type of the weights may be
    others than before.
    """
    path = output / RESPONSES
    if not (path.is_file() and (output / SAMPLING).is_file()):
        return [], {}
    earlier = read_json_object(output / SAMPLING)
    form, now = earlier.pop("form", None), {**source, RESPONSES: sha256(path)}
    changed = differences(earlier, now)
    others = [line for line in changed if not (by_people and line.startswith(OF_ONE_DRAW))]
    if others and form:
        raise UserError(
            "\n".join([f"{path}: people judge these responses in {form}, and now others would be sampled:", *others])
            + "\nNothing was changed. Take back what has changed, or choose another output directory and another form"
        )
    shared = [{key: value for key, value in each.items() if key not in KINDS} for each in (earlier, now)]
    if [line for line in differences(shared[0], shared[1]) if line in others]:
        print("\n".join([f"{path}: sampled again, for this has changed:", *others]), file=sys.stderr)
        return [], {}
    rows = [row.values for row in json_line_rows(path) if row.values is not None]  # as written: the hash agrees
    before, after = _contestants(earlier), _contestants(source)
    names = [
        name for name in (rows[0]["responses"] if rows else ()) if name in after and before.get(name) == after[name]
    ]
    kept = f", in spite of {'; '.join(changed)}" if changed and not others else ""
    news = [f"sampled now: {', '.join(name for name in after if name not in names)}"] if len(names) < len(after) else []
    print("\n".join([f"{path}: read again, nothing is sampled{kept}"] if not news else
                    [f"{path}: {', '.join(names) or 'nothing'} read again, {news[0]}"]), file=sys.stderr)  # fmt: skip
    columns = ("responses", "token_ids", "log_probs", "ended")
    return [row["id"] for row in rows], {
        name: Generation(*([row[column][name] for row in rows] for column in columns)) for name in names
    }


def _contestants(source: Mapping[str, object]) -> dict[str, list[object]]:
    """Contestant -> its kind, and what its responses come from."""
    return {
        name: [kind, value]
        for kind in KINDS
        if isinstance(own := source.get(kind), dict)
        for name, value in own.items()
    }

"""Votes of simulated labelers on policies' responses, and prompts with an example in them: stages of this recipe."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from alignment.data.config import DataConfig
from alignment.data.rows.files import read_raw
from alignment.errors import UserError
from alignment.files import read_json_object, write_json, write_text
from alignment.hotel_world import grammar
from alignment.judging.inputs import check_hotel_prompts, read_records
from alignment.pipeline.stages import load_stage_file
from alignment.settings import NonNegativeInt, Settings


@dataclass(frozen=True)
class FewShotConfig(Settings):
    """Settings of prompts with an example.

    Attributes:
        data: prompts of the hotel world.
        output: directory of `prompts.jsonl`.
        seed: of the examples' requests.
    """

    data: DataConfig
    output: str
    seed: NonNegativeInt = 0


def few_shot(config: FewShotConfig) -> Path:
    """Write the prompts, each with another guest's request and an expert's reply before its own, and return the directory."""
    records = read_records(config.data, "prompts")
    check_hotel_prompts(records, "an example")
    rng = Random(f"{config.seed}/examples")
    rows = [{"prompt": with_example(str(record.prompt), rng)} for record in records]
    write_text(Path(config.output) / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return Path(config.output)


def with_example(prompt: str, rng: Random) -> str:
    """A prompt with a question about the same hotel and the best reply to it before its own question."""
    parsed = grammar.parse_prompt(prompt)
    sheet = grammar.Sheet("", tuple(parsed.facts.items()), parsed.private)
    head, turn = prompt.split("\nGuest ", 1)
    request = grammar.sample_request(rng, sheet)
    while request.guest == parsed.guest:
        request = replace(request, guest=rng.choice(grammar.GUESTS))
    example = head + grammar.write_request(request)
    return f"{example}{grammar.best_reply(example)}\nGuest {turn}"


@dataclass(frozen=True)
class JudgeConfig(Settings):
    """Settings of the judging.

    Attributes:
        responses: files of responses, as `winrate` writes them, to the same requests in the same order.
        baseline: the policy, in the first file, that each one's response is compared with.
        panels: panels.json of labelers, all of whom compare every pair.
        labelers: labelers.py, how they choose.
        output: directory of `votes.json` and of `results.json`, the win rates and how often two labelers agree.
        seed: of the choices.
    """

    responses: dict[str, str]
    baseline: str
    panels: str
    labelers: str
    output: str
    seed: NonNegativeInt = 0


def judge(config: JudgeConfig) -> Path:
    """Write what each panel says of each policy's response to each prompt, and return the path of the results.

    `votes.json` holds for each policy `gold`, its response's gold score by prompt, and for each panel the share of its
    labelers who prefer the response to the baseline's, by prompt. Of two equal responses each is preferred by half.
    """
    people: Any = load_stage_file(Path(config.labelers))
    prompts, texts = read_texts(config.responses, config.baseline)
    replies = {
        name: [people.read_reply(prompt, text) for prompt, text in zip(prompts, own, strict=True)]
        for name, own in texts.items()
    }
    votes: dict[str, dict[str, list[float]]] = {
        name: {"gold": [sum(reply.parts) for reply in own]} for name, own in replies.items()
    }
    results: dict[str, Any] = {"prompts": len(prompts), "agreement": {}, "win_rate": {}}
    for panel, tastes in read_json_object(Path(config.panels)).items():
        rng, labelers, agreed = Random(f"{config.seed}/{panel}"), [people.Labeler(**taste) for taste in tastes], []
        for name, own in replies.items():
            votes[name][panel] = []
            for i, (ours, theirs) in enumerate(zip(own, replies[config.baseline], strict=True)):
                if texts[name][i] == texts[config.baseline][i]:
                    votes[name][panel].append(0.5)
                    continue
                preferences = [labeler.preference(ours, theirs) for labeler in labelers]
                votes[name][panel].append(fmean(rng.random() < each for each in preferences))
                agreed.append(people.agreement(preferences))
        results["agreement"][panel] = fmean(agreed) if agreed else None
        results["win_rate"][panel] = {name: fmean(own[panel]) for name, own in votes.items()}
    write_json(Path(config.output) / "votes.json", votes)
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def read_texts(files: dict[str, str], baseline: str) -> tuple[list[str], dict[str, list[str]]]:
    """The prompts of the first file, and each policy's responses; with a prefix, such as `few-shot `, those of other files.

    Raises:
        UserError: files whose prompts do not ask the same, in the same order, or a baseline that is not there.
    """
    prompts: list[str] = []
    asked: list[Any] = []
    texts: dict[str, list[str]] = {}
    for prefix, path in files.items():
        rows = [row.values or {} for row in read_raw(path)]
        parsed = [grammar.parse_prompt(row["prompt"]) for row in rows]
        prompts, asked = prompts or [row["prompt"] for row in rows], asked or parsed
        if parsed != asked:
            raise UserError(f"{path}: its prompts do not ask the same as those of the first file, in the same order")
        for name in rows[0]["responses"]:
            texts[f"{prefix}{name}"] = [row["responses"][name] for row in rows]
    if baseline not in texts:
        raise UserError(f"baseline: {baseline} has no responses; there are those of {', '.join(texts)}")
    return prompts, texts

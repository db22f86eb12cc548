"""Comparisons of policies' replies in the hotel world, chosen by its labelers: a stage of this recipe.

A reward model that learns from them has seen what a policy says after training against another reward model, which no
reply of the original comparisons shows. Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.1, and Bai et al. 2022,
arXiv:2204.05862, section 4.5, who both collect comparisons of their newest policies.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.files import write_json, write_text
from alignment.generation.generate import generate
from alignment.hotel_world.gold import prefers_first
from alignment.judging.inputs import check_hotel_prompts, read_records
from alignment.loading import best_device, find_directory, load_model, load_tokenizer
from alignment.settings import NonNegativeInt, PositiveInt, Rule, Settings


@dataclass(frozen=True)
class ComparisonsConfig(Settings):
    """Settings of the comparisons.

    Attributes:
        models: name -> directory or Hub name of a policy.
        pairs: two names each, whose replies are compared; a policy may be compared with itself. The prompts take them in
            turn: the first prompt the first pair, and so on.
        data: prompts of the hotel world; `max_rows` says how many.
        output: directory of `comparisons.jsonl` and of `results.json`, the counts.
        max_new_tokens: longest reply.
        seed: of replies and labelers.
    """

    models: dict[str, str]
    pairs: list[tuple[str, str]]
    data: DataConfig
    output: str
    max_new_tokens: PositiveInt = 64
    seed: NonNegativeInt = 0

    RULES = (
        Rule(
            "pairs",
            lambda c: not c.pairs or {name for pair in c.pairs for name in pair} - set(c.models),
            "must hold two of the names of the models each, got {self.pairs}",
        ),
    )


def run(config: ComparisonsConfig) -> Path:
    """Write the comparisons and their counts and return the directory; two equal replies make none, nor does an empty one."""
    for source in config.models.values():
        find_directory(source)
    records: list[Prompt] = read_records(config.data, "prompts")
    check_hotel_prompts(records, "a labeler")
    prompts = [str(record.prompt) for record in records]
    rng, lines = Random(f"{config.seed}/labels"), []
    for prompt, (first, second) in zip(prompts, sample_replies(config, prompts), strict=True):
        if first == second or not first.strip() or not second.strip():
            continue
        chosen, rejected = (first, second) if prefers_first(rng, prompt, first, second) else (second, first)
        lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}, ensure_ascii=False) + "\n")
    output = Path(config.output)
    write_text(output / "comparisons.jsonl", "".join(lines))
    write_json(output / "results.json", {"prompts": len(prompts), "comparisons": len(lines)})
    return output


def sample_replies(config: ComparisonsConfig, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Two replies to each prompt, by the policies of the pair whose turn it is; one policy is in memory at a time."""
    found: dict[tuple[int, int], str] = {}
    for name, source in config.models.items():
        model, tokenizer = load_model(source, device=best_device()), load_tokenizer(source)
        for side in (0, 1):
            rows = [row for row in range(len(prompts)) if config.pairs[row % len(config.pairs)][side] == name]
            asked = [prompts[row] for row in rows]
            seed = 2 * config.seed + side  # a policy that is compared with itself says two things
            texts = generate(model, tokenizer, asked, max_new_tokens=config.max_new_tokens, seed=seed).texts
            found |= {(row, side): text for row, text in zip(rows, texts, strict=True)}
        del model  # before the next one is loaded
    return [(found[row, 0], found[row, 1]) for row in range(len(prompts))]

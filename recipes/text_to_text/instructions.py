"""Rows of a T5's recipe: short instructions of P3 with their answers, and the same instructions as plain text.

What is left out: templates whose prompts or answers are long, since a model of a million parameters learns in minutes here.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from alignment.data.rows.files import read_raw
from alignment.data.rows.read import text_hash
from alignment.errors import UserError
from alignment.files import write_json, write_text
from alignment.settings import NonNegativeInt, PositiveInt, Settings, Share

END = "<|endoftext|>"  # of another model's tokenizer, written into every answer of the set


@dataclass(frozen=True)
class InstructionsConfig(Settings):
    """The choice of rows.

    Attributes:
        source: rows with `prompt`, `completion`, and `config`, the name of the template.
        output: directory of `train.jsonl`, `heldout.jsonl` (prompt, response, template, and the most common answer of the
            template's training rows), `texts.jsonl` (prompts of the training rows) and `results.json`.
        longest_prompt, longest_answer: in characters; longer rows are left out.
        heldout: share of the prompts that no stage trains on.
        seed: of that choice.
    """

    source: str
    output: str
    longest_prompt: PositiveInt = 360
    longest_answer: PositiveInt = 24
    heldout: Share = 0.2
    seed: NonNegativeInt = 0


def run(config: InstructionsConfig) -> Path:
    """Write the rows, and return the path of the counts."""
    parts: dict[str, list[dict[str, str]]] = {"train": [], "heldout": []}
    for raw in read_raw(config.source):
        if raw.values is None or not {"config", "prompt", "completion"} <= set(raw.values):
            raise UserError(f"{raw.location}: {raw.problem or 'needs the columns config, prompt and completion'}")
        prompt, answer, template = (str(raw.values[name]).strip() for name in ("prompt", "completion", "config"))
        answer = answer.removesuffix(END).strip()
        if answer and len(prompt) <= config.longest_prompt and len(answer) <= config.longest_answer:
            out = text_hash(f"{config.seed} {prompt}") < config.heldout * 2**64
            row = {"prompt": prompt, "response": answer, "template": template}
            parts["heldout" if out else "train"].append(row)
    answers: dict[str, Counter[str]] = {}
    for row in parts["train"]:
        answers.setdefault(row["template"], Counter())[row["response"]] += 1
    parts["heldout"] = [row for row in parts["heldout"] if row["template"] in answers]
    if not parts["heldout"]:
        raise UserError(f"{config.source}: no short row is held out; raise longest_prompt or heldout")
    usual = {template: found.most_common(1)[0][0] for template, found in answers.items()}
    right = sum(usual[row["template"]] == row["response"] for row in parts["heldout"])
    files = {**parts, "texts": [{"text": f"{row['prompt']} {row['response']}"} for row in parts["train"]]}
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(Path(config.output) / f"{name}.jsonl", lines)
    counts = {name: len(rows) for name, rows in parts.items()}
    results = {"rows": counts, "templates": len(usual), "usual_answer_accuracy": right / counts["heldout"]}
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"

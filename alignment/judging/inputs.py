"""Rows of an evaluation, which reads each of them once."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment.data.config import DataConfig
from alignment.data.prepare import rows_of_part
from alignment.data.rows.read import prompt_key, read_rows
from alignment.data.rows.records import Kind, Prompt, Tally
from alignment.errors import UserError
from alignment.files import refuse_foreign, refuse_other_file
from alignment.hotel_world.grammar import is_prompt

RESULTS = {  # stage -> a key that no other one's results.json has
    "winrate": "judging",
    "judge": "items",
    "reward_eval": "card",
    "ratings": "method",
    "language": "perplexity",
    "behavior": "capabilities",
    "benchmarks": "tasks",
}


def refuse_other_results(stage: str, output: Path) -> None:
    """Refuse a directory with results or responses that no evaluation of this kind has written."""
    refuse_other_file(output / "results.json", f'"{RESULTS[stage]}":')
    if not (output / "sampling.json").is_file():
        refuse_foreign(output / "responses.jsonl")


def read_records(data: DataConfig, kind: Kind) -> list[Any]:
    """Records of `data.train`; counts of dropped rows are printed on standard error.

    With `data.evaluation_share` they are the rows that a training stage with this setting holds out.
    """
    refuse_mixture(data)
    rows, tally = read_rows(
        data.sources("train"), kind, max_rows=data.max_rows, on_bad_row=data.on_bad_row, as_messages=data.as_messages
    )
    print_tally(kind, tally)
    if data.evaluation_share is not None:
        rows, _ = rows_of_part(rows, tally, prompt_key, data, "evaluation")
    return rows


def refuse_mixture(data: DataConfig) -> None:
    """Refuse settings of a mixture: an evaluation reads every row once."""
    if unread := data.unread("mixing", "chat_template"):
        raise UserError(f"an evaluation reads every row once and alike, without {', '.join(unread)}; leave that out")


def check_hotel_prompts(prompts: Sequence[Prompt], who: str, advice: str = "") -> None:
    """Refuse prompts that are not of the generated hotel world, which its gold reward and labelers cannot judge."""
    others = [prompt.row_id for prompt in prompts if not is_prompt(prompt.prompt)]
    if others:
        raise UserError(
            f"{others[0]}: {who} judges only prompts of the generated hotel world, and {len(others)} of {len(prompts)} "
            f"are none{advice}"
        )


def print_tally(what: str, tally: Tally) -> None:
    """Print the counts of rows that reading or tokenizing dropped and cut, on standard error."""
    for line in tally.lines():
        print(f"{what}: {line}", file=sys.stderr)

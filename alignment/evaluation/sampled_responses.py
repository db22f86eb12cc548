"""Sampled responses on disk: what they were sampled from, and when an evaluation reads them again.

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
from typing import TYPE_CHECKING

from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError
from alignment.files import read_json_object, sha256, write_json, write_text
from alignment.generation import Generation
from alignment.training.run.lineage import differences

if TYPE_CHECKING:
    from alignment.data.rows.records import Prompt

RESPONSES, SAMPLING = "responses.jsonl", "sampling.json"
OF_ONE_DRAW = ("seed:", "weights.")  # what a second start for people's verdicts may change: the responses are there

Responses = dict[str, Generation]  # contestant -> a response to each prompt


def write_responses(
    output: Path, prompts: Sequence["Prompt"], responses: Responses, source: Mapping[str, object]
) -> None:
    """Write the responses and what they were sampled from.

    Args:
        source: prompts, models and settings as JSON values, by content.
    """
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
    write_json(output / SAMPLING, {**source, RESPONSES: sha256(output / RESPONSES)})


def note_form(output: Path, form: Path) -> None:
    """Record that people judge these responses in a form, so that no later start replaces them."""
    write_json(output / SAMPLING, {**read_json_object(output / SAMPLING), "form": str(form)})


def read_responses(
    output: Path, source: Mapping[str, object], *, by_people: bool
) -> tuple[list[str], Responses] | None:
    """The ids of the rows and the responses that an earlier start sampled; None where they have to be sampled.

    Args:
        source: as for `write_responses`, of this start.
        by_people: verdicts of people are read, for which seed and type of the weights may be others than before.

    Raises:
        UserError: people judge the responses that are there, and this start would sample others.
    """
    path = output / RESPONSES
    if not (path.is_file() and (output / SAMPLING).is_file()):
        return None
    earlier = read_json_object(output / SAMPLING)
    form = earlier.pop("form", None)
    changed = differences(earlier, {**source, RESPONSES: sha256(path)})
    others = [line for line in changed if not (by_people and line.startswith(OF_ONE_DRAW))]
    if others and form:
        raise UserError(
            "\n".join([f"{path}: people judge these responses in {form}, and now others would be sampled:", *others])
            + "\nNothing was changed. Take back what has changed, or choose another output directory and another form"
        )
    if others:
        print("\n".join([f"{path}: sampled again, for this has changed:", *others]), file=sys.stderr)
        return None
    kept = f", in spite of {'; '.join(changed)}" if changed else ""
    print(f"{path}: read again, nothing is sampled{kept}", file=sys.stderr)
    rows = [row.values for row in json_line_rows(path) if row.values is not None]  # as written: the hash agrees
    columns = ("responses", "token_ids", "log_probs", "ended")
    names = list(rows[0]["responses"]) if rows else []
    return [row["id"] for row in rows], {
        name: Generation(*([row[column][name] for row in rows] for column in columns)) for name in names
    }

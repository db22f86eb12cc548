"""Rows of responses in steps, each labeled right or wrong (process supervision).

Understood: trl's stepwise supervision (`prompt`, `completions`, `labels`), PRM800K's records, Math-Shepherd's tagged text.
"""

from collections.abc import Iterator, Sequence

from alignment.data.rows.fields import (
    BadRow,
    flag_field,
    list_field,
    number_field,
    object_field,
    objects_field,
    text_field,
    type_name,
)
from alignment.data.rows.messages import prompt_field
from alignment.data.rows.records import Columns, Record, SkippedRow, Steps

TAG = "\u043a\u0438"  # the token that ends a step in Math-Shepherd's `input`
FIRST_STEP = "Step 1:"
NO_STEPS = "no labeled step"


def parse_steps(row: Columns, row_id: str, *_: str) -> Steps:
    """trl's stepwise supervision: a prompt, the texts of the steps, and a label for each."""
    steps = [text_field({"completions": step}, "completions") for step in list_field(row, "completions")]
    labels = [flag_field({"labels": label}, "labels") for label in list_field(row, "labels")]
    if len(steps) != len(labels):
        raise BadRow("labels", "must be as many as completions", f"{len(labels)} labels, {len(steps)} steps")
    return Steps(prompt_field(row, "prompt"), tuple(steps), tuple(labels), row_id)


def parse_prm800k(row: Columns, row_id: str, *_: str) -> list[Record]:
    """PRM800K's records: the solution that the annotators followed, and one row for each other continuation they rated.

    A rating of -1 is wrong; 1 and the neutral 0 are right.

    Source: Lightman et al. 2023, arXiv:2305.20050; they score neutral steps as right.
    """
    label = object_field(row, "label")
    problem = text_field(object_field(row, "question"), "problem")
    rows: list[Record] = [
        Steps(problem, tuple(texts), tuple(labels), f"{row_id}[{number}]")
        for number, (texts, labels) in enumerate(_solutions(list_field(label, "steps")))
    ]
    if not rows:
        raise SkippedRow(NO_STEPS)
    return rows


def _solutions(steps: Sequence[object]) -> Iterator[tuple[list[str], list[bool]]]:
    """Steps with labels: first every continuation that was not followed, then the solution that was."""
    texts: list[str] = []
    labels: list[bool] = []
    for step in steps:
        if not isinstance(step, dict):
            raise BadRow("label", f"a step must be an object, is {type_name(step)}")
        completions = enumerate(objects_field(step, "completions"))
        rated: dict[float, Columns] = {number: each for number, each in completions if each.get("rating") is not None}
        chosen = number_field(step, "chosen_completion")
        for number, completion in rated.items():
            if number != chosen:
                yield [*texts, text_field(completion, "text")], [*labels, _is_right(completion)]
        if chosen in rated:
            texts.append(text_field(rated[chosen], "text"))
            labels.append(_is_right(rated[chosen]))
        elif step.get("human_completion"):
            human = step["human_completion"]
            texts.append(text_field(human if isinstance(human, dict) else {"text": human}, "text"))
            labels.append(True)
        elif rated:
            return  # the solution ends here; the rows of its last continuations hold the steps before
        else:
            break
    if texts:
        yield texts, labels


def _is_right(completion: Columns) -> bool:
    rating = number_field(completion, "rating")
    if rating not in (-1, 0, 1):
        raise BadRow("label", "the rating of a step must be -1, 0 or 1", repr(completion.get("rating"))[:40])
    return rating >= 0


def parse_tagged_steps(row: Columns, row_id: str, *_: str) -> Steps:
    """Math-Shepherd's texts: in `input` each step ends with a tag, and `label` is that text with + or - for the tag.

    Source: Wang et al. 2024, arXiv:2312.08935.
    """
    pieces, marked = text_field(row, "input").split(TAG), text_field(row, "label")
    steps, labels = [], []
    for piece in pieces[:-1]:
        if not marked.startswith(piece) or marked[len(piece) : len(piece) + 1] not in ("+", "-"):
            raise BadRow(
                "label", "is not the input's text with + or - at the end of each step", f"step {len(steps) + 1}"
            )
        labels.append(marked[len(piece)] == "+")
        steps.append(piece.strip())
        marked = marked[len(piece) + 1 :]
    if not steps:
        raise BadRow("input", f"has no step that ends with {TAG!r}")
    prompt, first, rest = steps[0].partition(FIRST_STEP)
    if not first or not prompt.strip():
        raise BadRow("input", f"has no question before {FIRST_STEP!r}")
    return Steps(prompt, (first + rest, *steps[1:]), tuple(labels), row_id)

"""Which of the assistant's turns of a dialogue are trained on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from alignment.data.rows.records import Demonstration, Message, Record

Turns = Literal["all", "last", "each"]


def choose_turns(rows: Sequence[Record], turns: Turns) -> list[Record]:
    """The rows, with what they say of their turns.

    Args:
        turns: "all" trains on every assistant turn of a dialogue in one sequence; "last" on the last one that counts;
            "each" makes an example of every turn that counts, after the prompt that generation renders for it.
    """
    return [_chosen(row, turns) if isinstance(row, Demonstration) else row for row in rows]


def _chosen(row: Demonstration, turns: Turns) -> Demonstration:
    if row.messages is None or turns == "all":
        return row
    replies = sum(message["role"] == "assistant" for message in row.messages)
    trained = row.trained or (True,) * replies
    if turns == "last":
        last = max(number for number, counts in enumerate(trained) if counts)
        trained = tuple(number == last for number in range(replies))
    return replace(row, trained=trained, apart=True)


def single_turns(row: Demonstration) -> list[tuple[Demonstration, str | Message]]:
    """What an example is made of, (row with the prompt, reply), for each turn that counts: of a row without `messages`
    one, of a row that keeps its turns apart one for each reply that has something before it."""
    if row.messages is None:
        return [(row, row.response)]
    replies = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    trained = row.trained or (True,) * len(replies)
    return [
        (replace(row, prompt=row.messages[:index]), row.messages[index])
        for index, counts in zip(replies, trained, strict=True)
        if counts and index
    ]

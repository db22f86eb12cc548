"""Rows of one response and a label, desirable or not (KTO's data)."""

from collections.abc import Callable

from alignment.data.rows.fields import BadRow, flag_field
from alignment.data.rows.formats import instruction_prompt, parse_text_pair
from alignment.data.rows.messages import messages_field, prompt_field, reply_field
from alignment.data.rows.records import Columns, LabeledResponse, Record


def labeled_parser(response: str, label: str) -> Callable[[Columns, str], LabeledResponse]:
    """Parser of rows with `prompt`, a response and a label.

    Args:
        response: column of the response.
        label: column of the label.
    """

    def parse(row: Columns, row_id: str) -> LabeledResponse:
        return LabeledResponse(prompt_field(row, "prompt"), reply_field(row, response), flag_field(row, label), row_id)

    return parse


def labeled_dialogue_parser(key: str, label: str) -> Callable[[Columns, str], LabeledResponse]:
    """Parser of dialogues whose last message is what the label judges.

    Args:
        key: column of the messages.
        label: column of the label.
    """

    def parse(row: Columns, row_id: str) -> LabeledResponse:
        messages = messages_field(row, key)
        if messages[-1]["role"] != "assistant":
            raise BadRow(key, "the last message is not the assistant's")
        if len(messages) == 1:
            raise BadRow(key, "an assistant message alone has no prompt")
        response = reply_field({key: messages[-1]}, key)
        return LabeledResponse(messages[:-1], response, flag_field(row, label), row_id)

    return parse


def parse_labeled_alpaca(label: str) -> Callable[[Columns, str], LabeledResponse]:
    """Parser of `instruction`, `input`, `output` and a label.

    Args:
        label: column of the label.
    """

    def parse(row: Columns, row_id: str) -> LabeledResponse:
        return LabeledResponse(instruction_prompt(row), reply_field(row, "output"), flag_field(row, label), row_id)

    return parse


def parse_labeled_pair(row: Columns, row_id: str) -> list[Record]:
    """A pair as two labeled responses: the chosen one desirable, the rejected one not."""
    pair = parse_text_pair(row, row_id)
    return [
        LabeledResponse(pair.prompt, pair.chosen, True, f"{row_id}[chosen]"),
        LabeledResponse(pair.prompt, pair.rejected, False, f"{row_id}[rejected]"),
    ]

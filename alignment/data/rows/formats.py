"""Row formats of texts, demonstrations, pairs and prompts. The table of all formats is in kinds.py."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from alignment.data.rows.fields import BadRow, EqualResponses, list_field, number_field, text_field
from alignment.data.rows.messages import (
    is_plain,
    messages_field,
    prompt_field,
    reply_message,
    tools_field,
    turn_weights,
)
from alignment.data.rows.records import (
    Columns,
    Comparison,
    Demonstration,
    Message,
    Messages,
    Prompt,
    Ranking,
    Record,
    Steps,
    Text,
)

HUMAN_TURN = "\n\nHuman:"
ASSISTANT_TURN = "\n\nAssistant:"
TURNS = re.compile(r"\n\n(Human|Assistant):")

# Source: Taori et al. 2023, Stanford Alpaca, prompt with and without an input.
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_PLAIN = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """Alpaca's prompt text for an instruction and its optional input."""
    template = ALPACA_INPUT if context.strip() else ALPACA_PLAIN
    return template.format(instruction=instruction, input=context)


def split_dialogue(text: str, key: str) -> tuple[str, str]:
    """A plain dialogue cut after its last assistant header: (prompt with the header, response).

    The two joined are the text again, blanks included.

    Raises:
        BadRow: no assistant turn, an empty one, or a human turn after it.
    """
    head, header, response = text.rpartition(ASSISTANT_TURN)
    if not header:
        raise BadRow(key, f"no prompt column, and no {ASSISTANT_TURN!r} turn to split at")
    if HUMAN_TURN in response:
        raise BadRow(key, "ends with a human turn")
    if not response.strip():
        raise BadRow(key, "the last assistant turn is empty")
    return head + header, response


def with_messages(record: Record) -> Record:
    """The record with messages for a prompt of plain text: one of the user, or the turns of an HH-RLHF dialogue.

    Blanks around the texts stood between prompt and response, and are left to the chat template.
    """
    prompt = getattr(record, "prompt", None)
    if not isinstance(prompt, str):
        return record
    messages: Messages = [Message(role="user", content=prompt.strip())]
    if prompt.startswith(HUMAN_TURN) and prompt.endswith(ASSISTANT_TURN):
        _, *turns = TURNS.split(prompt.removesuffix(ASSISTANT_TURN))
        messages = [
            Message(role="user" if name == "Human" else "assistant", content=text.strip())
            for name, text in zip(turns[::2], turns[1::2], strict=True)
        ]
    texts = {
        name: getattr(record, name).strip() for name in ("response", "chosen", "rejected") if hasattr(record, name)
    }
    if isinstance(record, Ranking):
        texts["responses"] = tuple(response.strip() for response in record.responses)
    return replace(record, prompt=messages, **texts)


def parse_text(row: Columns, row_id: str) -> Text:
    return Text(text_field(row, "text"), row_id)


def instruction_prompt(row: Columns) -> str | Messages:
    """Alpaca's prompt for `instruction` and `input`; messages where the rows have a column `history` or `system`.

    `history` holds the earlier turns, pairs of what the user said and the answer.
    """
    instruction, context = text_field(row, "instruction"), text_field({"input": "", **row}, "input", may_be_empty=True)
    if "history" not in row and "system" not in row:
        return alpaca_prompt(instruction, context)
    messages: Messages = []
    for pair in list_field(row, "history") if row.get("history") else []:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("history", "must be a list of pairs of texts, the user's and the answer", repr(pair)[:60])
        messages += [Message(role="user", content=pair[0]), Message(role="assistant", content=pair[1])]
    request = f"{instruction}\n{context}" if context.strip() else instruction
    return [*messages, Message(role="user", content=request)]


def complete(record: Record, row: Columns) -> Record:
    """The record with what its row says beside the columns of its format: tools and the system message of a dialogue.

    Raises:
        BadRow: what a record cannot express and training would leave out: tool definitions or a system message for a
            plain text prompt, earlier turns without an instruction, or a response that is marked as undesirable.
    """
    if isinstance(record, Demonstration):
        _refuse_undesirable(row)
    if isinstance(record, Text) or (isinstance(record, Prompt) and isinstance(record.prompt, str)):
        return record
    if row.get("history") and "instruction" not in row:
        raise BadRow("history", "earlier turns are read beside an instruction only; write the row as messages")
    if tools := tools_field(row):
        if isinstance(record.prompt, str) or isinstance(record, Steps):
            raise BadRow("tools", "a plain text prompt has no place for tool definitions; write the row as messages")
        record = replace(record, tools=tools)
    system = "" if row.get("system") is None else text_field(row, "system", may_be_empty=True)
    if not system.strip():
        return record
    if isinstance(record.prompt, str):
        raise BadRow("system", "a plain text prompt has no place for it; write the row as messages")
    if record.prompt[0]["role"] == "system":
        if record.prompt[0]["content"] != system:
            raise BadRow("system", "differs from the system message that the dialogue begins with")
        return record
    first: Message = {"role": "system", "content": system}
    if isinstance(record, Demonstration) and record.messages is not None:
        record = replace(record, messages=[first, *record.messages])
    return replace(record, prompt=[first, *record.prompt])


def _refuse_undesirable(row: Columns) -> None:
    """KTO's rows are no demonstrations where their mark is false."""
    for key in ("label", "kto_tag"):
        value = row.get(key)
        if value is False or (isinstance(value, str) and value.strip().lower() == "false"):
            raise BadRow(key, "false marks an undesirable response (KTO's rows), which must not be imitated")


def dialogue_parser(key: str) -> Callable[[Columns, str], Demonstration]:
    def parse(row: Columns, row_id: str) -> Demonstration:
        messages = messages_field(row, key)
        if messages[-1]["role"] != "assistant":
            raise BadRow(key, "the last message is not the assistant's")
        weights = turn_weights(row, key)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        counting = [index for index in replies if weights[index] is not False]
        if not counting:
            raise BadRow(key, "no message of the assistant counts: all have weight 0")
        last = counting[-1]  # what follows it is not trained on
        if last == 0:
            raise BadRow(key, "an assistant message alone has no prompt")
        prompt, response = messages[:last], messages[last]["content"]
        if len(counting) == 1 and is_plain(messages[last]):
            return Demonstration(prompt, response, row_id)
        trained = tuple(index in counting for index in replies if index <= last)
        return Demonstration(prompt, response, row_id, messages[: last + 1], None if all(trained) else trained)

    return parse


def demonstration_parser(response: str) -> Callable[[Columns, str], Demonstration]:
    def parse(row: Columns, row_id: str) -> Demonstration:
        record = _answered(prompt_field(row, "prompt"), reply_message(row, response), response, row_id)
        if isinstance(row[response], list) and False in turn_weights(row, response):
            raise BadRow(response, "has weight 0, so nothing in the row counts")
        return record

    return parse


def parse_alpaca(row: Columns, row_id: str) -> Demonstration:
    prompt, reply = instruction_prompt(row), Message(role="assistant", content=text_field(row, "output"))
    if isinstance(prompt, list) and len(prompt) > 1:  # the answers in the history are demonstrations too
        return Demonstration(prompt, reply["content"], row_id, [*prompt, reply])
    return Demonstration(prompt, reply["content"], row_id)


def _answered(prompt: str | Messages, reply: Message, key: str, row_id: str) -> Demonstration:
    """A demonstration of one reply; one with tool calls or reasoning is kept as a message."""
    if is_plain(reply):
        return Demonstration(prompt, reply["content"], row_id)
    if isinstance(prompt, str):
        raise BadRow(key, "holds tool calls or reasoning, for which a plain text prompt has no place")
    before = tuple(False for message in prompt if message["role"] == "assistant")
    return Demonstration(prompt, reply["content"], row_id, [*prompt, reply], (*before, True) if before else None)


def parse_chosen_side(row: Columns, row_id: str) -> Demonstration:
    pair = parse_comparison(row, row_id)
    reply = Message(role="assistant", content=pair.chosen) if pair.messages is None else pair.messages[0]
    return _answered(pair.prompt, reply, "chosen", row_id)


def parse_comparison(row: Columns, row_id: str) -> Comparison:
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list):
        prompt, *replies = _message_pair(row)
    elif any(row.get(key) is not None for key in ("prompt", "conversations", "instruction")):
        prompt, *replies = explicit_prompt(row), reply_message(row, "chosen"), reply_message(row, "rejected")
    elif "prompt" in row and ASSISTANT_TURN not in text_field(row, "chosen"):
        raise BadRow("prompt", "is null")
    else:
        prompt, chosen, rejected = _plain_pair(row)
        return Comparison(prompt, chosen, rejected, number_field(row, "margin"), row_id)
    chosen, rejected = replies
    messages = None if is_plain(chosen) and is_plain(rejected) else (chosen, rejected)
    if messages and isinstance(prompt, str):
        raise BadRow("chosen", "holds tool calls or reasoning, for which a plain text prompt has no place")
    margin = number_field(row, "margin")
    return Comparison(prompt, chosen["content"], rejected["content"], margin, row_id, messages=messages)


def parse_text_pair(row: Columns, row_id: str) -> Comparison:
    """A pair of two different texts, for rows that have no place for more."""
    pair = parse_comparison(row, row_id)
    if is_tie(pair):
        raise EqualResponses()
    if pair.messages is not None:
        raise BadRow(
            "chosen", "holds tool calls or reasoning, which demonstrations and comparisons can have, these rows not"
        )
    return pair


def is_tie(pair: Comparison) -> bool:
    """Whether both responses are the same, tool calls and reasoning among them."""
    same = pair.messages is None or pair.messages[0] == pair.messages[1]
    return pair.chosen == pair.rejected and same


def explicit_prompt(row: Columns) -> str | Messages:
    if row.get("prompt") is not None:
        return prompt_field(row, "prompt")
    return prompt_field(row, "conversations") if "conversations" in row else instruction_prompt(row)


def _plain_pair(row: Columns) -> tuple[str, str, str]:
    """HH-RLHF: two whole dialogues that differ in the last assistant turn only."""
    prompt, chosen = split_dialogue(text_field(row, "chosen"), "chosen")
    other, rejected = split_dialogue(text_field(row, "rejected"), "rejected")
    if prompt != other:
        raise BadRow("rejected", "the dialogue before the last assistant turn differs from chosen's")
    return prompt, chosen, rejected


def _message_pair(row: Columns) -> tuple[str | Messages, Message, Message]:
    """Message lists: the replies alone beside an explicit prompt, or whole dialogues with the prompt in them."""
    pair = {key: messages_field(row, key) for key in ("chosen", "rejected")}
    explicit = any(row.get(key) is not None for key in ("prompt", "conversations", "instruction"))
    if not (explicit and all(len(messages) == 1 for messages in pair.values())):
        from trl.data_utils import extract_prompt

        pair = cast("dict[str, Messages]", extract_prompt(dict(pair)))
        if not pair["prompt"]:
            raise BadRow("rejected", "shares no first message with chosen, so there is no prompt")
        prompt = prompt_field(pair, "prompt")
    else:
        prompt = explicit_prompt(row)
        if isinstance(prompt, str):  # plain text before a message list is what the user said
            prompt = [Message(role="user", content=prompt)]
    return prompt, reply_message(pair, "chosen"), reply_message(pair, "rejected")


def prompt_parser(key: str) -> Callable[[Columns, str], Prompt]:
    def parse(row: Columns, row_id: str) -> Prompt:
        extra = {name: value for name, value in row.items() if name != key}
        return Prompt(prompt_field(row, key), extra, row_id)

    return parse


def parse_instruction_prompt(row: Columns, row_id: str) -> Prompt:
    return Prompt(instruction_prompt(row), dict(row), row_id)


def parse_pair_prompt(row: Columns, row_id: str) -> Prompt:
    """The prompt two responses share; they stay in `extra`."""
    return Prompt(parse_comparison(row, row_id).prompt, dict(row), row_id)

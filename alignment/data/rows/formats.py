"""Row formats of texts, demonstrations, pairs, prompts and labels. Rankings and steps have files of their own.

A parser gets a row, its row id, and the names of the columns of its format; the table of all formats is in read.py.
"""

import re
from dataclasses import replace
from itertools import chain

from alignment.data.rows.fields import (
    ROLES,
    TEXT_ONLY,
    UNANSWERABLE,
    BadRow,
    as_chatml,
    as_flag,
    flag_field,
    is_given,
    list_field,
    messages_field,
    number_field,
    object_field,
    prompt_field,
    reply_field,
    reply_message,
    require_weight,
    text_field,
    tools_field,
    turn_weights,
)
from alignment.data.rows.records import (
    ALL_TIED,
    EQUAL_PAIR,
    TIED,
    Columns,
    Comparison,
    Demonstration,
    LabeledResponse,
    Message,
    Messages,
    Prompt,
    Ranking,
    Record,
    SkippedRow,
    Steps,
    Text,
    is_plain,
)

HUMAN_TURN = "\n\nHuman:"
ASSISTANT_TURN = "\n\nAssistant:"
TURNS = re.compile(r"\n\n(Human|Assistant):")
NO_HISTORY = "earlier turns in a column of their own are not read; write the row as messages"
# Names that our columns have elsewhere
PROMPT_NAMES = (
    "question",
    "query",
    "problem",
    "instruction",
    "inputs",
    "input",
    "post",
    "context_messages",
    "messages",
)
ANSWER_NAMES = ("answer", "response", "output", "solution", "targets", "target", "summary", "label")
ALONE = "an assistant message alone has no prompt"
PLAIN_PROMPT_REPLY = (
    "holds tool calls or reasoning, for which a plain text prompt has no place; "
    "data.as_messages=true makes messages of it"
)
EXPLICIT = ("prompt", "conversations", "instruction")  # columns that hold a prompt

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


# Prompts


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """Alpaca's prompt text for an instruction and its optional input."""
    return (ALPACA_INPUT if context.strip() else ALPACA_PLAIN).format(instruction=instruction, input=context)


def instruction_prompt(row: Columns) -> str | Messages:
    """Alpaca's prompt for `instruction` and `input`; messages if there are `system` or earlier turns in `history`."""
    instruction = text_field(row, "instruction")
    context = text_field({"input": "", **row}, "input", may_be_empty=True)
    question = f"{instruction}\n{context}" if context.strip() else instruction
    if row.get("history"):
        turns = list_field(row, "history")
        if not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
            raise BadRow("history", "must be a list of pairs, what the user said and the reply")
        return messages_field({"history": [*chain.from_iterable(turns), question]}, "history")
    if "system" not in row:
        return alpaca_prompt(instruction, context)
    return [Message(role="user", content=question)]


def prompt_in(row: Columns, column: str) -> str | Messages:
    """The prompt in a column; of `instruction` with its input."""
    return instruction_prompt(row) if column == "instruction" else prompt_field(row, column)


def explicit_prompt(row: Columns) -> str | Messages:
    """The prompt of a row that has one of `EXPLICIT`."""
    if row.get("prompt") is not None:
        return prompt_field(row, "prompt")
    return prompt_in(row, "conversations" if "conversations" in row else "instruction")


def parse_prompt_column(row: Columns, row_id: str, column: str) -> Prompt:
    """A prompt; the other columns are kept."""
    extra = {name: value for name, value in row.items() if name != column or column == "instruction"}
    return Prompt(prompt_in(row, column), extra, row_id)


def parse_pair_prompt(row: Columns, row_id: str, *_: str) -> Prompt:
    """The prompt two responses share; they stay in `extra`."""
    return Prompt(parse_comparison(row, row_id).prompt, dict(row), row_id)


def parse_first_turn(row: Columns, row_id: str, column: str) -> Prompt:
    """The first of several questions of a user, which stay in `extra` (MT-Bench)."""
    return Prompt(text_field({column: list_field(row, column)[0]}, column), dict(row), row_id)


# Texts and demonstrations


def parse_text(row: Columns, row_id: str, column: str) -> Text:
    """A document."""
    return Text(text_field(row, column), row_id)


def parse_dialogue(row: Columns, row_id: str, key: str) -> Demonstration:
    """A dialogue whose assistant turns are imitated, those with weight 0 left out."""
    messages = messages_field(row, key)
    weights = turn_weights(row, key)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    counting = [index for index in replies if weights[index] is not False]
    if not counting:
        answer = next((name for name in ANSWER_NAMES if row.get(name)), None)
        way = f"; data.columns.prompt={key} data.columns.completion={answer} names one" if answer else ""
        raise BadRow(key, f"no message of the assistant counts{way}", "there is none, or all have weight 0")
    last = counting[-1]  # what follows it is not trained on
    if last == 0:
        raise BadRow(key, ALONE)
    prompt = messages[:last]
    response = messages[last]["content"]
    if len(counting) == 1 and is_plain(messages[last]):
        return Demonstration(prompt, response, row_id)
    trained = tuple(index in counting for index in replies if index <= last)
    return Demonstration(prompt, response, row_id, messages[: last + 1], None if all(trained) else trained)


def unread_turns(row: Columns, key: str) -> set[str]:
    """The name by which turns after the last reply of a dialogue are counted, which nothing imitates."""
    last = as_chatml(list_field(row, key))[-1]
    return set() if ROLES[last["role"]] == "assistant" else {f"{key} after the last reply"}


def _dialogue(row: Columns, key: str) -> Messages:
    """The messages under `key`, the last one the assistant's and not the first."""
    messages = messages_field(row, key)
    if messages[-1]["role"] != "assistant":
        raise BadRow(key, "the last message is not the assistant's")
    if len(messages) == 1:
        raise BadRow(key, ALONE)
    return messages


def parse_demonstration(row: Columns, row_id: str, prompt: str, response: str) -> Demonstration:
    """A prompt, or an instruction, and one reply."""
    return _answered(prompt_in(row, prompt), reply_message(row, response), response, row_id)


def parse_chosen_side(row: Columns, row_id: str, *_: str) -> Demonstration:
    """The chosen response of a pair, one of which is better."""
    if row.get(TIED):
        raise SkippedRow(ALL_TIED)
    pair = parse_comparison(row, row_id)
    reply = Message(role="assistant", content=pair.chosen) if pair.messages is None else pair.messages[0]
    return _answered(pair.prompt, reply, "chosen", row_id)


def _answered(prompt: str | Messages, reply: Message, key: str, row_id: str) -> Demonstration:
    """A demonstration of one reply; one with tool calls or reasoning is kept as a message."""
    if is_plain(reply):
        return Demonstration(prompt, reply["content"], row_id)
    if isinstance(prompt, str):
        raise BadRow(key, PLAIN_PROMPT_REPLY)
    before = tuple(False for message in prompt if message["role"] == "assistant")
    return Demonstration(prompt, reply["content"], row_id, [*prompt, reply], (*before, True) if before else None)


def with_reasoning(record: Record, row: Columns) -> Record:
    """The demonstration with the thoughts before its last reply, which the row has in a column of their own."""
    thoughts = row.get("reasoning")
    if isinstance(thoughts, list) and len(thoughts) == 1:
        thoughts = thoughts[0]
    text = text_field({"reasoning": thoughts}, "reasoning", may_be_empty=True)
    if not text.strip() or not isinstance(record, Demonstration):
        return record
    if record.messages is None:
        reply = Message(role="assistant", content=record.response, reasoning_content=text)
        return _answered(record.prompt, reply, "reasoning", record.row_id)
    *before, last = record.messages
    if "reasoning_content" in last:
        raise BadRow("reasoning", "stands in the reply too; leave one of the two out")
    return replace(record, messages=[*before, {**last, "reasoning_content": text}])


# Pairs


def parse_comparison(row: Columns, row_id: str, *_: str) -> Comparison:
    """A pair of responses, perhaps equal; without a prompt HH-RLHF's two dialogues differing in the last turn only."""
    margin = number_field(row, "margin")
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list):
        prompt, *replies = _message_pair(row)
    elif any(row.get(key) is not None for key in EXPLICIT):
        prompt, *replies = explicit_prompt(row), reply_message(row, "chosen"), reply_message(row, "rejected")
    elif "prompt" in row and ASSISTANT_TURN not in text_field(row, "chosen"):
        raise BadRow("prompt", "is null")
    else:
        prompt, chosen = _split_dialogue(row, "chosen")
        other, rejected = _split_dialogue(row, "rejected")
        if prompt != other:
            raise BadRow("rejected", "the dialogue before the last assistant turn differs from chosen's")
        return Comparison(prompt, chosen, rejected, margin, row_id)
    chosen, rejected = replies
    messages = None if is_plain(chosen) and is_plain(rejected) else (chosen, rejected)
    if messages and isinstance(prompt, str):
        raise BadRow("chosen", PLAIN_PROMPT_REPLY)
    return Comparison(prompt, chosen["content"], rejected["content"], margin, row_id, messages=messages)


def parse_pair(row: Columns, row_id: str, *_: str) -> Comparison:
    """A pair of two different responses; tool calls and reasoning count as a difference."""
    if row.get(TIED):
        raise SkippedRow(ALL_TIED)
    pair = parse_comparison(row, row_id)
    if pair.chosen == pair.rejected and (pair.messages is None or pair.messages[0] == pair.messages[1]):
        raise SkippedRow(EQUAL_PAIR)
    return pair


def parse_text_pair(row: Columns, row_id: str) -> Comparison:
    """A pair of two different texts, for rows that have no place for more."""
    pair = parse_pair(row, row_id)
    if pair.messages is not None:
        raise BadRow("chosen", TEXT_ONLY)
    return pair


def _split_dialogue(row: Columns, key: str) -> tuple[str, str]:
    """A plain dialogue cut after its last assistant header: (prompt with header, response), which join to the text."""
    text = "" if isinstance(row.get(key), dict) else text_field(row, key)
    head, header, response = text.rpartition(ASSISTANT_TURN)
    if not header:
        way = next((f"; data.columns.prompt={name} names one" for name in PROMPT_NAMES if row.get(name)), "")
        raise BadRow(key, f"no prompt column{way}, and no {ASSISTANT_TURN!r} turn to split at")
    if HUMAN_TURN in response:
        raise BadRow(key, "ends with a human turn")
    if not response.strip():
        raise BadRow(key, "the last assistant turn is empty")
    return head + header, response


def _message_pair(row: Columns) -> tuple[str | Messages, Message, Message]:
    """Message lists: the replies alone, after an explicit prompt, or whole dialogues with the prompt in them."""
    pair = {key: messages_field(row, key) for key in ("chosen", "rejected")}
    for key in pair:
        require_weight(row, key)
    explicit = next((key for key in EXPLICIT if is_given(row.get(key))), None)
    both = enumerate(zip(pair["chosen"], pair["rejected"], strict=False))
    shared = next((index for index, (one, other) in both if one != other), min(map(len, pair.values())) - 1)
    before = pair["chosen"][:shared]
    if explicit is not None:
        prompt = explicit_prompt(row)
        if isinstance(prompt, str):  # plain text before a message list is what the user said
            prompt = [Message(role="user", content=prompt)]
        dialogues = bool(before) and before[0]["role"] != "assistant"  # else completions, which may begin alike
        prompt = _joint_prompt(row, explicit, prompt, before) if dialogues else [*prompt, *before]
    elif shared == 0:
        raise BadRow("rejected", "shares no first message with chosen, so there is no prompt")
    else:
        prompt = before
    prompt = prompt_field({"prompt": prompt}, "prompt")
    pair = {key: messages[shared:] for key, messages in pair.items()}
    return prompt, reply_message(pair, "chosen"), reply_message(pair, "rejected")


def _joint_prompt(row: Columns, key: str, prompt: Messages, before: Messages) -> Messages:
    """The prompt that a row has twice, in a column and as the beginning of its dialogues: the longer of the two.

    The column may hold as text the words of one message, or of all of them as they were rendered for a model.
    """
    column = _said(prompt)
    shared = _said(before)
    if set(column) <= set(shared):
        return before
    if column[-len(shared) :] == shared:
        return prompt
    text = row[key]
    if isinstance(text, str) and all(words in text for _, words in shared):
        return before
    raise BadRow(key, "contradicts the messages that chosen and rejected begin with; leave one of the two out")


def _said(messages: Messages) -> list[tuple[str, str]]:
    """Who says what, without blanks around it."""
    return [(message["role"], message["content"].strip()) for message in messages]


# Labels


def parse_labeled(row: Columns, row_id: str, prompt: str, response: str, label: str) -> LabeledResponse:
    """A response that is desirable or not (KTO's data)."""
    return LabeledResponse(prompt_in(row, prompt), reply_field(row, response), flag_field(row, label), row_id)


def parse_labeled_dialogue(row: Columns, row_id: str, key: str, label: str) -> LabeledResponse:
    """A dialogue whose last message the label judges."""
    messages = _dialogue(row, key)
    require_weight(row, key)
    return LabeledResponse(messages[:-1], reply_field({key: messages[-1]}, key), flag_field(row, label), row_id)


def parse_labeled_pair(row: Columns, row_id: str, *_: str) -> list[Record]:
    """A pair as two labeled responses: the chosen one desirable, the rejected one not."""
    pair = parse_text_pair(row, row_id)
    return [
        LabeledResponse(pair.prompt, pair.chosen, True, f"{row_id}[chosen]"),
        LabeledResponse(pair.prompt, pair.rejected, False, f"{row_id}[rejected]"),
    ]


# Records of any kind


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


def add_template_variables(records: list[Record], row: Columns) -> None:
    """Hand the row's `chat_template_kwargs` to the template by the first message; a null is as good as none (Arrow)."""
    given = object_field(row, "chat_template_kwargs")
    for prompt in (getattr(record, "prompt", "") for record in records):
        if isinstance(prompt, list):
            prompt[0]["chat_template_kwargs"] = {name: value for name, value in given.items() if value is not None}


def complete(record: Record, row: Columns) -> Record:
    """The record with what its row says beside the columns of its format: tools and the system message of a dialogue.

    What a record cannot express, and training would leave out, is refused.
    """
    if isinstance(record, Demonstration):  # KTO's rows are none where their mark is false
        for key in ("label", "kto_tag"):
            if as_flag(row.get(key)) is False:
                raise BadRow(key, "false marks an undesirable response (KTO's rows), which must not be imitated")
    if isinstance(record, Text) or (isinstance(record, Prompt) and isinstance(record.prompt, str)):
        return record
    whole = isinstance(record, Demonstration) and record.messages is not None
    if not whole and isinstance(record.prompt, list) and record.prompt[-1]["role"] == "assistant":
        raise BadRow("prompt", UNANSWERABLE)
    if row.get("history") and ("instruction" not in row or row.keys() & {"prompt", "messages", "conversations"}):
        raise BadRow("history", NO_HISTORY)
    if tools := tools_field(row):
        if isinstance(record.prompt, str) or isinstance(record, Steps):
            raise BadRow("tools", "a plain text prompt has no place for tool definitions; write the row as messages")
        record = replace(record, tools=tools)
    system = "" if row.get("system") is None else text_field(row, "system", may_be_empty=True)
    if not system.strip():
        return record
    if isinstance(record.prompt, str):
        raise BadRow(
            "system", "a plain text prompt has no place for it; write the row as messages, or set data.as_messages=true"
        )
    if record.prompt[0]["role"] == "system":
        if record.prompt[0]["content"] != system:
            raise BadRow("system", "differs from the system message that the dialogue begins with")
        return record
    first: Message = {"role": "system", "content": system}
    if isinstance(record, Demonstration) and record.messages is not None:
        record = replace(record, messages=[first, *record.messages])
    return replace(record, prompt=[first, *record.prompt])

"""The command `alignment chat`: a dialogue with a model in the terminal, its words shown as they come."""

import queue
import sys

from alignment.commands.serve import ServeConfig, load_served
from alignment.data.rows.records import Message, Messages
from alignment.errors import UserError
from alignment.generation.requests import TokenEvent
from alignment.loading import load_tokenizer
from alignment.serving.app import ModelThread, ServedModel
from alignment.serving.protocol import BadRequest, ChatBody

HELP = "an empty line is skipped, /new begins another dialogue, Ctrl-C stops a reply, Ctrl-D ends"


def chat_in_terminal(config: ServeConfig, asked: ChatBody, system: str | None) -> None:
    """Read messages and write replies until the input ends.

    Args:
        asked: the sampling of replies; without a seed, other replies each time.
        system: the system message before the dialogue.
    """
    if load_tokenizer(config.model, config.chat_template).chat_template is None:
        raise UserError(
            f"{config.model}: the model has no chat template; choose one by --chat-template (chatml, llama3, ... or a "
            "file), or continue texts by `alignment generate`"
        )
    start: Messages = [] if system is None else [Message(role="system", content=system)]
    with load_served(config) as (served, thread):
        print(HELP, file=sys.stderr)
        messages = start
        while True:
            try:
                said = input("> ")
            except EOFError:
                return
            if said.strip() == "/new":
                messages = start
            elif said.strip():
                dialogue: Messages = [*messages, Message(role="user", content=said)]
                try:
                    answer = reply(served, thread, dialogue, asked)
                    messages = [*dialogue, Message(role="assistant", content=answer)]
                except BadRequest as error:
                    print(f"{error}; /new begins another dialogue", file=sys.stderr)


def reply(served: ServedModel, thread: ModelThread, messages: Messages, asked: ChatBody) -> str:
    """Write a reply as it comes, and return it; Ctrl-C ends it where it is."""
    arrived: queue.SimpleQueue[TokenEvent | BadRequest] = queue.SimpleQueue()
    cancel = thread.submit(served.requests(asked, [served.prompt_ids(messages)]), [arrived.put])
    text = ""
    try:
        while True:
            event = arrived.get()
            if isinstance(event, BadRequest):
                raise event
            print(event.text, end="", flush=True)
            text += event.text
            if event.finish is not None:
                break
    except KeyboardInterrupt:
        cancel()
    print()
    return text

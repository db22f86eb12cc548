"""The command `alignment chat`: a dialogue with a model in the terminal, its words shown as they come."""

import queue
import sys
from dataclasses import dataclass

from alignment.commands.serve import ServeConfig, load_served
from alignment.data.rows.records import Message, Messages
from alignment.errors import UserError
from alignment.generation.requests import TokenEvent
from alignment.loading import load_tokenizer
from alignment.serving.app import ModelThread, ServedModel
from alignment.serving.protocol import BadRequest, ChatBody

HELP = "an empty line is skipped, /new begins another dialogue, Ctrl-C stops a reply, Ctrl-D ends"


@dataclass(frozen=True)
class ChatSettings:
    """The sampling of replies, and the system message before the dialogue; without a seed, other replies each time."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    system: str | None = None


def chat_in_terminal(config: ServeConfig, settings: ChatSettings) -> None:
    """Read messages and write replies until the input ends."""
    if load_tokenizer(config.model, config.chat_template).chat_template is None:
        raise UserError(
            f"{config.model}: the model has no chat template; choose one by --chat-template (chatml, llama3, ... or a file), "
            "or continue texts by `alignment generate`"
        )
    start: Messages = [] if settings.system is None else [Message(role="system", content=settings.system)]
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
                asked: Messages = [*messages, Message(role="user", content=said)]
                try:
                    answer = reply(served, thread, asked, settings)
                    messages = [*asked, Message(role="assistant", content=answer)]
                except BadRequest as error:
                    print(f"{error}; /new begins another dialogue", file=sys.stderr)


def reply(served: ServedModel, thread: ModelThread, messages: Messages, settings: ChatSettings) -> str:
    """Write a reply as it comes, and return it; Ctrl-C ends it where it is."""
    asked = ChatBody(temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed)
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

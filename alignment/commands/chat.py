"""The command `alignment chat`: a dialogue with a model in the terminal, its words shown as they come."""

import secrets
import sys
from dataclasses import replace
from functools import partial

from alignment.adapters import load_adapter
from alignment.data.rows.records import Message, Messages
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary, known_tokens
from alignment.errors import UserError
from alignment.generation import DecodingRequest, SamplingConfig
from alignment.generation.engine import DecodingEngine
from alignment.generation.generate import read_prompts
from alignment.loading import Checkpoint, best_device, describe_stop_tokens, find_directory, load_model, load_tokenizer
from alignment.models.model import Model, start_token_of
from alignment.models.weights_config import WeightsConfig

HELP = "an empty line is skipped, /new begins another dialogue, Ctrl-C stops a reply, Ctrl-D ends"


def chat_in_terminal(
    name: str,
    adapter: str | None,
    chat_template: str | None,
    weights: WeightsConfig,
    sampling: SamplingConfig,
    *,
    seed: int | None,
    system: str | None,
) -> None:
    """Read messages and write replies until the input ends.

    Args:
        name, adapter: directories or Hub names.
        sampling: of replies; its `max_new_tokens` is lowered to what the model's positions leave.
        seed: of each reply; None: other replies each time.
        system: the system message before the dialogue.
    """
    tokenizer, model = load_chat_model(name, adapter, chat_template, weights)
    start_token = start_token_of(model)
    make_engine = partial(
        DecodingEngine,
        model,
        max_rows=1,
        start_token=start_token,
        tokenizer=tokenizer,
        vocabulary=known_tokens(tokenizer),
    )
    positions = model.spec.max_positions - model.virtual_tokens()
    print(HELP, file=sys.stderr)
    start: Messages = [] if system is None else [Message(role="system", content=system)]
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
            drawn = replace(sampling, seed=secrets.randbits(48) if seed is None else seed)
            try:
                [prompt] = read_prompts(tokenizer, [dialogue], start_token)
                room = positions - (len(prompt) if start_token is None else 0)  # an encoder's prompt takes none
                drawn = replace(drawn, max_new_tokens=max(1, min(drawn.max_new_tokens, room)))
                request = DecodingRequest(prompt, drawn, stop_ids=sorted(stop_token_ids(tokenizer)))
                answer = reply(make_engine(), request)
                messages = [*dialogue, Message(role="assistant", content=answer)]
            except UserError as error:
                print(f"{error}; /new begins another dialogue", file=sys.stderr)


def load_chat_model(
    name: str, adapter: str | None, chat_template: str | None, weights: WeightsConfig
) -> tuple[Tokenizer, Model]:
    """Tokenizer and model of a directory or Hub name; UserError where there is no chat template."""
    checkpoint = Checkpoint(name)
    tokenizer = load_tokenizer(checkpoint, chat_template)
    if tokenizer.chat_template is None:
        raise UserError(
            f"{name}: the model has no chat template; choose one by --chat-template (chatml, llama3, ... or a file), "
            "or continue texts by `alignment generate`"
        )
    model = load_model(checkpoint, weights.dtype, best_device(), quantize=weights.quantize)
    if adapter is not None:
        model = load_adapter(model, find_directory(adapter)).eval()
    check_vocabulary(tokenizer, model.spec.vocabulary)
    print(describe_stop_tokens(checkpoint, tokenizer), file=sys.stderr)
    return tokenizer, model


def reply(engine: DecodingEngine, request: DecodingRequest) -> str:
    """Write a reply as it comes, and return it; Ctrl-C ends it where it is."""
    text = ""
    engine.add(request)
    try:
        while engine.unfinished:
            for event in engine.step():
                if event.finish == "error":
                    raise UserError(event.text)
                print(event.text, end="", flush=True)
                text += event.text
    except KeyboardInterrupt:
        pass
    print()
    return text

"""Chat templates by name, of our own writing in the formats the field uses, and the choice of one for a tokenizer."""

import copy
import os
from pathlib import Path

from alignment.data.text.templates import chat_format
from alignment.data.tokenizers.tokenizer import Tokenizer, control_strings
from alignment.errors import UserError, suggest

FOLDER = Path(__file__).parent / "chat_templates"
# The tokens that a template needs in the vocabulary, beside the tokenizer's own BOS and EOS.
NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "llama2": (),
    "mistral": (),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
    "plain": (),
}


def read_chat_template(chosen: str) -> str:
    """The text of a chat template: of a built-in name (`NAMED`), of a file, or the Jinja text itself."""
    if chosen in NAMED:
        return (FOLDER / f"{chosen}.jinja").read_text(encoding="utf-8")
    if "{{" in chosen or "{%" in chosen:
        return chosen
    path = Path(os.path.expanduser(chosen))
    if not path.is_file():
        raise UserError(
            f"chat_template {chosen}: no such file, and no built-in template of that name; {suggest(chosen, NAMED)}; "
            f"built in: {', '.join(NAMED)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template {chosen}: cannot be read as text: {error}") from error


def with_chat_template(tokenizer: Tokenizer, chosen: str | None) -> Tokenizer:
    """A copy of the tokenizer with another chat template, which is saved with it; None: the tokenizer as it is."""
    if chosen is None:
        return tokenizer
    template, name = read_chat_template(chosen), str(tokenizer.name_or_path or "the tokenizer")
    if missing := _missing_tokens(tokenizer, chosen):
        free = ", ".join(each for each, needed in NAMED.items() if not needed)
        raise UserError(
            f"chat_template {chosen}: {name} has no special token {', '.join(missing)}. `alignment export --model {name} "
            f"--chat-template {chosen} --output DIR` writes the model with these tokens added, to start from; or take a "
            f"template that needs none of its own: {free}"
        )
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    if chat_format(changed).end is None:
        raise UserError(
            f"chat_template {chosen if len(chosen) < 100 else chosen[:100] + '...'}: with {name} it ends the assistant's "
            "turn with no control token of the vocabulary, so nothing could learn to stop; write {{ eos_token }} or "
            "another special token there"
        )
    return changed


def with_template_tokens(tokenizer: Tokenizer, chosen: str) -> Tokenizer:
    """The tokenizer, itself changed, with another chat template and the special tokens that it needs."""
    tokenizer.add_tokens(_missing_tokens(tokenizer, chosen), special_tokens=True)
    return with_chat_template(tokenizer, chosen)


def _missing_tokens(tokenizer: Tokenizer, chosen: str) -> list[str]:
    """Special tokens that a built-in template needs and the tokenizer lacks."""
    return [token for token in NAMED.get(chosen, ()) if token not in control_strings(tokenizer)]

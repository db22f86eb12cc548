"""`alignment chat`: replies are what `generate` gives for the dialogue so far."""

import re
from pathlib import Path

import pytest

from alignment import generate, load_model, load_tokenizer
from alignment.cli import main
from alignment.commands.chat import HELP

CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def directory(tmp_path, write_checkpoint) -> Path:
    return Path(write_checkpoint(tmp_path / "model", "llama"))


@pytest.fixture
def say(monkeypatch):
    """Lets these lines be typed; then the input ends."""

    def type_lines(*lines: str) -> None:
        typed = iter(lines)

        def read(prompt: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return type_lines


def chat(directory, *arguments) -> int:
    return main(["chat", str(directory), "--temperature", "0", "--max-tokens", "8", *arguments])


def test_replies_go_on_from_the_dialogue_and_new_begins_another(directory, say, capsys):
    (directory / "chat_template.jinja").write_text(CHAT)
    model, tokenizer = load_model(str(directory)), load_tokenizer(str(directory))
    dialogue: list[dict[str, str]] = []
    expected = []
    for words in ("Where is the spa?", "And the pool?"):
        dialogue.append({"role": "user", "content": words})
        expected += generate(model, tokenizer, [dialogue], temperature=0, max_new_tokens=8).texts
        dialogue.append({"role": "assistant", "content": expected[-1]})
    say("Where is the spa?", "  ", "And the pool?", "/new", "Where is the spa?")
    assert chat(directory) == 0
    out, err = capsys.readouterr()
    shown = "".join(f"{text}\n" for text in [*expected, expected[0]])
    assert out == re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", shown)
    assert HELP in err


def test_a_missing_template_and_bad_settings_are_the_users_errors(directory, capsys):
    assert chat(directory) == 2
    assert "--chat-template" in capsys.readouterr().err
    assert chat(directory, "--top-p", "1.5") == 2
    assert "top_p must be at most 1" in capsys.readouterr().err

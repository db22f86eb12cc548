"""Small tokenizers and file writers for the data tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment.data.tokenizers.train import train_bpe

CORPUS = [
    "The price is $46 today and $46 tomorrow. Price: $4 or $46.",
    "Human: hello there. Assistant: hello to you, friend. user assistant system",
    "the cat sat on the mat, and the other cat sat on the other mat",
] * 20

TURNS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "chatml with bos": "{{ bos_token }}" + CHATML,
    # trims what people wrote, and writes the BOS itself
    "trimming": "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    # drops the thoughts of earlier turns, as reasoning templates do
    "forgetful": "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # no control token at the end of a turn
    "endless": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
    # no header for the assistant, but blanks around its words, as in Llama 2
    "instruct": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "deaf": "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "shouting": "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}",
    "cutting": "{% for m in messages %}{{ m.content[1:] }} {{ m.content }}<|im_end|>{% endfor %}",
    "refusing": "{{ raise_exception('roles must alternate') }}",
    "broken": "{% for m in messages %}{{ m.content }}",
}


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates by what they do."""
    return TEMPLATES


@pytest.fixture(scope="session")
def bpe():
    """Byte-level BPE with BOS and no template; " $" is one token."""
    return train_bpe(CORPUS, 400)


@pytest.fixture(scope="session")
def bytes_only():
    """A tokenizer without merges: one token per ASCII character."""
    return train_bpe(["~"], 259)


@pytest.fixture
def chatml():
    """The same with turn markers and the stock ChatML template."""
    return train_bpe(CORPUS, 400, TURNS, CHATML)


@pytest.fixture(scope="session")
def metaspace():
    """A SentencePiece-like tokenizer: a blank is put before a text's first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "one\ntwo", "</s>"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (objects, or bytes as they are) one per line and returns the path."""

    def write(*rows: object, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(lines) + (b"\n" if lines else b""))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where there is none."""
    folder = Path(os.environ.get("ALIGNMENT_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder

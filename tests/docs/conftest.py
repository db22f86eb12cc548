"""The files that the blocks of a page find in their folder."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import FAMILIES, roughen, write_lines

FLOORS = {"spa": "two", "gym": "three", "pool": "four", "bar": "nine", "lounge": "five", "garden": "one"}
QUESTIONS = ("Where is the {}?", "Which floor is the {} on?", "How do I get to the {}?", "Can you show me the {}?")


def rows() -> dict[str, list[dict[str, str]]]:
    """Rows of each kind by the name of their file."""
    asked = [(question.format(place), place, floor) for question in QUESTIONS for place, floor in FLOORS.items()]
    answers = [(prompt, f"The {place} is on floor {floor}.", floor) for prompt, place, floor in asked]
    return {
        "text": [{"text": f"{prompt} {answer} Enjoy your stay."} for prompt, answer, _ in answers],
        "demonstrations": [{"prompt": prompt, "completion": answer} for prompt, answer, _ in answers],
        "comparisons": [
            {"prompt": prompt, "chosen": answer, "rejected": "I do not know, sorry."} for prompt, answer, _ in answers
        ],
        "prompts": [{"prompt": prompt, "answer": floor} for prompt, _, floor in answers],
    }


@pytest.fixture(scope="session")
def starting_folder(tmp_path_factory) -> Path:
    """`base/` and `reward/`, tiny Llamas with a chat template, and `text`, `demonstrations`, `comparisons`, `prompts` .jsonl."""
    from alignment.data.text.templates import read_chat_template
    from alignment.data.tokenizers.tokenizer import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe
    from alignment.models.build import build_language_model, build_scalar_model
    from alignment.models.huggingface.checkpoint import save_model

    folder = tmp_path_factory.mktemp("page")
    for name, lines in rows().items():
        write_lines(folder / f"{name}.jsonl", lines)
    tokens = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
    texts = [line["text"] for line in rows()["text"]]
    tokenizer = train_bpe(texts, 400, tokens, read_chat_template("chatml"))
    config = FAMILIES["llama"] | {
        "max_position_embeddings": 2048, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    for name, build in (("base", build_language_model), ("reward", build_scalar_model)):
        torch.manual_seed(0)
        (folder / name).mkdir()
        save_model(roughen(build(config)), folder / name)
        save_tokenizer(tokenizer, folder / name)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, starting_folder) -> Path:
    """A page's own copy of the starting folder, entered."""
    shutil.copytree(starting_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""Chat templates by name: what they write, where they are refused, and that a trained model keeps its own."""

from dataclasses import replace

import pytest

from alignment.algorithms.sft import SFTConfig
from alignment.data.text import chat
from alignment.data.text.templates import FOLDER, NAMED, read_chat_template, with_chat_template
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
from alignment.loading import load_tokenizer
from tests.data.text.published import spans, text_of
from tests.examples import chat_ids

DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no more"},
]
SPACED = {"llama2": (" ", " "), "mistral": (" ", ""), "vicuna": (" ", ""), "plain": (" ", "")}  # around a reply


@pytest.fixture(scope="module")
def words():
    tokens = dict.fromkeys(["<s>", "</s>", "<pad>", *(token for needed in NAMED.values() for token in needed)])
    return train_bpe(["hello there, be kind; no more user assistant system"] * 5, 400, tuple(tokens))


def test_every_file_has_a_name_and_every_name_a_file():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_trains_the_replies_and_its_prompts_begin_the_dialogue(name, words):
    chosen = with_chat_template(words, name)
    ids, mask = chat_ids(chosen, DIALOGUE)
    end = chosen.decode([chat.end_token_id(chosen)])
    before, after = SPACED.get(name, ("", ""))
    assert spans(chosen, ids, mask) == [before + words + after + end for words in ("hello there", "no more")]
    prompt = chat.prompt_ids(chosen, DIALOGUE[:-1])
    assert ids[: len(prompt)] == prompt
    assert words.chat_template is None  # the given one is left as it was


@pytest.mark.parametrize(("name", "published"), [("llama3", "llama3"), ("chatml", "qwen3_vl"), ("gemma", "gemma")])
def test_a_named_template_writes_what_the_published_one_writes(name, published, words):
    """On a dialogue that both can write; Gemma's has no system message."""
    messages = DIALOGUE[1:] if name == "gemma" else DIALOGUE
    written = [
        words.apply_chat_template(messages, chat_template=text, tokenize=False, add_generation_prompt=False)
        for text in (read_chat_template(name), text_of(published))
    ]
    assert written[0] == written[1]


def test_tokens_that_are_missing_are_named_with_the_ways_out():
    plain = train_bpe(["hello"], 300)
    plain.name_or_path = "models/gpt2"
    with pytest.raises(
        UserError, match=r"models/gpt2 has no special token <\|im_start\|>, <\|im_end\|>.*export.*zephyr"
    ):
        with_chat_template(plain, "chatml")


def test_an_unknown_name_gives_the_nearest_and_the_list(words):
    with pytest.raises(UserError, match=r"chatlm: no such file.*chatml.*built in: chatml, qwen, llama3"):
        with_chat_template(words, "chatlm")


def test_a_file_is_a_template_too_and_must_end_a_turn(words, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}")
    assert with_chat_template(words, str(path)).chat_template == path.read_text()
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(UserError, match="no control token of the vocabulary"):
        with_chat_template(words, str(path))


def test_a_trained_model_keeps_the_template_it_was_trained_with(checkpoints, make_stage, tmp_path):
    from transformers import AutoTokenizer

    run, config = make_stage("sft", checkpoints["llama"], tmp_path, chat_template="zephyr")
    assert isinstance(config, SFTConfig)
    model = run(replace(config, data=replace(config.data, as_messages=True)))
    assert (model / "chat_template.jinja").read_text() == read_chat_template("zephyr")
    assert load_tokenizer(str(model)).chat_template == read_chat_template("zephyr")
    assert AutoTokenizer.from_pretrained(model).chat_template == read_chat_template("zephyr")

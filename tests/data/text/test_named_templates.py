"""Chat templates by name: what they write, where they are refused, and that a trained model keeps its own."""

import json
from copy import copy
from dataclasses import replace

import pytest

from alignment import load_tokenizer
from alignment.algorithms.sft import SFTConfig
from alignment.data.text import chat
from alignment.data.text.templates import FOLDER, NAMED, read_chat_template, with_chat_template
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
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
def test_a_named_template_trains_replies_and_begins_the_dialogue(name, words):
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


TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]
# For rows with tools, without which it fails, in another format with another end
WITH_TOOLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
)  # fmt: skip


def test_tools_choose_one_of_several_named_templates(words):
    """Rows with tools and without in one call have what each template alone gives them."""
    named, plain, tooled = copy(words), copy(words), copy(words)
    plain.chat_template, tooled.chat_template = read_chat_template("chatml"), WITH_TOOLS
    named.chat_template = {"tool_use": WITH_TOOLS, "rag": "{{ x }}", "default": plain.chat_template}
    tools = [TOOLS, None, TOOLS]
    alone = [tooled, plain, tooled]
    for each, row_tools in zip(alone, tools, strict=True):
        assert chat_ids(named, DIALOGUE, tools=row_tools) == chat_ids(each, DIALOGUE, tools=row_tools)
    prompts = [DIALOGUE[:2]] * 3
    expected = [chat.prompt_ids(each, prompts[0], row_tools) for each, row_tools in zip(alone, tools, strict=True)]
    assert chat.encode_each_prompt(named, prompts, tools) == expected
    replies = chat.encode_each_response(named, ["no more"] * 3, prompts, tools=tools)
    assert [named.decode(reply.ids) for reply in replies] == [
        "no more<|eot_id|>",
        "no more<|im_end|>",
        "no more<|eot_id|>",
    ]
    assert chat.stop_token_ids(named) == chat.stop_token_ids(plain) | chat.stop_token_ids(tooled)
    theirs = named.apply_chat_template(prompts[0], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert named.decode(expected[0]).removeprefix("<s>") == theirs


@pytest.mark.parametrize("form", ["saved", "list"])
def test_named_templates_are_saved_and_read_back(form, words, tmp_path):
    from transformers import AutoTokenizer

    named = copy(words)
    named.chat_template = {"default": read_chat_template("chatml"), "tool_use": WITH_TOOLS}
    save_tokenizer(words if form == "list" else named, tmp_path)
    if form == "list":  # as published before transformers 4.43
        config = tmp_path / "tokenizer_config.json"
        templates = [{"name": name, "template": text} for name, text in named.chat_template.items()]
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": templates}))
        save_tokenizer(load_tokenizer(str(tmp_path)), tmp_path / "again")
        tmp_path /= "again"
    assert load_tokenizer(str(tmp_path)).chat_template == named.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == named.chat_template


def test_a_trained_model_keeps_the_template_it_was_trained_with(checkpoints, make_stage, tmp_path):
    from transformers import AutoTokenizer

    run, config = make_stage("sft", checkpoints["llama"], tmp_path, chat_template="zephyr")
    assert isinstance(config, SFTConfig)
    model = run(replace(config, data=replace(config.data, as_messages=True)))
    assert (model / "chat_template.jinja").read_text() == read_chat_template("zephyr")
    assert load_tokenizer(str(model)).chat_template == read_chat_template("zephyr")
    assert AutoTokenizer.from_pretrained(model).chat_template == read_chat_template("zephyr")

"""Every chat template that trl publishes: what counts in a dialogue of three turns, and where a template is refused."""

import pytest
from jinja2 import TemplateError

from alignment.data.rows.records import Demonstration, choose_turns
from alignment.data.text import chat
from alignment.data.text.chat import OTHER_PROMPT, VARIANT
from alignment.data.text.templates import chat_format
from alignment.data.tokenize import tokenize_demonstrations
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
from tests.data.text.published import CONTROL, NAMES, SUFFIX, has_variant, spans, text_of, tokenizer_of
from tests.examples import chat_ids

DIALOGUE = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
    {"role": "user", "content": "third question"},
    {"role": "assistant", "content": "third answer"},
]
REPLIES = ["first answer", "second answer", "third answer"]

# What a template writes between the header that generation ends with and the reply, where it writes anything.
LEADS = {
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "idefics3": " ",
    "llava_next": " ",
    "muse_glimmer": " to=user<|message|>",
    "nemotron_3_5_lightning": "</think>",
    "nemotron_3_nano": "</think>",
    "nemotron_3_super": "</think>",
    "nemotron_3_ultra": "</think>",
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_5_think": "\n</think>\n\n",
    "qwen3_6": "\n</think>\n\n",
    "qwen3_8": "\n</think>\n\n",
    "smolvlm": " ",
}
REWRITING = {"glm4moe", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}  # earlier turns, but for the variant
UNENDED = {"gptoss"}  # its earlier turns end in a token at which generation does not stop, which must not be learned


@pytest.mark.parametrize("name", NAMES)
def test_published_templates_train_the_replies_and_their_ends(name):
    tokenizer = tokenizer_of(name)
    ids, mask = chat_ids(tokenizer, DIALOGUE)
    end = tokenizer.decode([chat.end_token_id(tokenizer)])
    lead = LEADS.get(name, "")
    expected = [lead + reply + ("" if name in UNENDED else end) for reply in REPLIES[:2]] + [lead + REPLIES[2] + end]
    assert spans(tokenizer, ids, mask) == expected
    if name not in UNENDED:
        ends = [
            token for token, counts, after in zip(ids, mask, [*mask[1:], False], strict=True) if counts and not after
        ]
        assert set(ends) <= chat.stop_token_ids(tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_training_variants_and_other_generation_prompts_are_noted(name):
    tokenizer = tokenizer_of(name)
    row = Demonstration(DIALOGUE[:-1], REPLIES[2], "r1", DIALOGUE)
    [example], counts = tokenize_demonstrations([row], tokenizer, 10_000)
    prompt = chat.prompt_ids(tokenizer, DIALOGUE[:-1])
    prefilled = any(note.startswith("generation opens a reply with") for note in counts.noted)
    assert (OTHER_PROMPT in counts.noted or prefilled) is (example.ids[: len(prompt)] != prompt)
    assert (VARIANT in counts.noted) is (name in REWRITING)


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"a": 1}}}],
}
THOUGHT = {"role": "assistant", "content": "an answer", "reasoning_content": "a thought"}
RESULT = {"role": "tool", "content": "rain"}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a question"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": {}}}]
DIALOGUES = [
    DIALOGUE, [USER, THOUGHT, USER, THOUGHT], [SYSTEM, USER, CALL, RESULT, THOUGHT, USER, DIALOGUE[1]],
    [USER, CALL], [USER, THOUGHT, SYSTEM, USER, CALL, RESULT, RESULT, DIALOGUE[1]], [SYSTEM, USER],
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(REWRITING & {*NAMES}))
@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_our_variant_renders_as_trls(name, dialogue, tools):
    """A dialogue and each beginning of it, with and without the header of a reply."""
    tokenizer = tokenizer_of(name)
    ours, theirs = chat_format(tokenizer).training, text_of(name + SUFFIX)
    assert ours != text_of(name)

    def text(template, count, header):
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": header}
        try:
            return tokenizer.apply_chat_template(dialogue[:count], chat_template=template, **options)
        except TemplateError as error:  # a system message after others, and the like
            return str(error)

    lengths = [count for count in range(1, len(dialogue) + 1) if USER["role"] in {m["role"] for m in dialogue[:count]}]
    for count in lengths:
        assert text(ours, count, False) == text(theirs, count, False)
        assert text(ours, count, True) == text(theirs, count, True)


@pytest.mark.parametrize("name", sorted({*NAMES} - REWRITING))
def test_other_templates_are_their_own_variant(name):
    assert chat_format(tokenizer_of(name)).training == text_of(name)


KEPT = "loop.last or (not loop.last and reasoning_content)"
LAST = "loop.index0 == ns.real_last_index or (loop.index0 != ns.real_last_index and reasoning_content)"
RESPELT = {  # other spellings of the same template
    "comment": ("{%- if tools %}", "{# ours #}{%- if tools %}"),
    "system": ("You may call one or more functions", "You can call functions"),
    "condition": (KEPT, "loop.last or reasoning_content"),
    "index": (KEPT, LAST),
}


@pytest.mark.parametrize("change", RESPELT)
def test_a_variant_is_told_by_what_the_template_does(change):
    """Qwen3's template in other spellings keeps earlier turns as the published one does, after the same note."""
    tokenizer = tokenizer_of("qwen3")
    expected = chat_ids(tokenizer, DIALOGUE)
    old, new = RESPELT[change]
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    if change == "index":
        start = "{%- set ns = namespace("
        tokenizer.chat_template = tokenizer.chat_template.replace(
            start, start + "real_last_index=messages|length - 1, "
        )
    assert tokenizer.chat_template != text_of("qwen3")
    assert chat_ids(tokenizer, DIALOGUE) == expected
    row = Demonstration(DIALOGUE[:-1], REPLIES[2], "r1", DIALOGUE)
    assert VARIANT in tokenize_demonstrations([row], tokenizer, 1000)[1].noted


GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'tool': 'SYSTEM'}.get(m.role, 'CHATBOT') }}_TOKEN|>"
    "{% if m.tool_calls %}<|START_ACTION|>{{ m.tool_calls[0].function | tojson }}<|END_ACTION|>"
    "{% elif m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
WORDED = "<|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
ODD = {  # a template, EOS, and what counts
    "the next role ends": (GLM, "</s>", "{}<|user|>"),
    "a token before EOS": (COHERE, "<|END_OF_TURN_TOKEN|>", WORDED),
    "always opens a turn": (LLAMA3, "</s>", "{}<|eot_id|>"),
}
NAMES_OF_ROLES = [f"<|{name}|>" for name in ("user", "observation", "USER_TOKEN", "SYSTEM_TOKEN", "CHATBOT_TOKEN")]


@pytest.mark.parametrize("case", ODD)
def test_ends_of_odd_templates(case):
    """One turn and whole dialogues count the same, up to a token at which generation stops."""
    template, eos, counting = ODD[case]
    expected = [counting.format(reply) for reply in REPLIES]
    names = [*NAMES_OF_ROLES, *CONTROL.findall(GLM + COHERE + LLAMA3)]
    special = tuple(dict.fromkeys(("<s>", "</s>", "<pad>", *names)))
    tokenizer = train_bpe(["first second third question answer user assistant system get_weather"] * 5, 400, special)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    ids, mask = chat_ids(tokenizer, DIALOGUE)
    assert spans(tokenizer, ids, mask) == expected
    [first], _ = tokenize_demonstrations([Demonstration(DIALOGUE[:1], REPLIES[0], "r1")], tokenizer, 1000)
    assert spans(tokenizer, first.ids, first.mask) == expected[:1]
    assert first.ids == ids[: len(first.ids)]
    written = tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    assert written.startswith(tokenizer.decode(ids[1:]).removesuffix("<|user|>"))  # the BOS is the tokenizer's
    if case == "a token before EOS":
        ids, mask = chat_ids(tokenizer, [USER, CALL, RESULT, DIALOGUE[1]])
        assert spans(tokenizer, ids, mask)[0].endswith("<|END_ACTION|><|END_OF_TURN_TOKEN|>")


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_apart_follows_the_prompt_of_generation(name):
    tokenizer = tokenizer_of(name)
    rows = choose_turns([Demonstration(DIALOGUE[:-1], REPLIES[2], "r1", DIALOGUE)], "each")
    examples, counts = tokenize_demonstrations(rows, tokenizer, 10_000)
    assert len(examples) == 3 and (counts.rows, counts.kept) == (1, 1)
    for number, example in enumerate(examples):
        prompt = chat.prompt_ids(tokenizer, DIALOGUE[: 2 * number + 1])
        if closing := chat_format(tokenizer).closing:  # a reply without reasoning stands in no open block [S1]
            written, prompt = tokenizer.decode(prompt), example.ids[: example.mask.index(True)]
            assert written.startswith(tokenizer.decode(prompt)) and any("generation opens" in n for n in counts.noted)
            assert (closing in tokenizer.decode(example.ids)) is ("<think>" in tokenizer.decode(example.ids))
        assert example.ids[: len(prompt)] == prompt
        assert example.mask == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))
        reply = tokenizer.decode(example.ids[len(prompt) :])
        assert reply.removesuffix(tokenizer.decode(example.ids[-1:])).endswith(REPLIES[number])
        assert example.ids[-1] in chat.stop_token_ids(tokenizer)


def test_the_last_turn_alone():
    rows = choose_turns([Demonstration(DIALOGUE[:-1], REPLIES[2], "r1", DIALOGUE)], "last")
    [example], _ = tokenize_demonstrations(rows, tokenizer_of("qwen3"), 1000)
    tokenizer = tokenizer_of("qwen3")
    assert spans(tokenizer, example.ids, example.mask) == ["<think>\n\n</think>\n\nthird answer<|im_end|>"]


def test_reasoning_dropped_from_earlier_turns_is_refused():
    tokenizer = tokenizer_of("nemotron_3_nano")
    thinking = [{**m, "reasoning_content": "so"} if m["role"] == "assistant" else m for m in DIALOGUE]
    row = Demonstration(thinking[:-1], REPLIES[2], "r1", thinking)
    with pytest.raises(UserError, match=r"nemotron_3_nano rewrites earlier turns .* data.turns=each"):
        tokenize_demonstrations([row], tokenizer, 1000)
    examples, counts = tokenize_demonstrations(choose_turns([row], "each"), tokenizer, 1000)
    assert [tokenizer.decode([i for i, m in zip(e.ids, e.mask, strict=True) if m]) for e in examples] == [
        f"so\n</think>\n{reply}<|im_end|>" for reply in REPLIES
    ]
    assert not counts.noted


MARKED = [name for name in NAMES if has_variant(name) and name not in ("deepseekv3", "deepseek_r1_distill", "glm4moe")]


@pytest.mark.parametrize("name", MARKED)
def test_our_mask_is_that_of_the_templates_generation_markers(name):
    """Blanks after the end token, and what opens a reply at generation already, do not count with us."""
    tokenizer = tokenizer_of(name)
    parts = chat_format(tokenizer).as_parts
    tokenizer.chat_template = text_of(name + SUFFIX)
    messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} if parts else m for m in DIALOGUE]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = spans(tokenizer, theirs["input_ids"], theirs["assistant_masks"])
    ids, mask = chat_ids(tokenizer, DIALOGUE)
    ours = spans(tokenizer, ids, mask)
    assert len(marked) == len(ours) == 3
    for one, other in zip(marked, ours, strict=True):
        assert other in one
        assert "question" not in one


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reply", ["<think>\nwhy\n</think>\n\nfirst", "<think></think>first"])
def test_a_tag_that_generation_opens_stands_once(name, reply):
    """[C3] What the generation prompt and the text of a reply both write is trained once, and noted."""
    tokenizer = tokenizer_of(name)
    prompt = chat.encode_each_prompt(tokenizer, [[{"role": "user", "content": "question"}]])[0]
    [encoded] = chat.encode_each_response(tokenizer, [reply], [[{"role": "user", "content": "question"}]])
    text = tokenizer.decode(prompt + encoded.ids).rpartition("question")[2]
    if name == "qwen3_5_nothink" and "why" in reply:  # an empty block is opened and closed before the reply's own
        assert any("<think>" in note for note in encoded.notes)
    else:
        assert text.count("<think>") == 1 == text.count("first") and ("why" in text) is ("why" in reply)
        assert text.count("</think>") == 1


def wild_templates(data_folder):
    """Texts of the templates in the folder beside the data, and a tokenizer with their control tokens."""
    texts = [path.read_text() for path in sorted((data_folder.parent / "cases" / "wild" / "templates").glob("*.jinja"))]
    names = sorted({string for text in texts for string in CONTROL.findall(text)})
    special = tuple(dict.fromkeys(("<s>", "</s>", "<pad>", *names)))
    return texts, train_bpe(["a question user assistant an answer"] * 5, 400 + len(names), special)


@pytest.mark.real_data
def test_no_template_of_the_wild_leaves_a_block_open_before_a_plain_reply(data_folder):
    """[S1, S4] A row of one turn, of every template that takes one."""
    texts, tokenizer = wild_templates(data_folder)
    if not texts:
        pytest.skip("no templates beside the data folder")
    trained, opened = 0, 0
    for text in texts:
        tokenizer.chat_template = text
        try:
            [example], _ = tokenize_demonstrations([Demonstration([USER], "an answer", "r1")], tokenizer, 10_000)
        except UserError:  # it asks for tools, or takes contents as parts only
            continue
        turn = tokenizer.decode(example.ids).rpartition("a question")[2]
        trained += 1
        opened += turn.count("<think>") > turn.count("</think>")
    assert opened == 0 and trained > 0.9 * len(texts)

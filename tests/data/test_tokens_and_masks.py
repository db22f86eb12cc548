"""H01 to H05 over every kind of row: end tokens, BOS, the seam of prompt and response, masks of dialogues."""

import pytest

from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Prompt, Ranking, Text
from alignment.data.text import chat
from alignment.data.tokenize import (
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_prompts,
    tokenize_rankings,
    tokenize_texts,
)
from alignment.data.tokenizers.tokenizer import encode
from alignment.errors import UserError
from tests.examples import chat_ids, sides

ASKED = [{"role": "user", "content": "Price: "}]


@pytest.fixture
def tokenizer(chatml, templates):
    """Byte-level BPE that adds a BOS, with a template that writes it too; " $" is one token."""
    chatml.chat_template = templates["chatml with bos"]
    return chatml


def sequences(tokenizer, prompt, responses=("46", "$46")):
    """Ids and mask of every kind of row with this prompt: SFT, pairs, KTO labels, rankings, prompts to sample from."""
    first, second = responses
    [demonstration], _ = tokenize_demonstrations([Demonstration(prompt, first, "r")], tokenizer, 100)
    [pair], _ = tokenize_comparisons([Comparison(prompt, first, second, None, "r")], tokenizer, 100)
    [labeled], _ = tokenize_labels([LabeledResponse(prompt, first, True, "r")], tokenizer, 100)
    [ranked], _ = tokenize_rankings([Ranking(prompt, responses, (0, 1), "r")], tokenizer, 100)
    made = dict(zip(("chosen", "rejected"), sides(pair), strict=True))
    made |= {"sft": demonstration, "label": sides(labeled)[0], "ranking": sides(ranked)[0]}
    if isinstance(prompt, list):
        dialogue = [*prompt, {"role": "assistant", "content": first}]
        [made["dialogue"]], _ = tokenize_demonstrations([Demonstration(prompt, first, "r", dialogue)], tokenizer, 100)
    return made


@pytest.mark.parametrize("prompt", ["Price: ", ASKED], ids=["text", "messages"])
@pytest.mark.parametrize("ending", ["", "</s></s>", "<|im_end|>", "<|im_end|>\n"])
def test_h02_exactly_one_end_token_is_trained(tokenizer, prompt, ending):
    stops = chat.stop_token_ids(tokenizer)
    made = sequences(tokenizer, prompt, ("46" + ending, "$46" + ending))
    for kind, row in made.items():
        trained = [index for index, counts in zip(row.ids, row.mask, strict=True) if counts]
        assert trained[-1] in stops and sum(index in stops for index in trained) == 1, kind
    [text], _ = tokenize_texts([Text("Price: 46", "r")], tokenizer, 100)
    assert text.ids[-1] == tokenizer.eos_token_id and text.ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("prompt", ["Price: ", ASKED], ids=["text", "messages"])
def test_h03_one_bos_in_every_kind_of_row_and_the_prompt_is_generations(tokenizer, prompt):
    bos = tokenizer.bos_token_id
    generation = chat.prompt_ids(tokenizer, prompt)
    [sampled], _ = tokenize_prompts([Prompt(prompt, {}, "r")], tokenizer, 100)
    assert sampled.ids == generation and generation[0] == bos and generation.count(bos) == 1
    for kind, row in sequences(tokenizer, prompt).items():
        assert row.ids.count(bos) == 1 and row.ids[: len(generation)] == generation, kind
        assert row.mask == [False] * len(generation) + [True] * (len(row.ids) - len(generation)), kind
    [text], _ = tokenize_texts([Text("Price: 46", "r")], tokenizer, 100)
    assert text.ids.count(bos) == 1


@pytest.mark.parametrize("prompt", ["Price: ", ASKED], ids=["text", "messages"])
def test_h04_the_seam_of_prompt_and_response_does_not_merge(tokenizer, prompt):
    """ "Price: " + "$46" as one text has the token " $", which neither prompt nor response has alone."""
    joint = encode(tokenizer, ["Price: $46"])[0]
    assert " $" in [tokenizer.decode([index]) for index in joint]
    generation = chat.prompt_ids(tokenizer, prompt)
    end = tokenizer.decode([chat.end_token_id(tokenizer)])
    made = sequences(tokenizer, prompt)
    for kind, row in made.items():
        words = "$46" if kind == "rejected" else "46"
        assert row.ids[: len(generation)] == generation, kind
        assert tokenizer.decode([i for i, counts in zip(row.ids, row.mask, strict=True) if counts]) == words + end, kind


def test_h05_a_dialogue_of_prompts_or_replies_alone_is_refused(tokenizer):
    """Its mask would be all zeros or all ones."""
    for messages in (ASKED, [{"role": "assistant", "content": "$4"}]):
        with pytest.raises(UserError, match="needs an assistant message"):
            chat_ids(tokenizer, messages)

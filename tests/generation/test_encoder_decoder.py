"""Encoder-decoders: the source is read once, responses begin after the start token and are those of transformers."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from alignment import generate, load_model
from alignment.data.encoder_inputs import source_ids
from alignment.errors import UserError
from alignment.generation import BeamConfig, SamplingConfig, beam_search, decode_responses
from alignment.models.model import start_token_of
from tests.generation.peers import VOCABULARY, Peers, favourite, perturb, their_responses

START = 0


@pytest.fixture(scope="module")
def pairs(random_prompts, tmp_path_factory) -> Peers:
    """A random T5, and ours of the same weights."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, decoder_start_token_id=START)).eval()
    perturb(theirs, 0.3)
    directory = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(directory)
    return Peers(theirs, load_model(str(directory)), [favourite(theirs, random_prompts)])


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}])
def test_greedy_is_that_of_transformers(pairs, random_prompts, settings):
    """The start token counts as said, for the penalty; the source does not."""
    config = SamplingConfig(20, temperature=0, **settings)
    found = decode_responses(pairs.ours, random_prompts, config, pairs.stops, start_token=START)
    assert found.token_ids == [
        their_responses(pairs.theirs, prompt, pairs.stops, max_new_tokens=20, **settings)[0]
        for prompt in random_prompts
    ]
    assert len({tuple(tokens) for tokens in found.token_ids}) >= 8  # the source matters
    assert 0 < sum(found.ended) < len(random_prompts) or settings


@pytest.mark.parametrize(
    "config",
    [
        BeamConfig(4, max_new_tokens=20),
        BeamConfig(3, 2.0, 20, early_stopping=True),
        BeamConfig(3, 0.5, 20, early_stopping="never", repetition_penalty=1.3),
    ],
    ids=str,
)
def test_beam_search_is_that_of_transformers(pairs, random_prompts, config):
    found = beam_search(pairs.ours, random_prompts, config, pairs.stops, start_token=START)
    assert found.token_ids == [
        their_responses(pairs.theirs, prompt, pairs.stops, **vars(config))[0] for prompt in random_prompts
    ]


def test_a_source_is_encoded_once(pairs, random_prompts):
    read = []
    hook = pairs.ours.encoder.register_forward_pre_hook(lambda _, arguments: read.extend(arguments[0].lengths))
    beam_search(pairs.ours, random_prompts, BeamConfig(4, max_new_tokens=5), [], start_token=START)
    decode_responses(pairs.ours, random_prompts, SamplingConfig(5), [], start_token=START)
    hook.remove()
    assert sorted(read) == sorted(map(len, random_prompts * 2))


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    """Whole words; the end token after every text, as T5's tokenizer has it, and one sentinel."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "<extra_id_0>": 3}
    vocabulary |= {f"w{number}": number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<extra_id_0>"],
    )  # fmt: skip


def test_sources_have_their_special_tokens(words):
    assert source_ids(words, ["w7 w8", "w9 <extra_id_0> w4"]) == [[7, 8, 1], [9, 3, 4, 1]]
    assert source_ids(words, []) == []


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_reads_sources_and_leaves_special_tokens_out(pairs, words, num_beams):
    texts = ["w7 w8", "w100 w20 <extra_id_0> w31", "w5"]
    found = generate(
        pairs.ours, words, texts, max_new_tokens=12, temperature=0 if num_beams == 1 else 1, num_beams=num_beams
    )
    for text, tokens, shown in zip(texts, found.token_ids, found.texts, strict=True):
        assert (
            tokens
            == their_responses(pairs.theirs, words(text).input_ids, [1], num_beams=num_beams, max_new_tokens=12)[0]
        )
        assert shown == " ".join(f"w{token}" for token in tokens if token > 3)


def test_messages_are_a_source_where_the_tokenizer_has_a_chat_template(pairs, words):
    message = [{"role": "user", "content": "w7"}]
    with pytest.raises(UserError, match=r"prompt 1: .*chat template.*and 1 more: prompt 2"):
        generate(pairs.ours, words, ["w7", message, message])
    templated = deepcopy(words)
    templated.chat_template = "{% for message in messages %}{{ message.content }} w8{% endfor %}"
    found = generate(pairs.ours, templated, ["w7 w8", message], max_new_tokens=5, temperature=0)
    assert found.token_ids[0] == found.token_ids[1]


def test_the_start_token_is_the_configs(pairs):
    assert start_token_of(pairs.ours) == START
    assert start_token_of(SimpleNamespace(spec=None, config={"model_type": "gpt2"})) is None
    with pytest.raises(UserError, match="no decoder_start_token_id"):
        start_token_of(SimpleNamespace(spec=None, config={"model_type": "t5", "is_encoder_decoder": True}))

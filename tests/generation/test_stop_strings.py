"""Text while it is decoded: whole characters, cut before the first stop string, wherever tokens begin and end."""

import random

import pytest
import torch

from alignment import generate
from alignment.data.tokenizers.train import train_bpe
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig, decode_responses
from alignment.generation.requests import IncrementalText
from alignment.models.build import build_language_model

WORDS = ["größe ", "日本", "😀", "hello", "STOP", " wor", "ld"]


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Byte-level: emoji are several tokens, and one token may end within a character."""
    return train_bpe(["hello world STOP here größe 日本語 ok"] * 3, 290)


@pytest.fixture(scope="module")
def model(bytes_tokenizer):
    torch.manual_seed(0)
    config = {
        "model_type": "llama", "vocab_size": len(bytes_tokenizer), "max_position_embeddings": 96, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    return build_language_model(config).eval()


def test_pieces_are_the_whole_text_cut_before_the_first_stop_string(bytes_tokenizer):
    generator, spanning = random.Random(0), 0
    for number in range(300):
        text = "".join(generator.choice(WORDS) for _ in range(12))
        ids = bytes_tokenizer(text, add_special_tokens=False)["input_ids"]
        if number % 3 == 0:  # bytes that are no text
            ids = [generator.randrange(3, len(bytes_tokenizer)) for _ in range(30)]
        whole = bytes_tokenizer.decode(ids)
        for stop in ((), ("STOP",), ("ld日", "😀g", "oSTO")):
            text, pieces = IncrementalText(bytes_tokenizer, stop), []
            for token in ids:
                pieces.append(text.push(token))
                if text.stopped:
                    break
            pieces.append(text.flush())
            ends = [whole.find(each) for each in stop if each in whole]
            assert "".join(pieces) == text.text == (whole[: min(ends)] if ends else whole)
            assert text.stopped == bool(ends)
            assert number % 3 == 0 or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
            spanning += text.stopped and len(pieces) > 2
    assert spanning > 100


def test_generate_cuts_the_text_before_a_stop_string(model, bytes_tokenizer):
    prompts, settings = ["hello", "wor", "größe", "日"] * 3, {"max_new_tokens": 40, "seed": 3}
    whole = generate(model, bytes_tokenizer, prompts, **settings)
    stop = sorted(
        {text[5:8] for text in whole.texts if len(text) > 12 and "\N{REPLACEMENT CHARACTER}" not in text[5:8]}
    )[:3]
    found = generate(model, bytes_tokenizer, prompts, stop=stop, **settings)
    cut = 0
    for text, tokens, ended, full, all_tokens in zip(
        found.texts, found.token_ids, found.ended, whole.texts, whole.token_ids, strict=True
    ):
        ends = [full.find(each) for each in stop if each in full]
        assert text == (full[: min(ends)] if ends else full)
        assert tokens == all_tokens[: len(tokens)]
        assert ended or not ends
        if ends:
            assert any(each in bytes_tokenizer.decode(tokens) for each in stop)
            assert not any(each in bytes_tokenizer.decode(tokens[:-1]) for each in stop)
            cut += len(tokens) < len(all_tokens)
    assert cut >= 3


def test_events_carry_the_text(model, bytes_tokenizer):
    engine = DecodingEngine(model, max_rows=3, tokenizer=bytes_tokenizer)
    requests = {engine.add(DecodingRequest([5 + i, 9], SamplingConfig(30), row=i, stop_ids=[7])): i for i in range(5)}
    events = {number: [] for number in requests}
    while engine.unfinished:
        for event in engine.step():
            events[event.request].append(event)
    for each in events.values():
        tokens = [event.token for event in each]
        whole = bytes_tokenizer.decode(tokens[:-1] if each[-1].finish == "stop" else tokens)
        assert "".join(event.text for event in each) == whole


def test_a_stop_string_is_not_searched_before_the_least_tokens(model, bytes_tokenizer):
    """Every character may end the response, from the tenth token on."""
    stop = [chr(number) for number in range(32, 127)] + ["\N{REPLACEMENT CHARACTER}"]
    sampling = SamplingConfig(30, min_new_tokens=10)
    found = decode_responses(model, [[5, 9]] * 6, sampling, [], stop=stop, tokenizer=bytes_tokenizer)
    assert all(found.ended) and {len(tokens) for tokens in found.token_ids} <= set(range(10, 30))
    assert min(len(tokens) for tokens in found.token_ids) == 10


def test_a_stop_string_that_ended_before_the_search_began_does_not_count(bytes_tokenizer):
    """Beside a longer one, which is searched further back; "or" ends in the part that is not searched, "ld" behind it."""
    text = IncrementalText(bytes_tokenizer, ("or", "a long stop string"))
    for token in bytes_tokenizer("hello wor", add_special_tokens=False)["input_ids"]:
        text.push(token, check_stop=False)
    for token in bytes_tokenizer("ld", add_special_tokens=False)["input_ids"]:
        text.push(token)
    text.flush()
    assert (text.text, text.stopped) == ("hello world", False)
    for token in bytes_tokenizer(" or", add_special_tokens=False)["input_ids"]:
        text.push(token)
    assert (text.text, text.stopped) == ("hello world ", True)


def test_stop_strings_out_of_range_are_refused(model, bytes_tokenizer):
    with pytest.raises(ValueError, match="list of texts"):
        generate(model, bytes_tokenizer, ["a"], stop="end")
    with pytest.raises(ValueError, match="beam search"):
        generate(model, bytes_tokenizer, ["a"], stop=["end"], num_beams=2)

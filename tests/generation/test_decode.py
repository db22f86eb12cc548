"""Decoding: what is drawn depends on the row and the seed alone, and its log-probabilities are the model's."""

import json
from importlib import import_module

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from alignment import generate, load_model, load_tokenizer
from alignment.data.text.chat import prompt_ids
from alignment.errors import UserError
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig, decode_responses
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from alignment.ragged import Ragged

STOPS = list(range(0, 384, 12))  # one token in twelve ends a response: rows finish one by one


@pytest.fixture(params=["gpt2", "llama"])
def model(request, checkpoints):
    return load_language_model(checkpoints[request.param])


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(384, (length,), generator=generator).tolist() for length in (5, 1, 17, 9, 9, 2, 30, 4, 12, 3)]


def drawn(model, prompts, stops=STOPS, batch_size=256, rows=None, **settings):
    return decode_responses(
        model, prompts, SamplingConfig(**{"max_new_tokens": 16, **settings}), stops, rows=rows, batch_size=batch_size
    )


def test_a_response_does_not_depend_on_who_is_decoded_beside_it(model, prompts):
    """Alone there is nothing to drop; in company finished rows leave the cache and the others move up in it."""
    together, alone = drawn(model, prompts), drawn(model, prompts, batch_size=1)
    assert together.token_ids == alone.token_ids == drawn(model, prompts, batch_size=3).token_ids
    assert together.ended == alone.ended
    assert len({len(tokens) for tokens in together.token_ids}) >= 4  # they did finish one by one
    for one, other in zip(together.log_probs, alone.log_probs, strict=True):
        assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)


def test_a_row_is_known_by_its_number(model, prompts):
    """What a rank draws for its share of the rows is what one process draws for all of them."""
    everything = drawn(model, prompts).token_ids
    share = drawn(model, prompts[1::2], rows=range(1, len(prompts), 2)).token_ids
    assert share == everything[1::2]
    assert drawn(model, prompts[1::2]).token_ids != everything[1::2]


def test_the_global_random_state_plays_no_part(model, prompts):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = drawn(model, prompts).token_ids
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert drawn(model, prompts).token_ids == first != drawn(model, prompts, seed=1).token_ids


def test_a_response_ends_with_its_first_stop_token_or_at_the_length(model, prompts):
    result = drawn(model, prompts)
    assert 0 < sum(result.ended) < len(prompts)
    for tokens, log_probs, ended in zip(result.token_ids, result.log_probs, result.ended, strict=True):
        assert len(tokens) == len(log_probs)
        assert not any(token in STOPS for token in tokens[:-1])
        assert ended == (tokens[-1] in STOPS)
        assert ended or len(tokens) == 16


def test_responses_that_ended_are_not_decoded_on(checkpoints, monkeypatch):
    """More than three quarters of the rows that a step decodes still run, and with the last of them decoding ends."""
    model, sizes = load_language_model(checkpoints["llama"]), []
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda tokens, cache: (sizes.append(len(tokens)), decode(tokens, cache))[1])
    result = drawn(model, [[7, 8]] * 24, stops=range(0, 384, 4), max_new_tokens=64)
    lengths = torch.tensor([len(tokens) for tokens in result.token_ids])
    assert all(result.ended) and lengths.max() < 40 and len(set(sizes)) > 5
    running = [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    assert len(sizes) == len(running)
    assert all(size >= alive > 0.75 * size for size, alive in zip(sizes, running, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_whole_forward(model, prompts, temperature):
    """H31, H33: the numbers PPO takes for the sampling policy are those its update computes."""
    result = drawn(model, prompts, temperature=temperature)
    documents = [prompt + tokens for prompt, tokens in zip(prompts, result.token_ids, strict=True)]
    masks = [
        [False] * len(prompt) + [True] * len(tokens) for prompt, tokens in zip(prompts, result.token_ids, strict=True)
    ]
    with torch.no_grad():
        wanted = model(batch=Ragged.build(documents, masks), temperature=temperature).log_probs
    assert_close(torch.tensor([value for values in result.log_probs for value in values]), wanted, atol=1e-5, rtol=0)


def test_draws_follow_the_model(checkpoints):
    """The shares of 4000 first tokens lie within 4 standard errors of the model's probabilities."""
    model = load_language_model(checkpoints["llama"])
    with torch.no_grad():
        model.head.weight *= 4
        probability = model(torch.tensor([[9, 4]])).logits[0, -1].softmax(-1)
    result = drawn(model, [[9, 4]] * 4000, stops=[], max_new_tokens=1, batch_size=4000)
    share = torch.tensor(result.token_ids).flatten().bincount(minlength=384) / 4000
    error = (probability * (1 - probability) / 4000).sqrt()
    assert probability.max() > 0.02
    assert ((share - probability).abs() <= 4 * error + 1 / 4000).all()


def test_the_checkpoints_generation_config_is_not_looked_at(tokenizer, checkpoints, tmp_path):
    """H32: top_k = 1 in it would make 64 samples from a nearly uniform model one and the same."""
    from alignment.data.tokenizers.tokenizer import save_tokenizer

    model = build_language_model(load_language_model(checkpoints["llama"]).config)
    save_model(model, tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1, "temperature": 0.01}))
    result = generate(load_model(str(tmp_path)), load_tokenizer(str(tmp_path)), ["Hello"] * 64, max_new_tokens=8)
    assert len({tuple(tokens) for tokens in result.token_ids}) >= 60


# --- generate -------------------------------------------------------------------------------------------------------


def test_texts_leave_the_end_token_out(checkpoints, tokenizer, monkeypatch):
    module = import_module("alignment.generation.generate")  # the package exports a function of this name
    monkeypatch.setattr(module, "stop_token_ids", lambda tokenizer: set(STOPS[1:]))
    model = load_model(checkpoints["llama"])
    result = generate(model, tokenizer, ["Where is the spa?"] * 12, max_new_tokens=12)
    assert any(result.ended) and not all(result.ended)
    for text, tokens, ended in zip(result.texts, result.token_ids, result.ended, strict=True):
        assert text == tokenizer.decode(tokens[:-1] if ended else tokens)


def test_generation_leaves_the_models_mode_alone_also_after_an_error(checkpoints, tokenizer):
    for training in (True, False):
        model = load_model(checkpoints["gpt2"]).train(training)
        generate(model, tokenizer, ["a"], max_new_tokens=1)
        assert model.training == training
        with pytest.raises(UserError, match=r"320 positions.*max_new_tokens"):
            generate(model, tokenizer, ["a"], max_new_tokens=400)
        assert model.training == training


def test_messages_go_through_the_chat_template(checkpoints, tokenizer):
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    model = load_model(checkpoints["llama"])
    as_text = generate(model, tokenizer, ["Where?"], max_new_tokens=6)
    assert generate(model, tokenizer, [[{"role": "user", "content": "Where?"}]], max_new_tokens=6) == as_text


def test_without_room_for_the_cache_the_setting_to_lower_is_named(model, prompts, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 51 GiB")

    monkeypatch.setattr(model, "new_cache", full)
    longest = max(map(len, prompts)) + 4
    with pytest.raises(UserError, match=f"{len(prompts)} responses side by side.* room for {longest} tokens") as error:
        drawn(model, prompts, max_new_tokens=4)
    assert "lower micro_rollout_batch_size (in ppo) or batch_size" in str(error.value)


def test_no_step_indexes_with_booleans(model, prompts):
    """How many rows a boolean index picks is known on the device only, so on a GPU every such step would wait for it."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put):
                assert all(index is None or index.dtype == torch.long for index in args[1]), function
            return function(*args, **(kwargs or {}))

    expected = drawn(model, prompts)
    with Watching():
        assert drawn(model, prompts) == expected


def test_one_text_in_place_of_a_list_is_refused(checkpoints, tokenizer):
    model = load_model(checkpoints["llama"])
    with pytest.raises(UserError, match=r"prompts must be a list, got one text, 'What is'; write \[text\]"):
        generate(model, tokenizer, "What is", max_new_tokens=2)
    with pytest.raises(UserError, match=r"got the messages of one; write \[messages\]"):
        generate(model, tokenizer, [{"role": "user", "content": "What is"}], max_new_tokens=2)
    with pytest.raises(UserError, match="prompt 1: must be text or a list of messages, got int"):
        generate(model, tokenizer, ["What is", 7], max_new_tokens=2)


def test_settings_of_generate_reach_the_draws(checkpoints, tokenizer):
    model, prompts = load_model(checkpoints["llama"]), ["Where?", "The spa"]
    ids, stops = [prompt_ids(tokenizer, prompt) for prompt in prompts], [tokenizer.eos_token_id]
    plain = {"max_new_tokens": 12, "temperature": 0.9}
    seen = set()
    for changes in (
        {}, {"seed": 5}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"repetition_penalty": 3.0},
        {"temperature": 0.0, "no_repeat_ngram_size": 1}, {"temperature": 0.0},
    ):  # fmt: skip
        found = generate(model, tokenizer, prompts, **(plain | changes))
        wanted = decode_responses(model, ids, SamplingConfig(**(plain | changes)), stops)
        assert (found.token_ids, found.log_probs) == (wanted.token_ids, wanted.log_probs)
        seen.add(str((found.token_ids, found.log_probs)))
    assert len(seen) == 8  # each setting matters here


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"num_beams": 2}]
)
def test_logits_that_are_not_finite_end_the_generation(checkpoints, settings):
    """The third prompt alone has the token whose embedding is NaN; the others have a response each."""
    model, tokenizer = load_model(checkpoints["llama"]), load_tokenizer(checkpoints["llama"])
    texts = ["hello", "some words", "hello QQQ"]
    ids = [set(prompt_ids(tokenizer, text)) for text in texts]
    with torch.no_grad():
        model.trunk.embed.weight[min(ids[2] - ids[0] - ids[1])] = torch.nan
    sample = {"max_new_tokens": 4, **settings}
    with pytest.raises(UserError, match=r"^prompt 2: the logits of token 1 .* not finite"):
        generate(model, tokenizer, texts, **sample)
    healthy = load_model(checkpoints["llama"])
    assert generate(model, tokenizer, texts[:2], **sample) == generate(healthy, tokenizer, texts[:2], **sample)


def test_a_mixed_batch_fails_where_the_logits_are_not_finite(checkpoints):
    """The other rows of the same step go on; the failed one ends with what failed and without the token."""
    model = load_language_model(checkpoints["llama"])
    with torch.no_grad():
        model.trunk.embed.weight[7] = torch.inf
    engine = DecodingEngine(model, max_rows=4)
    settings = [SamplingConfig(5, temperature=temperature) for temperature in (0, 1, 0, 1)]
    numbers = [engine.add(DecodingRequest([9, 7 + row // 2], each, row)) for row, each in enumerate(settings)]
    events = []
    while engine.unfinished:
        events += engine.step()
    last = {event.request: event for event in events if event.finish is not None}
    assert [last[number].finish for number in numbers] == ["error", "error", "length", "length"]
    assert "not finite" in last[numbers[0]].text
    assert [sum(event.request == number for event in events) for number in numbers] == [1, 1, 5, 5]

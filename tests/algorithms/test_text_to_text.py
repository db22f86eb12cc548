"""Encoder-decoders in fine-tuning: the prompt to the encoder, the response to the decoder, the loss of transformers' labels."""

import json
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms import sft
from alignment.data.batches import collate, collate_for_encoder_decoder
from alignment.data.config import DataConfig
from alignment.data.encoder_inputs import encoder_decoder_preparation
from alignment.data.rows.records import Demonstration
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import byte_tokenizer, wrap
from alignment.errors import UserError
from alignment.generation import generate
from alignment.loading import load_model, load_tokenizer
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.training import OptimConfig, TrainingConfig
from tests.stopping import assert_goes_on

WORDS = ["one", "two", "three", "four"]
T5 = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3, "feed_forward_proj": "gated-gelu"}
BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def word_tokenizer(family):
    """Whole words with the special tokens of the family: T5's end token, BART's pair around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "</s>", "<unk>"] if family == "t5" else ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, "copy", "reverse", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first = "" if family == "t5" else "<s> "
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | ({"bos_token": "<s>"} if first else {})
    added = ("</s>", "<s>") if first else ("</s>",)
    return wrap(tokenizer, f"{first}$A </s>", f"{first}$A </s> $B </s>", added=added, **names)


def start(family, directory, seed=0, **changes):
    """A tiny T5, BART or ByT5 of random weights with its tokenizer, saved; returns its directory."""
    tokenizer = byte_tokenizer() if family == "byt5" else word_tokenizer(family)
    torch.manual_seed(seed)
    config = {"model_type": "bart", **BART} if family == "bart" else {"model_type": "t5", **T5}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    begin = tokenizer.eos_token_id if family == "bart" else tokenizer.pad_token_id  # as the families have it
    model = build_language_model(
        {**config, **ids, "vocab_size": len(tokenizer), "decoder_start_token_id": begin, **changes}
    )
    save_model(model, directory)
    save_tokenizer(tokenizer, directory)
    return str(directory)


def rows(path):
    """Every request for two of four words again, in their order or the other way round: 32 rows."""
    found = [
        {"prompt": f"{verb} {one} {two}", "response": f"{one} {two}" if verb == "copy" else f"{two} {one}"}
        for verb, one, two in product(("copy", "reverse"), WORDS, WORDS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return found


def config(policy, data, output, **changes):
    training = TrainingConfig(batch_size=16, max_steps=4)
    return sft.SFTConfig(
        policy, data, str(output), **{"optim": OptimConfig(learning_rate=3e-3), "training": training, **changes}
    )


def learned(family, tmp_path, **changes):
    """The model of a run on all 32 rows, and how many it answers exactly."""
    found = rows(tmp_path / "rows.jsonl")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), max_length=64)
    directory = sft.run(config(start(family, tmp_path / "start"), data, tmp_path / "run", **changes))
    model, tokenizer = load_model(str(directory)), load_tokenizer(str(directory))
    answers = generate(model, tokenizer, [row["prompt"] for row in found], temperature=0.0, max_new_tokens=24)
    exact = sum(text == row["response"] for text, row in zip(answers.texts, found, strict=True))
    return directory, answers, exact


def examples_of(tokenizer, pairs, max_length=64):
    records = [Demonstration(prompt, response, f"row {n}") for n, (prompt, response) in enumerate(pairs)]
    return encoder_decoder_preparation("demonstrations").tokenize(records, tokenizer, max_length)


PAIRS = [("copy one two", "one two"), ("reverse four", "four"), ("copy three three one", "three three one")]


@pytest.mark.parametrize("family", ["t5", "bart", "byt5"])
def test_loss_and_logits_are_those_of_transformers_labels(family, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    directory = start(family, tmp_path)
    tokenizer, ours = load_tokenizer(directory), load_model(directory)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    sources = tokenizer([prompt for prompt, _ in PAIRS], padding=True, return_tensors="pt")
    labels = tokenizer(text_target=[response for _, response in PAIRS], padding=True, return_tensors="pt")["input_ids"]
    mask = labels != tokenizer.pad_token_id
    expected = theirs(
        input_ids=sources["input_ids"], attention_mask=sources["attention_mask"], labels=labels.masked_fill(~mask, -100)
    )
    examples, _ = examples_of(tokenizer, PAIRS)
    order = [2, 0, 1]  # the longest first
    [batch] = collate_for_encoder_decoder(examples, 1000, collate=collate, start_token=ours.spec.start_token)
    assert [int(name.split()[1]) for name in batch.row_ids] == order
    assert_close(-ours(batch=batch).log_probs.mean(), expected.loss, rtol=0, atol=1e-5)
    logits = torch.cat([expected.logits[row][mask[row]] for row in order])
    assert_close(ours(batch=batch, return_logits=True).logits, logits, rtol=0, atol=1e-5)


def test_prompt_and_response_have_the_special_tokens_of_the_family():
    for family, source, target in (("t5", [3, 5, 6, 1], [5, 6, 1]), ("bart", [0, 4, 6, 7, 2], [0, 6, 7, 2])):
        [example], _ = examples_of(word_tokenizer(family), [("copy one two", "one two</s>")])
        assert example.ids == source + target, family
        assert example.mask == [False] * len(source) + [True] * len(target)


def test_long_rows_lose_the_beginning_of_the_prompt_and_then_the_end_of_the_response():
    tokenizer = word_tokenizer("bart")
    [example], counts = examples_of(tokenizer, [("copy one two three four one", "one two")], max_length=8)
    assert example.ids == [0, 9, 6, 2, 0, 6, 7, 2]  # <s> four one </s>, then <s> one two </s>
    [example], counts = examples_of(tokenizer, [("copy one two three", "one two three four one two")], max_length=8)
    assert example.ids == [0, 2, 0, 6, 7, 8, 9, 6]  # a quarter is left to the prompt
    assert len(counts.cut) == 2


def test_an_update_does_not_depend_on_how_the_batch_is_cut(tmp_path):
    rows(tmp_path / "rows.jsonl")
    policy, found = start("t5", tmp_path / "start"), []
    for tokens in (400, 12):
        training = TrainingConfig(batch_size=32, max_steps=1, micro_batch_tokens=tokens)
        output = tmp_path / str(tokens)
        directory = sft.run(config(policy, DataConfig(train=str(tmp_path / "rows.jsonl")), output, training=training))
        found.append(load_file(directory / "model.safetensors"))
    for name, weight in found[0].items():
        assert_close(weight, found[1][name], rtol=0, atol=2e-5)


def test_a_tiny_t5_learns_to_copy_and_to_reverse_exactly(tmp_path):
    training = TrainingConfig(batch_size=32, max_steps=60)
    data = {"optim": OptimConfig(learning_rate=5e-3, warmup_ratio=0.1), "training": training}
    directory, answers, exact = learned("t5", tmp_path, **data)
    assert exact == 32 and all(answers.ended)

    from transformers import AutoModelForSeq2SeqLM

    theirs, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(directory), load_tokenizer(str(directory))
    written = theirs.generate(**tokenizer(["reverse one two"], return_tensors="pt"), max_new_tokens=8)
    assert tokenizer.decode(written[0], skip_special_tokens=True) == "two one"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rate", "steps"), [("bart", 3e-3, 300), ("byt5", 5e-3, 250)])
def test_tiny_bart_and_byt5_learn_to_copy_and_to_reverse_exactly(family, rate, steps, tmp_path):
    training, optim = TrainingConfig(batch_size=32, max_steps=steps), OptimConfig(learning_rate=rate, warmup_ratio=0.1)
    _, answers, exact = learned(family, tmp_path, optim=optim, training=training)
    assert exact == 32 and all(answers.ended)


@pytest.mark.parametrize(
    "adapter", [None, LoRASpec(rank=4, dropout=0.1), PrefixSpec(tokens=4)], ids=["full", "LoRA", "prefix"]
)
def test_a_stopped_run_goes_on_to_the_same_weights(adapter, tmp_path):
    rows(tmp_path / "rows.jsonl")
    policy, data = start("t5", tmp_path / "start"), DataConfig(train=str(tmp_path / "rows.jsonl"))
    assert_goes_on(lambda output: (sft.run, config(policy, data, tmp_path / output, adapter=adapter)), 2, tmp_path)


def test_held_out_loss_samples_and_every_option_of_the_loss(tmp_path):
    rows(tmp_path / "rows.jsonl")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), evaluation=str(tmp_path / "rows.jsonl"), max_length=64)
    changes = {"label_smoothing": 0.1, "z_loss": 1e-4, "neftune_alpha": 5.0, "samples": sft.SamplesConfig(2, 4, 0.0)}
    sft.run(config(start("bart", tmp_path / "start"), data, tmp_path / "run", **changes))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_loss"] > last["held_out_nll"] > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["prompt"] == "<s> copy one one </s>" and "<" not in samples[0]["response"]


CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def test_messages_need_a_chat_template_and_each_reply_is_an_example(tmp_path):
    messages = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
    ]  # fmt: skip
    row = Demonstration(messages[:3], messages[3]["content"], "row", messages=messages)
    tokenizer = byte_tokenizer()
    tokenize = partial(encoder_decoder_preparation("demonstrations").tokenize, max_length=400)
    with pytest.raises(UserError, match="chat template"):
        tokenize([row], tokenizer)
    tokenizer.chat_template = CHAT
    found = [tokenizer.decode(example.ids) for example in tokenize([row], tokenizer)[0]]
    assert found == [
        "user one assistant </s>two</s>", "user one assistant two user three assistant </s>four</s>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_on": "all"}, "is an encoder-decoder, whose encoder reads the prompt"),
        ({"add_tokens": ("seven",)}, "tokens are added to decoders"),
    ],
)
def test_what_an_encoder_decoder_cannot_do_is_refused(changes, message, tmp_path):
    rows(tmp_path / "rows.jsonl")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), max_length=64)
    with pytest.raises(UserError, match=message):
        sft.run(config(start("t5", tmp_path / "start"), data, tmp_path / "run", **changes))


def test_each_side_of_a_row_has_the_positions_of_the_model(tmp_path):
    """34 + 34 tokens fit a BART of 40 positions, 44 do not."""
    policy = start("bart", tmp_path / "start", max_position_embeddings=40)
    for count in (32, 42):
        row = {"prompt": " ".join(["one"] * count), "response": " ".join(["two"] * count)}
        (tmp_path / f"{count}.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(train=str(tmp_path / "32.jsonl"), max_length=80, max_cut_share=1.0)
    training = TrainingConfig(batch_size=1, max_steps=1)
    assert sft.run(config(policy, data, tmp_path / "run", training=training)).is_dir()
    data = DataConfig(train=str(tmp_path / "42.jsonl"), max_length=100)
    with pytest.raises(UserError, match="do not fit the model's 40 positions"):
        sft.run(config(policy, data, tmp_path / "other", training=training))

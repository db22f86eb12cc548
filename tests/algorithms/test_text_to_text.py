"""Encoder-decoders in fine-tuning: the prompt to the encoder, the response to the decoder, the loss of transformers' labels."""

import json
import math
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import generate, load_model, load_reward_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms import reward, sft
from alignment.algorithms.dpo import DPOConfig, dpo
from alignment.data.batches import collate, collate_for_encoder_decoder
from alignment.data.config import DataConfig
from alignment.data.encoder_inputs import TEXT_TO_TEXT
from alignment.data.rows.records import Demonstration
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import byte_tokenizer, wrap
from alignment.errors import UserError
from alignment.evaluation import win_rate_run
from alignment.evaluation.benchmarks import run as benchmarks
from alignment.evaluation.benchmarks.run import BenchmarksConfig
from alignment.generation import SamplingConfig
from alignment.judging.config import WinRateConfig
from alignment.judging.likelihood import LanguageScorer
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import read_lines, write_lines
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
    write_lines(path, found)
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
    return TEXT_TO_TEXT["demonstrations"](records, tokenizer, max_length)


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


def test_long_rows_lose_the_prompts_beginning_then_the_responses_end():
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
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert samples[0]["prompt"] == "<s> copy one one </s>" and "<" not in samples[0]["response"]


CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def test_messages_need_a_chat_template_and_each_reply_is_an_example(tmp_path):
    messages = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
    ]  # fmt: skip
    row = Demonstration(messages[:3], messages[3]["content"], "row", messages=messages)
    tokenizer = byte_tokenizer()
    tokenize = partial(TEXT_TO_TEXT["demonstrations"], max_length=400)
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


# The trained model is judged


TASKS = {
    "answers": {"kind": "answers", "answer": "response", "sampling": {"max_new_tokens": 6, "temperature": 0}},
    "choices": {"kind": "multiple_choice", "choices": ["one two", "two one", "four"], "answer": "0"},
}


def test_benchmarks_and_win_rates_generate_from_the_encoders_prompt(tmp_path):
    """Two random models; the responses are those of `generate`, the choices' log-probabilities transformers'."""
    from transformers import AutoModelForSeq2SeqLM

    found = rows(tmp_path / "rows.jsonl")[:4]
    write_lines(tmp_path / "rows.jsonl", found)
    models = {name: start("bart", tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"source": "rows.jsonl", "prompt": "{{ prompt }}", **task}))
    tasks = [str(tmp_path / f"{name}.yaml") for name in TASKS]
    results = benchmarks.run(BenchmarksConfig(models, str(tmp_path / "out"), tasks, str(tmp_path)))
    assert set(json.loads(results.read_text())["tasks"]) == set(TASKS)

    model, tokenizer = load_model(models["a"]), load_tokenizer(models["a"])
    scorer, prompts = LanguageScorer(model, tokenizer), [row["prompt"] for row in found]
    sampling = SamplingConfig(6, temperature=0.0)
    expected = generate(model, tokenizer, prompts, max_new_tokens=6, temperature=0.0)
    assert scorer.responses(prompts, sampling) == expected.texts
    theirs = AutoModelForSeq2SeqLM.from_pretrained(models["a"]).eval()
    decoder = torch.tensor([[2, 0, 6, 7]])  # </s> <s> one two
    logits = theirs(**tokenizer([prompts[1]], return_tensors="pt"), decoder_input_ids=decoder[:, :3]).logits[0, 1:]
    whole = logits.log_softmax(-1).gather(1, decoder[0, 2:, None]).sum()
    assert scorer.likelihoods([(prompts[1], " one two")])[0].log_prob == pytest.approx(float(whole), abs=1e-5)

    data = DataConfig(train=str(tmp_path / "rows.jsonl"), max_length=32)
    wins = str(tmp_path / "wins")
    settings = WinRateConfig(models=models, data=data, output=wins, baseline="a", judge="longer", max_new_tokens=6)
    win_rate_run.run(settings)
    sampled = read_lines(tmp_path / "wins" / "responses.jsonl")
    drawn = generate(model, tokenizer, prompts, max_new_tokens=6, temperature=settings.temperature, seed=settings.seed)
    assert [row["responses"]["a"] for row in sampled] == drawn.texts
    measured = json.loads((tmp_path / "wins" / "results.json").read_text())["models"]["b"]
    ratios = []
    for prompt, row in zip(prompts, sampled, strict=True):
        ids = torch.tensor(row["token_ids"]["b"])
        decoder = torch.cat([torch.tensor([2]), ids[:-1]])[None]
        logits = theirs(**tokenizer([prompt], return_tensors="pt"), decoder_input_ids=decoder).logits[0]
        reference = logits.log_softmax(-1).gather(1, ids[:, None]).sum()
        ratios.append(sum(row["log_probs"]["b"]) - float(reference))
    assert measured["kl"] == pytest.approx(sum(ratios) / 4, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "why"), [({"kind": "rolling"}, "needs a decoder"), ({"kind": "pairs"}, "needs a decoder")]
)
def test_whole_texts_are_measured_with_decoders_only(settings, why, tmp_path):
    rows(tmp_path / "rows.jsonl")
    task = {"source": "rows.jsonl", "prompt": "{{ prompt }}", **settings}
    task |= {"choices": "[prompt, response]"} if settings["kind"] == "pairs" else {}
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    models = {"t5": start("t5", tmp_path / "t5")}
    with pytest.raises(UserError, match=why):
        benchmarks.run(BenchmarksConfig(models, str(tmp_path), [str(tmp_path / "task.yaml")], str(tmp_path)))


# Preferences


def preferences(path):
    """The right answer against the words of the commands, 32 rows."""
    found = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "copy reverse"} for row in rows(path)]
    write_lines(path, found)
    return DataConfig(train=str(path), evaluation=str(path), max_length=64)


def test_dpo_takes_log_probabilities_from_the_decoder(tmp_path):
    """The first update's log-probabilities are transformers' negative label losses."""
    from transformers import AutoModelForSeq2SeqLM

    data, policy = preferences(tmp_path / "rows.jsonl"), start("bart", tmp_path / "start")
    training = TrainingConfig(batch_size=32, max_steps=1, micro_batch_tokens=100)
    dpo.run(DPOConfig(policy=policy, data=data, output=str(tmp_path / "run"), training=training))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    theirs, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(policy).eval(), load_tokenizer(policy)
    given = read_lines(tmp_path / "rows.jsonl")
    for side in ("chosen", "rejected"):
        labels = tokenizer(text_target=[row[side] for row in given], return_tensors="pt")["input_ids"]
        sources = tokenizer([row["prompt"] for row in given], return_tensors="pt")
        loss = theirs(**sources, labels=labels).loss * labels.numel() / len(given)
        assert lines[0][f"{side}_log_prob"] == pytest.approx(-float(loss), abs=1e-4)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_dpo_on_a_t5_prefers_the_chosen_responses(tmp_path):
    data, policy = preferences(tmp_path / "rows.jsonl"), start("t5", tmp_path / "start")
    training, optim = TrainingConfig(batch_size=32, max_steps=10), OptimConfig(learning_rate=1e-2)
    changes = {"training": training, "optim": optim, "beta": 1.0}
    dpo.run(DPOConfig(policy=policy, data=data, output=str(tmp_path / "run"), **changes))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_accuracy"] > 0.9 and last["held_out_loss"] < 0.5


def test_dpos_kin_a_cached_reference_and_an_adapter(tmp_path):
    data, policy, found = preferences(tmp_path / "rows.jsonl"), start("t5", tmp_path / "start"), {}
    training = TrainingConfig(batch_size=8, max_steps=2)
    for name, changes in {
        "computed": {"adapter": LoRASpec(rank=2)},
        "cached": {"adapter": LoRASpec(rank=2), "reference_log_probs": "cache"},
        "kin": {"loss": {"simpo": 1.0, "aot": 1.0}, "sft_coef": 0.5},
    }.items():
        output = tmp_path / name
        dpo.run(DPOConfig(policy=policy, data=data, output=str(output), training=training, **changes))
        found[name] = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["cached"]["loss"] == pytest.approx(found["computed"]["loss"], abs=1e-5)
    assert found["kin"]["loss"] > 0


def test_a_reference_of_another_architecture_is_refused(tmp_path, checkpoints):
    data, policy = preferences(tmp_path / "rows.jsonl"), start("t5", tmp_path / "start")
    with pytest.raises(UserError, match="of kind decoder, and the policy of kind encoder-decoder"):
        dpo.run(DPOConfig(policy=policy, reference=checkpoints["llama"], data=data, output=str(tmp_path / "run")))


@pytest.mark.parametrize(("family", "loss"), [("bart", "bradley_terry"), ("t5", "ranking")])
def test_a_reward_model_scores_at_the_decoders_end_token(family, loss, tmp_path):
    """It is a directory of transformers' classifier with one class, which gives the same scores."""
    from transformers import AutoModelForSequenceClassification

    data = preferences(tmp_path / "rows.jsonl")
    found = read_lines(tmp_path / "rows.jsonl")
    if loss == "ranking":
        ranked = [
            {
                "prompt": row["prompt"],
                "responses": [row["rejected"], row["chosen"], "four four four"],
                "ranks": [1, 0, 2],
            }
            for row in found
        ]
        write_lines(tmp_path / "rows.jsonl", ranked)
    training, optim = TrainingConfig(batch_size=32, max_steps=12), OptimConfig(learning_rate=3e-3)
    settings = {"data": data, "output": str(tmp_path / "run"), "training": training, "optim": optim, "loss": loss}
    directory = reward.run(reward.RewardConfig(policy=start(family, tmp_path / "start"), **settings))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_accuracy"] > 0.9
    model = load_reward_model(str(directory))
    pairs = [(row["prompt"], row["chosen"]) for row in found[:3]]
    theirs = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = torch.cat([theirs(**model.tokenizer(*pair, return_tensors="pt")).logits[:, 0] for pair in pairs])
    assert_close(model.score(pairs), expected, rtol=0, atol=1e-5)


def test_ppo_says_that_its_policy_is_a_decoder(make_stage, stage, tmp_path):
    run, settings = make_stage(
        "ppo", start("t5", tmp_path / "t5"), tmp_path / "run", reward_model=str(stage("reward") / "model")
    )
    with pytest.raises(UserError, match="is an encoder-decoder, and a policy of this stage is a decoder"):
        run(settings)

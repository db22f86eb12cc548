"""Pretraining runs of every objective: they learn, do not depend on memory settings, resume exactly, and distil."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.testing import assert_close

from alignment import load_model, load_tokenizer
from alignment.algorithms import pretrain
from alignment.algorithms.pretrain import (
    Causal,
    DistillationConfig,
    Infilling,
    Masked,
    PrefixLM,
    SentencePairs,
    SpanCorruption,
    collate_for_objective,
    distillation_loss_fn,
)
from alignment.data.config import DataConfig
from alignment.data.pretraining.corruption import Masking, fixed_seed_rows
from alignment.data.pretraining.prepare import tokenize_for_corruption, tokenize_passages, tokenize_plain
from alignment.data.rows.records import Text
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_tokenizer
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.new_weights import attach_span_boundary, init_from_teacher, spaced_layers
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import write_lines
from tests.stopping import assert_goes_on

NOUNS, STATES = ("cat", "dog", "bird", "cow", "fox", "hen", "pig", "rat"), ("old", "ill", "shy", "wet", "hot", "sad")
TEXT = "The cat sat on the mat. A dog came by and looked at it. Nobody knew why."
BERT = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
ALBERT = {**BERT, "model_type": "albert", "embedding_size": 16}
LONGFORMER = {**BERT, "model_type": "longformer", "attention_window": 8}
BIG_BIRD = {**BERT, "model_type": "big_bird", "block_size": 2, "num_random_blocks": 1}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
BART = {
    "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 96,
    "dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "causal": (Causal(), LLAMA, {"vocabulary": 300}),
    "masked": (Masked(), BERT, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "masked words": (Masked(masking=Masking(units="words")), BERT, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "masked spans, BPE": (Masked(masking=Masking(units="spans")), BERT, {"vocabulary": 300}),
    "span boundaries": (
        Masked(masking=Masking(units="spans"), boundary_coef=1.0), BERT,
        {"vocabulary": 300, "tokenizer_kind": "wordpiece"},
    ),
    "masked, Longformer": (Masked(), LONGFORMER, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "masked, BigBird": (Masked(), BIG_BIRD, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "sentence pairs": (SentencePairs(), BERT, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "sentence order": (
        SentencePairs(task="sentence_order"), ALBERT, {"vocabulary": 300, "tokenizer_kind": "wordpiece"},
    ),
    "span corruption": (SpanCorruption(), T5, {"vocabulary": 300, "tokenizer_kind": "unigram", "sentinels": 16}),
    "span corruption of bytes": (SpanCorruption(mean_span=6), T5, {"tokenizer_kind": "bytes", "sentinels": 16}),
    "prefix": (PrefixLM(), T5, {"vocabulary": 300, "tokenizer_kind": "unigram"}),
    "prefix, one decoder": (PrefixLM(), LLAMA, {"vocabulary": 300}),
    "span corruption, one decoder": (
        SpanCorruption(), LLAMA, {"vocabulary": 300, "tokenizer_kind": "unigram", "sentinels": 16},
    ),
    "infilling": (Infilling(), BART, {"vocabulary": 300, "tokenizer_kind": "wordpiece"}),
    "permutation and infilling": (
        Infilling(noises=("permutation", "infilling")), BART, {"vocabulary": 300, "tokenizer_kind": "wordpiece"},
    ),
    "every noise": (
        Infilling(noises=("rotation", "masking", "deletion"), density=0.1),
        BART, {"vocabulary": 300, "tokenizer_kind": "wordpiece"},
    ),
}  # fmt: skip


@pytest.fixture
def make(world, tmp_path):
    """`make(case, name, **changes)` -> config of a short run."""

    def config(case, name="run", **changes):
        objective, model, tokenizer = CASES[case]
        data = DataConfig(train=world["pretrain"], evaluation=world["pretrain_heldout"], max_length=48, max_rows=48)
        fields = {
            "data": data, "output": str(tmp_path / name), "objective": objective, "model": model, **tokenizer,
            "optim": OptimConfig(learning_rate=1e-2), "training": TrainingConfig(batch_size=16, max_steps=12),
        }  # fmt: skip
        return pretrain.PretrainConfig(**(fields | changes))

    return config


@pytest.mark.parametrize("case", CASES)
def test_every_objective_learns_and_opens_again(case, make, tmp_path, read_metrics):
    directory = str(pretrain.run(make(case)))
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert lines[-1]["tokens"] > 0 and lines[-1]["held_out_loss"] > 0
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    assert model.spec.vocabulary >= len(tokenizer)
    if case == "span boundaries":
        assert lines[-1]["boundary_loss"] < lines[0]["boundary_loss"] - 0.3
        assert lines[-1]["loss"] == pytest.approx(lines[-1]["masked_loss"] + lines[-1]["boundary_loss"], rel=1e-4)
        _, loading = transformers.BertForMaskedLM.from_pretrained(directory, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]  # the head is not part of the model
    if case == "sentence order":
        assert {"masked_loss", "sentence_order_loss", "sentence_order_accuracy"} <= lines[-1].keys()
    if case == "sentence pairs":
        assert {"masked_loss", "next_sentence_loss", "next_sentence_accuracy"} <= lines[-1].keys()
        assert lines[-1]["loss"] == pytest.approx(lines[-1]["masked_loss"] + lines[-1]["next_sentence_loss"], rel=1e-4)


@pytest.mark.parametrize(("share", "part"), [(0.1, "evaluation"), (0.9, "train")])
def test_passages_of_one_text_are_refused_after_the_split(share, part, make, tmp_path):
    """[A4] No other text of that part has a second sentence for them, and drawing one would never end."""
    texts = [" ".join(f"{noun} {state} once." for state in STATES) for noun in NOUNS]
    file = tmp_path / "rows.jsonl"
    write_lines(file, ({"text": text} for text in texts))
    data = DataConfig(train=str(file), evaluation_share=share, max_length=32)
    with pytest.raises(UserError, match=f"{part} text are of one text"):
        pretrain.run(make("sentence pairs", data=data))
    order = replace(SentencePairs(), task="sentence_order")
    assert pretrain.run(make("sentence pairs", "order", data=data, objective=order)).exists()


def test_an_albert_learns_sentence_order_and_opens_in_transformers(make, tmp_path, read_metrics):
    rows = [f"at dawn the {noun} was {state}. at dusk the {noun} left." for noun in NOUNS for state in STATES]
    data = tmp_path / "rows.jsonl"
    write_lines(data, ({"text": row} for row in rows))
    changes = {
        "data": DataConfig(train=str(data), evaluation=str(data), max_length=48),
        "optim": OptimConfig(learning_rate=1e-2, warmup_steps=10),
        "training": TrainingConfig(batch_size=32, max_steps=100),
    }
    directory = pretrain.run(make("sentence order", **changes))
    line = read_metrics(tmp_path / "run")[-1]
    assert line["held_out_sentence_order_accuracy"] > 0.95
    theirs, loading = transformers.AlbertForPreTraining.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    first, second = rows[0].replace(". ", ".|").split("|")
    tokens = load_tokenizer(str(directory))([first, second], [second, first], padding=True, return_tensors="pt")
    inputs = (tokens["input_ids"], tokens["attention_mask"], tokens["token_type_ids"])
    with torch.no_grad():
        ours = load_pretrained(directory, "next_sentence")(*inputs)
        expected = theirs.eval()(*inputs)
    assert_close(ours.next_sentence_logits, expected.sop_logits, atol=1e-5, rtol=1e-5)
    assert_close(ours.logits, expected.prediction_logits, atol=1e-5, rtol=1e-5)
    assert expected.sop_logits.argmax(1).tolist() == [0, 1]  # in order, and swapped


@pytest.mark.parametrize("case", ["span boundaries", "sentence pairs", "span corruption"])
def test_memory_settings_change_no_result(case, make):
    weights = []
    for name, settings in (("a", {}), ("b", {"micro_batch_tokens": 150, "gradient_checkpointing": True})):
        changes = {
            "training": TrainingConfig(batch_size=16, max_steps=3, **settings),
            "optim": OptimConfig(learning_rate=1e-3),  # Adam's first steps make a rate of what is noise near 0
        }
        weights.append(load_file(pretrain.run(make(case, name, **changes)) / "model.safetensors"))
    assert_close(weights[0], weights[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["masked", "span corruption"])
def test_a_row_is_corrupted_anew_each_epoch_and_alike_in_each_run(case, make, read_metrics, tmp_path):
    still = OptimConfig(learning_rate=1e-12)  # the loss then changes with the corruption only
    losses = {}
    for name in ("a", "b"):
        training = TrainingConfig(batch_size=48, max_steps=3)  # an epoch is one step
        pretrain.run(make(case, name, optim=still, training=training))
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert losses["a"] == losses["b"]
    assert len({round(loss, 4) for loss in losses["a"]}) > 1


def test_an_encoder_of_transformers_trains_on_and_opens_there(make, tmp_path, read_metrics):
    tokenizer = load_tokenizer(str(pretrain.run(make("masked", "first"))))
    config = transformers.MPNetConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=66, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MPNetForMaskedLM(config).save_pretrained(tmp_path / "mpnet")
    save_tokenizer(tokenizer, tmp_path / "mpnet")
    more = {"model": None, "policy": str(tmp_path / "mpnet"), "vocabulary": None, "tokenizer_kind": "bpe"}
    directory = str(pretrain.run(make("masked", "second", **more)))
    lines = read_metrics(tmp_path / "second")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()(ids).logits
        assert_close(load_model(directory)(ids, torch.ones_like(ids)).logits, theirs, atol=1e-5, rtol=1e-5)


def test_continuing_from_a_checkpoint_starts_where_it_ended(make, tmp_path, read_metrics):
    first = make("masked", "first")
    directory = str(pretrain.run(first))
    more = {"model": None, "policy": directory, "vocabulary": None, "tokenizer_kind": "bpe"}
    pretrain.run(make("masked", "second", **more))
    before, after = read_metrics(tmp_path / "first"), read_metrics(tmp_path / "second")
    assert after[0]["loss"] < before[0]["loss"] - 0.3


@pytest.mark.parametrize(
    ("case", "model", "advice"),
    [
        ("masked", LLAMA, "causal"),
        ("causal", BERT, "masked"),
        ("causal", T5, "span_corruption"),
        ("infilling", LLAMA, "causal"),
    ],
)
def test_an_objective_that_does_not_fit_the_model_is_refused(case, model, advice, make):
    with pytest.raises(UserError, match=rf"does not fit model_type.*objective.kind: {advice} would"):
        pretrain.run(make(case, model=model))


@pytest.mark.parametrize("case", ["causal", "masked", "span corruption"])
def test_a_student_comes_closer_to_its_teacher(case, make, tmp_path, read_metrics):
    teacher = str(pretrain.run(make(case, "teacher")))
    distillation = DistillationConfig(teacher, soft_coef=1.0, hard_coef=0.0)
    shape = dict(CASES[case][1])
    shape["num_layers" if case == "span corruption" else "num_hidden_layers"] = 1
    own = {"vocabulary": None, "tokenizer_kind": "bpe", "tokenizer": teacher, "sentinels": None}
    pretrain.run(make(case, "student", model=shape, distillation=distillation, **own))
    lines = read_metrics(tmp_path / "student")
    assert lines[-1]["soft_loss"] < lines[0]["soft_loss"] - 0.2
    assert lines[0]["loss"] == pytest.approx(lines[0]["soft_loss"], rel=1e-5)
    assert lines[-1]["held_out_loss"] < lines[0]["hard_loss"]


def test_a_teacher_may_be_padded_differently(make, tmp_path, read_metrics):
    """[C15] The logits beyond the smaller of two vocabularies of one tokenizer are left out on both sides."""
    teacher = str(pretrain.run(make("causal", "teacher", model=CASES["causal"][1] | {"vocab_size": 340})))
    own = {"vocabulary": None, "tokenizer_kind": "bpe", "tokenizer": teacher, "sentinels": None}
    own["training"] = TrainingConfig(batch_size=16, max_steps=2)
    distillation = DistillationConfig(teacher, soft_coef=1.0, hard_coef=0.0)
    for size in (320, 360):
        model = CASES["causal"][1] | {"vocab_size": size}
        pretrain.run(make("causal", f"{size}", model=model, distillation=distillation, **own))
        assert 0 < read_metrics(tmp_path / f"{size}")[0]["soft_loss"] < 20
    copies = replace(distillation, copy_layers=True)
    with pytest.raises(UserError, match="needs its teacher's tokenizer"):
        pretrain.run(make("causal", "copied", model=model, distillation=copies, **own))


def test_the_distillation_loss_is_its_three_terms():
    torch.manual_seed(0)
    student, teacher = (build_model({**LLAMA, "vocab_size": 50, "num_hidden_layers": n}) for n in (1, 2))
    batch = Ragged.build([[1, 2, 3, 4], [5, 6, 7]])
    config = DistillationConfig("t", temperature=2.0, soft_coef=5.0, hard_coef=2.0, cosine_coef=1.0)
    loss = distillation_loss_fn(student, teacher, config)(batch)
    ours, theirs = student(batch=batch, return_logits=True), teacher(batch=batch, return_logits=True)
    p, q = (theirs.logits / 2).log_softmax(-1), (ours.logits / 2).log_softmax(-1)
    soft = 4 * (p.exp() * (p - q)).sum()
    hard = F.cross_entropy(ours.logits, torch.tensor([2, 3, 4, 6, 7]), reduction="sum")
    cosine = (1 - F.cosine_similarity(ours.hidden, theirs.hidden)).sum()
    assert_close(loss.total, 5 * soft + 2 * hard + cosine)
    assert not any(parameter.grad is not None for parameter in teacher.parameters())


def test_layers_copied_from_a_teacher_are_evenly_spaced():
    assert (spaced_layers(3, 6), spaced_layers(6, 12)) == ([1, 3, 5], [1, 3, 5, 7, 9, 11])
    config = {**LLAMA, "vocab_size": 50}
    student, teacher = build_model({**config, "num_hidden_layers": 2}), build_model({**config, "num_hidden_layers": 4})
    init_from_teacher(student, teacher)
    for ours, theirs in ((0, 1), (1, 3)):
        copied = teacher.trunk.blocks[theirs].state_dict()
        assert all(torch.equal(value, copied[name]) for name, value in student.trunk.blocks[ours].state_dict().items())
    assert torch.equal(student.head.weight, teacher.head.weight)
    with pytest.raises(UserError, match=r"copy_layers.*(head|embed)\.weight"):
        init_from_teacher(build_model({**config, "hidden_size": 48}), teacher)


def test_a_run_with_span_boundaries_goes_on_as_if_it_had_not_stopped(make, tmp_path):
    training = TrainingConfig(batch_size=16, max_steps=4)
    assert_goes_on(lambda name: (pretrain.run, make("span boundaries", name, training=training)), 2, tmp_path)


def test_a_span_is_predicted_from_the_states_beside_it_and_places():
    torch.manual_seed(0)
    model = build_model({**BERT, "vocab_size": 50})
    attach_span_boundary(model)
    masked = Ragged.build([[2, 4, 4, 12, 3], [2, 11, 4, 3]])
    batch = replace(masked, target_index=torch.tensor([1, 2, 7]), labels=torch.tensor([20, 21, 22]))
    boundaries = torch.tensor([[0, 3, 0], [0, 3, 1], [6, 8, 0]])
    output = model(batch=batch, boundaries=boundaries)
    head, states = model.span_boundary, model.hidden_states(model.trunk, batch)
    h = torch.cat([states[[0, 0, 6]], states[[3, 3, 8]], head.place.weight[[0, 1, 0]]], 1)
    for dense, norm in ((head.mix.dense, head.mix.norm), (head.predict.transform.dense, head.predict.transform.norm)):
        h = F.layer_norm(F.gelu(dense(h)), [32], norm.weight, norm.bias, 1e-12)
    logits = h @ model.trunk.embed.weight.T + head.predict.bias
    expected = logits.log_softmax(1)[[0, 1, 2], batch.labels]
    assert_close(output.boundary_log_probs, expected)
    assert_close(output.log_probs, model(batch=batch).log_probs)
    far = head(states, torch.tensor([[0, 3, 19], [0, 3, 500]]))
    assert torch.equal(far[0], far[1])


def test_a_document_of_source_and_target_must_fit_the_decoder(make):
    """Sentinels make a document longer than its text of up to 48 tokens: the bound is on what the model reads."""
    with pytest.raises(UserError, match=r"do not fit the model's 48 positions.*lower data.max_length"):
        pretrain.run(make("span corruption, one decoder", model={**LLAMA, "max_position_embeddings": 48}))


def test_settings_that_contradict_each_other_are_refused(make):
    with pytest.raises(ValueError, match=r"tokenizer .* one of the two"):
        make("masked", tokenizer="somewhere")
    with pytest.raises(ValueError, match="not sentence_pairs"):
        make("sentence pairs", distillation=DistillationConfig("t"))
    with pytest.raises(ValueError, match=r"boundary_coef .*units=spans"):
        Masked(boundary_coef=1.0)
    with pytest.raises(ValueError, match="boundary_coef trains a head"):
        make("span boundaries", distillation=DistillationConfig("t"))
    with pytest.raises(UserError, match="puts none before or after"):
        pretrain.run(make("span boundaries", tokenizer_kind="bpe"))
    with pytest.raises(ValueError, match="must be above 0"):
        DistillationConfig("t", soft_coef=0.0)
    with pytest.raises(ValueError, match="noises must name at least one"):
        Infilling(noises=())
    assert replace(make("causal"), vocabulary=None, tokenizer_kind="characters").vocabulary is None


def test_an_objectives_settings_reach_its_batches(make):
    """Shares of 1 mask everything and nothing is left or replaced; lengths and limits are kept to."""
    tokenizer = train_tokenizer("wordpiece", [TEXT] * 5, 60)
    rows = [Text(TEXT, str(number)) for number in range(6)]
    masking = Masking(rate=1.0, mask_share=1.0, random_share=0.0)
    for objective, tokenize in ((Masked, tokenize_for_corruption), (SentencePairs, tokenize_passages)):
        examples, _ = tokenize(rows, tokenizer, 24)
        collate = collate_for_objective(objective(masking=masking), tokenizer, examples, start_id=None, max_length=24)
        batches = collate(fixed_seed_rows(examples), micro_batch_tokens=30)
        for batch in (getattr(batch, "ragged", batch) for batch in batches):
            assert max(batch.lengths) <= 24 and (sum(batch.lengths) <= 30 or len(batch.lengths) == 1)
            special = torch.isin(batch.tokens, torch.tensor(tokenizer.all_special_ids))
            assert special.all() and (batch.tokens[batch.target_index] == tokenizer.mask_token_id).all()
    examples, _ = tokenize_plain(rows, tokenizer, 24)
    objective = Infilling(density=0.9, mean_span=2.0)
    collate = collate_for_objective(objective, tokenizer, examples, start_id=7, max_length=24)
    for batch in collate(fixed_seed_rows(examples), micro_batch_tokens=60):
        assert (batch.decoder.tokens[batch.decoder.firsts] == 7).all()
        assert sum(batch.lengths) <= 60 or len(batch.lengths) == 2
        masks = (batch.encoder.tokens == tokenizer.mask_token_id).sum()  # by default three in ten tokens, in spans of 3
        assert masks > 0.6 * (len(batch.encoder.tokens) - 2 * len(batch.encoder.lengths))

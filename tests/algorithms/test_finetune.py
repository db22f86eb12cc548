"""Fine-tuning for downstream tasks: what it learns, what it does not change, and that transformers reads its results alike."""

import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import load_tokenizer
from alignment.adapters import DoRASpec, IA3Spec, LoRASpec
from alignment.algorithms.finetune import finetune, scoring
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.model import (
    DoubleHeadsModel,
    classifier_state,
    freeze,
    label_config,
    start_classifier,
)
from alignment.algorithms.finetune.scoring import predict, predict_examples
from alignment.config.load import load_config
from alignment.data.config import DataConfig
from alignment.data.tasks import (
    LabeledRow,
    TaskBatch,
    TaskExample,
    TaskFormat,
    add_gpt1_tokens,
    collate_tasks,
    encode_rows,
)
from alignment.data.text.special_tokens import EncodedText
from alignment.errors import UserError
from alignment.losses.language import squared_error_loss
from alignment.models.huggingface.checkpoint import load_language_model, load_pretrained
from alignment.models.weights_config import WeightsConfig
from alignment.pipeline.stages import find_stage
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig
from tests.algorithms.labeled_rows import TASKS, write_rows
from tests.conftest import read_lines, write_lines
from tests.stopping import assert_goes_on

BERT = {
    "model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
KINDS = [
    *((family, task) for family in ("gpt2", "bert") for task in TASKS),
    *(("llama", task) for task in ("classification", "question_answering")),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Files of training and held-out rows by task."""
    folder = tmp_path_factory.mktemp("rows")
    return {
        task: DataConfig(
            train=write_rows(folder, task, 160, 0, f"{task}.jsonl"),
            evaluation=write_rows(folder, task, 24, 1, f"{task}_heldout.jsonl"),
            max_length=96,
        )
        for task in TASKS
    }


def small_config(rows, checkpoints, folder, family, task, **changes):
    start = {"policy": checkpoints[family]} if family != "bert" else {"model": BERT, "tokenizer": checkpoints["gpt2"]}
    defaults = {
        "data": rows[task],
        "output": str(folder / f"{family}-{task}"),
        "stride": 32,
        "optim": OptimConfig(learning_rate=3e-3, eps=1e-5),
        "training": TrainingConfig(batch_size=16, max_steps=2),
    }
    return FinetuneConfig(task=task, **{**start, **defaults, **changes})


@pytest.fixture
def settings(rows, checkpoints, tmp_path):
    """`settings("bert", "question_answering", **changes)`: a small config; encoders start from nothing."""
    return partial(small_config, rows, checkpoints, tmp_path)


@pytest.fixture(scope="module")
def trained(rows, checkpoints, tmp_path_factory):
    """`trained("gpt2", "classification")`: the directory of a model that learned the task, trained once."""
    folder = tmp_path_factory.mktemp("trained")
    training = TrainingConfig(batch_size=16, epochs=8)
    return cache(
        lambda family, task: finetune.run(small_config(rows, checkpoints, folder, family, task, training=training))
    )


def weights(directory):
    return load_file(Path(directory) / "model.safetensors")


# What is learned

ASKED = {  # a row without its labels, and its labels as `predict` gives them
    "classification": (lambda row: row["text"], lambda row: row["label"]),
    "pair_classification": (lambda row: (row["text"], row["pair"]), lambda row: row["label"]),
    "token_classification": (lambda row: row["words"], lambda row: row["labels"]),
    "question_answering": (lambda row: (row["question"], row["context"]), lambda row: row["answers"][0]["text"]),
    "multiple_choice": (lambda row: (row["context"], row["choices"]), lambda row: row["label"]),
    "regression": (lambda row: (row["text"], row["pair"]), lambda row: pytest.approx(row["label"], abs=0.6)),
}
NAMES = {
    "classification": ["bad", "good"], "pair_classification": ["agrees", "objects"], "multiple_choice": ["score"],
    "token_classification": ["B-person", "B-town", "I-town", "O"], "question_answering": ["LABEL_0", "LABEL_1"],
    "regression": ["LABEL_0"],
}  # fmt: skip


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_separable_task_is_learned_and_predicted(trained, rows, read_metrics, family, task):
    model = trained(family, task)
    last = read_metrics(model.parent)[-1]
    metrics = {
        "question_answering": ("exact_match", "f1"), "token_classification": ("accuracy", "entity_f1"),
        "regression": ("pearson",),
    }  # fmt: skip
    found = [last[f"held_out_{name}"] for name in metrics.get(task, ("accuracy",))]
    assert found == pytest.approx([1.0] * len(found), abs=0.05 if task == "regression" else 0)
    assert task != "regression" or (last["held_out_spearman"] > 0.9 and "accuracy" not in last)
    held_out = read_lines(str(rows[task].evaluation))
    asked, expected = ASKED[task]
    assert predict(str(model), [asked(row) for row in held_out], micro_batch_tokens=200) == list(
        map(expected, held_out)
    )
    if task == "token_classification":
        long = predict(str(model), [["the"] * 200])[0]
        assert len(long) == 200 and long[0] == "O" and long[-1] is None


def test_only_models_of_this_stage_have_the_settings_for_reading_rows(checkpoints, settings):
    with pytest.raises(UserError, match="how rows are read"):
        predict(checkpoints["gpt2"], ["a text"])
    own = {"stride": 20, "max_question": 5, "max_answer": 7, "no_answer": True}
    model = finetune.run(settings("bert", "question_answering", **own))
    assert scoring.task_format(str(model)) == TaskFormat("question_answering", "tokenizer", 96, **own)


def test_logits_that_are_not_finite_are_no_class_and_no_figure(settings, read_metrics, monkeypatch):
    """[B-H1] The highest of them is the first class."""

    def broken(*given):
        logits, loss = predict_examples(*given)
        return [each * math.nan for each in logits], loss * math.nan

    monkeypatch.setattr(finetune, "predict_examples", broken)
    model = finetune.run(settings("bert", "classification"))
    assert read_metrics(model.parent)[-1]["held_out_accuracy"] is None
    monkeypatch.setattr(scoring, "predict_examples", broken)
    with pytest.raises(UserError, match=r"row 0: .*not finite"):
        predict(str(model), ["a text"])


# What others make of it


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_transformers_gives_the_same_scores(trained, family, task):
    directory = trained(family, task)
    kind = {"token_classification": "TokenClassification", "question_answering": "QuestionAnswering"}
    own_class = getattr(transformers, f"AutoModelFor{kind.get(task, 'SequenceClassification')}")
    theirs, loading = own_class.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ours = scoring.load_finetuned(str(directory))
    ids = torch.randint(5, 300, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) < torch.tensor([[12], [7], [9]])
    ids = ids.masked_fill(~mask, theirs.config.pad_token_id or 0)
    with torch.no_grad():
        scores = ours(ids, mask.long()).logits
        output = theirs.eval()(input_ids=ids, attention_mask=mask.long())
    question = task == "question_answering"
    logits = torch.stack([output.start_logits, output.end_logits], -1) if question else output.logits
    if scores.dim() == 3:
        logits, scores = logits[mask], scores[mask]
    assert_close(scores, logits, atol=2e-5, rtol=1e-4)
    assert theirs.config.problem_type == ("regression" if task == "regression" else None)
    if task == "regression":
        labels = torch.tensor([0.5, 3.0, 5.0])
        loss = theirs(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
        assert_close(squared_error_loss(scores.squeeze(1), labels) / 3, loss.detach(), atol=1e-5, rtol=1e-4)
    assert theirs.config.id2label == dict(enumerate(NAMES[task]))
    assert theirs.config.label2id == {name: number for number, name in enumerate(NAMES[task])}


# What it leaves alone


@pytest.mark.parametrize("task", ["classification", "token_classification"])
def test_a_frozen_trunk_is_left_bit_equal_and_without_dropout(
    settings, checkpoints, write_checkpoint, tmp_path, read_metrics, task
):
    dropping = write_checkpoint(tmp_path / "dropping", "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    changes = {
        "training": TrainingConfig(batch_size=16, max_steps=8, evaluate_every_steps=1),
        "optim": OptimConfig(learning_rate=3e-2),
        "frozen_trunk": True,
    }
    plain, other = (
        weights(finetune.run(settings("gpt2", task, policy=start, output=out, **changes)))
        for start, out in ((checkpoints["gpt2"], str(tmp_path / "plain")), (dropping, str(tmp_path / "other")))
    )
    start = weights(checkpoints["gpt2"])
    assert_close(other, plain, rtol=0, atol=0)
    for name, before in start.items():
        assert torch.equal(plain[name], before)
    losses = [line["held_out_loss"] for line in read_metrics(tmp_path / "plain")]
    assert losses[-1] < losses[0] - 0.01  # the head learns


@pytest.mark.parametrize(
    ("family", "task"),
    [("gpt2", "pair_classification"), ("bert", "token_classification"), ("bert", "question_answering")],
)
def test_the_result_does_not_depend_on_how_the_batch_is_cut(settings, tmp_path, family, task):
    changes, found = {"language_coef": 0.5} if family == "gpt2" else {}, []
    for tokens in (10**6, 50):
        training = TrainingConfig(batch_size=16, max_steps=3, micro_batch_tokens=tokens)
        config = settings(family, task, output=str(tmp_path / str(tokens)), training=training, **changes)
        found.append(weights(finetune.run(config)))
    assert_close(found[1], found[0], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["plain", "language", "LoRA", "DoRA", "IA3", "frozen"])
def test_stopped_and_resumed_equals_uninterrupted(settings, tmp_path, name):
    changes = {
        "plain": {},
        "language": {"language_coef": 0.5},
        "LoRA": {"adapter": LoRASpec(rank=2, dropout=0.1)},
        "DoRA": {"adapter": DoRASpec(rank=2)},
        "IA3": {"adapter": IA3Spec()},
        "frozen": {"frozen_trunk": True},
    }[name] | {"training": TrainingConfig(batch_size=16, max_steps=4, evaluate_every_steps=2)}
    config = partial(settings, "gpt2", "pair_classification", **changes)
    assert_goes_on(lambda name: (finetune.run, config(output=str(tmp_path / name))), 2, tmp_path)


# GPT-1's parts


def test_the_language_term_is_a_mean_over_tokens_texts_and_a_sum_over_rows():
    """Row 0: texts of 2 and 1 predicted tokens, means 2 and 6, hence 4; row 1: one text, mean 5; together 9."""
    batch = TaskBatch(Ragged.build([[1, 2, 3], [4, 5], [6, 7, 8]]), torch.tensor([0, 1]), torch.tensor([0, 0, 1]))
    log_probs = torch.tensor([-1.0, -3.0, -6.0, -4.0, -6.0])
    assert scoring.auxiliary_language_loss(log_probs, batch).item() == pytest.approx(9.0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # tied to the embedding, and a matrix of its own
def test_the_language_head_is_that_of_the_checkpoint(checkpoints, family):
    tokenizer, names = load_tokenizer(checkpoints[family]), {0: "no", 1: "yes"}
    model = start_classifier(
        checkpoints[family], "classification", label_config("classification", names), len(tokenizer), True
    )
    texts = [LabeledRow(("the spa is warm", None), ("yes",), "a"), LabeledRow(("no", None), ("no",), "b")]
    [batch] = collate_tasks(encode_rows(texts, TaskFormat("classification"), tokenizer, names)[0], 100)
    log_probs = load_language_model(checkpoints[family])(batch=batch.ragged).log_probs.detach()
    result = scoring.finetune_loss_fn(model, "classification", 0.5)(batch)
    means = [float(-log_probs[batch.ragged.target_rows == row].mean()) for row in (0, 1)]
    assert result.metrics["language_loss"].item() == pytest.approx(sum(means), rel=1e-5)
    scores = model(batch=batch.ragged).logits
    assert_close(scores, model.classifier(batch=batch.ragged).logits)
    cost = torch.nn.functional.cross_entropy(scores, batch.labels, reduction="sum")
    assert_close(result.total, cost + 0.5 * result.metrics["language_loss"])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gpt1_tokens_have_new_embeddings_and_the_old_ones_stay(checkpoints, family):
    tokenizer = add_gpt1_tokens(load_tokenizer(checkpoints[family]))
    before = load_language_model(checkpoints[family])
    model = start_classifier(
        checkpoints[family], "multiple_choice", label_config("multiple_choice", {}), len(tokenizer), True
    )
    assert isinstance(model, DoubleHeadsModel) and model.classifier.spec.vocabulary == len(tokenizer)
    old = len(tokenizer) - 3
    assert torch.equal(model.classifier.trunk.embed.weight[:old], before.trunk.embed.weight)
    head = model.language_head.get_parameter("weight")
    assert torch.equal(head[:old], before.head.weight)
    assert (head is model.classifier.trunk.embed.weight) == (family == "gpt2")
    assert 0 < model.classifier.trunk.embed.weight[old:].std() < 0.04


def test_both_orders_of_a_pair_count_the_same(settings):
    model = str(finetune.run(settings("gpt2", "pair_classification", format="gpt1_similarity")))
    texts = [("the spa is warm", "a cold bus came"), ("a cold bus came", "the spa is warm")]
    tokenizer, names = load_tokenizer(model), {0: "agrees", 1: "objects"}
    rows = [LabeledRow(pair, ("agrees",), str(number)) for number, pair in enumerate(texts)]
    examples, _ = encode_rows(rows, TaskFormat("pair_classification", "gpt1_similarity"), tokenizer, names)
    classifier = load_pretrained(model, "sequence")
    logits, _ = predict_examples(classifier, examples, "pair_classification", 1000)
    assert_close(logits[0], logits[1])
    alone = [classifier(batch=Ragged.build([document])).logits[0] for document in examples[0].documents]
    assert_close(logits[0], sum(alone))


# Adapters


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
@pytest.mark.parametrize(
    "adapter",
    [LoRASpec(rank=2, alpha=3.0), DoRASpec(rank=2, alpha=3.0), IA3Spec(), LoRASpec(rank=2, token_rows=(5, 8))],
    ids=["lora", "dora", "ia3", "token rows"],
)
def test_a_saved_update_is_the_one_that_was_trained(checkpoints, adapter, quantize):
    labels, held = label_config("classification", {0: "no", 1: "yes"}), WeightsConfig(quantize=quantize)
    start = start_classifier(checkpoints["gpt2"], "classification", labels, 0, True, adapter=adapter, weights=held)
    model = freeze(start, False, adapter)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = (".lora_", ".ia3_l.", "token_rows", "classifier.head.")
    assert trained and all(any(part in name for part in own) for name in trained)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    plain = start_classifier(checkpoints["gpt2"], "classification", labels, 0, False)
    batch = Ragged.build([[5, 6, 7], [8, 9]])
    with torch.no_grad():
        before = plain(batch=batch).logits
        plain.load_state_dict(classifier_state(model, model.state_dict()))
        assert_close(plain(batch=batch).logits, model(batch=batch).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(plain(batch=batch).logits, before, atol=1e-3)


# Answers


def window(question, scores, words, first):
    """A window of one-letter words from letter `first` of the context, behind a first token that is no word."""
    offsets = [None, *((first + 2 * word, first + 2 * word + 1) for word in range(words))]
    encoded = EncodedText([0] * (words + 1), [0] * (words + 1), [True] * (words + 1), (0, 1))
    return TaskExample((encoded,), [0, 0], "q", offsets=tuple(offsets), question=question), torch.tensor(scores)


def test_windows_of_a_question_are_compared_by_score():
    nothing = [0.0, 0.0]
    made = [
        window(0, [nothing, [1.0, 0.0], [0.0, 2.0]], 2, 0),  # "a b" at 3
        window(0, [nothing, [2.0, 0.0], [5.0, 4.0]], 2, 2),  # "c" at 9
        window(1, [[3.0, 3.0], [1.0, 0.0], [0.0, 2.0]], 2, 0),  # "x y" at 3, nothing at 6
        window(1, [[1.0, 1.5], [0.0, 0.0], [0.0, 0.0]], 2, 2),  # nothing at 2.5: the least counts
    ]
    examples, rows = zip(*made, strict=True)
    contexts = ["a b c d", "x y z w"]
    cases = [(2, False, ["c", "x y"]), (1, False, ["c", "y"]), (2, True, ["c", "x y"]), (1, True, ["c", ""])]
    for max_answer, no_answer, expected in cases:  # in the last one y has 2, nothing 2.5
        form = TaskFormat("question_answering", max_answer=max_answer, no_answer=no_answer)
        assert scoring.best_answers(examples, rows, contexts, form) == expected


# What is refused


@pytest.mark.parametrize(
    ("task", "lines", "words"),
    [
        ("classification", [{"text": "the spa is warm"}, {"text": "warm", "label": -1}], "2 bad rows"),
        ("classification", [{"text": "the spa is warm", "label": "good"}], "same label 'good'"),
        ("question_answering", [{"question": "Who?", "context": "Nobody.", "answers": []}], "no_answer=true"),
    ],
)
def test_bad_rows_are_refused_before_a_model_is_loaded(settings, tmp_path, monkeypatch, task, lines, words):
    monkeypatch.setattr(finetune, "start_classifier", lambda *a: pytest.fail("a model was loaded"))
    path = tmp_path / "rows.jsonl"
    write_lines(path, lines)
    with pytest.raises(UserError, match=words):
        finetune.run(settings("bert", task, data=DataConfig(train=str(path))))


def test_what_does_not_go_together_is_refused(settings, checkpoints):
    for family, changes, words in [
        ("bert", {"format": "gpt1"}, "format=gpt1 is a decoder's and bert is none"),
        ("bert", {"language_coef": 0.5}, "needs a decoder and bert is none"),
    ]:
        with pytest.raises(UserError, match=words):
            finetune.run(settings(family, "classification", **changes))
    for task, changes, words in [
        ("token_classification", {"format": "gpt1"}, "does not go with task token_classification"),
        ("classification", {"format": "gpt1_similarity"}, "does not go with task classification"),
        ("token_classification", {"language_coef": 0.5}, "language_coef goes with"),
        ("pair_classification", {"language_coef": 0.5, "frozen_trunk": True}, "language_coef goes with"),
        ("pair_classification", {"language_coef": -1.0}, "language_coef must be at least 0"),
        ("pair_classification", {"adapter": LoRASpec(), "frozen_trunk": True}, "leave one of them out"),
        ("question_answering", {"max_answer": 0}, "max_answer must be at least 1"),
        ("pair_classification", {"policy": None}, "policy .* one of the two"),
        ("pair_classification", {"policy": None, "model": BERT}, "model needs `tokenizer`"),
    ]:
        with pytest.raises(ValueError, match=words):
            settings("gpt2", task, **changes)


def test_tiny_configs_run_after_tiny_pretraining(tmp_path, monkeypatch, read_metrics):
    monkeypatch.chdir(tmp_path)
    for name in (
        "pretrain/tiny",
        *("finetune/tiny" + (f"_{task}" if task != "classification" else "") for task in TASKS if task != "regression"),
    ):
        config_class, run = find_stage(name.partition("/")[0])
        directory = run(load_config(config_class, name))
        if name != "pretrain/tiny":
            last = read_metrics(directory.parent)[-1]
            assert last["held_out_exact_match" if "question_answering" in name else "held_out_accuracy"] > 0.8


# Encoders of long documents, and encoders that run as transformers' class


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Directories of random encoders by family, with a tokenizer that marks pairs as RoBERTa's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(special.values()), initial_alphabet=letters)
    words.train_from_iterator(["the spa is lovely"], trainer)
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, cls_token="<s>", sep_token="</s>", **special
    )
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 98, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "sep_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    longformer = transformers.LongformerConfig(attention_window=16, type_vocab_size=1, **shape)
    big_bird = transformers.BigBirdConfig(block_size=4, num_random_blocks=1, **shape)
    built = {
        "longformer": transformers.LongformerForMaskedLM(longformer),
        "big_bird": transformers.BigBirdForPreTraining(big_bird),
        "mpnet": transformers.MPNetForMaskedLM(transformers.MPNetConfig(**shape)),
        "rembert": transformers.RemBertForMaskedLM(
            transformers.RemBertConfig(input_embedding_size=16, output_embedding_size=24, **shape)
        ),
    }
    directories = {}
    for name, model in built.items():
        directories[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(directories[name])
        tokenizer.save_pretrained(directories[name])
    return directories


@pytest.mark.parametrize(
    ("task", "row", "own_class"),
    [
        ("classification", "the spa is warm", "AutoModelForSequenceClassification"),
        ("token_classification", ["the", "guest"], "AutoModelForTokenClassification"),
        ("question_answering", ("Who came?", "spa: Ines came by bus."), "AutoModelForQuestionAnswering"),
        ("multiple_choice", ("We liked:", ["warm", "cold"]), "AutoModelForSequenceClassification"),
    ],
)
@pytest.mark.parametrize("family", ["longformer", "mpnet"])
def test_a_fine_tuned_encoder_opens_in_transformers_alike(
    settings, encoders, monkeypatch, family, task, row, own_class
):
    """The logits that `predict` reads are those of the plain class for the same token ids."""
    directory = str(finetune.run(settings("gpt2", task, policy=encoders[family])))
    assert load_pretrained(encoders[family]).source == ("native" if family == "longformer" else "transformers")
    seen = []

    def spy(model, examples, *arguments):
        seen.append((examples, predict_examples(model, examples, *arguments)))
        return seen[-1][1]

    monkeypatch.setattr(scoring, "predict_examples", spy)
    assert len(predict(directory, [row])) == 1
    [(examples, (logits, _))] = seen
    plain = getattr(transformers, own_class).from_pretrained(directory).eval()
    documents = [torch.tensor([list(document)]) for document in examples[0].documents]
    with torch.no_grad():
        outputs = [plain(document) for document in documents]
    if task == "question_answering":
        theirs = torch.stack([outputs[0].start_logits[0], outputs[0].end_logits[0]], dim=-1)
    else:
        theirs = torch.cat([output.logits[0] for output in outputs])
    assert_close(logits[0].reshape(theirs.shape), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("longformer", "token_classification"),
        ("big_bird", "multiple_choice"),
        ("mpnet", "multiple_choice"),
        ("rembert", "token_classification"),
    ],
)
def test_each_of_these_encoders_learns_a_separable_task(settings, encoders, read_metrics, family, task):
    training = TrainingConfig(batch_size=16, epochs=4)
    config = settings("gpt2", task, policy=encoders[family], training=training)
    finetune.run(config)
    assert read_metrics(config.output)[-1]["held_out_accuracy"] == 1.0


def test_a_frozen_trunk_of_transformers_keeps_its_weights(settings, encoders):
    config = settings("gpt2", "classification", policy=encoders["mpnet"], frozen_trunk=True)
    after, before = weights(finetune.run(config)), weights(encoders["mpnet"])
    kept = [name for name in before if name.startswith("mpnet.")]
    assert len(kept) > 30 and all(torch.equal(after[name], before[name]) for name in kept)
    assert any(name.startswith("classifier.") for name in after)


def test_what_is_not_fine_tuned_of_transformers_classes_is_refused_by_name(settings, encoders, tmp_path):
    with pytest.raises(UserError, match=r"'mpnet' .*`adapter`"):
        finetune.run(settings("gpt2", "classification", policy=encoders["mpnet"], adapter=LoRASpec()))
    decoder = transformers.CodeGenConfig(vocab_size=300, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    transformers.CodeGenForCausalLM(decoder).save_pretrained(tmp_path / "codegen")
    load_tokenizer(encoders["mpnet"]).save_pretrained(tmp_path / "codegen")
    with pytest.raises(UserError, match=r"'codegen' .* encoders only"):
        finetune.run(settings("gpt2", "classification", policy=str(tmp_path / "codegen")))


def test_a_text_beyond_the_positions_of_transformers_is_refused(settings, encoders, tmp_path):
    """MPNet counts positions from 2, so that 98 rows hold 96 tokens."""
    path = tmp_path / "long.jsonl"
    write_lines(path, ({"text": "x" * 200, "label": label} for label in "ab"))
    data = DataConfig(train=str(path), max_length=97)
    with pytest.raises(UserError, match="96 positions"):
        finetune.run(settings("gpt2", "classification", policy=encoders["mpnet"], data=data))

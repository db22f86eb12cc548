"""Benchmarks: rows to prompts, log-probabilities of continuations, figures worked by hand, and what is refused before a model
is loaded."""

import gzip
import importlib
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from alignment import load_model, load_tokenizer
from alignment.cli import main
from alignment.data.rows.files import read_raw
from alignment.errors import UserError
from alignment.evaluation.benchmarks import run as benchmarks
from alignment.evaluation.benchmarks.figures import (
    ToxicityConfig,
    baselines,
    figures_of,
    measure,
    task_figures,
    toxicity_classifier,
)
from alignment.evaluation.benchmarks.run import BenchmarksConfig, print_benchmarks, task_results
from alignment.evaluation.benchmarks.tasks import detokenize, read_task
from alignment.judging.likelihood import LanguageScorer, Likelihood
from alignment.reports.recipe_report import benchmark_section
from alignment.statistics.winrate import accuracy_gain, win_rate
from tests.conftest import write_lines

FROM = {"source": "rows.jsonl", "prompt": "{{ question }}"}
CHOICES = FROM | {"kind": "multiple_choice", "choices": "choices", "answer": "right"}
ANSWERS = FROM | {"kind": "answers", "answer": "a"}
ROLLING = FROM | {"kind": "rolling", "prompt": "{{ text }}"}


@pytest.fixture
def make_task(tmp_path):
    """Writes rows and a task file, and reads the task."""

    def make(rows, settings, **options):
        write_lines(tmp_path / "rows.jsonl", rows)
        (tmp_path / "task.yaml").write_text(json.dumps(settings))
        return read_task(str(tmp_path / "task.yaml"), tmp_path, **options)

    return make


class Planted:
    """Gives every continuation the log-probability in a table, and the same responses to everyone."""

    def __init__(self, table=None, answers=()):
        self.table, self.answers, self.asked = table or {}, list(answers), []

    def likelihoods(self, requests):
        return [Likelihood(self.table[tail.strip()], self.table[tail.strip()] > -1) for _, tail in requests]

    def text_log_probs(self, texts):
        return [self.table[text] for text in texts]

    def responses(self, prompts, sampling, stop=()):
        self.asked += prompts
        return [self.answers[number % len(self.answers)] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def scorer(checkpoints):
    return LanguageScorer(load_model(checkpoints["llama"]), load_tokenizer(checkpoints["llama"]))


# Log-probabilities


@pytest.fixture(scope="module")
def peer(checkpoints):
    """transformers' own model of the same weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)


@torch.no_grad()
def direct(peer, ids, start):
    """Log-probability of ids[start:] by one call of transformers' own class, and whether they are the likeliest tokens."""
    logits = peer(torch.tensor([ids[:-1]])).logits[0]
    own = logits.log_softmax(-1)[range(start - 1, len(ids) - 1), ids[start:]]
    return float(own.sum()), bool((logits[start - 1 :].argmax(-1) == torch.tensor(ids[start:])).all())


def test_a_choice_s_log_probability_is_that_of_a_direct_forward(scorer, peer):
    tokenizer = scorer.tokenizer
    requests = [("Hotel Oak: the bar", tail) for tail in (" serves tea.", " serves cider and", " x", " y")]
    requests += [("The wifi opens with", " olive"), ("", "Welcome David"), ("Guest: hello", "\n")]
    found = scorer.likelihoods(requests)
    for (context, tail), one in zip(requests, found, strict=True):
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = tokenizer(context + tail, add_special_tokens=bool(context)).input_ids
        ids = ids if context else [first, *ids]
        start = len(tokenizer(context).input_ids) if context else 1
        expected = direct(peer, ids, start)
        assert one.log_prob == pytest.approx(expected[0], abs=1e-4)
        assert one.greedy == expected[1]


def test_blanks_at_a_context_s_end_belong_to_the_continuation(scorer):
    (one, tail), (other, same) = scorer.encode_requests([("The bar \n", "tea"), ("The bar", " \ntea")])
    assert (one, tail) == (other, same)
    assert scorer.tokenizer.decode(tail) == " \ntea"
    with pytest.raises(UserError, match="continuation '' of 'The bar' has 0 tokens"):
        scorer.encode_requests([("The bar", "")])


def test_continuations_of_one_token_share_one_input(scorer, monkeypatch):
    sizes = []
    forward = type(scorer.model).forward
    monkeypatch.setattr(
        type(scorer.model), "forward",
        lambda self, *a, batch=None, **k: sizes.append(len(batch.tokens)) or forward(self, *a, batch=batch, **k),
    )  # fmt: skip
    context = list(range(5, 45))
    scorer.token_likelihoods([(context, [token]) for token in range(50, 60)])
    scorer.token_likelihoods([(context, [token, 3, 4]) for token in range(50, 60)])
    assert sizes == [40 + 1, 40 + 10 * 2 + 1]  # and the token behind them all


def test_long_contexts_lose_their_beginning_and_texts_are_cut(scorer, peer, capsys):
    size = scorer.positions  # 320
    ids = torch.randint(5, 300, (2 * size + 40,), generator=torch.Generator().manual_seed(0)).tolist()
    [found] = scorer.token_likelihoods([(ids[:-2], ids[-2:])])
    assert found.log_prob == pytest.approx(direct(peer, ids[-size - 1 :], size - 1)[0], abs=1e-4)
    text = scorer.tokenizer.decode(ids)
    tokens = [scorer.first_token, *scorer.context_ids([text])[0]]
    expected, start = 0.0, 1
    while start < len(tokens):  # every token once; the last window reaches back as far as the model reads
        end = min(start + size, len(tokens))
        window = tokens[max(0, end - size - 1) : end]
        expected += direct(peer, window, len(window) - (end - start))[0]
        start = end
    assert scorer.text_log_probs([text])[0] == pytest.approx(expected, rel=1e-6)
    assert not capsys.readouterr().err
    scorer.likelihoods([(text, " cat"), ("the", " cat")])
    assert "1 of 2 texts have more tokens than the 320 that fit, and lose their beginning" in capsys.readouterr().err


@torch.no_grad()
def test_an_encoder_masks_each_token_that_both_texts_have(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "old", "young", "man", "sleeps", "here"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    peer = BertForMaskedLM(config).eval()
    peer.save_pretrained(tmp_path)
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    scorer = LanguageScorer(load_model(str(tmp_path)), load_tokenizer(str(tmp_path)))
    found = scorer.pseudo_log_probs([("the old man sleeps", "the young man sleeps here")])
    for text, value in zip(("the old man sleeps", "the young man sleeps here"), found, strict=True):
        ids = [2, *(words.index(word) for word in text.split()), 3]
        total = 0.0
        for column in (1, 3, 4):  # the, man, sleeps
            masked = torch.tensor([[4 if i == column else token for i, token in enumerate(ids)]])
            total += float(peer(masked).logits[0, column].log_softmax(-1)[ids[column]])
        assert value == pytest.approx(total, abs=1e-5)


def test_greedy_responses_are_those_of_transformers(scorer, peer):
    from alignment.generation import SamplingConfig

    prompt = "Hotel Oak: bar serves tea."
    ids = scorer.tokenizer(prompt, return_tensors="pt").input_ids
    expected = peer.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    [found] = scorer.responses([prompt], SamplingConfig(6, 0.0))
    assert scorer.tokenizer.decode(expected).startswith(found)


@pytest.fixture(scope="module")
def broken(checkpoints):
    """A scorer whose model gives numbers that are not finite, for every token."""
    model = load_model(checkpoints["llama"])
    model.trunk.norm.weight.data.fill_(math.nan)
    return LanguageScorer(model, load_tokenizer(checkpoints["llama"]))


def test_log_probabilities_that_are_not_finite_are_refused(broken, make_task):
    """[B-H1] The highest of them is the first, the right choice of several tasks."""
    task = make_task([{"question": "Hotel Oak", "choices": [" tea", " rain"], "right": 0}], CHOICES)
    with pytest.raises(UserError, match=r" tea' after '<s>Hotel Oak': .*not finite(?s:.*) rain'"):
        measure(task, broken)
    with pytest.raises(UserError, match="not finite"):
        broken.text_log_probs(["Hotel Oak"])


# Figures


def test_choices_worked_by_hand(make_task):
    """The longest choice is likeliest per character: -4 / 8 against -3 / 3 and -3.5 / 2."""
    rows = [
        {"question": "q", "choices": ["abc", "abcdefgh", "ab"], "right": 0},  # by sum right, by length wrong
        {"question": "q", "choices": ["abc", "abcdefgh", "ab"], "right": 1},
    ]
    planted = Planted({"abc": -3.0, "abcdefgh": -4.0, "ab": -3.5})
    columns = measure(make_task(rows, CHOICES), planted)
    assert columns["accuracy"].tolist() == [1, 0] and columns["accuracy_norm"].tolist() == [0, 1]


def test_mc1_and_mc2_worked_by_hand(make_task):
    """p: best 0.2, other right 0.3, wrong 0.25 and 0.05: the best is not above every wrong one; 0.5 / 0.8 is right."""
    row = {"question": "q", "choices": ["w", "r", "b", "v"], "right": [2, 1]}
    planted = Planted({name: math.log(p) for name, p in {"b": 0.2, "r": 0.3, "w": 0.25, "v": 0.05}.items()})
    task = make_task([row], {**CHOICES, "metrics": ["mc1", "mc2"]})
    columns = measure(task, planted)
    assert columns["mc1"].tolist() == [0] and columns["accuracy"].tolist() == [1]
    assert columns["mc2"].tolist() == pytest.approx([0.5 / 0.8])


def test_bias_scores_worked_by_hand(make_task):
    """Ambiguous: 2 of 3 named answers follow the stereotype, 1 of 4 answers is right: (2 * 2/3 - 1) * (1 - 1/4) = 1/4.
    Disambiguated: 1 of 4 follows it: -1/2, whatever the accuracy."""
    keys = {"stereotyped": "s", "unknown": "2", "ambiguous": "a"}
    given = [("x", True), ("x", True), ("y", True), ("u", True), ("x", False), ("y", False), ("y", False), ("y", False)]
    rows = [
        {"question": "q", "choices": [f"{'x' if best == 'x' else 'o'}", f"{'y' if best == 'y' else 'o'}", f"{'u' if best == 'u' else 'o'}"],
         "right": 2 if ambiguous else 0, "s": 0, "a": ambiguous}
        for best, ambiguous in given
    ]  # fmt: skip
    planted = Planted({"x": -1.0, "y": -1.0, "u": -1.0, "o": -9.0})
    task = make_task(rows, {**CHOICES, "bias": keys})
    columns = measure(task, planted)
    found = task_figures(task.settings, columns)
    assert found["bias_ambiguous"] == pytest.approx(1 / 4)
    assert found["bias_disambiguated"] == pytest.approx(-1 / 2)
    assert found["accuracy"] == pytest.approx(2 / 8)


def test_a_row_without_a_stereotyped_answer_counts_in_the_accuracy_alone(make_task):
    row = {"question": "q", "choices": ["x", "y"], "right": 0, "s": None, "a": False}
    task = make_task([row], {**CHOICES, "bias": {"stereotyped": "s", "unknown": "1", "ambiguous": "a"}})
    columns = measure(task, Planted({"x": -1.0, "y": -2.0}))
    assert task_figures(task.settings, columns) == {
        "accuracy": 1, "accuracy_norm": 1, "bias_ambiguous": 0, "bias_disambiguated": 0,
    }  # fmt: skip


def test_f1_and_matthews_of_classes(make_task):
    """Labels 1 1 1 0 0, predicted 1 1 0 1 0: F1 of class 1 is 4/6, r = (2 * 1 - 1 * 1) / sqrt(3 * 2 * 3 * 2) = 1/6."""
    cells = [(1, 1), (1, 1), (1, 0), (0, 1), (0, 0)]
    rows = [{"question": "q", "choices": [f"n{p}", f"y{p}"], "right": label} for label, p in cells]
    task = make_task(rows, {**CHOICES, "metrics": ["f1", "matthews"]})
    columns = measure(task, Planted({"n1": -2.0, "y1": -1.0, "n0": -1.0, "y0": -2.0}))
    found = figures_of(task.settings, np.arange(5), columns)
    assert found["f1"]["value"] == pytest.approx(4 / 6) and found["matthews"]["value"] == pytest.approx(1 / 6)
    assert found["matthews"]["low"] < 1 / 6 < found["matthews"]["high"]


def test_a_figure_that_no_draw_changes_has_no_bounds():
    """[G] An expected maximum toxicity of 0.48 in all rows is not known to be 0.48."""
    settings = SimpleNamespace(kind="toxicity", metrics=[], bias=False)
    columns = np.array([(0.48, 0.0)] * 4, dtype=[("expected_maximum_toxicity", float), ("toxicity_probability", float)])
    found = figures_of(settings, np.arange(4), columns)
    assert math.isnan(found["expected_maximum_toxicity"]["low"]) and found["toxicity_probability"]["high"] < 1


def test_f1_of_three_choices_is_that_of_class_1(make_task):
    """Labels 1 1 0 0; ours predicts 1 0 0 0, F1 2/3, the other 1 1 0 2, F1 1."""
    rows = [{"question": "q", "choices": [f"{i}{c}" for c in "abc"], "right": int(i < 2)} for i in range(4)]
    task, columns = make_task(rows, {**CHOICES, "metrics": ["f1"]}), []
    for best in (["0b", "1a", "2a", "3a"], ["0b", "1b", "2a", "3c"]):
        table = {choice: -2.0 + (choice in best) for row in rows for choice in row["choices"]}
        columns.append(measure(task, Planted(table)))
    assert figures_of(task.settings, np.arange(4), columns[0])["f1"]["value"] == pytest.approx(2 / 3)
    assert figures_of(task.settings, np.arange(4), *columns)["f1"]["value"] == pytest.approx(2 / 3 - 1)


def test_last_word_pairs_and_rolling_worked_by_hand(make_task):
    rows = [{"text": "a b c"}, {"text": "a b dé"}]
    word = FROM | {"kind": "last_word", "prompt": "{{ text.rsplit(' ', 1)[0] }}", "answer": "text.rsplit(' ', 1)[1]"}
    task = make_task(rows, word)
    columns = measure(task, Planted({"c": -0.5, "dé": -2.5}))
    found = task_figures(task.settings, columns)
    assert found == pytest.approx({"accuracy": 0.5, "perplexity": math.exp(1.5)})
    task = make_task(rows, ROLLING)
    found = task_figures(task.settings, measure(task, Planted({"a b c": -4.0, "a b dé": -8.0})))
    assert found["word_perplexity"] == pytest.approx(math.exp(12 / 6))  # 5 + 7 bytes
    assert found["byte_perplexity"] == pytest.approx(math.e)
    assert found["bits_per_byte"] == pytest.approx(1 / math.log(2))
    # a text without blanks is one word, however long
    rows, table = [{"text": "晴" * 1000}, {"text": "雨" * 1000}], {"晴" * 1000: -3000.0, "雨" * 1000: -3600.0}
    task = make_task(rows, ROLLING)
    found = figures_of(task.settings, np.arange(2), measure(task, Planted(table)))
    assert found["word_perplexity"]["value"] == math.inf and math.isnan(found["word_perplexity"]["high"])
    assert found["byte_perplexity"]["value"] == pytest.approx(math.exp(1.1))
    pairs = {"kind": "pairs", "source": "rows.jsonl", "choices": ["{{ a }}", "{{ b }}"], "figure": "preferred"}
    task = make_task([{"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": "x", "b": "x"}], pairs)
    assert measure(task, Planted({"x": -1.0, "y": -2.0}))["preferred"].tolist() == [1, 0, 0.5]  # [B-L1] equal texts tie


def test_answers_are_extracted_and_compared(make_task):
    rows = [{"q": "1 + 1", "a": "So it is 2.\n#### 2"}, {"q": "2 + 2", "a": "#### 4"}]
    math_task = {"kind": "answers", "source": "rows.jsonl", "prompt": "{{ q }}", "answer": "a", "match": "gsm8k"}
    task = make_task(rows, math_task)
    columns = measure(task, Planted(answers=["I think 1 + 1 = 2", "#### 5"]))
    assert columns["accuracy"].tolist() == [1, 0]
    choice = {**math_task, "match": "exact", "answer": "'B'", "extract": r"answer is \(?([A-D])"}
    columns = measure(make_task(rows, choice), Planted(answers=["no: the answer is (A) ... the answer is (B)", "B"]))
    assert columns["accuracy"].tolist() == [1, 0]
    slow = {**choice, "extract": "((a|aa)+)$"}
    with pytest.raises(UserError, match=r"extract: pattern .* takes more than 1 seconds; nest no repetitions"):
        measure(make_task(rows, slow), Planted(answers=["a" * 60 + "b"]))
    squad = {**math_task, "match": "squad", "answer": "['the old town', 'town']"}
    columns = measure(make_task(rows, squad), Planted(answers=["an old Town.", "old city"]))
    assert columns["exact_match"].tolist() == [1, 0] and columns["f1"].tolist() == [1, 0.5]


def test_bleu_and_rouge_are_the_libraries_figures_of_the_corpus(make_task):
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    accepted = [
        ["the cat sat on the mat", "a cat was on the mat"],
        ["he reads two old books", "two books"],
        ["yes", "it is"],
    ]
    written = ["the cat sat on a mat today", "he is reading two books", ""]
    rows = [{"question": str(n), "a": texts} for n, texts in enumerate(accepted)]
    task = make_task(rows, ANSWERS | {"metrics": ["rouge_l", "bleu"]})
    columns = measure(task, Planted(answers=written))
    found = task_figures(task.settings, columns)
    references = [list(side) for side in zip(*accepted, strict=True)]
    assert found["bleu"] == pytest.approx(BLEU().corpus_score(written, references).score)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(written, accepted, strict=True)
    each = [max(scorer.score(one, text)["rougeL"].fmeasure for one in texts) for text, texts in pairs]
    assert each[1] == pytest.approx(2 * (4 / 5 * 4 / 5) / (4 / 5 + 4 / 5))  # he, read(ing), two, books of five and five
    assert columns["rouge_l"].tolist() == pytest.approx(each) and found["rouge_l"] == pytest.approx(sum(each) / 3)
    intervals = figures_of(task.settings, np.arange(3), columns)
    assert set(intervals) == {"accuracy", "rouge_l", "bleu"}
    assert intervals["bleu"]["low"] <= found["bleu"] <= intervals["bleu"]["high"]


def test_text_metrics_are_of_answers_and_of_an_extra(make_task, monkeypatch, checkpoints, tmp_path):
    import importlib.util

    settings = {"kind": "answers", "source": "rows.jsonl", "prompt": "{{ q }}", "answer": "q", "metrics": ["bleu"]}
    make_task([{"q": "a"}], settings)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sacrebleu" else found(name, *a))
    tasks = [str(tmp_path / "task.yaml")]
    config = BenchmarksConfig({"base": checkpoints["llama"]}, str(tmp_path), tasks, str(tmp_path))
    with pytest.raises(UserError, match=r"bleu take rouge-score and sacrebleu, .*\[text-metrics\]"):
        benchmarks.run(config)
    with pytest.raises(
        UserError, match="metrics: are figures of generated answers; leave them out with kind=last_word"
    ):
        make_task([{"q": "a"}], {**settings, "kind": "last_word"})
    with pytest.raises(UserError, match="metrics: are figures of choices; leave them out with kind=answers"):
        make_task([{"q": "a"}], {**settings, "metrics": ["f1"]})


def test_toxicity_worked_by_hand(make_task):
    """Largest of three continuations: 0.9 and 0.4, so 0.65 in the mean; one of two prompts has one of at least a half."""
    settings = {"kind": "toxicity", "source": "rows.jsonl", "prompt": "{{ q }}", "samples": 3, "sampling": {}}
    task, planted = make_task([{"q": "a"}, {"q": "b"}], settings), Planted(answers=list("abcdef"))
    scores = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.4, "e": 0.2, "f": 0.3}
    columns = measure(task, planted, lambda texts: [scores[text] for text in texts])
    assert planted.asked == ["a"] * 3 + ["b"] * 3
    expected = {"expected_maximum_toxicity": 0.65, "toxicity_probability": 0.5}
    assert task_figures(task.settings, columns) == pytest.approx(expected)


def test_baselines(make_task):
    """2 of 3 rows are "no": the majority's accuracy. unigram: "no" is also the more frequent word of the choices? Both equal."""
    rows = [{"question": "q", "choices": ["no", "yes"], "right": right} for right in (0, 0, 1)]
    task = make_task(rows, {**CHOICES, "metrics": ["f1"]})
    majority = baselines(task)["majority"]
    assert task_figures(task.settings, measure(task, majority))["accuracy"] == pytest.approx(2 / 3)
    rows = [{"question": "q", "choices": choices, "right": 0} for choices in (["a b", "c"], ["c", "d"])]
    found = baselines(make_task(rows, CHOICES))
    assert set(found) == {"unigram"}  # no two rows have the same choices
    # a, b, d once, c twice, 4 different words: p(c) = 3 / 10, p(a b) = (2 / 10)^2
    assert found["unigram"].log_prob("c") == pytest.approx(math.log(3 / 10))
    assert found["unigram"].log_prob("a b") == pytest.approx(2 * math.log(2 / 10))


def test_intervals_are_those_of_win_rates_and_wider_in_clusters(make_task):
    rows = [{"question": "q", "choices": ["a", "b"], "right": int(i < 8), "author": i // 4} for i in range(20)]
    values = [0.0] * 8 + [1.0] * 12
    planted, found = Planted({"a": -1.0, "b": -2.0}), {}
    for cluster in (None, "author"):  # four equal values each
        task = make_task(rows, {**CHOICES, "cluster": cluster})
        entry = task_results(task, {"base": measure(task, planted)})
        expected = win_rate(values, clusters=None if cluster is None else [row["author"] for row in rows])
        found[cluster] = entry["models"]["base"]["accuracy"]
        assert entry["clusters"] == expected.clusters
        assert found[cluster] == pytest.approx({"value": 0.6, "low": expected.low, "high": expected.high, "n": 20})
    assert found["author"]["low"] < found[None]["low"] and found["author"]["high"] > found[None]["high"]


def test_models_side_by_side_and_their_paired_difference(make_task):
    kinds = ["odd", "even"]
    rows = [{"question": "q", "choices": ["x", f"y{i}"], "right": 1, "kind": kinds[i % 2]} for i in range(9)]
    task = make_task(rows, {**CHOICES, "subsets": ["kind"]})
    tables = [{"x": -2.0, **{f"y{i}": -1.0 if i < count else -3.0 for i in range(9)}} for count in (3, 7)]
    measured = {name: measure(task, Planted(table)) for name, table in zip(("base", "sft"), tables, strict=True)}
    found = task_results(task, measured)
    assert found["models"]["base"]["accuracy"]["value"] == pytest.approx(3 / 9)
    assert found["subsets"]["kind"]["odd"]["sft"]["accuracy"]["n"] == 5
    expected = accuracy_gain([1.0] * 7 + [0.0] * 2, [1.0] * 3 + [0.0] * 6)
    lead = found["differences"]["sft"]["accuracy"]
    assert lead["value"] == pytest.approx(expected["difference"])
    assert (lead["low"], lead["high"]) == pytest.approx((expected["low"], expected["high"]))
    assert found["chance"] == 0.5 and found["against"] == "base"


# Rows and refusals


def test_examples_never_contain_the_judged_row_and_are_of_its_kind(make_task):
    rows = [{"question": f"q{i % 3}", "choices": ["a", "b"], "right": 0, "topic": i % 2} for i in range(12)]
    task = make_task(rows, {**CHOICES, "few_shot": 2, "alike": "topic", "description": "About {{ topic }}.\n\n"})
    for item, row in zip(task.items, rows, strict=True):
        description, *examples, own = item.prompt.split("\n\n")
        assert own == row["question"] and description == f"About {row['topic']}."
        assert len(examples) == 2 and all(not example.startswith(own) for example in examples)
        assert all(example.endswith(" a") for example in examples)
    assert make_task(rows, {**CHOICES, "few_shot": 2}, shots=0).items[0].prompt == "q0"


def test_rows_with_too_few_examples_are_counted(make_task, capsys):
    make_task([{"question": f"q{i}", "choices": ["a", "b"], "right": 0} for i in range(3)], {**CHOICES, "few_shot": 3})
    assert "few_shot: 3 rows have fewer than 3 examples" in capsys.readouterr().err


def test_rows_are_drawn_evenly(make_task):
    rows = [{"question": str(i), "choices": ["a", "b"], "right": 0} for i in range(10)]
    assert [item.prompt for item in make_task(rows, CHOICES, max_rows=4).items] == ["0", "2", "5", "7"]


def test_paragraphs_of_an_article_are_one_document(tmp_path):
    articles = [" = One = \n \n first\n \n = = Part = = \n \n second\n \n", " = Two = \n \n third\n"]
    (tmp_path / "text.txt").write_text(" \n" + "".join(articles))
    task = ROLLING | {"source": "text.txt", "document_start": "^ = [^=]"}
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    prompts = [item.prompt for item in read_task(str(tmp_path / "task.yaml"), tmp_path).items]
    assert prompts == articles  # [G A.2-1] to the byte: perplexity per byte or word is of the file's own text


def test_answers_of_truthfulqa_are_cut_as_its_authors_do(tmp_path):
    """[B-M6] By `split_multi_answer`: blank answers are left out, and each ends with one full stop."""
    row = {
        "Question": "q", "Type": "t", "Category": "c", "Best Answer": " Yes ",
        "Correct Answers": "No comment.; Yes;", "Incorrect Answers": "; No ;Never...;Cannibal Holocaust;",
    }  # fmt: skip
    (tmp_path / "truthfulqa").mkdir()
    with gzip.open(tmp_path / "truthfulqa/questions.jsonl.gz", "wt") as file:
        file.write(json.dumps(row))
    [item] = read_task("truthfulqa", tmp_path).items
    assert item.choices == ("No comment.", "Yes.", "No.", "Never...", "Cannibal Holocaust.")
    assert item.right == (1, 0)


# GPT-2's zero-shot tasks


CLOZE = [  # two questions in the form of the Hub's rows
    {
        "sentences": ["A line of the tale ."] * 19 + ["`` Is n't it late ? '' said the king -LRB- Tom 's son -RRB- ."],
        "question": "The XXXXX , who was old , slept .", "answer": "queen", "options": ["king", "queen", "cat"],
    },
    {
        "sentences": ["A line of the tale ."] * 19 + ["It rained ."],
        "question": "`` Come in , '' said the XXXXX .", "answer": "cat", "options": ["king", "queen", "cat"],
    },
]  # fmt: skip


@pytest.fixture
def write_conversion(tmp_path, monkeypatch):
    """Writes a split as the Hub's conversion to Parquet has it; what `datasets` keeps of it is of this test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(name, rows):
        (tmp_path / name).mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name / "0000.parquet")

    return write


@pytest.mark.parametrize("name", ["cbt_common_nouns", "cbt_named_entities"])
def test_a_cloze_takes_the_candidate_whose_completed_text_is_likeliest(name, tmp_path, write_conversion):
    """queen, right, leads in the first question (-7 against -8 and -9), king, wrong, in the second (-2, -5, -3): 1 of 2."""
    write_conversion(f"cam-cst/cbt/{'CN' if 'common' in name else 'NE'}/validation", CLOZE)
    task = read_task(name, tmp_path)
    first, second = task.items
    assert first.prompt == "A line of the tale. " * 19 + "\"Isn't it late?\" said the king (Tom's son). The "
    assert first.choices == tuple(f"{word}, who was old, slept." for word in ("king", "queen", "cat"))
    assert second.prompt.endswith('It rained. "Come in," said the ') and second.own == "cat."
    rest = [f"{word}, who was old, slept." for word in ("king", "queen", "cat")]
    table = dict(zip(rest, (-8.0, -7.0, -9.0), strict=True)) | {"king.": -2.0, "queen.": -5.0, "cat.": -3.0}
    assert measure(task, Planted(table))["accuracy"].tolist() == [1, 0]
    assert sum(len(item.right) / len(item.choices) for item in task.items) / 2 == pytest.approx(1 / 3)


def test_a_cloze_s_candidates_are_scored_with_the_rest_of_the_sentence(scorer, peer, tmp_path, write_conversion):
    row = {"question": "The XXXXX serves tea .", "answer": "bar", "options": ["spa", "bar"]}
    row["sentences"] = ["The bar opens ."]
    write_conversion("cam-cst/cbt/CN/validation", [row])
    [item] = read_task("cbt_common_nouns", tmp_path).items
    found = scorer.likelihoods([(item.prompt, one) for one in item.choices])
    whole = [direct(peer, scorer.context_ids([item.prompt + one])[0], 1)[0] for one in item.choices]
    before = direct(peer, scorer.context_ids([item.prompt.rstrip()])[0], 1)[0]
    assert [one.log_prob for one in found] == pytest.approx([one - before for one in whole], abs=1e-4)


@pytest.mark.parametrize(
    ("style", "text", "written"),
    [
        ("wikitext", ' = = Part = = \n A 1 @,@ 000 @-@ year " old " town ( of 5 @.@ 2 ) , Tom \'s ; boys \' \n',
         ' == Part ==\nA 1,000-year "old" town (of 5.2), Tom\'s; boys\'\n'),
        ("ptb", " it is n't the company 's N shares at $ N a share \n that 's # N \n",
         " it isn't the company's 1 shares at $1 a share\nthat's #1\n"),
        ("cbt", "1 `` Oh ! '' he said -LRB- he 'd come -RRB- .\n2 They 're off ; go .",
         '"Oh!" he said (he\'d come). They\'re off; go.'),
    ],
)  # fmt: skip
def test_detokenizers_write_texts_as_people_do(style, text, written):
    assert detokenize(text, style) == written


def test_a_detokenized_text_s_perplexity_is_per_word_of_the_set(make_task):
    """ "a , b" has 3 words and 5 bytes, and is scored as "a, b"."""
    settings = {"kind": "rolling", "source": "rows.jsonl", "prompt": "{{ text | detokenize('wikitext') }}"}
    task = make_task([{"text": "a , b"}], {**settings, "counted": "{{ text }}"})
    found = figures_of(task.settings, np.zeros(1), measure(task, Planted({"a, b": -6.0})))
    assert found["word_perplexity"]["value"] == pytest.approx(math.exp(6 / 3))
    assert found["bits_per_byte"]["value"] == pytest.approx(6 / 5 / math.log(2))
    assert math.isnan(found["word_perplexity"]["low"])  # one text says nothing of how far texts lie apart
    with pytest.raises(UserError, match="detokenize knows wikitext, ptb, cbt; did you mean 'wikitext'"):
        make_task([{"text": "a"}], {**settings, "prompt": "{{ text | detokenize('wikitex') }}"})


def test_sentences_of_the_penn_treebank_are_one_text_as_in_its_file(tmp_path, write_conversion):
    rows = [{"sentence": "no it was n't black monday"}, {"sentence": "up N %"}]
    write_conversion("ptb-text-only/ptb_text_only/penn_treebank/test", rows)
    [item] = read_task("ptb", tmp_path).items
    assert item.counted == " no it was n't black monday \n up N % \n"


@pytest.mark.parametrize(("name", "file"), [
    ("enwik8", "LTCB/enwik8/enwik8-raw/train/0000.parquet"), ("text8", "afmck/text8/data/test-00000-of-00001.parquet")
])  # fmt: skip
def test_a_whole_set_is_one_text_to_the_byte(name, file, tmp_path, monkeypatch):
    """Blank lines and line ends count: 14 bytes at 7 nats are half a nat each."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    content = "\n\na b\r\n\n\nc d \n"
    (tmp_path / file).parent.mkdir(parents=True)
    datasets.Dataset.from_list([{"text": content}]).to_parquet(tmp_path / file)
    task = read_task(name, tmp_path)
    assert len(task.items) == 1 and (task.items[0].counted or task.items[0].prompt) == content
    found = task_figures(task.settings, measure(task, Planted({task.items[0].prompt: -7.0})))
    assert found["bits_per_byte"] == pytest.approx(7 / len(content) / math.log(2))


def test_enwik8_is_the_end_of_its_text_without_parts_of_a_character(tmp_path, write_conversion):
    write_conversion("LTCB/enwik8/enwik8-raw/train", [{"text": "x\u00e9" + "a" * 4_999_999}])
    assert [item.prompt for item in read_task("enwik8", tmp_path).items] == ["a" * 4_999_999]


ROW = {"question": "q", "choices": ["a", "b"], "right": 1}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([ROW, ROW], {"prompt": "{{ qestion }}"}, r"rows.jsonl:1: prompt: '{{ qestion }}': 'qestion' is undefined.*question, choices"),
        ([ROW], {"answer": "righ"}, "answer: 'righ': 'righ' is undefined"),
        ([ROW], {"answer": "2"}, "answer: must be the index of one of 2 choices, from 0, got 2"),
        ([ROW], {"answer": "1 +"}, "answer: '1 \\+': "),
        ([ROW], {"prompt": "{{ ''.__class__.__mro__ }}"}, "unsafe|undefined"),
        ([ROW], {"choices": "question"}, "choices: must be a list of texts, got 'q'"),
        ([ROW], {"metrics": ["f2"]}, "task.yaml:1: metrics"),
        ([ROW], {"promt": "x"}, "promt: unknown key; did you mean 'prompt'"),
        ([ROW], {"kind": "pairs", "few_shot": 2}, "few_shot: has no effect with kind=pairs"),
        ([ROW], {"answer": "none"}, "answer: is missing"),
        ([ROW], {"kind": "toxicity"}, "sampling: temperature must be above 0"),
        ([ROW], {"extract": "("}, "extract: pattern"),
        ([ROW], {"extract": "answer is .*"}, "extract: must have a group"),
        ([ROW], {"kind": "answers", "metrics": ["f1"]}, "metrics: are figures of choices; leave them out with kind=answers"),
        ([ROW], {"kind": "answers", "bias": dict.fromkeys(("stereotyped", "unknown", "ambiguous"), "1")},
         "bias: is a figure of choices; leave it out with kind=answers"),
        ([ROW], {"bias": {"unknown": "1"}}, "bias: needs stereotyped, unknown and ambiguous"),
        ([ROW], {"source": "other.jsonl"}, "other.jsonl: no such file"),
        ([ROW, ROW], {"document_start": "=", "prompt": "{{ text }}"},
         r"rows.jsonl:1: document_start puts the column text together, and the row has question, choices, right"),
        ([ROW], {"document_start": "=", "whole_files": True}, "document_start: has no effect with whole_files"),
        ([ROW], {"counted": "{{ question }}"}, "counted: has no effect with kind=multiple_choice"),
        ([], {}, "there is no row in rows.jsonl"),
    ],
)  # fmt: skip
def test_a_bad_task_is_named_before_a_model_is_loaded(make_task, rows, changes, message):
    with pytest.raises(UserError, match=message):
        make_task(rows, {**CHOICES, **changes})


def test_one_fault_of_many_rows_is_one_line(make_task):
    with pytest.raises(UserError) as error:
        make_task([ROW] * 30, {**CHOICES, "prompt": "{{ missing }}"})
    assert len(str(error.value).splitlines()) == 1 and "and 29 more rows" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, "nowhere: no such folder"),
        ({"tasks": ["mmlo"]}, "mmlo: no such file, and no packaged task of that name; did you mean 'mmlu'"),
        ({"models": {"base": "./nothing"}}, "nothing: no such model directory"),
    ],
)
def test_what_is_not_there_is_named_before_a_model_is_loaded(tmp_path, checkpoints, monkeypatch, changes, message):
    monkeypatch.setattr(benchmarks, "load_on_best_device", lambda *a, **k: pytest.fail("a model was loaded"))
    settings = {"models": {"base": checkpoints["llama"]}, "tasks": ["tiny_choices"], "output": str(tmp_path)}
    settings["data"] = str(Path(__file__).parents[2] / "configs" / "tiny_data")
    with pytest.raises(UserError, match=message):
        benchmarks.run(BenchmarksConfig(**{**settings, **changes}))


def test_lm_eval_is_optional(monkeypatch, checkpoints, tmp_path):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a))
    config = BenchmarksConfig(models={"base": checkpoints["llama"]}, lm_eval=["lambada"], output=str(tmp_path))
    with pytest.raises(UserError, match=r"lm-eval is not installed; pip install -e '\.\[bench\]'"):
        benchmarks.run(config)


@pytest.fixture
def lm_eval_model(monkeypatch):
    """Our model behind lm-eval's interface, whose package need not be there."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LM=object))
    name = "alignment.evaluation.benchmarks.lm_eval_model"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).LMEvalModel
    sys.modules.pop(name)


@pytest.mark.parametrize(
    ("settings", "size", "temperature"),
    [
        ({}, 256, 0.0),
        ({"max_new_tokens": 16}, 16, 0.0),
        ({"max_tokens": 17, "do_sample": False, "temperature": 0.7}, 17, 0.0),
        ({"max_completion_tokens": 18, "temperature": 0.7}, 18, 0.7),
        ({"max_gen_toks": 19, "max_new_tokens": 20, "do_sample": True, "temperature": 0.5}, 19, 0.5),
    ],
)
def test_settings_of_lm_eval_count_as_for_its_own_models(
    settings, size, temperature, lm_eval_model, scorer, monkeypatch
):
    """[B-H5] `normalize_gen_kwargs` of lm-eval 0.4.13."""
    asked = []
    monkeypatch.setattr(
        LanguageScorer, "responses", lambda self, texts, sampling, stop: asked.append(sampling) or texts
    )
    assert lm_eval_model(scorer).generate_until([SimpleNamespace(args=("a", settings))]) == ["a"]
    assert (asked[0].max_new_tokens, asked[0].temperature) == (size, temperature)


def test_lm_eval_samples_at_no_temperature_of_our_own(lm_eval_model, scorer):
    with pytest.raises(UserError, match="do_sample"):
        lm_eval_model(scorer).generate_until([SimpleNamespace(args=("a", {"do_sample": True}))])


def test_the_beginning_of_an_answer_of_lm_eval_stays_open(lm_eval_model, scorer, capsys):
    """[B-H5] And a template without a system role reads the rest."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = load_tokenizer(scorer.tokenizer.name_or_path)
    tokenizer.chat_template = template
    model = lm_eval_model(replace(scorer, tokenizer=tokenizer))
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The best answer is"}]
    assert model.apply_chat_template(said, add_generation_prompt=False) == "<user>q<end><assistant>The best answer is"
    system = [{"role": "system", "content": "s"}, said[0]]
    assert model.apply_chat_template(system) == "<user>q<end><assistant>"
    assert "no system role" in capsys.readouterr().err


def test_a_task_s_classifier_and_an_encoder_are_checked(tmp_path, checkpoints):
    (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "task.yaml").write_text("kind: toxicity\nsource: rows.jsonl\nprompt: '{{ q }}'\nsampling: {}\n")
    settings = {"models": {"base": checkpoints["llama"]}, "tasks": [str(tmp_path / "task.yaml")], "data": str(tmp_path)}
    with pytest.raises(UserError, match=r"needs a classifier of toxic texts; set toxicity\.model"):
        benchmarks.run(BenchmarksConfig(**settings, output=str(tmp_path)))


# A whole run


def test_settings_alone_are_a_config(tmp_path, checkpoints, capsys):
    """Where a key is missing, it is named; of training too."""
    settings = ["tasks=[tiny_choices]", f"data={Path(__file__).parents[2] / 'configs' / 'tiny_data'}", "max_rows=2"]
    model = checkpoints["llama"]
    assert main(["evaluate", "benchmarks", *settings, f"model={model}", f"output={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["models"] == {"model": model}
    capsys.readouterr()
    assert main(["evaluate", "benchmarks", *settings]) == 2
    assert {line.split(": ")[-2] for line in capsys.readouterr().err.splitlines()} == {"output", "models"}
    assert main(["sft", "policy=runs/none"]) == 2
    assert {line.split(": ")[-2] for line in capsys.readouterr().err.splitlines()} == {"data", "output"}
    assert main(["evaluate", "benchmarks", "tasks=[mmlu]", "models={a: b}", "model=b", "output=x"]) == 2


def test_a_run_has_every_model_baseline_and_difference(tmp_path, checkpoints, capsys):
    tiny = str(Path(__file__).parents[2] / "configs" / "tiny_data")
    config = BenchmarksConfig(
        models={"base": checkpoints["llama"], "other": checkpoints["gpt2"]},
        tasks=["tiny_choices", "tiny_pairs", "tiny_last_word", "tiny_rolling", "tiny_answers"],
        data=tiny, output=str(tmp_path), max_rows=4, few_shot=1,
    )  # fmt: skip
    results = json.loads(benchmarks.run(config).read_text())
    assert set(results["tasks"]) == set(config.tasks)
    for entry in results["tasks"].values():
        assert set(entry["models"]) == {"base", "other"} and set(entry["differences"]) == {"other"}
        for figure in [*entry["models"]["base"].values(), *entry["differences"]["other"].values()]:
            assert figure["low"] <= figure["value"] <= figure["high"]
    print_benchmarks(tmp_path / "results.json")
    assert "tiny_rolling: the first prompt" in (printed := capsys.readouterr().out) and "byte_perplexity" in printed


def test_a_figure_without_an_interval_is_null_in_the_results(tmp_path, checkpoints, capsys):
    """[B-L3] One text has no interval, and JSON has no word for what is no number."""
    write_lines(tmp_path / "rows.jsonl", [{"text": "The bar serves tea."}])
    (tmp_path / "task.yaml").write_text(json.dumps(ROLLING | {"figure": "word_perplexity"}))
    models, tasks = {"base": checkpoints["llama"]}, [str(tmp_path / "task.yaml")]
    path = benchmarks.run(BenchmarksConfig(models=models, tasks=tasks, data=str(tmp_path), output=str(tmp_path)))
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert results["tasks"]["task"]["models"]["base"]["word_perplexity"]["low"] is None
    print_benchmarks(path)
    assert "[–, –]" in capsys.readouterr().out
    assert benchmark_section(results).tables


def test_toxicity_of_a_classifier(tmp_path):
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizerFast

    texts = ["The bar serves tea.", "Hello"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "bar", "serves", "tea"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                        id2label={0: "fine", 1: "toxic"})  # fmt: skip
    torch.manual_seed(0)
    peer = BertForSequenceClassification(config).eval()
    peer.save_pretrained(tmp_path)
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    inputs = AutoTokenizer.from_pretrained(tmp_path)(texts, padding=True, return_tensors="pt")
    found = toxicity_classifier(ToxicityConfig(str(tmp_path), "toxic"))(texts)
    assert found == pytest.approx(peer(**inputs).logits.softmax(-1)[:, 1].tolist(), abs=1e-5)
    assert toxicity_classifier(ToxicityConfig(str(tmp_path), "toxic"))(["", texts[1], "\n"]) == [0, found[1], 0]
    assert toxicity_classifier(ToxicityConfig(str(tmp_path), "toxic"))([" "]) == [0]  # a policy may end at once
    with pytest.raises(UserError, match="has no class 'toxi'; did you mean 'toxic'"):
        toxicity_classifier(ToxicityConfig(str(tmp_path), "toxi"))


@pytest.mark.slow
def test_lm_eval_s_tasks_run_on_our_models(tmp_path, checkpoints):
    """A local task of lm-eval gives the same figures as ours; importing lm-eval alone takes seconds."""
    pytest.importorskip("lm_eval")
    rows = [{"question": f"The bar serves {a}", "choices": [" tea", " cider", " olive oil"], "right": i % 3}
            for i, a in enumerate("abcdefgh")]  # fmt: skip
    write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "task.yaml").write_text(json.dumps({**CHOICES, "delimiter": ""}))
    own = tmp_path / "lm_eval"
    own.mkdir()
    (own / "planted_choices.yaml").write_text(json.dumps({
        "task": "planted_choices", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, "target_delimiter": "",
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }))  # fmt: skip
    config = BenchmarksConfig(
        models={"base": checkpoints["llama"]}, tasks=[str(tmp_path / "task.yaml")], data=str(tmp_path), output=str(tmp_path),
        lm_eval=["planted_choices"], include_path=str(own),
    )  # fmt: skip
    results = json.loads(benchmarks.run(config).read_text())
    ours, theirs = results["tasks"]["task"]["models"]["base"], results["lm_eval"]["base"]["planted_choices"]
    assert theirs["acc,none"] == ours["accuracy"]["value"] and theirs["acc_norm,none"] == ours["accuracy_norm"]["value"]
    with pytest.raises(UserError, match="there is no task nothing_of_this_name"):
        benchmarks.run(BenchmarksConfig(models=config.models, lm_eval=["nothing_of_this_name"], output=str(tmp_path)))


# Real data


def text_log_prob(peer, ids):
    """Log-probability of ids[1:] in windows of 512, the last of which reaches back as far as the others."""
    total = 0.0
    for start in range(1, len(ids), 512):
        window = ids[max(0, min(start + 512, len(ids)) - 513) : start + 512]
        total += direct(peer, window, len(window) - len(ids[start : start + 512]))[0]
    return total


@pytest.mark.real_data
@torch.no_grad()
def test_figures_of_stories260k_equal_those_of_direct_forwards(data_folder, tmp_path, stories260k):
    """LAMBADA's accuracy and perplexity, WikiText-2's perplexity per word and byte, of a few rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = stories260k
    peer, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    tasks = {"lambada": 30, "wikitext": 2}
    found = {}
    for task, rows in tasks.items():
        config = BenchmarksConfig({"stories": model}, str(tmp_path), [task], str(data_folder), max_rows=rows)
        figures = json.loads(benchmarks.run(config).read_text())["tasks"][task]["models"]["stories"]
        found |= {f"{task} {name}": figure["value"] for name, figure in figures.items()}
    texts = [row.values["text"] for row in read_raw(str(data_folder / "lambada" / "lambada_test.jsonl.gz"))]
    last = []
    for text in [texts[i * len(texts) // 30] for i in range(30)]:
        ids, size = tokenizer(text).input_ids, len(tokenizer(text.rsplit(" ", 1)[0]).input_ids)
        last.append(direct(peer, ids[-513:], len(ids[-513:]) - len(ids) + size))
    assert found["lambada perplexity"] == pytest.approx(math.exp(-np.mean([one[0] for one in last])), rel=1e-5)
    assert found["lambada accuracy"] == np.mean([one[1] for one in last])
    nats = words = size = 0
    for item in read_task("wikitext", data_folder, max_rows=2).items:
        nats -= text_log_prob(peer, [1, *tokenizer(item.prompt).input_ids])
        words, size = words + len(re.split(r"\s+", item.prompt)), size + len(item.prompt.encode())
    assert found["wikitext word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert found["wikitext byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-5)


@pytest.mark.real_data
def test_gpt2_s_zero_shot_table_of_stories260k(data_folder, tmp_path, stories260k):
    """The parts whose files are there, and the perplexity of the detokenized articles by transformers' own class."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alignment.config.load import load_config

    model = stories260k
    config = load_config(BenchmarksConfig, "evaluate/gpt2_zero_shot")
    assert config.tasks == [
        "lambada", "cbt_common_nouns", "cbt_named_entities", "wikitext_detokenized", "ptb", "enwik8", "text8"
    ]  # fmt: skip
    config = replace(
        config, models={"stories": model}, output=str(tmp_path), data=str(data_folder), max_rows=2,
        tasks=["lambada", "wikitext_detokenized", "wikitext"],
    )  # fmt: skip
    tasks = json.loads(benchmarks.run(config).read_text())["tasks"]
    measured = {name: task["models"]["stories"] for name, task in tasks.items()}
    figures = {name: {key: one["value"] for key, one in own.items()} for name, own in measured.items()}
    plain, written = figures["wikitext"], figures["wikitext_detokenized"]
    assert plain["word_perplexity"] != pytest.approx(written["word_perplexity"], rel=0.1)
    peer, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    nats = words = size = 0
    for item in read_task("wikitext", data_folder, max_rows=2).items:
        assert " @-@ " in item.prompt and " @" not in detokenize(item.prompt, "wikitext")
        nats -= text_log_prob(peer, [1, *tokenizer(detokenize(item.prompt, "wikitext")).input_ids])
        words, size = words + len(re.split(r"\s+", item.prompt)), size + len(item.prompt.encode())
    assert written["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert written["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert figures["lambada"]["perplexity"] > 35.13  # GPT-2's


@pytest.mark.real_data
def test_the_packaged_tasks_read_the_published_sets(data_folder):
    """Rows, and facts of the sets: MMLU's shots are its subject's, majorities are those that the papers give."""
    rows = {
        "truthfulqa": 632, "crows_pairs": 1214, "lambada": 4159, "wikitext": 46, "mmlu": 1234, "squad": 948, "sst2": 705,
        "cola": 842, "mrpc": 1418, "rte": 226, "hhh": 184, "llmbar": 770,
    }  # fmt: skip
    tasks = {name: read_task(name, data_folder) for name in rows}
    assert {name: len(task.items) for name, task in tasks.items()} == rows
    majority = task_figures(tasks["mrpc"].settings, measure(tasks["mrpc"], baselines(tasks["mrpc"])["majority"]))
    assert majority["accuracy"] == pytest.approx(0.665, abs=0.005) and majority["f1"] == pytest.approx(0.799, abs=0.005)
    assert all(item.prompt.count("Answer:") == 6 for item in tasks["mmlu"].items if "college_physics" not in item.alike)


@pytest.mark.slow
@pytest.mark.real_data
def test_the_longer_sets_are_read(data_folder):
    rows = {"bbq": 8024, "gsm8k": 1035, "persona": 6504, "advanced_ai_risk": 6453}
    tasks = {name: read_task(name, data_folder) for name in rows}
    assert {name: len(task.items) for name, task in tasks.items()} == rows
    assert all(item.bias["stereotyped"] not in (None, item.bias["unknown"]) for item in tasks["bbq"].items)

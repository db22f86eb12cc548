"""Behavioral tests: cases and templates, the rule of each kind of test, the models, and what is refused before one is loaded."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment import load_model, load_reward_model
from alignment.algorithms.finetune import scoring
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.finetune import run as finetune
from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_wordpiece
from alignment.errors import UserError
from alignment.evaluation import behavior
from alignment.evaluation.behavior import BehaviorConfig, failure_rates, label_predictions, label_responses, run
from alignment.evaluation.behavior_cases import BehaviorCase, Prediction, fill_templates, judge_case, read_cases
from alignment.generation import SamplingConfig
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import DATA, lines_file

TEMPLATES = packaged_folder("configs") / "evaluate" / "behavior"


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    return str(lines_file(path, rows))


# The rules, worked out by hand. A classifier gives probabilities of negative, neutral and positive.


def labeled(*values: float) -> Prediction:
    names = ("0", "1", "2")
    return Prediction(names[max(range(3), key=lambda i: values[i])], dict(zip(names, values, strict=True)))


def case(kind: Any, texts: int = 2, **keys: Any) -> BehaviorCase:
    return BehaviorCase(test="t", type=kind, examples=[f"text {i}" for i in range(texts)], **keys)


SURE, DOUBTFUL, WRONG = labeled(0.05, 0.05, 0.9), labeled(0.2, 0.25, 0.55), labeled(0.7, 0.2, 0.1)
NEUTRAL = labeled(0.2, 0.6, 0.2)


@pytest.mark.parametrize(
    ("rule", "answers", "failed", "excess"),
    [
        ({"kind": "MFT", "label": 2}, [SURE], False, 0.1),  # 1 - 0.9
        ({"kind": "MFT", "label": 2}, [WRONG], True, 0.9),
        ({"kind": "MFT", "label": [1, 2]}, [NEUTRAL], False, 0.2),
        ({"kind": "MFT", "label": 1, "accept": {"1": [1, 2]}}, [SURE], False, 0.05),
        ({"kind": "MFT", "label": 1}, [SURE], True, 0.95),
        ({"kind": "INV"}, [SURE, DOUBTFUL], False, 0.25),  # moves by 0.35, but the label is the same
        ({"kind": "INV"}, [SURE, WRONG], True, 0.7),  # positive: 0.9 to 0.1, over 0.1
        ({"kind": "INV"}, [DOUBTFUL, labeled(0.5, 0.04, 0.46)], False, -0.01),  # another label, but only 0.09 less
        ({"kind": "DIR", "change": "does not fall"}, [SURE, DOUBTFUL], True, 0.25),
        ({"kind": "DIR", "change": "does not fall"}, [SURE, labeled(0.1, 0.1, 0.8)], False, 0.0),  # just the tolerance
        ({"kind": "DIR", "change": "does not rise"}, [DOUBTFUL, SURE], True, 0.25),
        ({"kind": "DIR", "change": "does not rise"}, [SURE, DOUBTFUL], None, 0.0),  # 0.9 has no room to rise by more
        ({"kind": "DIR", "change": "does not rise", "skip": [1]}, [NEUTRAL, WRONG], None, 0.0),
        # positive minus negative: 0.85, then 0.35, then -0.6
        ({"kind": "DIR", "change": "does not fall", "of": {"0": -1, "2": 1}}, [SURE, DOUBTFUL], True, 0.4),
        ({"kind": "DIR", "change": "does not rise", "of": {"0": -1, "2": 1}}, [SURE, WRONG], False, -1.55),
        ({"kind": "DIR", "change": "falls", "of": {"2": 1}}, [SURE, WRONG], False, -0.7),
        ({"kind": "DIR", "change": "rises", "of": {"2": 1}, "tolerance": 0}, [SURE, SURE], True, 0.0),
    ],
)
def test_a_case_of_each_kind_fails_as_worked_out(rule, answers, failed, excess):
    found = judge_case(case(**rule, texts=max(2, len(answers))), answers)
    assert found.failed is failed
    assert found.excess == pytest.approx(excess, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "scores", "failed"),
    [
        ({"kind": "DIR", "change": "falls", "tolerance": 0}, [-3.0, -3.1], False),
        ({"kind": "DIR", "change": "falls", "tolerance": 0}, [-3.0, -3.0], True),  # a tie is no preference
        ({"kind": "DIR", "change": "does not rise", "tolerance": 0.5}, [1.0, 1.4], False),
        ({"kind": "INV", "tolerance": 0.5}, [1.0, 1.4], False),
        ({"kind": "INV", "tolerance": 0.5}, [1.0, 0.4], True),
    ],
)
def test_a_model_that_only_scores_is_judged_by_its_scores(rule, scores, failed):
    assert judge_case(case(**rule), [Prediction(None, {"score": score}) for score in scores]).failed is failed


@pytest.mark.parametrize("rule", [{"kind": "INV"}, {"kind": "DIR", "change": "falls"}, {"kind": "MFT", "label": 2}])
def test_an_answer_that_is_not_finite_passes_no_test(rule):
    """[B-H1] No comparison holds with it."""
    with pytest.raises(UserError, match="not finite"):
        judge_case(case(**rule), [SURE, labeled(*[float("nan")] * 3)])


def test_the_worst_text_of_a_case_is_the_one_that_fails_most():
    found = judge_case(case("INV", 4), [SURE, DOUBTFUL, WRONG, labeled(0.6, 0.2, 0.2)])
    assert (found.failed, found.worst) == (True, 2)
    assert judge_case(case("MFT", 3, label=2), [SURE, WRONG, NEUTRAL]).worst == 1


def test_a_model_of_two_labels_is_neutral_where_it_is_undecided():
    p = torch.tensor([0.1, 0.4, 0.5, 0.6, 0.7])  # of positive
    found = label_predictions(["0", "2"], torch.stack([1 - p, p], -1).log(), neutral=1)
    assert [one.label for one in found] == ["0", "1", "1", "1", "2"]
    assert found[3].values == pytest.approx({"1": 0.7, "2": 0.3})  # 1 - 3 * 0.1
    assert found[1].values == pytest.approx({"1": 0.7, "0": 0.3})
    assert found[4].values == pytest.approx({"0": 0.3, "2": 0.7})
    # [B-M1] the likeliest label may be that of several classes, of which none is the likeliest
    same = label_predictions(["entailment", "not", "not"], torch.tensor([[0.4, 0.35, 0.25]]).log())
    assert same[0].label == "not" and same[0].values["not"] == pytest.approx(0.6)


# Planted models: rates by hand over the same nine cases

RULES = {  # test -> its rule, and the texts of its cases
    "words": ({"type": "MFT", "capability": "words", "label": 2}, [["good"], ["fine"]]),
    "bad words": ({"type": "MFT", "capability": "words", "label": 0}, [["bad"], ["poor"], ["sad"]]),
    "names": ({"type": "INV", "capability": "names"}, [["Ann is good", "Bob is good"], ["Ann is bad", "Bob is bad"]]),
    "and": (
        {"type": "DIR", "capability": "more", "change": "does not rise", "of": {"2": 1}},
        [["good", "good and bad"], ["fine", "fine and bad"]],
    ),
}
CASES = [BehaviorCase(test=test, examples=own, **rule) for test, (rule, texts) in RULES.items() for own in texts]


def right(text: str) -> float:
    return 0.1 if any(word in text for word in ("bad", "poor", "sad")) else 0.9


PLANTED = {
    "always positive": (lambda text: 0.9, {"words": 0, "bad words": 3, "names": 0, "and": 0}),
    "flips at a name": (lambda text: 1 - right(text) if "Bob" in text else right(text), {"words": 0, "bad words": 0, "names": 2, "and": 0}),
    "right": (right, {"words": 0, "bad words": 0, "names": 0, "and": 0}),
    "likes length": (lambda text: min(0.99, len(text) / 14), {"words": 2, "bad words": 0, "names": 0, "and": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_classifiers_have_the_failure_rates_worked_out_by_hand(name, monkeypatch, tmp_path, capsys):
    positive, expected = PLANTED[name]

    def answers(config: BehaviorConfig, texts: list[str]) -> list[Prediction]:
        p = torch.tensor([positive(text) for text in texts])
        return label_predictions(["0", "2"], torch.stack([1 - p, p], -1).log())

    monkeypatch.setattr(behavior, "predict_texts", answers)
    monkeypatch.setattr(behavior, "given_labels", lambda config: ["0", "2"])
    monkeypatch.setattr(behavior, "read_cases", lambda tests, expectations: CASES)
    results = json.loads(run(BehaviorConfig(str(tmp_path), ["planted.jsonl"], classifier="planted")).read_text())
    assert {test: own["failed"] for test, own in results["tests"].items()} == expected
    counted = {"words": 5, "names": 2, "more": 2}
    for capability, own in results["capabilities"].items():
        failed = sum(expected[test] for test, one in results["tests"].items() if one["capability"] == capability)
        assert own["failure"]["rate"] == pytest.approx(failed / counted[capability])
        assert own["failure"]["low"] <= own["failure"]["rate"] <= own["failure"]["high"]
    if name == "flips at a name":
        [worst, _] = results["examples"]
        assert (worst["test"], worst["text"], worst["answer"]) == ("names", "Ann is good → Bob is good", "2 → 0")
        assert worst["excess"] == pytest.approx(0.7)
    page = (tmp_path / "behavior.html").read_text()
    assert "bad words" in page and "words" in capsys.readouterr().out


def test_cases_that_say_nothing_are_in_no_rate():
    results = [True] * 3 + [False] * 7 + [None] * 2
    cases = [BehaviorCase(test="t", type="MFT", label=1, examples=[str(i)]) for i in range(12)]
    judged = list(zip(cases, map(behavior.CaseResult, results), strict=True))
    own = failure_rates(judged, "test")["t"]
    assert (own["cases"], own["say_nothing"], own["failed"]) == (12, 2, 3)
    wilson = [0.3, 0.1078, 0.6032]
    assert [own["failure"][key] for key in ("rate", "low", "high")] == pytest.approx(wilson, abs=1e-4)
    nothing = failure_rates([(judged[0][0], behavior.CaseResult(None))], "test")["t"]
    assert nothing["failure"] is None


# Files of cases


@pytest.mark.parametrize(
    ("name", "counts"),
    [  # the product of the lists, without the pairs that `where` leaves out, at most 500
        ("hotel_reviews", [8 * 4, 8 * 4, 28 * 8, 28 * 8, 14 * 4 * 4]),
        ("inference_heuristics", [56 * 6, 56 * 5, 56 * 5, 500, 500, 56 * 4, 500, 500, 500]),
        ("minimal_pairs", [8 * 3 * 4, 8 * 3 * 4, 8 * 8 * 2 * 2, 4 * 8 * 3, 4 * 3, 4 * 4 * 3]),
        ("refusal", [3 * 8, 3 * 8]),
        ("sycophancy", [8 * 3 * 2, 4 * 3, 4 * 3]),
    ],
)
def test_packaged_templates_have_the_cases_their_lists_say(name, counts):
    cases = read_cases([str(TEMPLATES / f"{name}.yaml")])
    tests = list(dict.fromkeys(case.test for case in cases))
    assert [sum(case.test == test for case in cases) for test in tests] == counts
    assert len({(case.test, *case.examples) for case in cases}) == len(cases)


def test_templates_of_pairs_draw_the_same_cases_each_time():
    test = BehaviorCase(
        test="t", type="MFT", label="no", examples=[("{{ a.name }} saw {{ b }}.", "{{ b }} saw {{ a.name }}, {{ a.age }}.")],
        fill={"a": [{"name": "Ann", "age": 8}, {"name": "Bo", "age": 9}], "b": ["Bo", "Cy"]}, where="a.name != b",
    )  # fmt: skip
    assert [case.examples for case in fill_templates(test)] == [
        [("Ann saw Bo.", "Bo saw Ann, 8.")], [("Ann saw Cy.", "Cy saw Ann, 8.")], [("Bo saw Cy.", "Cy saw Bo, 9.")],
    ]  # fmt: skip
    many = BehaviorCase(test="t", type="MFT", label=1, examples=["{{ i }}"], fill={"i": list(range(900))}, max_cases=40)
    assert len({case.examples[0] for case in fill_templates(many)}) == 40
    assert fill_templates(many) == fill_templates(many)


def test_rows_take_the_rule_of_their_test(tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"test": "not bad", "type": "MFT", "capability": "negation", "description": "x", "label": None, "examples": ["a"], "index": 3},
        {"test": "no", "type": "MFT", "label": 1, "examples": ["b"]},
        {"test": "own", "type": "DIR", "change": "rises", "examples": ["c", "d"]},
    )  # fmt: skip
    rules = tmp_path / "rules.yaml"
    rules.write_text("not bad: {label: [1, 2]}\nno: {accept: {1: [1, 2]}}\nown: {change: falls, tolerance: 0}\n")
    first, second, third = read_cases([rows], str(rules))
    assert (first.accepted, first.capability, second.accepted) == (["1", "2"], "negation", ["1", "2"])
    assert (third.change, third.tolerance) == ("rises", 0)  # its own key stands


def test_a_bad_file_ends_in_one_message_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(behavior, "predict_texts", lambda *_: pytest.fail("a model was loaded"))
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"test": "a", "type": "MFT", "label": 1, "examples": ["fine"]},
        {"test": "b", "type": "MFT", "examples": ["no label"]},
        {"test": "c", "type": "INV", "examples": ["only one"]},
        {"test": "d", "type": "DIR", "examples": ["x", "y"], "chnge": "rises"},
        {"test": "e", "type": "XYZ", "label": 1, "examples": ["x"]},
        {"test": "f", "type": "INV", "tolerance": -1, "examples": ["x", "y"]},
        {"type": "MFT", "label": 1, "examples": "x"},
        {"test": "g", "type": "MFT", "label": 1, "examples": ["{{ a }}"], "fill": {"a": "people"}},
        {"test": "h", "type": "MFT", "label": 1, "examples": ["{{ a }}"], "fill": {name: list(range(100)) for name in "abc"}},
    )  # fmt: skip
    (tmp_path / "bad.yaml").write_text(
        "unknown name:\n  type: MFT\n  label: 1\n  examples: ['{{ b }}']\n  fill: {a: [x]}\n"
        "bad syntax:\n  type: MFT\n  label: 1\n  examples: ['{{ a']\n  fill: {a: [x]}\n"
        "none left:\n  type: MFT\n  label: 1\n  examples: ['{{ a }}']\n  fill: {a: [x]}\n  where: a == 'y'\n"
    )
    config = BehaviorConfig(str(tmp_path / "out"), [rows, str(tmp_path / "bad.yaml")], classifier="nowhere")
    with pytest.raises(UserError) as error:
        run(config)
    message = str(error.value)
    for place in (
        "rows.jsonl:2: label: must be given for MFT", "rows.jsonl:3: examples: must be a list", "rows.jsonl:4: chnge:",
        "rows.jsonl:5: type: must be", "rows.jsonl:6: tolerance: must be at least 0", "rows.jsonl:7: test:",
        "rows.jsonl:8: fill.a: must be a list", "rows.jsonl:9: fill: must have at most 200000 combinations",
        "bad.yaml:5: unknown name: a template cannot be filled: 'b' is undefined", "bad.yaml:10: bad syntax: a template",
        "bad.yaml:15: none left: no case; `fill` and `where`",
    ):  # fmt: skip
        assert place in message
    (tmp_path / "broken.jsonl").write_text('{"test": \n')
    with pytest.raises(UserError, match=r"broken.jsonl:1:\d+: not JSON"):
        read_cases([str(tmp_path / "broken.jsonl")])
    with pytest.raises(UserError, match=r"nothing\.yaml: cannot be read"):
        read_cases([rows], str(tmp_path / "nothing.yaml"))
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"list\.yaml:1: .*must be a section"):
        read_cases([str(tmp_path / "list.yaml")])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "classifier or reward_model or policy must be given"),
        ({"classifier": "a", "policy": "b"}, "one of the three"),
        ({"classifier": "a", "answers": {" A": "A"}}, "policy is needed for"),
        ({"policy": "a", "answers": {" A": "A"}, "sampling": SamplingConfig()}, "does not go with `answers`"),
        ({"policy": "a", "labels": {"x": 1}}, "labels are of a classifier"),
        ({"reward_model": "a", "neutral_label": 1}, "neutral_label goes with"),
        ({"policy": "a", "as_messages": True}, "as_messages goes with"),
        ({"policy": "a", "patterns": {"refusal": "("}}, "patterns pattern '\\(' is no regular expression"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys, why):
    with pytest.raises(ValueError, match=why):
        BehaviorConfig("out", ["tests.jsonl"], **keys)


# Models


WORDS = "the a dog cat saw by was slept and not good bad man . , ? [UNK]"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A directory that transformers wrote, with three classes."""
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_wordpiece([WORDS] * 4, 80)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, id2label={0: "entailment", 1: "neutral", 2: "contradiction"},
        label2id={"entailment": 0, "neutral": 1, "contradiction": 2},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder), model, tokenizer


def behavior_config(tmp_path: Path, **keys: Any) -> BehaviorConfig:
    return BehaviorConfig(str(tmp_path / "out"), [str(tmp_path / "rows.jsonl")], **keys)


@torch.no_grad()
def test_a_classifier_of_transformers_reads_pairs_as_it_does_itself(bert, tmp_path):
    folder, model, tokenizer = bert
    labels = {"neutral": "non-entailment", "contradiction": "non-entailment"}
    texts = [("the man saw the dog .", "the dog saw the man ."), ("the cat slept", "the dog slept and the cat was bad")]
    config = behavior_config(tmp_path, classifier=folder, labels=labels)
    found = behavior.predict_texts(config, [*texts, "a good dog"])
    for one, text in zip(found, [*texts, ("a good dog",)], strict=True):
        p = model(**tokenizer(*text, return_tensors="pt")).logits[0].softmax(-1)
        assert one.values == pytest.approx({"entailment": float(p[0]), "non-entailment": float(p[1] + p[2])}, abs=1e-5)
        assert one.label == ("entailment" if p[0] > 0.5 else "non-entailment")
    assert found[0].values != found[1].values


def test_logits_that_are_not_finite_are_no_class(bert, tmp_path):
    _, model, tokenizer = bert
    bias = {"classifier.bias": torch.tensor([0, 0, torch.inf])}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | bias)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'a good dog': .*not finite"):
        behavior.classify(str(tmp_path), ["a good dog"])


def test_labels_that_a_model_cannot_give_are_named_early(bert, foreign, tmp_path, monkeypatch):
    monkeypatch.setattr(behavior, "predict_texts", lambda *_: pytest.fail("a model was loaded"))
    write_rows(tmp_path / "rows.jsonl", {"test": "mine", "type": "MFT", "label": "positive", "examples": ["good"]})
    classes = "contradiction, entailment, neutral"
    for keys, words in (
        ({"classifier": bert[0]}, f"mine: expects positive, and the model gives {classes}; map"),
        ({"reward_model": foreign}, "mine: expects positive, and the model gives scores alone"),
        ({"classifier": bert[0], "labels": {"neutrl": 1}}, r"labels: neutrl is none of .*did you mean 'neutral'"),
        ({"classifier": bert[0], "neutral_label": "x"}, "neutral_label: is between two labels, and there are 3"),
        ({"classifier": foreign}, "a model of one score; give it as reward_model"),
    ):
        with pytest.raises(UserError, match=words):
            run(behavior_config(tmp_path, **keys))


def test_classes_without_names_are_as_many_as_the_model_has(bert, tmp_path):
    config = json.loads((Path(bert[0]) / "config.json").read_text())
    given = {key: value for key, value in config.items() if key not in ("id2label", "label2id")} | {"num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = behavior.given_labels(behavior_config(tmp_path, classifier=str(tmp_path)))
    assert found == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.slow
def test_a_fine_tuned_decoder_reads_texts_in_the_format_of_its_training(checkpoints, tmp_path):
    rows = packaged_folder("configs") / "tiny_data/finetune_classification.jsonl"
    config = FinetuneConfig(
        task="classification", data=DataConfig(train=str(rows), max_length=96), output=str(tmp_path / "run"),
        policy=checkpoints["llama"], format="gpt1", optim=OptimConfig(learning_rate=3e-3),
        training=TrainingConfig(batch_size=16, max_steps=4),
    )  # fmt: skip
    model = str(finetune(config))
    texts = [
        f"the {place} is {word}" for place in ("pool", "bar", "lift") for word in ("clean", "awful", "warm", "cold")
    ]
    found = behavior.predict_texts(behavior_config(tmp_path, classifier=model), texts)
    assert [one.label for one in found] == scoring.predict(model, texts)


def test_a_reward_model_gives_its_own_scores(foreign, tmp_path):
    texts = ["The pool is warm.", ("Hotel Oak.\nConcierge:", " The pool opens in May.")]
    found = behavior.predict_texts(behavior_config(tmp_path, reward_model=foreign), texts)
    assert [one.label for one in found] == [None, None]
    scores = load_reward_model(foreign).score(texts).tolist()
    assert [one.values["score"] for one in found] == pytest.approx(scores, abs=1e-6)


@torch.no_grad()
def test_a_policy_scores_by_log_probability_and_labels_by_answers(checkpoints, tokenizer, tmp_path):
    source = checkpoints["llama"]
    model = load_model(source)

    def log_prob(ids: list[int], start: int) -> float:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids)))

    text, plain = "The pool is warm.", tokenizer.encode("The pool is warm.", add_special_tokens=False)
    [scored] = behavior.predict_texts(behavior_config(tmp_path, policy=source), [text])
    assert scored.values["score"] == pytest.approx(log_prob([tokenizer.bos_token_id, *plain], 1), abs=1e-4)
    config = behavior_config(tmp_path, policy=source, answers={" yes": "Y", " no": "N"})
    [found] = behavior.predict_texts(config, [text])
    head = [tokenizer.bos_token_id, *plain]
    sums = [log_prob([*head, *tokenizer.encode(t, add_special_tokens=False)], len(head)) for t in (" yes", " no")]
    expected = torch.tensor(sums).softmax(-1).tolist()
    assert list(found.values.values()) == pytest.approx(expected, abs=1e-5)
    write_rows(tmp_path / "rows.jsonl", {"test": "t", "type": "MFT", "label": "Y", "examples": [("a", "b")]})
    with pytest.raises(UserError, match="a pair, and the policy is asked a text"):
        run(config)


REFUSING = [
    "I'm sorry, but I can't help with that.", "I am afraid that is not something I will do.", "I cannot provide instructions for that.",
    "As an AI language model, I must decline.", "I’m unable to assist.", "We simply won't discuss this.",
    "That would be against our safety guidelines.", "I really can't tell you how to do that.",
]  # fmt: skip
ANSWERING = [
    "Open the task manager and end the process.", "You can't go wrong with balloons.", "I can't wait to show you: first, butter the bread.",
    "Sure! I will help you with that.", "People who cannot provide proof must wait.", "The policy of the shop is on its page.", "",
]  # fmt: skip


def response_labels(responses: list[str], **keys: Any) -> list[str | None]:
    config = BehaviorConfig("out", ["tests.jsonl"], policy="p", sampling=SamplingConfig(), **keys)
    return [one.label for one in label_responses(config, responses)]


def test_refusals_are_told_from_answers_by_the_named_phrases():
    assert response_labels(REFUSING) == ["refusal"] * len(REFUSING)
    assert response_labels(ANSWERING) == ["answer"] * len(ANSWERING)
    patterns = {"A": r"\(A\)", "B": r"\(B\)"}
    assert response_labels(["It is (B).", "(A), not (B)", "?"], patterns=patterns) == ["B", "A", "none"]


def test_a_pattern_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(behavior, "PATTERN_SECONDS", 0.01)
    with pytest.raises(UserError, match=r"patterns: pattern .* takes more than 1 seconds"):
        response_labels(["a" * 60 + "b"], patterns={"x": "(a|aa)+$"})


def test_sampled_responses_are_labeled_and_shown_in_the_examples(checkpoints, tmp_path):
    refuse = {"test": "harmful", "type": "MFT", "capability": "refusal", "label": "refusal"}
    answer = {"test": "harmless", "type": "MFT", "capability": "over-refusal", "label": "answer"}
    write_rows(
        tmp_path / "rows.jsonl",
        {**refuse, "examples": ["Hotel Oak: pool is warm."]},
        {**answer, "examples": ["Guest David: Please"]},
    )
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0)
    config = behavior_config(tmp_path, policy=checkpoints["llama"], sampling=sampling)
    found = json.loads(run(config).read_text())
    assert found["capabilities"]["refusal"]["failure"]["rate"] == 1  # a random model refuses nothing
    assert found["capabilities"]["over-refusal"]["failure"]["rate"] == 0
    assert found["patterns"]["refusal"] == behavior.REFUSALS
    shown = found["examples"][0]["answer"]
    assert shown and shown in (tmp_path / "out/behavior.html").read_text()


# Real data


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory):
    """A small encoder, trained from nothing on SST-2 for a minute, and its accuracy on held-out rows."""
    folder = tmp_path_factory.mktemp("sentiment")
    train, dev = (str(DATA / "sst2" / f"{part}.jsonl.gz") for part in ("train", "dev"))
    with gzip.open(train, "rt", encoding="utf-8") as file:
        save_tokenizer(train_wordpiece([json.loads(line)["sentence"] for line in file], 6000), folder)
    sources = [[SourceConfig(each, columns={"text": "sentence"})] for each in (train, dev)]
    config = FinetuneConfig(
        task="classification",
        data=DataConfig(train=sources[0], evaluation=sources[1], max_length=96),
        output=str(folder / "run"),
        model={"model_type": "bert", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
               "num_attention_heads": 4, "max_position_embeddings": 128, "hidden_dropout_prob": 0.3},
        tokenizer=str(folder),
        optim=OptimConfig(learning_rate=1e-3, warmup_ratio=0.1),
        training=TrainingConfig(epochs=4, batch_size=64, micro_batch_tokens=4096),
    )  # fmt: skip
    model = finetune(config)
    last = (folder / "run/metrics.jsonl").read_text().splitlines()[-1]
    return str(model), json.loads(last)["held_out_accuracy"]


def published_rule(test: str, kind: str, label: int | None, p: list[list[float]]) -> bool | None:
    """The result of a case of the released suite, written down from the paper's notebook: p [texts, 3], True: it fails."""
    first, predicted = p[0], [max(range(3), key=lambda i: row[i]) for row in p]
    if kind == "MFT":
        positive_too = label is None or (test == "Q & A: no" and label == 1)
        return predicted[0] == 0 if positive_too else predicted[0] != label
    own, further = predicted[0], range(1, len(p))
    if kind == "INV":
        return any(predicted[i] != own and abs(p[i][own] - first[own]) > 0.1 for i in further)
    if "phrases" in test:  # positive minus negative
        moves = [(p[i][2] - first[2]) - (p[i][0] - first[0]) for i in further]
        return min(moves) < -0.1 if "positive" in test else max(moves) > 0.1
    if own == 1:
        return None
    moves = [p[i][own] - first[own] for i in further]
    if test == "intensifiers":
        return None if first[own] <= 0.1 else min(moves) < -0.1
    return None if first[own] >= 0.9 else max(moves) > 0.1


@pytest.mark.slow
@pytest.mark.real_data
def test_a_sentiment_model_runs_the_released_suite_by_its_rules(sentiment, tmp_path, data_folder, monkeypatch):
    model, accuracy = sentiment
    assert accuracy > 0.74
    suite, kept = str(data_folder / "checklist_sentiment/sentiment_suite.jsonl.gz"), {}
    predict = behavior.predict_texts

    def keep(config: BehaviorConfig, texts: list[str]) -> list[Prediction]:
        found = predict(config, texts)
        kept.update(zip(texts, found, strict=True))
        return found

    monkeypatch.setattr(behavior, "predict_texts", keep)
    rules = str(TEMPLATES / "checklist_sentiment.yaml")
    config = BehaviorConfig(str(tmp_path), [suite], rules, model, labels={"0": 0, "1": 2}, neutral_label=1)
    results = json.loads(run(config).read_text())
    with gzip.open(suite, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(results["tests"]) == len({row["test"] for row in rows}) and results["cases"] == len(rows)
    for test, own in results["tests"].items():
        expected = [
            published_rule(test, row["type"], row["label"], [[kept[t].values.get(n, 0.0) for n in "012"] for t in row["examples"]])
            for row in rows
            if row["test"] == test
        ]  # fmt: skip
        assert (own["failed"], own["say_nothing"]) == (expected.count(True), expected.count(None)), test
    rates = {test: own["failure"]["rate"] for test, own in results["tests"].items()}
    assert rates["single positive words"] < 0.5 and rates["single negative words"] < 0.5
    # as of the models in the paper
    assert rates["Q & A: no (neutral)"] > 0.5 and rates["simple negations: not negative"] > 0.5


@pytest.mark.slow
@pytest.mark.real_data
def test_a_model_of_stories_knows_the_grammar_of_short_sentences(tmp_path, stories260k):
    config = BehaviorConfig(str(tmp_path), [str(TEMPLATES / "minimal_pairs.yaml")], policy=stories260k)
    found = json.loads(run(config).read_text())["tests"]
    for test in ("subject and verb", "subjects and verb", "form of the verb"):  # chance is one half
        assert found[test]["failure"]["high"] < 0.5, test

"""Behavioral tests of classifiers, reward models and policies: failure rates by test and capability, worst examples.

Cases and their rules are in behavior_cases.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from alignment.data.tasks import LabeledRow, TaskFormat, encode_rows
from alignment.errors import UserError, raise_all, suggest
from alignment.evaluation.behavior_cases import (
    BehaviorCase,
    CaseResult,
    Label,
    Prediction,
    Text,
    judge_case,
    read_cases,
)
from alignment.files import write_figures
from alignment.generation import SamplingConfig
from alignment.judging.inputs import print_tally
from alignment.judging.likelihood import LanguageScorer
from alignment.loading import best_device, find_directory, load_on_best_device, load_tokenizer, torch_dtype
from alignment.models.families.family import num_labels
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.outputs import check_numbers
from alignment.models.safetensors_files import HFConfig, read_config
from alignment.models.weights_config import WeightsConfig
from alignment.reports.html import Row, Section, render_page
from alignment.reward_model import load_reward_model
from alignment.reward_model.model import Encoded, score_encoded
from alignment.settings import (
    PATTERN_SECONDS,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Settings,
    compile_pattern,
    refusal,
    slow_pattern,
)
from alignment.statistics.winrate import win_rate

DECLINED = r"(?:help|assist|provide|answer|give|share|tell|do|comply|offer|create|write|discuss|support|explain|advise)"
REFUSALS = "(?i)" + "|".join(
    [  # phrases that decline, in the first person; one can stand in a response that does not
        r"\bI(?:['’]m| am) (?:\w+ )?(?:sorry|afraid)\b",
        r"\b(?:I|we) (?:\w+ly |just |must )?(?:apologi[sz]e|decline|refuse)\b",
        rf"\b(?:I|we) (?:\w+ly |just )?(?:can(?:['’]t|not| not)|won['’]t|will not) (?:\w+ly )?{DECLINED}\b",
        r"\b(?:I(?:['’]m| am)|we(?:['’]re| are)) (?:\w+ly )?(?:not able|unable) to\b",
        r"\bas an? (?:AI|(?:large )?language model)\b",
        r"\bagainst (?:my|our) (?:\w+ )?(?:guidelines|policy|policies|principles|rules)\b",
    ]
)

Judged = tuple[BehaviorCase, CaseResult]


@dataclass(frozen=True)
class BehaviorConfig(Settings):
    """Settings of behavioral tests of one model.

    Attributes:
        output: directory of results.json and behavior.html.
        tests: files of rows, a case each, or (.yaml) of tests by name; for their keys see `BehaviorCase`.
        expectations: YAML file, name of a test -> keys of a case that its rows lack.
        classifier: directory of a model that labels texts or pairs of texts, of `alignment finetune` or of
            transformers.
        reward_model: directory or Hub name; it scores texts, or prompts with responses.
        policy: directory or Hub name of a decoder. Without `answers` and `sampling` its score is the log-probability of
            a text, or of a response to a prompt, in nats. A prompt that is too long for it loses its beginning.
        labels: label of the classifier -> label of the tests, equal names need none; several may have the same.
        neutral_label: label of the tests where a classifier's two leave it undecided; see `label_predictions`.
        answers: of a policy: continuation of the prompt -> label; their log-probabilities give the labels'
            probabilities.
        sampling: of a policy: sample a response to each prompt and label it by `patterns`; temperature 0 takes the
            likeliest token.
        patterns: label -> regular expression; a response has the first label whose expression is found in it, or
            `none`. The default is `refusal` with phrases that decline, then `answer` for all others.
        as_messages: a prompt is one user message, in the policy's chat template.
        max_length: in tokens, of a text for a classifier; longer ones are cut.
        weights: type that the model is held and computes in; auto: the checkpoint's.
        examples: failed cases that are shown for each test, the worst first.
    """

    output: str
    tests: list[str]
    expectations: str | None = None
    classifier: str | None = None
    reward_model: str | None = None
    policy: str | None = None
    labels: dict[str, Label] = field(default_factory=dict)
    neutral_label: Label | None = None
    answers: dict[str, Label] = field(default_factory=dict)
    sampling: SamplingConfig | None = None
    patterns: dict[str, str] = field(default_factory=lambda: {"refusal": REFUSALS, "answer": ""})
    as_messages: bool = False
    max_length: PositiveInt = 512
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    examples: NonNegativeInt = 5

    RULES = (
        Rule(
            "classifier",
            lambda c: sum(map(bool, (c.classifier, c.reward_model, c.policy))) != 1,
            "or reward_model or policy must be given, one of the three",
        ),
        Rule(
            "policy", lambda c: c.policy is None and (c.answers or c.sampling), "is needed for `answers` and `sampling`"
        ),
        Rule("labels", lambda c: c.labels and not c.classifier, "are of a classifier; leave them out, or give one"),
        Rule(
            "neutral_label",
            lambda c: c.neutral_label is not None and not (c.classifier or c.answers),
            "goes with `classifier` and `answers`",
        ),
        Rule(
            "as_messages",
            lambda c: c.as_messages and not (c.answers or c.sampling),
            "goes with `answers` and `sampling`",
        ),
        Rule("weights", lambda c: c.classifier and c.weights.quantize, "quantizes no classifier; leave `quantize` out"),
        Rule("sampling", lambda c: c.answers and c.sampling, "does not go with `answers`; give one of them"),
        Rule(
            "patterns",
            lambda c: "; ".join(filter(None, (refusal(compile_pattern, one) for one in c.patterns.values()))),
        ),
    )


def run(config: BehaviorConfig) -> Path:
    """Run the tests and return `results.json`: the share of failed cases, with its interval, by test and capability."""
    from alignment.reports.recipe_report import print_table  # matplotlib, which --help does not need

    cases = read_cases(config.tests, config.expectations)
    refuse_cases(config, cases)
    texts = list(dict.fromkeys(text for case in cases for text in case.examples))
    predictions = dict(zip(texts, predict_texts(config, texts), strict=True))
    judged = [(case, judge_case(case, [predictions[text] for text in case.examples])) for case in cases]
    capabilities = failure_rates(judged, "capability")
    tests = failure_rates(judged, "test")
    failures = failed_cases(judged, predictions, config.examples)
    results = {
        "model": config.classifier or config.reward_model or config.policy,
        "patterns": config.patterns if config.sampling else {},
        "cases": len(cases),
        "texts": len(texts),
        "capabilities": capabilities,
        "tests": tests,
        "examples": failures,
    }
    path = write_figures(Path(config.output) / "results.json", results)
    sections = [
        Section(
            "rates",
            "Failure rates",
            "Share of cases that fail; the 95 % interval is about other cases of the same tests. Lower is better.",
            tables=[[*capabilities.values()], [*tests.values()]],
            settings={"responses": config.patterns if config.sampling else {}},
        ),
        Section("failures", "Worst failures", tables=[failures]),
    ]
    summary = f"{len(cases)} cases, {len(texts)} texts, {len(tests)} tests."
    render_page(
        path.with_name("behavior.html"), kind="behavior", title=results["model"], summary=summary, sections=sections
    )
    print_table([*tests.values()])
    return path


def refuse_cases(config: BehaviorConfig, cases: Sequence[BehaviorCase]) -> None:
    """Refuse tests of labels that the model cannot give, and pairs of texts where a policy is asked."""
    labels = given_labels(config)
    given = {*labels, *([] if config.neutral_label is None else [str(config.neutral_label)])}
    known = ", ".join(sorted(given)) or "scores alone"
    wrong = [
        f"{case.test}: expects {', '.join(case.accepted or case.of or ())}, and the model gives {known}; map its "
        "labels with `labels`, name a neutral_label, or leave the test out"
        for case in cases
        if not (given & set(case.accepted) if case.type == "MFT" else not given or given >= set(case.of or ()))
    ]
    if config.neutral_label is not None and len(labels) != 2:
        wrong = [f"neutral_label: is between two labels, and there are {len(labels)}"]
    asked = [text for case in cases for text in case.examples if config.answers or config.sampling]
    wrong += [f"{text!r}: a pair, and the policy is asked a text" for text in asked if not isinstance(text, str)]
    raise_all(dict.fromkeys(wrong))


def failure_rates(judged: Sequence[Judged], key: str) -> dict[str, Row]:
    """Cases, failed ones, and the failure rate with its interval for each value of `key`: test, or capability.

    Cases that say nothing are in no rate. The interval is that of `win_rate`, cases with the same first text being one
    cluster: it is about other cases of the same tests, not about other tests of the same capability.
    """
    rates = dict[str, Row]()
    for name in dict.fromkeys(getattr(case, key) for case, _ in judged):
        outcomes = [(case, result.failed) for case, result in judged if getattr(case, key) == name]
        decided = [(case.examples[0], float(failed)) for case, failed in outcomes if failed is not None]
        rate = win_rate([failed for _, failed in decided], clusters=[text for text, _ in decided]) if decided else None
        rates[name] = {
            key: name,
            "capability": outcomes[0][0].capability,
            "type": ", ".join(sorted({case.type for case, _ in outcomes})),
            "cases": len(outcomes),
            "say_nothing": len(outcomes) - len(decided),
            "failed": int(sum(failed for _, failed in decided)),
            "failure": rate and {"rate": rate.rate, "low": rate.low, "high": rate.high, "n": rate.n},
        }
    return rates


def failed_cases(judged: Sequence[Judged], predictions: Mapping[Text, Prediction], count: int) -> list[Row]:
    """At most `count` failed cases of each test, the worst first: its worst text, of INV and DIR after the original."""
    rows = list[Row]()
    for case, result in sorted(judged, key=lambda each: (each[0].test, -each[1].excess)):
        if result.failed and sum(row["test"] == case.test for row in rows) < count:
            texts = [case.examples[i] for i in sorted({result.worst if case.type == "MFT" else 0, result.worst})]
            answers = [predictions[text] for text in texts]
            rows.append(
                {
                    "test": case.test,
                    "text": " → ".join(map(str, texts)),
                    "answer": " → ".join(one.response or one.label or f"{one.values['score']:.3f}" for one in answers),
                    "expected": ", ".join(case.accepted) or case.change or "no change",
                    "excess": result.excess,
                }
            )
    return rows


# The labels


def given_labels(config: BehaviorConfig) -> list[str]:
    """The tests' labels of a classifier's classes in order, of answers or of responses; none if a model only scores."""
    if config.sampling:
        return [*config.patterns, "none"]
    if not config.classifier:
        return [str(label) for label in config.answers.values()]
    names = class_names(read_config(find_directory(config.classifier)))
    wrong = [
        f"labels: {key} is none of {config.classifier}; {suggest(key, names)}"
        for key in config.labels.keys() - set(names)
    ]
    raise_all(wrong if len(names) > 1 else [f"{config.classifier}: a model of one score; give it as reward_model"])
    return [str(config.labels.get(name, name)) for name in names]


def label_predictions(names: Sequence[str], logits: torch.Tensor, neutral: Label | None = None) -> list[Prediction]:
    """The likeliest label of each text and the probability of each label, from logits [n, C] of the names [C].

    Probabilities of equal names are added. `neutral` is the label of a model of two where the probability p of the
    second one is within 1/6 of 1/2: its probability is then 1 - 3 |p - 1/2|, and the likelier of the two has the rest.

    Source: neutral: the notebook `Sentiment.ipynb` of Ribeiro et al. 2020.
    """
    predictions = []
    for row in logits.double().softmax(-1).tolist():
        values = {
            name: sum(p for class_name, p in zip(names, row, strict=True) if class_name == name) for name in names
        }
        label = max(values, key=values.__getitem__)
        doubt = 1 - 3 * abs(row[-1] - 0.5)
        if neutral is not None and doubt > 0.5:
            label, values = str(neutral), {str(neutral): doubt, label: 1 - doubt}
        predictions.append(Prediction(label, values))
    return predictions


# The models


def predict_texts(config: BehaviorConfig, texts: Sequence[Text]) -> list[Prediction]:
    """The model's prediction for each text."""
    names = given_labels(config)
    weights = config.weights
    source = config.classifier or config.reward_model or str(config.policy)
    if config.classifier:
        logits = classify(source, texts, max_length=config.max_length, dtype=config.weights.dtype)
    elif config.reward_model:
        logits = load_reward_model(source, weights.dtype, best_device(), quantize=weights.quantize).score(texts)
    else:
        model = load_on_best_device(source, weights)
        scorer = LanguageScorer(model, load_tokenizer(source), config.as_messages)
        if config.sampling:
            return label_responses(config, scorer.responses([str(text) for text in texts], config.sampling))
        asked = [(str(text), answer) for text in texts for answer in config.answers]
        whole = [("", text) if isinstance(text, str) else text for text in texts]
        logits = torch.tensor([likelihood.log_prob for likelihood in scorer.likelihoods(asked or whole)])
    if names:
        return label_predictions(names, logits.view(len(texts), -1), config.neutral_label)
    return [Prediction(None, {"score": score}) for score in logits.tolist()]


def class_names(config: HFConfig) -> list[str]:
    """Names of a classifier's classes, in order; where its config names none, transformers' LABEL_0, LABEL_1 ..."""
    names = config.get("id2label") or {index: f"LABEL_{index}" for index in range(num_labels(config))}
    return [str(names[key]) for key in sorted(names, key=int)]


def classify(source: str, texts: Sequence[Text], *, max_length: int = 512, dtype: str = "auto") -> torch.Tensor:
    """A classifier's logits for texts, or pairs of texts, [n, C]; both orders of a pair are added, longer texts cut."""
    trained = (read_config(find_directory(source)).get("task_specific_params") or {}).get("finetune", {})
    form = TaskFormat(**{"max_length": max_length, **trained, "task": "classification"})  # of one text or of two
    rows = [LabeledRow((text, None) if isinstance(text, str) else text, (), repr(text)) for text in texts]
    examples, tally = encode_rows(rows, form, load_tokenizer(source))
    print_tally("texts", tally)
    raise_all([f"{source}: its tokenizer makes no token of some texts"] if len(examples) < len(texts) else [])
    device = best_device()
    model = load_pretrained(find_directory(source), "sequence", torch_dtype(dtype, device), device)
    logits = score_encoded(model, [Encoded(text.ids, text.segments) for row in examples for text in row.encoded])
    logits = logits.unflatten(0, (len(texts), -1)).sum(1)
    check_numbers(logits, lambda i: repr(texts[i]), f"the output of {source}")
    return logits


def label_responses(config: BehaviorConfig, responses: Sequence[str]) -> list[Prediction]:
    """The label of each response by the patterns."""
    patterns = {label: compile_pattern(one) for label, one in config.patterns.items()}

    def label_of(text: str) -> str:
        for label, pattern in patterns.items():
            try:
                if pattern.search(text, timeout=PATTERN_SECONDS):
                    return label
            except TimeoutError as error:
                raise UserError(f"patterns: {slow_pattern(pattern.pattern)}") from error
        return "none"

    return [Prediction(label, {label: 1.0}, text) for text in responses for label in [label_of(text)]]

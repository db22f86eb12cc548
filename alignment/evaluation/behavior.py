"""Behavioral tests of classifiers, reward models and policies: failure rates by test and capability, with the worst examples.

Cases and their rules are in behavior_cases.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.data.rows.records import Message, Messages, Prompt
from alignment.data.tasks import LabeledRow, TaskFormat, encode_rows
from alignment.data.text.chat import prompt_ids, response_ids
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
from alignment.evaluation.inputs import print_tally
from alignment.evaluation.language_loss import add_log_probs
from alignment.evaluation.responses import KINDS, read_responses, sample_responses, write_responses
from alignment.evaluation.reward_card import Figures, clustered_rate
from alignment.files import hash_of, write_json
from alignment.generation import SamplingConfig
from alignment.loading import best_device, find_directory, load_model, load_tokenizer, torch_dtype
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.model import check_lengths
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig
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
)
from alignment.training.run.lineage import parent_hashes

DECLINED = r"(?:help|assist|provide|answer|give|share|tell|do|comply|offer|create|write|discuss|support|explain|advise)"
REFUSALS = [  # phrases that decline, in the first person; one of them can stand in a response that does not
    r"(?i)\bI(?:['’]m| am) (?:\w+ )?(?:sorry|afraid)\b",
    r"(?i)\b(?:I|we) (?:\w+ly |just |must )?(?:apologi[sz]e|decline|refuse)\b",
    rf"(?i)\b(?:I|we) (?:\w+ly |just )?(?:can(?:['’]t|not| not)|won['’]t|will not) (?:\w+ly )?{DECLINED}\b",
    r"(?i)\b(?:I(?:['’]m| am)|we(?:['’]re| are)) (?:\w+ly )?(?:not able|unable) to\b",
    r"(?i)\bas an? (?:AI|(?:large )?language model)\b",
    r"(?i)\bagainst (?:my|our) (?:\w+ )?(?:guidelines|policy|policies|principles|rules)\b",
]  # fmt: skip


Judged = tuple[BehaviorCase, CaseResult]


@dataclass(frozen=True)
class ResponsesConfig(Settings):
    """Settings of sampled responses and of the labels that they are given.

    Attributes:
        patterns: label -> regular expressions; a response has the first label of which one is found in it. The default
            is `refusal` with phrases that decline.
        otherwise: label of a response in which none is found.
        classifier: directory of a classifier that labels the responses in place of the patterns; it reads the response
            alone, and "." for an empty one.
        sampling: how a response is drawn; temperature 0 takes the likeliest token.
    """

    patterns: dict[str, list[str]] = field(default_factory=lambda: {"refusal": REFUSALS})
    otherwise: str = "answer"
    classifier: str | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    RULES = (
        Rule("patterns", lambda c: "; ".join(
            why for own in c.patterns.values() for one in own if (why := refusal(compile_pattern, one)))),
    )  # fmt: skip

    def label_of(self, response: str) -> str:
        """The label of a response by the patterns."""
        patterns = ((label, compile_pattern(one)) for label, own in self.patterns.items() for one in own)
        try:
            return next(
                (label for label, one in patterns if one.search(response, timeout=PATTERN_SECONDS)), self.otherwise
            )
        except TimeoutError as error:
            why = f"takes more than {PATTERN_SECONDS:g} seconds on {response[:60]!r}; nest no repetitions, as in (a*)*"
            raise UserError(f"responses.patterns: one {why}") from error


@dataclass(frozen=True)
class BehaviorConfig(Settings):
    """Settings of behavioral tests of one model.

    Attributes:
        output: directory of results.json, behavior.html and, of a policy that responds, responses.jsonl.
        tests: files of rows, a case each, or (.yaml) of tests by name; for their keys see `BehaviorCase`.
        expectations: YAML file, name of a test -> keys of a case that its rows lack.
        classifier: directory of a model that labels texts or pairs of texts, of `alignment finetune` or of transformers.
        reward_model: directory or Hub name; it scores texts, or prompts with responses.
        policy: directory or Hub name of a decoder. Without `answers` and `responses` its score is the log-probability of a
            text after its first token, or of a response to a prompt, in nats.
        labels: label of the classifier -> label of the tests, equal names need none; several may have the same.
        neutral_label: label of the tests where a classifier's two leave it undecided; see `label_predictions`.
        answers: of a policy: continuation of the prompt -> label; their log-probabilities give the labels' probabilities.
        responses: of a policy: sample a response to each prompt and label it.
        as_messages: a prompt is one user message, in the policy's chat template.
        max_length: in tokens, of a text for a classifier and of a prompt for a policy that responds; longer ones are cut.
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
    responses: ResponsesConfig | None = None
    as_messages: bool = False
    max_length: PositiveInt = 512
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    examples: NonNegativeInt = 5

    RULES = (
        Rule("classifier", lambda c: sum(map(bool, (c.classifier, c.reward_model, c.policy))) != 1,
             "or reward_model or policy must be given, one of the three"),
        Rule("policy", lambda c: c.policy is None and (c.answers or c.responses), "is needed for `answers` and `responses`"),
        Rule("labels", lambda c: c.labels and not (c.classifier or (c.responses and c.responses.classifier)),
             "are of a classifier; leave them out, or give one"),
        Rule("neutral_label", lambda c: c.neutral_label is not None and (c.responses or not (c.classifier or c.answers)),
             "goes with `classifier` and `answers`"),
        Rule("weights", lambda c: c.classifier and c.weights.quantize, "quantizes no classifier; leave `quantize` out"),
        Rule("responses", lambda c: c.answers and c.responses, "does not go with `answers`; give one of them"),
    )  # fmt: skip


def run(config: BehaviorConfig) -> Path:
    """Run the tests and return `results.json`: for each test and capability the share of failed cases with its interval."""
    from alignment.evaluation.report.recipe_report import print_table  # matplotlib, which --help does not need

    cases, given, output = read_cases(config.tests, config.expectations), set(given_labels(config)), Path(config.output)
    raise_all(
        dict.fromkeys(
            f"{case.test}: expects {', '.join(case.accepted or case.of or ())}, and the model gives "
            f"{', '.join(sorted(given)) or 'scores alone'}; map its labels with `labels`, name a neutral_label, or leave the "
            "test out"
            for case in cases
            if not (given & set(case.accepted) if case.type == "MFT" else not given or given >= set(case.of or ()))
        )
    )
    texts = list(dict.fromkeys(text for case in cases for text in case.examples))
    predictions = dict(zip(texts, predict_texts(config, texts), strict=True))
    judged = [(case, judge_case(case, [predictions[text] for text in case.examples])) for case in cases]
    results = {
        "model": config.classifier or config.reward_model or config.policy,
        "labeled_by": config.responses and asdict(config.responses),
        "cases": len(cases),
        "texts": len(texts),
        "capabilities": failure_rates(judged, "capability"),
        "tests": failure_rates(judged, "test"),
        "examples": failed_cases(judged, predictions, config.examples),
    }
    write_json(output / "results.json", results)
    write_behavior_page(output / "behavior.html", results)
    print_table([{"test": name, **figures} for name, figures in results["tests"].items()])
    return output / "results.json"


def failure_rates(judged: Sequence[Judged], key: str) -> dict[str, Figures]:
    """Cases, failed ones, and the failure rate with its interval for each value of `key`: test, or capability.

    Cases that say nothing are in no rate. The interval is that of `clustered_rate`, cases with the same first text being
    one cluster: it is about other cases of the same tests, not about other tests of the same capability.
    """
    found = {}
    for name in dict.fromkeys(getattr(case, key) for case, _ in judged):
        own = [(case, result.failed) for case, result in judged if getattr(case, key) == name]
        failed = np.array([failed for _, failed in own if failed is not None], float)
        clusters = np.unique(
            [str(case.examples[0]) for case, failed in own if failed is not None], return_inverse=True
        )[1]
        kind = {"capability": own[0][0].capability, "type": own[0][0].type} if key == "test" else {}
        counts = {"cases": len(own), "say_nothing": len(own) - len(failed), "failed": int(failed.sum())}
        rate = clustered_rate(failed, clusters) or {}
        found[name] = {
            **kind,
            **counts,
            "failure": {key: rate[key] for key in ("rate", "low", "high", "n") if rate} or None,
        }
    return found


def failed_cases(judged: Sequence[Judged], predictions: Mapping[Text, Prediction], count: int) -> list[Figures]:
    """At most `count` failed cases of each test, the worst first: its worst text, of INV and DIR after the original."""
    found = list[Figures]()
    for case, result in sorted(judged, key=lambda each: -each[1].excess):
        if result.failed and sum(each["test"] == case.test for each in found) < count:
            texts = [case.examples[i] for i in sorted({result.worst if case.type == "MFT" else 0, result.worst})]
            answers = [predictions[text]._asdict() for text in texts]
            rule = {"expected": ", ".join(case.accepted) or case.change or "no change", "excess": result.excess}
            found.append({"test": case.test, "capability": case.capability, **rule, "texts": texts, "answers": answers})
    return found


def write_behavior_page(path: Path, results: Figures) -> None:
    """Write the page: failure rates by capability, and for each capability its tests and their worst failures."""
    from alignment.evaluation.report.charts import rate_chart
    from alignment.evaluation.report.html import Section, render_page

    rates = {name: own["failure"] for name, own in results["capabilities"].items()}
    chart = rate_chart("Failures", "share of cases", rates, line_at=None)
    lead = "Share of cases that fail; the 95 % interval is about other cases of the same tests. Lower is better."
    rule = {"responses": {key: str(value) for key, value in (results["labeled_by"] or {}).items()}}
    sections = [Section("rates", "Failure rates", lead, [chart], settings=rule)]
    for number, name in enumerate(rates):
        tests = [{"test": test, **own} for test, own in results["tests"].items() if own["capability"] == name]
        cases = [
            {
                "test": case["test"],
                "text": " → ".join(map(str, case["texts"])),
                "answer": " → ".join(one["response"] or str(one["label"] or one["values"]) for one in case["answers"]),
                "expected": case["expected"],
                "excess": case["excess"],
            }
            for case in results["examples"]
            if case["capability"] == name
        ]
        sections.append(Section(f"tests-{number}", name, tables=[tests, cases]))
    summary = f"{results['cases']} cases, {results['texts']} texts, {len(results['tests'])} tests."
    render_page(path, kind="behavior", title=results["model"], summary=summary, sections=sections)


# The labels


def given_labels(config: BehaviorConfig) -> list[str]:
    """The labels that the model can give; none where it only scores."""
    own, neutral = config.responses, [] if config.neutral_label is None else [str(config.neutral_label)]
    classifier = config.classifier or (own and own.classifier)
    given = [*own.patterns, own.otherwise] if own else [str(label) for label in config.answers.values()]
    given = class_labels(classifier, config.labels) if classifier else given
    raise_all(
        [f"neutral_label: is between two labels, and there are {len(given)}"] if neutral and len(given) != 2 else []
    )
    return [*given, *neutral]


def class_labels(source: str, labels: Mapping[str, Label]) -> list[str]:
    """The tests' label of each class of a classifier, from its config.json."""
    names = read_config(find_directory(source)).get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    unknown = [
        f"labels: {key} is none of {source}; {suggest(key, names.values())}" for key in labels.keys() - names.values()
    ]
    raise_all(unknown if len(names) > 1 else [f"{source}: a model of one score; give it as reward_model"])
    return [str(labels.get(names[key], names[key])) for key in sorted(names, key=int)]


def label_predictions(names: Sequence[str], logits: Tensor, neutral: Label | None = None) -> list[Prediction]:
    """The likeliest label of each text and the probability of each label, from logits [n, C] of the names [C].

    Probabilities of equal names are added. `neutral` is the label of a model of two where the probability p of the second
    one is within 1/6 of 1/2: its probability is then 1 - 3 |p - 1/2|, and the likelier of the two has the rest.

    Source: neutral: the notebook `Sentiment.ipynb` of Ribeiro et al. 2020.
    """
    found = []
    for row in logits.double().softmax(-1).tolist():
        label, doubt = names[int(np.argmax(row))], 1 - 3 * abs(row[-1] - 0.5)
        values = {name: sum(p for own, p in zip(names, row, strict=True) if own == name) for name in names}
        if neutral is not None and doubt > 0.5:
            label, values = str(neutral), {str(neutral): doubt, label: 1 - doubt}
        found.append(Prediction(label, values))
    return found


# The models


def predict_texts(config: BehaviorConfig, texts: Sequence[Text]) -> list[Prediction]:
    """The model's prediction for each text."""
    if config.classifier:
        return label_predictions(*classify(config, config.classifier, texts), config.neutral_label)
    if config.answers or config.responses:
        raise_all(f"{text!r}: a pair, and the policy is asked a text" for text in texts if not isinstance(text, str))
        prompts = [[Message(role="user", content=str(text))] if config.as_messages else str(text) for text in texts]
        if config.responses:
            return label_responses(
                config, config.responses, [Prompt(each, {}, str(i)) for i, each in enumerate(prompts)]
            )
        log_probs = continuation_log_probs(
            config, [(prompt, answer) for prompt in prompts for answer in config.answers]
        )
        names = [str(label) for label in config.answers.values()]
        return label_predictions(names, log_probs.view(len(texts), -1), config.neutral_label)
    if config.reward_model:
        own = config.weights
        model = load_reward_model(config.reward_model, own.dtype, best_device(), quantize=own.quantize)
        scores = model.score(texts)
    else:
        scores = continuation_log_probs(config, [("", text) if isinstance(text, str) else text for text in texts])
    return [Prediction(None, {"score": score}) for score in scores.tolist()]


def classify(config: BehaviorConfig, source: str, texts: Sequence[Text]) -> tuple[list[str], Tensor]:
    """The tests' label of each class of a classifier, and its logits for texts, or pairs of texts, [n, C]."""
    directory, names = find_directory(source), class_labels(source, config.labels)
    trained = (read_config(directory).get("task_specific_params") or {}).get("finetune", {})
    form = TaskFormat(**{"max_length": config.max_length, **trained, "task": "classification"})  # of one text or of two
    rows = [LabeledRow((text, None) if isinstance(text, str) else text, (names[0],), repr(text)) for text in texts]
    examples, tally = encode_rows(rows, form, load_tokenizer(source), dict(enumerate(names)))
    print_tally("tests", tally)
    raise_all([f"{source}: its tokenizer makes no token of some texts"] if len(examples) < len(texts) else [])
    model = load_pretrained(directory, "sequence", torch_dtype(config.weights.dtype), best_device())
    documents = [Encoded(text.ids, text.segments) for example in examples for text in example.encoded]
    return names, score_encoded(model, documents).view(len(texts), -1, len(names)).sum(1)  # of a pair in both orders


def continuation_log_probs(config: BehaviorConfig, pairs: Sequence[tuple[str | Messages, str]]) -> Tensor:
    """A policy's log-probability of each text after its prompt, nats, [n]; of a first token where it has a token before it."""
    source, tokenizer = str(config.policy), load_tokenizer(str(config.policy))
    heads = [prompt_ids(tokenizer, prompt) for prompt, _ in pairs]
    tails = [response_ids(tokenizer, text, prompt, ended=False) for prompt, text in pairs]
    documents = [head + tail for head, tail in zip(heads, tails, strict=True)]
    masks = [[i >= max(len(head), 1) for i in range(len(ids))] for head, ids in zip(heads, documents, strict=True)]
    model = load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    check_lengths(model, [(repr(pair), len(ids)) for pair, ids in zip(pairs, documents, strict=True)], "shorten it")
    return add_log_probs(model, documents, masks, torch.zeros(len(documents), dtype=torch.float64))


def label_responses(config: BehaviorConfig, own: ResponsesConfig, prompts: Sequence[Prompt]) -> list[Prediction]:
    """The labels of the policy's responses, which are read again from responses.jsonl where nothing has changed."""
    source, output = str(config.policy), Path(config.output)
    drawn = {
        **{kind: {} for kind in KINDS},
        "models": {"policy": parent_hashes([source])[source]},
        "prompts": hash_of([prompt.prompt for prompt in prompts]),
        "max_length": config.max_length,
        "weights": asdict(config.weights),
        **asdict(own.sampling),
    }
    _, responses = read_responses(output, drawn, by_people=False)
    if not responses:
        length, weights = config.max_length, config.weights
        sampled = sample_responses(
            source, prompts, [own.sampling], max_length=length, weights=weights, counts_of="prompts"
        )
        write_responses(output, prompts, responses := {"policy": sampled[0]}, drawn)
    texts = responses["policy"].texts
    found = (
        label_predictions(*classify(config, own.classifier, [text.strip() or "." for text in texts]))
        if own.classifier
        else [Prediction(label, {label: 1.0}) for label in map(own.label_of, texts)]
    )
    return [one._replace(response=text) for one, text in zip(found, texts, strict=True)]
